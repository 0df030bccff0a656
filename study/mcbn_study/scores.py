"""Scores of class probabilities that the experiments on images share."""

from typing import Any

from torch import Tensor

from mcbn import metrics


def class_scores(probs: Tensor, y: Tensor, *names: str) -> dict[str, Any]:
    """Score class probabilities (N, K), in double precision; return all scores but nll, or those named.

    pll: mean_n log p_n(y_n) (Teye et al. 2018, section 4.4), nll is -pll, pll_error the standard error over the images;
    error_auroc: how well 1 - max_k p_k finds the wrong labels, None where no label, or every one, is wrong.
    """
    probs, y = probs.double(), y.to(probs.device)
    log_p = log_likelihood(probs, y)
    scores: dict[str, Any] = {
        "pll": float(log_p.mean()),
        "pll_error": standard_error(log_p),
        "accuracy": float(metrics.accuracy(probs, y)),
        "ece": float(metrics.ece(probs, y)),
        "brier": float(metrics.brier(probs, y)),
        "error_auroc": metrics.error_auroc(1 - probs.amax(1), probs.argmax(1) != y),
    }
    return {name: (scores | {"nll": -scores["pll"]})[name] for name in names or scores}


def log_likelihood(probs: Tensor, y: Tensor) -> Tensor:
    """Log probability of the labels: probs (..., N, K), y (N,) give (..., N); finite where a probability is 0."""
    return probs.gather(-1, y.expand(probs.shape[:-1]).unsqueeze(-1)).squeeze(-1).clamp(min=1e-300).log()


def standard_error(values: Tensor) -> float:
    """s / sqrt(n)."""
    return float(values.double().std() / len(values) ** 0.5)
