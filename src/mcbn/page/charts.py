"""Charts of a report as data for chart.js; every one carries the text that stands for it where it cannot be seen.

A new chart is a function that returns a `Spec` and a line in `regression_charts` or `class_charts`; its words are in
assets/regression.html.j2 or classification.html.j2.
"""

import itertools
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcbn.page import scores
from mcbn.page.evidence import Spread, Vector, Votes
from mcbn.page.scores import Bins, Curve
from mcbn.page.templates import number, rounded
from mcbn.plots import Z50, Z95, bulk_height, running_mean

Spec: TypeAlias = dict[str, Any]
MOST_POINTS = 10_000  # drawn at most; scores and curves count all
MOST_NODES = 400  # of a curve


def regression_charts(spread: Spread, units: str) -> dict[str, Spec]:
    """Draw a regression beside its twin of one constant std."""
    std, error = spread.std, spread.error
    inside, constant = (scores.interval_coverage(error, s) for s in (std, spread.constant_stds))
    halves = ("the smaller half of errors", "the larger half of errors")
    return {
        "errors": uncertainty_error(std, error, constant_std=spread.constant_std, inputs=spread.inputs, units=units),
        "coverage": coverage(inside, constant, twin_name="constant uncertainty", what="Interval coverage"),
        "reliability": std_reliability(scores.spread_reliability(std, error), units),
        "risk": risk(std, error, None, "mean absolute error", percent=False),
        "histogram": histogram(std, error <= np.median(error), halves, f"predicted std ({units})"),
    }


def class_charts(ours: Votes, plain: Votes | None) -> dict[str, Spec]:
    """Draw a classification beside that of the plain network, where it was asked."""
    beside = [ours, plain] if plain else [ours]
    bins = [scores.reliability(votes.confidence, votes.right) for votes in beside]
    sets = [scores.set_coverage(votes.mass_above) for votes in beside]
    order = plain.entropy if plain else None
    return {
        "errors": error_rate(ours),
        "reliability": class_reliability(*bins),
        "coverage": coverage(*sets, twin_name="plain network", what="Set coverage"),
        "risk": risk(ours.entropy, ours.error, order, "share of wrong answers", percent=True),
        "histogram": histogram(ours.entropy, ours.right > 0, ("right", "wrong"), "entropy (nats)"),
    }


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
    order, rank, nodes, window = _ranked(std)
    N, heights = len(order), error[order]
    drawn = [
        {**series("band", "95 % interval", color, rank, Z95 * std[order]), "deep": False},
        {**series("band", "50 % interval", color, rank, Z50 * std[order]), "deep": True},
        series("dots", "absolute error", "gray", rank, heights),
        series("line", f"running mean of {window}", "ink", rank[nodes], running_mean(heights, window)[nodes]),
    ]
    if constant_std is not None:
        for z, name in ((Z50, "constant 50 %"), (Z95, "constant 95 %")):
            drawn.append(series("line", name, "red", [1, N], [z * constant_std] * 2, dash=True))
    names = np.arange(len(std)) if inputs is None else inputs
    return {
        "alt": _describe_errors(std, error, "absolute error"),
        "x": axis("points, from certain to uncertain", N + 1),
        "y": axis(f"absolute error ({units})", bulk_height(heights, std, constant_std), flag=True),
        "series": drawn,
        "titles": [f"input {names[i]}, std {number(std[i])}" for i in order],
        "nearest": "xy",
    }


def error_rate(votes: Votes) -> Spec:
    """Right and wrong answers in the order of uncertainty, under the share of wrong ones among neighbours."""
    order, rank, nodes, window = _ranked(votes.entropy)
    N = len(order)
    rate, promised = (running_mean(v[order], window)[nodes] for v in (votes.error, 1 - votes.confidence))
    top = max(1.25 * float(max(rate.max(), promised.max())), 0.02)
    jitter = np.random.default_rng(0).uniform(-0.02, 0.02, N)  # so that dots of one height can be told apart
    dots = np.where(votes.error[order] > 0, 0.95, 0.03) * top + jitter * top
    return {
        "alt": _describe_errors(votes.entropy, votes.error, "share of wrong answers"),
        "x": axis("points, from certain to uncertain", N + 1),
        "y": axis("share of wrong answers", top, percent=True),
        "series": [
            {**series("dots", "answers", "gray", rank, dots), "quiet": True, "lead": True},
            series("line", f"running share of {window}", "blue", rank[nodes], rate),
            series("line", "promised: 1 - confidence", "ink", rank[nodes], promised, dash=True),
            series("line", "over all", "red", [1, N], [float(votes.error.mean())] * 2, dash=True),
        ],
        "titles": [
            f"input {votes.inputs[i]}: {'wrong' if votes.error[i] else 'right'}, entropy {number(votes.entropy[i], 3)}"
            for i in order
        ],
        "nearest": "xy",
    }


def _ranked(uncertainty: Vector) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Return the points shown from certain to uncertain, their ranks, the nodes of a line, a running mean's window."""
    shown = thin(len(uncertainty), MOST_POINTS)
    order = shown[np.argsort(uncertainty[shown], kind="stable")]
    N = len(order)
    return order, np.arange(1, N + 1), _nodes(N), min(N, max(10, N // 10))


def thin(length: int, most: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Choose at most so many of the points at random, in their order."""
    if length <= most:
        return np.arange(length)
    return np.sort(np.random.default_rng(seed).choice(length, most, replace=False))


def _nodes(length: int) -> NDArray[np.int64]:
    """Choose at most MOST_NODES places, the ends among them."""
    return np.unique(np.linspace(0, length - 1, MOST_NODES).astype(int))


def _describe_errors(uncertainty: Vector, error: Vector, what: str) -> str:
    low, high = scores.tenths(uncertainty, error)
    way = "rises" if high >= low else "falls"
    return (
        f"Uncertainty-error plot of {len(error):,} points: the mean {what} {way} from {number(low, 3)} in the most"
        f" certain tenth to {number(high, 3)} in the least certain."
    )


def coverage(ours: Curve, twin: Curve | None = None, *, twin_name: str, what: str) -> Spec:
    """How often intervals or sets of each level hold the truth."""
    beside = f"; {twin.y[95]:.1%} for {twin_name}" if twin else ""
    alt = f"{what}: at the level 95 %, {ours.y[95]:.1%} of points are inside{beside}."
    axes = axis("level", 1, percent=True), axis("share inside", 1, percent=True)
    return _over_diagonal(alt, *axes, [series("line", "MCBN", "blue", *ours)], twin, twin_name)


def class_reliability(ours: Bins, twin: Bins | None = None) -> Spec:
    """Accuracy against confidence, bin by bin."""
    beside = f", {twin.gap:.1%} for the plain network" if twin else ""
    alt = f"Reliability: accuracy and confidence are {ours.gap:.1%} apart{beside}."
    axes = axis("confidence", 1, percent=True), axis("accuracy", 1, percent=True)
    titles = [f"confidence {p:.1%}, {n:,} points" for p, n in zip(ours.predicted, ours.size, strict=True)]
    return _over_diagonal(alt, *axes, _bins(ours), twin and twin[:2], "plain network") | {"titles": titles}


def std_reliability(bins: Bins, units: str) -> Spec:
    """Root mean squared error against predicted std, in tenths of the points."""
    top = 1.08 * float(max(bins.predicted.max(), bins.observed.max())) or 1.0
    ends = "; ".join(
        f"{name}, std {number(bins.predicted[i], 3)}: error {number(bins.observed[i], 3)}"
        for name, i in (("most certain", 0), ("least certain", -1))
    )
    axes = axis(f"predicted std ({units})", top), axis("root mean squared error", top)
    titles = [f"std {number(p)}, {n:,} points" for p, n in zip(bins.predicted, bins.size, strict=True)]
    return _over_diagonal(f"Reliability of the std, by tenths. {ends}.", *axes, _bins(bins)) | {"titles": titles}


def _over_diagonal(alt: str, x: Spec, y: Spec, lines: list[Spec], twin: Any = None, twin_name: str = "") -> Spec:
    """Draw lines, and the twin's curve or bins, over the diagonal that is ideal."""
    beside = [series("line", twin_name, "red", *twin, dash=True)] if twin else []
    ideal = {**series("line", "ideal", "gray", [0, x["max"]], [0, x["max"]], dash=True), "quiet": True}
    return {"alt": alt, "x": x, "y": y, "series": [*lines, *beside, ideal]}


def risk(uncertainty: Vector, loss: Vector, twin: Vector | None, label: str, *, percent: bool) -> Spec:
    """Mean loss of the points kept when the most uncertain ones are handed to someone else."""
    ours, best = (_few(scores.risk_coverage(order, loss)) for order in (uncertainty, loss))
    overall = float(loss.mean())
    lines = [series("line", "by MCBN's uncertainty", "blue", *ours)]
    if twin is not None:
        theirs = _few(scores.risk_coverage(twin, loss))
        lines.append(series("line", "by the plain network's", "red", *theirs, dash=True))
    color = "red" if twin is None else "gray"
    lines.append(series("line", "constant: no order", color, [0, 1], [overall] * 2, dash=True))
    lines.append(series("line", "best possible order", "green", *best, dash=True))
    half = float(ours.y[np.searchsorted(ours.x, 0.5).clip(max=len(ours.x) - 1)])
    shown = (f"{half:.1%}", f"{overall:.1%}") if percent else (number(half), number(overall))
    return {
        "alt": f"Risk-coverage: {label} is {shown[0]} on the more certain half and {shown[1]} on all points.",
        "x": axis("share of points kept, the most certain first", 1, percent=True),
        "y": axis(label, 1.12 * max(overall, float(np.quantile(ours.y, 0.98))) or 1.0, percent=percent),
        "series": lines,
    }


def histogram(uncertainty: Vector, good: NDArray[np.bool_], names: tuple[str, str], label: str) -> Spec:
    """Uncertainty of the points that went well beside that of the others, each as shares of its own group."""
    edges, first, second = scores.histograms(uncertainty, good)
    groups = (uncertainty[good], uncertainty[~good])
    medians = [number(float(np.median(group)), 3) if len(group) else "none" for group in groups]
    bars = zip(names, ("blue", "red"), (first, second), strict=True)
    return {
        "alt": f"Histogram of {label}: median {medians[0]} where {names[0]}, {medians[1]} where {names[1]}.",
        "x": axis(label, float(edges[-1]), float(edges[0])),
        "y": axis("share of the group", 1.08 * float(max(first.max(), second.max())), percent=True),
        "series": [series("bars", name, color, edges, share) for name, color, share in bars],
        "titles": [f"{label} {number(a, 3)} to {number(b, 3)}" for a, b in itertools.pairwise(edges)],
    }


def axis(label: str, top: float, low: float = 0, **flags: bool) -> Spec:
    """Describe an axis; flags are `percent` and `flag`, which marks what lies above it."""
    return {"label": label, "min": low, "max": top, **flags}


def series(kind: str, name: str, color: str, x: Any, y: Any, *, dash: bool = False) -> Spec:
    """Describe one series: a band, a line, dots or bars."""
    return {"name": name, "kind": kind, "color": color, "dash": dash, "x": rounded(x, 6), "y": rounded(y)}


def _bins(ours: Bins) -> list[Spec]:
    return [series(kind, name, "blue", *ours[:2]) for kind, name in (("dots", "MCBN, bins"), ("line", "MCBN"))]


def _few(curve: Curve) -> Curve:
    """Keep at most MOST_NODES points of a curve, its ends among them."""
    nodes = _nodes(len(curve.x))
    return Curve(curve.x[nodes], curve.y[nodes])
