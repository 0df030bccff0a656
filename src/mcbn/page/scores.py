"""A report in numbers and words: curves, scores beside a twin's and the bounds no uncertainty can pass, a headline.

Symbols: N points; `uncertainty` ranks them (std or entropy), `loss` is what went wrong (absolute error, or 1 if wrong).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mcbn import metrics
from mcbn.errors import MCBNError
from mcbn.page.evidence import Spread, Vector, Votes
from mcbn.page.templates import number

LEVELS = np.linspace(0, 1, 101)


class Curve(NamedTuple):
    """Points of a curve, in the order of x."""

    x: Vector
    y: Vector


class Bins(NamedTuple):
    """Averages over bins: predicted against observed, and how many points each holds."""

    predicted: Vector
    observed: Vector
    size: NDArray[np.int64]

    @property
    def gap(self) -> float:
        """sum_b size_b |observed_b - predicted_b| / N, for confidences the ECE (Guo et al. 2017, Eq. (3))."""
        return float(np.abs(self.observed - self.predicted) @ self.size / self.size.sum())


def tenths(uncertainty: Vector, loss: Vector) -> tuple[float, float]:
    """Mean loss of the least and of the most uncertain tenth; (N,) each, a tenth holds at least one point."""
    order = np.argsort(uncertainty, kind="stable")
    size = max(1, len(loss) // 10)
    return float(loss[order[:size]].mean()), float(loss[order[-size:]].mean())


def risk_coverage(uncertainty: Vector, loss: Vector) -> Curve:
    """Mean loss over the most certain k of N points, k = 1..N, against k / N (El-Yaniv and Wiener 2010).

    Points of equal uncertainty are kept or left together, so that the order they came in does not matter: the curve has
    one point for each different uncertainty.
    """
    order = np.argsort(uncertainty, kind="stable")
    last = np.append(np.flatnonzero(np.diff(uncertainty[order])), len(order) - 1)
    kept = last + 1
    return Curve(kept / len(loss), np.cumsum(loss[order])[last] / kept)


def interval_coverage(error: Vector, std: Vector) -> Curve:
    """Share of points inside their central Gaussian interval, for levels 0 to 1: |error| <= z_level std.

    A point lies inside from the level erf(|error| / (std sqrt 2)) on.
    """
    scale = np.where(std > 0, std, 1.0)
    needed = np.array([math.erf(z / math.sqrt(2)) for z in np.abs(error) / scale])
    needed = np.where(std > 0, needed, (error != 0).astype(float))
    return Curve(LEVELS, np.searchsorted(np.sort(needed), LEVELS, side="right") / len(needed))


def set_coverage(mass_above: Vector) -> Curve:
    """Share of points whose true class is in the smallest set of classes with probability `level` or more.

    mass_above (N,): probability of the classes ranked above the true one, which is in the set while that is below the
    level. Sets are whole classes, so a calibrated model covers the level or more.
    """
    return Curve(LEVELS, np.searchsorted(np.sort(mass_above), LEVELS, side="left") / len(mass_above))


def reliability(confidence: Vector, right: Vector, n_bins: int = 15) -> Bins:
    """Mean confidence and accuracy in bins (b / n, (b + 1) / n] that are not empty (Guo et al. 2017)."""
    edges = np.linspace(0, 1, n_bins + 1)
    return _average(np.searchsorted(edges[1:-1], confidence, side="left"), confidence, right, n_bins)


def spread_reliability(std: Vector, error: Vector, n_bins: int = 10) -> Bins:
    """Root mean predicted variance and root mean squared error in bins of equally many points, by predicted std."""
    n_bins = min(n_bins, len(std))
    rank = np.empty(len(std), dtype=np.int64)
    rank[np.argsort(std, kind="stable")] = np.arange(len(std))
    squares = _average(rank * n_bins // len(std), std**2, error**2, n_bins)
    return Bins(np.sqrt(squares.predicted), np.sqrt(squares.observed), squares.size)


def _average(place: NDArray[np.int64], predicted: Vector, observed: Vector, n_bins: int) -> Bins:
    count = np.bincount(place, minlength=n_bins)
    kept = count > 0
    sums = [np.bincount(place, weights=value, minlength=n_bins)[kept] for value in (predicted, observed)]
    return Bins(sums[0] / count[kept], sums[1] / count[kept], count[kept])


def histograms(uncertainty: Vector, good: NDArray[np.bool_], n_bins: int = 30) -> tuple[Vector, Vector, Vector]:
    """Edges (n + 1,), and the share of the good and of the other points in each bin (n,); each sums to 1 or is 0."""
    edges = np.histogram_bin_edges(uncertainty, n_bins)
    groups = (uncertainty[good], uncertainty[~good])
    first, second = (np.histogram(group, edges)[0] / max(1, len(group)) for group in groups)
    return edges, first, second


class Score(NamedTuple):
    """One row: ours, the twin's, the bound, and percent of the way from twin to bound; NaN where there is none."""

    name: str
    better: str
    ours: float
    twin: float
    bound: float
    normalized: float


class Headline(NamedTuple):
    """A sentence with the main number, and the facts that belong to it."""

    sentence: str
    facts: tuple[str, ...]


def regression_scores(spread: Spread) -> list[Score]:
    """RMSE, CRPS, PLL and the coverage of 95 % intervals (Teye et al. 2018, Sections 4.1 and 4.2)."""
    mean, y = torch.from_numpy(spread.mean), torch.from_numpy(spread.y)
    rmse = float(metrics.rmse(mean, y))
    rows = [Score("RMSE", "lower", rmse, rmse, 0.0, math.nan)]
    if spread.plain is not None:
        plain = float(metrics.rmse(torch.from_numpy(spread.plain), y))
        rows.append(Score("RMSE of the plain network", "lower", plain, math.nan, 0.0, math.nan))
    rows.append(_score("CRPS", "lower", *_crps(spread), metrics.crps_optimum(mean, y).numpy()))
    if spread.log_prob is not None:
        constant = metrics.pll(mean[None], y, spread.constant_std**-2).numpy()
        n_each = len(y) // len(spread.log_prob)  # maps: an input's joint likelihood is shared evenly by its points
        log_prob = np.repeat(spread.log_prob / n_each, n_each)
        rows.append(_score("PLL", "higher", log_prob, constant, metrics.pll_optimum(mean, y).numpy()))
    ours, twin = (_coverage(spread.error, std) for std in (spread.std, spread.constant_stds))
    return [*rows, Score("Share inside the 95 % interval", "near 0.95", ours, twin, 0.95, math.nan)]


def _crps(spread: Spread) -> tuple[Vector, Vector]:
    """CRPS of MCBN and of its constant twin, (N,) each."""
    mean, y = torch.from_numpy(spread.mean), torch.from_numpy(spread.y)
    variances = (torch.from_numpy(std**2) for std in (spread.std, spread.constant_stds))
    ours, twin = (metrics.crps_gaussian(mean, variance, y).numpy() for variance in variances)
    return ours, twin


def _score(name: str, better: str, ours: Vector, twin: Vector, bound: Vector) -> Score:
    means = float(ours.mean()), float(twin.mean()), float(bound.mean())
    return Score(name, better, *means, _percent(*means))


def _percent(ours: float, twin: float, bound: float) -> float:
    try:
        return float(metrics.normalized(ours, twin, bound))
    except MCBNError:  # the bounds coincide or one is infinite: no scale to place the score on
        return math.nan


def _coverage(error: Vector, std: Vector) -> float:
    return float(interval_coverage(error, std).y[95])


def class_scores(ours: Votes, plain: Votes | None) -> list[Score]:
    """Accuracy, NLL, Brier score, calibration error, and AUROC of entropy at finding the wrong ones."""
    mine = _class_values(ours)
    theirs = _class_values(plain) if plain else [math.nan] * len(mine)
    names = (
        ("Accuracy", "higher", 1.0),
        ("Negative log likelihood", "lower", 0.0),
        ("Brier score", "lower", 0.0),
        ("Calibration error (ECE)", "lower", 0.0),
        ("AUROC of entropy at finding the wrong ones", "higher", 1.0),
        ("AUROC of mutual information at it", "higher", 1.0),
    )
    return [
        Score(name, better, value, twin, bound, _percent(value, twin, bound))
        for (name, better, bound), value, twin in zip(names, mine, theirs, strict=True)
    ]


def _class_values(votes: Votes) -> list[float]:
    means = [float(value.mean()) for value in (votes.right, -votes.log_prob, votes.brier)]
    aurocs = [_auroc(uncertainty, votes.error) for uncertainty in (votes.entropy, votes.mutual_information)]
    return [*means, reliability(votes.confidence, votes.right).gap, *aurocs]


def _auroc(uncertainty: Vector | None, wrong: Vector) -> float:
    """Area under the curve; NaN for a single pass, which has no such uncertainty, and where all are right or wrong."""
    if uncertainty is None or not 0 < wrong.sum() < len(wrong):
        return math.nan
    return float(metrics.auroc(torch.from_numpy(uncertainty), torch.from_numpy(wrong)))


def regression_headline(spread: Spread) -> Headline:
    """Say by how much errors differ between the most and the least uncertain points."""
    low, high = tenths(spread.std, spread.error)
    crps, constant = _crps(spread)
    facts = [
        f"Mean absolute error: {number(low, 3)} in the most certain tenth, {number(high, 3)} in the least certain, "
        f"{number(float(spread.error.mean()), 3)} over all {len(spread.error):,} points.",
        f"The 95 % intervals hold {_coverage(spread.error, spread.std):.1%} of the points; those of constant"
        f" uncertainty {_coverage(spread.error, spread.constant_stds):.1%}.",
        _compare_crps(constant - crps),
    ]
    if spread.epistemic is not None:
        share = np.mean(spread.epistemic) / np.mean(spread.std**2)
        facts.append(
            f"{share:.0%} of the predicted variance is the network's own (epistemic); the rest is the noise of the"
            " targets."
        )
    return Headline(_ratio(low, high, "Errors"), tuple(facts))


def _compare_crps(gains: Vector) -> str:
    way = "lower (better)" if gains.mean() > 0 else "higher (worse)"
    shown, error = _difference(gains)
    doubt = "" if abs(gains.mean()) > 2 * error else ", which cannot be told from chance"
    return f"The CRPS is {way} than that of constant uncertainty by {shown} (standard error over points){doubt}."


def _difference(gains: Vector) -> tuple[str, float]:
    """Show the size of a mean with its standard error over points, and return that error."""
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    return f"{number(abs(float(gains.mean())), 3)} ± {number(error, 2)}", error


def _ratio(low: float, high: float, what: str) -> str:
    if low == 0 and high == 0:
        return f"Neither the most nor the least uncertain tenth has any {what.lower()}."
    if low == 0:
        return f"The least uncertain tenth has no {what.lower()} at all; those in the most uncertain are not 0."
    ratio = high / low
    times = f"{ratio:,.1f} times" if ratio >= 0.95 else f"{ratio:.2f} times"
    larger = "" if ratio >= 1 else "no larger: only "
    return f"{what} in the most uncertain tenth are {larger}{times} those in the least uncertain."


def class_headline(ours: Votes, plain: Votes | None) -> Headline:
    """Say how much more often the most uncertain predictions are wrong than the least uncertain ones."""
    low, high = tenths(ours.entropy, ours.error)
    sentence = f"{high:.1%} of the most uncertain tenth are wrong, none of the least uncertain."
    wrong = (
        f"{1 - ours.right.mean():.1%} of all {len(ours.right):,} points are wrong; {low:.1%} of the most certain tenth "
        f"and {high:.1%} of the least certain."
    )
    facts = [wrong, f"Mean confidence {ours.confidence.mean():.1%} at an accuracy of {ours.right.mean():.1%}"]
    if plain:
        facts[-1] += f"; the plain network: {plain.confidence.mean():.1%} at {plain.right.mean():.1%}"
        gains = ours.log_prob - plain.log_prob
        way, shown = "higher" if gains.mean() >= 0 else "lower", _difference(gains)[0]
        facts.append(
            f"The log likelihood is {way} than the plain network's by {shown} nats (standard error over points)."
        )
    facts[1] += "."
    return Headline(sentence if low == 0 else _ratio(low, high, "Wrong answers"), tuple(facts))
