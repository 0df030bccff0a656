"""Scores of one method on every set of images, and of the entropy as a sign that an image is out of place."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mcbn import metrics, noise
from mcbn.prediction import entropy
from mcbn_study.alternatives import methods
from mcbn_study.alternatives.inputs import Queries
from mcbn_study.alternatives.methods import THINNED, Material
from mcbn_study.scores import class_scores

Row = dict[str, Any]


def measure(method: str, material: Material, sets: Mapping[str, Queries]) -> Iterator[Row]:
    """Score one method on every set of images, with tau = 1 and with tau tuned on the validation images."""
    started = time.perf_counter()
    sampler = methods.make(method, material)
    validation = sampler(material.validation.x)  # (T, N, K)
    taus = {False: 1.0, True: temperature(validation, material.validation.y)}
    inside: dict[bool, Tensor] = {}
    for name, queries in {"validation": Queries(*material.validation), **sets}.items():
        logits = validation if name == "validation" else sampler(queries.x)
        for tempered, tau in taus.items():
            probs = probabilities(logits, tau)  # (N, K)
            row: Row = {"kind": "score", "data": name, "n": len(probs), "tempered": tempered, "tau": tau}
            if queries.y is not None:
                row |= score(probs, queries.y)
            if name == "test":
                inside[tempered] = probs
            elif name != "validation":
                row |= {"ood_auroc": ood_auroc(inside[tempered], probs)}
            chosen = material.chosen.get(THINNED.get(method, method))
            yield row | {"chosen_batch_size": chosen, "seconds": time.perf_counter() - started}


def probabilities(logits: Tensor, tau: float = 1.0) -> Tensor:
    """1/T sum_t softmax(tau * logits_t): (T, N, K) to (N, K), in double precision."""
    total = torch.zeros(logits.shape[1:], dtype=torch.float64, device=logits.device)
    for draw in logits:
        total += torch.softmax(tau * draw.double(), 1)
    return total / len(logits)


def temperature(logits: Tensor, y: Tensor) -> float:
    """Return the tau that maximises the mean log of `probabilities` on validation images (T, N, K), (N,)."""
    return noise.inverse_temperature(logits.double(), y.to(logits.device)).item()


def score(probs: Tensor, y: Tensor) -> Row:
    """Score probabilities (N, K); error_auroc: does 1 - max_k p_k find the wrong answers? None if there are none."""
    scores = class_scores(probs, y)
    names = ("accuracy", "ece", "brier", "error_auroc")
    return {"nll": -scores["pll"]} | {name: scores[name] for name in names}


def ood_auroc(inside: Tensor, other: Tensor) -> float:
    """Is the entropy of the averaged probabilities higher on other images than on test images?"""
    both = torch.cat([entropy(inside, 1), entropy(other, 1)])
    return float(metrics.auroc(both, torch.arange(len(both), device=both.device) >= len(inside)))
