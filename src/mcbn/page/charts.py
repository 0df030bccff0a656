"""Charts of a report as data for chart.js; every one carries the text that stands for it where it cannot be seen.

A new chart is a function here that returns a `Spec`, and a line in `regression_charts` or `class_charts`.
"""

import itertools
from typing import Any, NamedTuple, TypeAlias

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
DIAGONAL = {"name": "ideal", "kind": "line", "color": "gray", "dash": True, "x": [0, 1], "y": [0, 1], "quiet": True}
SURE = "Below the diagonal: too sure of itself."
LEFT = "when the least certain are left to someone else."
APART = "The further apart, the better uncertainty tells them."


class Chart(NamedTuple):
    """A chart with its caption; `name` tells it from the others of its page."""

    name: str
    title: str
    note: str
    spec: Spec


def regression_charts(spread: Spread, units: str) -> list[Chart]:
    """Draw a regression: the first chart is the large one."""
    std, error, constant = spread.std, spread.error, spread.constant_std
    errors = uncertainty_error(std, error, constant_std=constant, inputs=spread.inputs, units=units)
    twin = scores.interval_coverage(error, spread.constant_stds)
    inside = coverage(scores.interval_coverage(error, std), twin, "constant uncertainty", "Interval coverage")
    groups = ("the smaller half of errors", "the larger half of errors")
    halves = histogram(std, error <= np.median(error), groups, f"predicted std ({units})")
    note = (
        "Half of the errors should lie in the dark band, 95 % in both. Bands that rise with the running mean know where"
        f" errors are large; dashes are the bounds of one constant std.{_thinned(len(std))}"
    )
    bins = std_reliability(scores.spread_reliability(std, error), units)
    kept = risk(std, error, None, "mean absolute error", percent=False)
    return [
        Chart("errors", "Errors in the order of uncertainty", note, errors),
        Chart("coverage", "Interval coverage", f"Targets inside the interval of each level. {SURE}", inside),
        Chart("reliability", "Reliability of the std", "Predicted std against the error, in ten groups.", bins),
        Chart("risk", "Risk and coverage", f"Mean error of the points kept {LEFT}", kept),
        Chart("histogram", "Uncertainty of small and large errors", APART, halves),
    ]


def class_charts(ours: Votes, plain: Votes | None) -> list[Chart]:
    """Draw a classification: the first chart is the large one."""
    bins, sets = (scores.reliability(ours.confidence, ours.right), scores.set_coverage(ours.mass_above))
    plain_bins, plain_sets, order = None, None, None
    if plain is not None:
        plain_bins, order = scores.reliability(plain.confidence, plain.right), plain.entropy
        plain_sets = scores.set_coverage(plain.mass_above)
    kept = risk(ours.entropy, ours.error, order, "share of wrong answers", percent=True)
    note = (
        "Every dot is a point, right at the bottom and wrong at the top; the line is the share of wrong answers among"
        f" neighbours, the dashes what confidence promises and the rate over all.{_thinned(len(ours.entropy))}"
    )
    whole = (
        "True classes in the smallest set of each level. Sets hold whole classes, so a calibrated network lies on the"
        " diagonal or above."
    )
    inside = coverage(sets, plain_sets, "plain network", "Set coverage")
    groups = histogram(ours.entropy, ours.right > 0, ("right", "wrong"), "entropy (nats)")
    sure = class_reliability(bins, plain_bins)
    return [
        Chart("errors", "Share of wrong answers in the order of uncertainty", note, error_rate(ours)),
        Chart("reliability", "Reliability", f"Accuracy against confidence. {SURE}", sure),
        Chart("coverage", "Coverage of sets of classes", whole, inside),
        Chart("risk", "Risk and coverage", f"Wrong answers among the points kept {LEFT}", kept),
        Chart("histogram", "Uncertainty of right and wrong answers", APART, groups),
    ]


def _thinned(count: int) -> str:
    if count <= MOST_POINTS:
        return ""
    return f" Drawn are {MOST_POINTS:,} of the {count:,} points, chosen at random."


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


def coverage(ours: Curve, twin: Curve | None, twin_name: str, what: str) -> Spec:
    """How often intervals or sets of each level hold the truth."""
    beside = f"; {twin.y[95]:.1%} for {twin_name}" if twin else ""
    lines = [_line(twin_name, "red", twin, dash=True)] if twin else []
    return {
        "alt": f"{what}: at the level 95 %, {ours.y[95]:.1%} of points are inside{beside}.",
        "x": axis("level", 1, percent=True),
        "y": axis("share inside", 1, percent=True),
        "series": [_line("MCBN", "blue", ours), *lines, DIAGONAL],
    }


def class_reliability(ours: Bins, twin: Bins | None) -> Spec:
    """Accuracy against confidence, bin by bin."""
    beside = f", {twin.gap:.1%} for the plain network" if twin else ""
    plain = [_line("plain network", "red", Curve(*twin[:2]), dash=True)] if twin else []
    return {
        "alt": f"Reliability: accuracy and confidence are {ours.gap:.1%} apart{beside}.",
        "x": axis("confidence", 1, percent=True),
        "y": axis("accuracy", 1, percent=True),
        "series": [*_bins(ours), *plain, DIAGONAL],
        "titles": [f"confidence {p:.1%}, {n:,} points" for p, n in zip(ours.predicted, ours.size, strict=True)],
    }


def std_reliability(bins: Bins, units: str) -> Spec:
    """Root mean squared error against predicted std, in tenths of the points."""
    top = 1.08 * float(max(bins.predicted.max(), bins.observed.max())) or 1.0
    ends = "; ".join(
        f"{name}, std {number(bins.predicted[i], 3)}: error {number(bins.observed[i], 3)}"
        for name, i in (("most certain", 0), ("least certain", -1))
    )
    return {
        "alt": f"Reliability of the std, by tenths. {ends}.",
        "x": axis(f"predicted std ({units})", top),
        "y": axis("root mean squared error", top),
        "series": [*_bins(bins), {**DIAGONAL, "x": [0, top], "y": [0, top]}],
        "titles": [f"std {number(p)}, {n:,} points" for p, n in zip(bins.predicted, bins.size, strict=True)],
    }


def risk(uncertainty: Vector, loss: Vector, twin: Vector | None, label: str, *, percent: bool) -> Spec:
    """Mean loss of the points kept when the most uncertain ones are handed to someone else."""
    ours, best = _few(scores.risk_coverage(uncertainty, loss)), _few(scores.risk_coverage(loss, loss))
    overall = float(loss.mean())
    lines = [_line("by MCBN's uncertainty", "blue", ours)]
    if twin is not None:
        lines.append(_line("by the plain network's", "red", _few(scores.risk_coverage(twin, loss)), dash=True))
    color = "red" if twin is None else "gray"
    lines.append(series("line", "constant: no order", color, [0, 1], [overall] * 2, dash=True))
    lines.append(_line("best possible order", "green", best, dash=True))
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
    drawn = [
        {"name": name, "kind": "bars", "color": color, "x": rounded(edges, 6), "y": rounded(share)}
        for name, color, share in zip(names, ("blue", "red"), (first, second), strict=True)
    ]
    return {
        "alt": f"Histogram of {label}: median {medians[0]} where {names[0]}, {medians[1]} where {names[1]}.",
        "x": axis(label, float(edges[-1]), float(edges[0])),
        "y": axis("share of the group", 1.08 * float(max(first.max(), second.max())), percent=True),
        "series": drawn,
        "titles": [f"{label} {number(a, 3)} to {number(b, 3)}" for a, b in itertools.pairwise(edges)],
    }


def axis(label: str, top: float, low: float = 0, **flags: bool) -> Spec:
    """Describe an axis; flags are `percent` and `flag`, which marks what lies above it."""
    return {"label": label, "min": low, "max": top, **flags}


def series(kind: str, name: str, color: str, x: Any, y: Any, *, dash: bool = False) -> Spec:
    """Describe one series: a band, a line, dots or bars."""
    return {"name": name, "kind": kind, "color": color, "dash": dash, "x": rounded(x, 6), "y": rounded(y)}


def _line(name: str, color: str, curve: Curve, *, dash: bool = False) -> Spec:
    return series("line", name, color, curve.x, curve.y, dash=dash)


def _bins(ours: Bins) -> list[Spec]:
    return [
        series("dots", "MCBN, bins", "blue", ours.predicted, ours.observed),
        series("line", "MCBN", "blue", ours.predicted, ours.observed),
    ]


def _few(curve: Curve) -> Curve:
    """Keep at most MOST_NODES points of a curve, its ends among them."""
    nodes = _nodes(len(curve.x))
    return Curve(curve.x[nodes], curve.y[nodes])
