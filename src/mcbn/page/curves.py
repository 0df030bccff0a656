"""What a report draws, as numbers: each function takes vectors over points and returns vectors, nothing is fitted.

Symbols: N points; `uncertainty` ranks them (std or entropy), `loss` is what went wrong (absolute error, or 1 if wrong).
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]
N_BINS = 10
N_LEVELS = 101


class Curve(NamedTuple):
    """Points of a curve, in the order of x."""

    x: Vector
    y: Vector


class Bins(NamedTuple):
    """Averages over bins: predicted against observed, and how many points each holds."""

    predicted: Vector
    observed: Vector
    size: NDArray[np.int64]


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
    return _reached(needed)


def set_coverage(mass_above: Vector) -> Curve:
    """Share of points whose true class is in the smallest set of classes with probability `level` or more.

    mass_above (N,): probability of the classes ranked above the true one, which is in the set while that is below the
    level. Sets are whole classes, so a calibrated model covers the level or more.
    """
    levels = np.linspace(0, 1, N_LEVELS)
    ordered = np.sort(mass_above)
    return Curve(levels, np.searchsorted(ordered, levels, side="left") / len(ordered))


def _reached(needed: Vector) -> Curve:
    levels = np.linspace(0, 1, N_LEVELS)
    return Curve(levels, np.searchsorted(np.sort(needed), levels, side="right") / len(needed))


def reliability(confidence: Vector, right: Vector, n_bins: int = 15) -> Bins:
    """Mean confidence and accuracy in equal-width bins (b / n, (b + 1) / n] (Guo et al. 2017); empty bins are left out.

    sum_b count_b |observed_b - predicted_b| / N is the expected calibration error.
    """
    edges = np.linspace(0, 1, n_bins + 1)
    return _average(np.searchsorted(edges[1:-1], confidence, side="left"), confidence, right, n_bins)


def spread_reliability(std: Vector, error: Vector, n_bins: int = N_BINS) -> Bins:
    """Root mean predicted variance and root mean squared error in bins of equally many points, by predicted std."""
    n_bins = min(n_bins, len(std))
    rank = np.empty(len(std), dtype=np.int64)
    rank[np.argsort(std, kind="stable")] = np.arange(len(std))
    found = _average(rank * n_bins // len(std), std**2, error**2, n_bins)
    return Bins(np.sqrt(found.predicted), np.sqrt(found.observed), found.size)


def _average(place: NDArray[np.int64], predicted: Vector, observed: Vector, n_bins: int) -> Bins:
    count = np.bincount(place, minlength=n_bins)
    kept = count > 0
    sums = [np.bincount(place, weights=value, minlength=n_bins)[kept] for value in (predicted, observed)]
    return Bins(sums[0] / count[kept], sums[1] / count[kept], count[kept])


def histograms(uncertainty: Vector, good: NDArray[np.bool_], n_bins: int = 30) -> tuple[Vector, Vector, Vector]:
    """Edges (n + 1,), and the share of the good and of the other points in each bin (n,); each sums to 1 or is 0."""
    edges = np.histogram_bin_edges(uncertainty, n_bins)
    shares = []
    for chosen in (uncertainty[good], uncertainty[~good]):
        count = np.histogram(chosen, edges)[0]
        shares.append(count / max(1, len(chosen)))
    return edges, shares[0], shares[1]


def thin(length: int, most: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Choose at most so many of the points at random, in their order."""
    if length <= most:
        return np.arange(length)
    return np.sort(np.random.default_rng(seed).choice(length, most, replace=False))
