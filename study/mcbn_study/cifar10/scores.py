"""Scores of class probabilities averaged over draws: one set of draws, and the curve over their number T."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcbn import metrics
from mcbn.prediction import entropy

MOST_SETS = 8  # for scores other than PLL


@dataclass(frozen=True)
class Scored:
    """Scores by name, standard errors of some of them, and how many disjoint sets of T draws they are means of."""

    n_samples: int | None
    n_sets: int
    scores: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)


def log_likelihood(probs: Tensor, y: Tensor) -> Tensor:
    """Log probability of the labels: probs (..., N, K), y (N,) give (..., N)."""
    return probs.gather(-1, y.expand(probs.shape[:-1]).unsqueeze(-1)).squeeze(-1).log()


def score(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Score draws of class probabilities (T, N, K), averaged over the draws; of one draw, as a plain network's.

    pll is the mean log of the averaged softmax (Teye et al. 2018, section 4.4, Table 2). auroc_*: how well wrong labels
    are found by entropy, by 1 - max_k p_k, and by mutual information; absent where no label, or every one, is wrong.
    """
    mean = probs.mean(0)  # (N, K)
    found = {
        "pll": log_likelihood(mean, y).mean(),
        "accuracy": metrics.accuracy(mean, y),
        "ece": metrics.ece(mean, y),
        "brier": metrics.brier(mean, y),
    }
    wrong = mean.argmax(1) != y  # (N,)
    if 0 < int(wrong.sum()) < len(y):
        total = entropy(mean, 1)
        found["auroc_entropy"] = metrics.auroc(total, wrong)
        found["auroc_max_probability"] = metrics.auroc(1 - mean.amax(1), wrong)
        if len(probs) > 1:
            found["auroc_mutual_information"] = metrics.auroc(total - entropy(probs, 2).mean(0), wrong)
    return {name: float(value) for name, value in found.items()}


def curve(logits: Tensor, y: Tensor, sizes: Sequence[int]) -> list[Scored]:
    """Score MCBN at several T from one series of draws, logits (D, N, K).

    At each T the series is cut into D // T disjoint sets; PLL is the mean over all of them, with its standard error
    s / sqrt(sets), other scores over the first eight. Where every T divides D and the next T, PLL cannot fall as T
    grows: log (p + q) / 2 >= (log p + log q) / 2.
    """
    probs = torch.softmax(logits.double(), 2)
    return [_at(probs, y, T) for T in sizes if len(probs) >= T]


def _at(probs: Tensor, y: Tensor, n_samples: int) -> Scored:
    sets = set_means(probs, n_samples)  # (S, N, K)
    pll = log_likelihood(sets, y).mean(1)  # (S,)
    several = [score(part, y) for part in torch.split(probs, n_samples)[: min(len(sets), MOST_SETS)]]
    names = [name for name in several[0] if all(name in one for one in several)]
    values = {name: torch.tensor([one[name] for one in several], dtype=torch.float64) for name in names} | {"pll": pll}
    errors = {name: standard_error(v) for name, v in values.items() if len(v) > 1}
    return Scored(n_samples, len(sets), {name: float(v.mean()) for name, v in values.items()}, errors)


def set_means(probs: Tensor, n_samples: int) -> Tensor:
    """Average probabilities (D, N, K) over D // T successive sets of T draws: (D // T, N, K)."""
    n_sets = len(probs) // n_samples
    return probs[: n_sets * n_samples].reshape(n_sets, n_samples, *probs.shape[1:]).mean(1)


def standard_error(values: Tensor) -> float:
    """s / sqrt(n)."""
    return float(values.double().std() / len(values) ** 0.5)
