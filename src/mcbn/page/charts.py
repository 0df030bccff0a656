"""Charts of a report as data for chart.js; every one carries the text that stands for it where it cannot be seen."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcbn.page import curves
from mcbn.page.curves import Bins, Curve, Vector
from mcbn.page.evidence import Votes
from mcbn.page.html import number, rounded
from mcbn.plots import Z50, Z95, running_mean

Spec: TypeAlias = dict[str, Any]
MOST_POINTS = 10_000  # drawn at most; scores and curves count all
MOST_NODES = 400  # of a curve
DIAGONAL = {"name": "ideal", "kind": "line", "color": "gray", "dash": True, "x": [0, 1], "y": [0, 1], "quiet": True}


def uncertainty_error(
    std: Vector,
    error: Vector,
    *,
    constant_std: float | None,
    inputs: NDArray[np.int64] | None = None,
    color: str = "blue",
    units: str = "target units",
) -> Spec:
    """Absolute errors in the order of predicted std, over the bands that should hold half and 95 % of them.

    Teye et al. 2018, Figure 2, left: dashes are the same bounds for one constant std, the line is the running mean
    of a tenth of the points.
    """
    shown = curves.thin(len(std), MOST_POINTS)
    order = shown[np.argsort(std[shown], kind="stable")]
    N = len(order)
    rank = np.arange(1, N + 1)
    heights, window = error[order], min(N, max(10, N // 10))
    series = [
        _band(rank, Z95 * std[order], "95 % interval", color),
        _band(rank, Z50 * std[order], "50 % interval", color, deep=True),
    ]
    series.append(_series("dots", "absolute error", "gray", rank, heights))
    nodes = np.unique(np.linspace(0, N - 1, MOST_NODES).astype(int))
    mean = running_mean(heights, window)[nodes]
    series.append(_series("line", f"running mean of {window}", "ink", rank[nodes], mean))
    if constant_std is not None:
        for z, name in ((Z50, "constant 50 %"), (Z95, "constant 95 %")):
            series.append(_series("line", name, "red", np.array([1, N]), np.full(2, z * constant_std), dash=True))
    names = np.arange(len(std)) if inputs is None else inputs
    return {
        "alt": _describe_errors(std, error, "absolute error"),
        "x": {"label": "points, from certain to uncertain", "min": 0, "max": N + 1},
        "y": {"label": f"absolute error ({units})", "min": 0, "max": _height(heights, std, constant_std), "flag": True},
        "series": series,
        "titles": [f"input {names[i]}, std {number(std[i])}" for i in order],
        "nearest": "xy",
    }


def _height(error: Vector, std: Vector, constant_std: float | None) -> float:
    """Scale to the bands and the bulk of the errors, not to a few far ones."""
    band = Z95 * max(float(np.quantile(std, 0.99, method="lower")), constant_std or 0.0)
    bulk = max(1.08 * band, min(1.5 * float(np.quantile(error, 0.95, method="lower")), 1.05 * float(error.max())))
    near = error[error <= 1.4 * bulk]
    return float(max(bulk, 1.05 * float(near.max()) if len(near) else 0.0)) or 1.0


def coverage(found: Curve, twin: Curve | None, twin_name: str, what: str) -> Spec:
    """How often intervals or sets of each level hold the truth."""
    at = round(0.95 * (len(found.x) - 1))
    beside = f"; {twin.y[at]:.1%} for {twin_name}" if twin else ""
    lines = [_line(twin_name, "red", twin, dash=True)] if twin else []
    return {
        "alt": f"{what}: at the level 95 %, {found.y[at]:.1%} of points are inside{beside}.",
        "x": {"label": "level", "min": 0, "max": 1, "percent": True},
        "y": {"label": "share inside", "min": 0, "max": 1, "percent": True},
        "series": [_line("MCBN", "blue", found), *lines, DIAGONAL],
    }


def class_reliability(found: Bins, twin: Bins | None) -> Spec:
    """Accuracy against confidence, bin by bin."""
    gaps = [float(np.abs(b.observed - b.predicted) @ b.size / b.size.sum()) for b in (found, twin) if b]
    beside = f", {gaps[1]:.1%} for the plain network" if twin else ""
    plain = _bins("plain network", "red", twin, dash=True) if twin else []
    return {
        "alt": f"Reliability: accuracy and confidence are {gaps[0]:.1%} apart{beside}.",
        "x": {"label": "confidence", "min": 0, "max": 1, "percent": True},
        "y": {"label": "accuracy", "min": 0, "max": 1, "percent": True},
        "series": [*_bins("MCBN", "blue", found), *plain, DIAGONAL],
        "titles": [f"confidence {p:.1%}, {n:,} points" for p, n in zip(found.predicted, found.size, strict=True)],
    }


def spread_reliability(found: Bins, units: str) -> Spec:
    """Root mean squared error against predicted std, in tenths of the points."""
    top = 1.08 * float(max(found.predicted.max(), found.observed.max())) or 1.0
    ends = "; ".join(
        f"{name}, std {number(found.predicted[i], 3)}: error {number(found.observed[i], 3)}"
        for name, i in (("most certain", 0), ("least certain", -1))
    )
    diagonal = {**DIAGONAL, "x": [0, top], "y": [0, top]}
    return {
        "alt": f"Reliability of the std, by tenths. {ends}.",
        "x": {"label": f"predicted std ({units})", "min": 0, "max": top},
        "y": {"label": "root mean squared error", "min": 0, "max": top},
        "series": [*_bins("MCBN", "blue", found), diagonal],
        "titles": [f"std {number(p)}, {n:,} points" for p, n in zip(found.predicted, found.size, strict=True)],
    }


def risk(uncertainty: Vector, loss: Vector, twin: Vector | None, label: str, *, percent: bool) -> Spec:
    """Mean loss of the points kept when the most uncertain ones are handed to someone else."""
    ours, best = _few(curves.risk_coverage(uncertainty, loss)), _few(curves.risk_coverage(loss, loss))
    overall = float(loss.mean())
    lines = [_line("by MCBN's uncertainty", "blue", ours)]
    if twin is not None:
        lines.append(_line("by the plain network's", "red", _few(curves.risk_coverage(twin, loss)), dash=True))
    lines.append(
        _series("line", "constant: no order", "red" if twin is None else "gray", [0, 1], [overall] * 2, dash=True)
    )
    lines.append(_line("best possible order", "green", best, dash=True))
    half = float(ours.y[np.searchsorted(ours.x, 0.5).clip(max=len(ours.x) - 1)])
    shown = (f"{half:.1%}", f"{overall:.1%}") if percent else (number(half), number(overall))
    top = 1.12 * max(overall, float(np.quantile(ours.y, 0.98))) or 1.0
    return {
        "alt": f"Risk-coverage: {label} is {shown[0]} on the more certain half and {shown[1]} on all points.",
        "x": {"label": "share of points kept, the most certain first", "min": 0, "max": 1, "percent": True},
        "y": {"label": label, "min": 0, "max": top, "percent": percent},
        "series": lines,
    }


def histogram(uncertainty: Vector, good: NDArray[np.bool_], names: tuple[str, str], label: str) -> Spec:
    """Uncertainty of the points that went well beside that of the others, each as shares of its own group."""
    edges, first, second = curves.histograms(uncertainty, good)
    medians = [
        number(float(np.median(part)), 3) if len(part) else "none" for part in (uncertainty[good], uncertainty[~good])
    ]
    series = [
        {"name": name, "kind": "bars", "color": color, "x": rounded(edges, 6), "y": rounded(share)}
        for name, color, share in ((names[0], "blue", first), (names[1], "red", second))
    ]
    return {
        "alt": f"Histogram of {label}: median {medians[0]} where {names[0]}, {medians[1]} where {names[1]}.",
        "x": {"label": label, "min": float(edges[0]), "max": float(edges[-1])},
        "y": {
            "label": "share of the group",
            "min": 0,
            "max": 1.08 * float(max(first.max(), second.max())),
            "percent": True,
        },
        "series": series,
        "titles": [f"{label} {number(a, 3)} to {number(b, 3)}" for a, b in itertools.pairwise(edges)],
    }


def _describe_errors(std: Vector, error: Vector, what: str) -> str:
    low, high = curves.tenths(std, error)
    way = "rises" if high >= low else "falls"
    return (
        f"Uncertainty-error plot of {len(std):,} points: the mean {what} {way} from {number(low, 3)} in the most"
        f" certain tenth to {number(high, 3)} in the least certain."
    )


def _series(kind: str, name: str, color: str, x: Any, y: Any, *, dash: bool = False) -> Spec:
    return {"name": name, "kind": kind, "color": color, "dash": dash, "x": rounded(x, 6), "y": rounded(y)}


def _band(x: Any, top: Vector, name: str, color: str, *, deep: bool = False) -> Spec:
    return {**_series("band", name, color, x, top), "deep": deep}


def _line(name: str, color: str, curve: Curve, *, dash: bool = False) -> Spec:
    return _series("line", name, color, curve.x, curve.y, dash=dash)


def _bins(name: str, color: str, found: Bins, *, dash: bool = False) -> Sequence[Spec]:
    line = _series("line", name, color, found.predicted, found.observed, dash=dash)
    return [line] if dash else [_series("dots", f"{name}, bins", color, found.predicted, found.observed), line]


def _few(curve: Curve) -> Curve:
    """Keep at most MOST_NODES points of a curve, its ends among them."""
    nodes = np.unique(np.linspace(0, len(curve.x) - 1, MOST_NODES).astype(int))
    return Curve(curve.x[nodes], curve.y[nodes])


def error_rate(found: Votes) -> Spec:
    """Right and wrong answers in the order of uncertainty, under the share of wrong ones among neighbours."""
    shown = curves.thin(len(found.entropy), MOST_POINTS)
    order = shown[np.argsort(found.entropy[shown], kind="stable")]
    N = len(order)
    rank, window = np.arange(1, N + 1), min(N, max(10, N // 10))
    nodes = np.unique(np.linspace(0, N - 1, MOST_NODES).astype(int))
    rate, promised = (running_mean(v[order], window)[nodes] for v in (found.error, 1 - found.confidence))
    overall = float(found.error.mean())
    top = max(1.25 * float(max(rate.max(), promised.max())), 0.02)
    jitter = np.random.default_rng(0).uniform(-0.02, 0.02, N)  # so that dots of one height can be told apart
    dots = np.where(found.error[order] > 0, 0.95, 0.03) * top + jitter * top
    titles = [
        f"input {found.inputs[i]}: {'wrong' if found.error[i] else 'right'}, entropy {number(found.entropy[i], 3)}"
        for i in order
    ]
    return {
        "alt": _describe_errors(found.entropy, found.error, "share of wrong answers"),
        "x": {"label": "points, from certain to uncertain", "min": 0, "max": N + 1},
        "y": {"label": "share of wrong answers", "min": 0, "max": top, "percent": True},
        "series": [
            {**_series("dots", "answers", "gray", rank, dots), "quiet": True, "lead": True},
            _series("line", f"running share of {window}", "blue", rank[nodes], rate),
            _series("line", "promised: 1 - confidence", "ink", rank[nodes], promised, dash=True),
            _series("line", "over all", "red", [1, N], [overall] * 2, dash=True),
        ],
        "titles": titles,
        "nearest": "xy",
    }
