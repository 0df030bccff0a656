"""Scores of class probabilities, and of the entropy as a sign that an image is out of place."""

import torch
from torch import Tensor

from mcbn import metrics, noise
from mcbn.prediction import entropy

Scores = dict[str, float | None]


def probabilities(logits: Tensor, tau: float = 1.0) -> Tensor:
    """1/T sum_t softmax(tau * logits_t): (T, N, K) to (N, K), in double precision."""
    total = torch.zeros(logits.shape[1:], dtype=torch.float64, device=logits.device)
    for draw in logits:
        total += torch.softmax(tau * draw.double(), 1)
    return total / len(logits)


def temperature(logits: Tensor, y: Tensor) -> float:
    """Return the tau that maximises the mean log of `probabilities` on validation images (T, N, K), (N,)."""
    return noise.inverse_temperature(logits.double(), y.to(logits.device)).item()


def score(probs: Tensor, y: Tensor) -> Scores:
    """Score probabilities (N, K); error_auroc: does 1 - max_k p_k find the wrong answers? None if there are none."""
    y = y.to(probs.device)
    wrong = probs.argmax(1) != y
    both = bool(wrong.any()) and not bool(wrong.all())
    return {
        "nll": float(metrics.nll(probs.clamp(min=1e-300), y)),
        "accuracy": float(metrics.accuracy(probs, y)),
        "ece": float(metrics.ece(probs, y)),
        "brier": float(metrics.brier(probs, y)),
        "error_auroc": float(metrics.auroc(1 - probs.amax(1), wrong)) if both else None,
    }


def outside(inside: Tensor, other: Tensor) -> Scores:
    """ood_auroc: is the entropy of the averaged probabilities higher on other images than on test images?"""
    both = torch.cat([entropy(inside, 1), entropy(other, 1)])
    return {"ood_auroc": float(metrics.auroc(both, torch.arange(len(both), device=both.device) >= len(inside)))}
