"""A report in numbers: curves, scores beside a twin's and the bounds no uncertainty can pass.

Symbols: N points; `uncertainty` ranks them (std or entropy), `loss` is what went wrong (absolute error, or 1 if wrong).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcbn import metrics
from mcbn.errors import MCBNError
from mcbn.page.evidence import Names, Spread, Vector, Votes
from mcbn.page.templates import number

LEVELS = np.linspace(0, 1, 101)
MOST_NODES = 400  # of a curve
MOST_POINTS = 10_000  # drawn at most; scores and curves count all
FIFTHS = ("least uncertain", "second", "third", "fourth", "most uncertain")


class Curve(NamedTuple):
    """Points of a curve, in the order of x."""

    x: Vector
    y: Vector

    @property
    def bulk(self) -> float:
        """Height below which all but the highest points lie."""
        return float(np.quantile(self.y, 0.98))


class Bins(NamedTuple):
    """Averages over bins: predicted against observed, and how many points each holds."""

    predicted: Vector
    observed: Vector
    size: NDArray[np.int64]

    @property
    def gap(self) -> float:
        """sum_b size_b |observed_b - predicted_b| / N, for confidences the ECE (Guo et al. 2017, Eq. (3))."""
        return float(np.abs(self.observed - self.predicted) @ self.size / self.size.sum())


def ranked(uncertainty: Vector) -> NDArray[np.int64]:
    """Put points in the order of their uncertainty (N,); of more than 10,000 a random part."""
    size = min(len(uncertainty), MOST_POINTS)
    shown = np.sort(np.random.default_rng(0).choice(len(uncertainty), size, replace=False))
    return shown[np.argsort(uncertainty[shown], kind="stable")]


def answers(wrong: Vector, top: float) -> tuple[Vector, list[str]]:
    """Place answers (N,) on an axis, right ones low and wrong ones high, each with its word."""
    jitter = np.random.default_rng(0).uniform(-0.02, 0.02, len(wrong))  # so that dots can be told apart
    heights = np.where(wrong > 0, 0.95, 0.03) * top + jitter * top
    return heights, np.where(wrong > 0, "wrong", "right").tolist()


def tenths(uncertainty: Vector, loss: Vector) -> tuple[float, float]:
    """Mean loss of the least and of the most uncertain tenth; (N,) each, a tenth holds at least one point."""
    order, size = np.argsort(uncertainty, kind="stable"), max(1, len(loss) // 10)
    return float(loss[order[:size]].mean()), float(loss[order[-size:]].mean())


def mean_error(values: Vector) -> tuple[float, float]:
    """Mean over points (N,) and its standard error, NaN for a single point."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def fault(held: Vector, promised: Vector | float, words: tuple[str, str]) -> str:
    """Say, in one of two words, that points fall short of what was promised for them, or go beyond it; else nothing.

    held (N,) is 1 or 0, promised (N,) its probability. Two percent, or two standard errors, may be chance.
    """
    gap, chance = np.mean(held - promised), 2 * math.sqrt(np.mean(promised * (1 - promised)) / len(held))
    return "" if abs(gap) <= max(0.02, chance) else words[int(gap > 0)]


def risk_coverage(uncertainty: Vector, loss: Vector) -> Curve:
    """Mean loss over the most certain k of N points, against k / N (`mcbn.metrics.risk_coverage`), at a few nodes."""
    coverage, risk = metrics.risk_coverage(uncertainty, loss)
    shown = nodes(len(risk))
    return Curve(coverage.numpy()[shown], risk.numpy()[shown])


def nodes(length: int) -> NDArray[np.int64]:
    """Choose at most 400 places of a curve, its ends among them."""
    return np.unique(np.linspace(0, length - 1, MOST_NODES).astype(int))


def coverage_by_group(evidence: Spread | Votes, uncertainty: Vector, groups: Names) -> list[tuple[str, int, float]]:
    """Name, points and their share inside the 95 % interval or set, by fifths of uncertainty and groups of inputs."""
    fifth = _equal_groups(uncertainty, 5)
    masks = {f"{name} fifth by uncertainty": fifth == k for k, name in enumerate(FIFTHS)}
    if groups is not None:
        names = np.asarray([str(name) for name in groups])[evidence.inputs]
        masks |= {name: names == name for name in sorted(set(names.tolist()))}
    return [(name, int(mask.sum()), float(evidence.inside[mask].mean())) for name, mask in masks.items() if mask.any()]


def _equal_groups(values: Vector, count: int) -> NDArray[np.int64]:
    """Number the points (N,) by groups of equal size, from low values to high."""
    return np.argsort(np.argsort(values, kind="stable")) * count // len(values)


def interval_coverage(error: Vector, std: Vector | float) -> Curve:
    """Share of points inside their central Gaussian interval, for levels 0 to 1: |error| <= z_level std."""
    z = np.divide(error, std, out=np.where(error > 0, np.inf, 0.0), where=np.greater(std, 0))
    needed = [math.erf(value / math.sqrt(2)) for value in z]  # a point is inside from there on
    return Curve(LEVELS, np.searchsorted(np.sort(needed), LEVELS, side="right") / len(needed))


def set_coverage(mass_above: Vector) -> Curve:
    """Share of points whose true class is in the smallest set of each level: where `mass_above` (N,) is below it."""
    return Curve(LEVELS, np.searchsorted(np.sort(mass_above), LEVELS, side="left") / len(mass_above))


def reliability(confidence: Vector, right: Vector) -> Bins:
    """Mean confidence and accuracy in those of 15 bins (b / 15, (b + 1) / 15] that hold points (Guo et al. 2017)."""
    return _average(np.searchsorted(np.linspace(0, 1, 16)[1:-1], confidence, side="left"), confidence, right)


def spread_reliability(std: Vector, error: Vector) -> Bins:
    """Root mean predicted variance and root mean squared error in ten groups of equal size, by predicted std."""
    squares = _average(_equal_groups(std, 10), std**2, error**2)
    return Bins(np.sqrt(squares.predicted), np.sqrt(squares.observed), squares.size)


def _average(place: NDArray[np.int64], predicted: Vector, observed: Vector) -> Bins:
    _, place, size = np.unique(place, return_inverse=True, return_counts=True)
    return Bins(np.bincount(place, predicted) / size, np.bincount(place, observed) / size, size)


def histograms(uncertainty: Vector, good: NDArray[np.bool_]) -> tuple[Vector, Vector, list[str]]:
    """Edges (n + 1,), shares of the good and of the other points in each bin (2, n), and both medians in words."""
    low, high = float(uncertainty.min()), float(uncertainty.max())
    room = max(0.0, 1e-3 * max(abs(low), abs(high)) - (high - low)) / 2  # values that all but agree: middle bins
    edges = np.histogram_bin_edges(uncertainty, 30, (low - room, high + room))
    groups = (uncertainty[good], uncertainty[~good])
    shares = np.stack([np.histogram(group, edges)[0] / max(1, len(group)) for group in groups])
    return edges, shares, [number(float(np.median(group)), 3) if len(group) else "none" for group in groups]


class Score(NamedTuple):
    """One row: ours, the twin's, the bound, and percent of the way from twin to bound; NaN where there is none."""

    name: str
    better: str
    ours: float
    twin: float
    bound: float
    normalized: float


def regression_scores(spread: Spread) -> list[Score]:
    """RMSE, CRPS, PLL and the coverage of 95 % intervals (Teye et al. 2018, Sections 4.1 and 4.2)."""
    mean, y = spread.mean, spread.y
    rmse = float(metrics.rmse(mean, y))
    rows = [Score("RMSE", "lower", rmse, rmse, 0.0, math.nan)]
    if spread.plain is not None:
        plain = float(metrics.rmse(spread.plain, y))
        rows.append(Score("RMSE of the plain network", "lower", plain, math.nan, 0.0, math.nan))
    rows.append(_score("CRPS", "lower", *crps(spread), metrics.crps_optimum(mean, y).numpy()))
    if spread.log_prob is not None:
        constant = metrics.pll(mean[None], y, spread.constant_std**-2).numpy()
        n_each = len(y) // len(spread.log_prob)  # maps: an input's joint likelihood is shared evenly by its points
        log_prob = np.repeat(spread.log_prob / n_each, n_each)
        rows.append(_score("PLL", "higher", log_prob, constant, metrics.pll_optimum(mean, y).numpy()))
    ours, twin = float(spread.inside.mean()), float(interval_coverage(spread.error, spread.constant_std).y[95])
    return [*rows, Score(f"Share inside the {spread.kind} 95 % interval", "near 0.95", ours, twin, 0.95, math.nan)]


def crps(spread: Spread) -> tuple[Vector, Vector]:
    """CRPS of MCBN and of its constant twin, (N,) each."""
    variances = spread.std**2, np.full_like(spread.std, spread.constant_std**2)
    ours, twin = (metrics.crps_gaussian(spread.mean, variance, spread.y).numpy() for variance in variances)
    return ours, twin


def _score(name: str, better: str, *values: Vector | float) -> Score:
    """Average ours, the twin's and the bound over points; place ours between the others, where they make a scale."""
    ours, twin, bound = (float(np.mean(value)) for value in values)
    try:
        percent = float(metrics.normalized(ours, twin, bound))
    except MCBNError:  # the bounds coincide or one is infinite
        percent = math.nan
    return Score(name, better, ours, twin, bound, percent)


def class_scores(ours: Votes, plain: Votes | None) -> list[Score]:
    """Scores of both, and their bound: 1 where higher is better, else 0."""
    return [
        _score(name, better, score(ours), score(plain) if plain else math.nan, float(better == "higher"))
        for name, better, score in CLASS_SCORES
    ]


def _auroc(uncertainty: Vector | None, wrong: Vector) -> float:
    """Area under the curve; NaN for a single pass, which has no such uncertainty, and where all are right or wrong."""
    found = None if uncertainty is None else metrics.error_auroc(uncertainty, wrong)
    return math.nan if found is None else found


CLASS_SCORES: list[tuple[str, str, Callable[[Votes], float]]] = [
    ("Accuracy", "higher", lambda votes: votes.right.mean()),
    ("Negative log likelihood", "lower", lambda votes: -votes.log_prob.mean()),
    ("Brier score", "lower", lambda votes: votes.brier.mean()),
    ("Calibration error (ECE)", "lower", lambda votes: reliability(votes.confidence, votes.right).gap),
    ("AUROC of entropy at finding the wrong ones", "higher", lambda votes: _auroc(votes.entropy, votes.error)),
    ("AUROC of mutual information at it", "higher", lambda votes: _auroc(votes.mutual_information, votes.error)),
]
