"""The large chart of a report as data for chart.js: points from certain to uncertain. charts.html.j2 has the others."""

import numpy as np
from numpy.typing import NDArray

from mcbn.page import scores
from mcbn.page.evidence import Vector, Votes
from mcbn.page.templates import Spec, axis, number, series
from mcbn.plots import Z50, Z95, bulk_height, mean_window, running_mean

MOST_POINTS = 10_000  # drawn at most; scores and curves count all


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
    y = axis(f"absolute error ({units})", bulk_height(heights, std, constant_std), flag=True)
    titles = [f"input {names[i]}, std {number(std[i])}" for i in order]
    return _over_ranks(std, error, "absolute error", y, drawn, titles)


def error_rate(votes: Votes) -> Spec:
    """Right and wrong answers in the order of uncertainty, under the share of wrong ones among neighbours."""
    order, rank, nodes, window = _ranked(votes.entropy)
    N = len(order)
    rate, promised = (running_mean(v[order], window)[nodes] for v in (votes.error, 1 - votes.confidence))
    top = max(1.25 * float(max(rate.max(), promised.max())), 0.02)
    jitter = np.random.default_rng(0).uniform(-0.02, 0.02, N)  # so that dots of one height can be told apart
    dots = np.where(votes.error[order] > 0, 0.95, 0.03) * top + jitter * top
    drawn = [
        {**series("dots", "answers", "gray", rank, dots), "quiet": True, "lead": True},
        series("line", f"running share of {window}", "blue", rank[nodes], rate),
        series("line", "promised: 1 - confidence", "ink", rank[nodes], promised, dash=True),
        series("line", "over all", "red", [1, N], [float(votes.error.mean())] * 2, dash=True),
    ]
    words = ["wrong" if error else "right" for error in votes.error[order]]
    values = zip(votes.inputs[order], words, votes.entropy[order], strict=True)
    titles = [f"input {i}: {word}, entropy {number(entropy, 3)}" for i, word, entropy in values]
    y = axis("share of wrong answers", top, percent=True)
    return _over_ranks(votes.entropy, votes.error, "share of wrong answers", y, drawn, titles)


def _over_ranks(uncertainty: Vector, loss: Vector, what: str, y: Spec, drawn: list[Spec], titles: list[str]) -> Spec:
    low, high = scores.tenths(uncertainty, loss)
    change = f"the mean {what} {'rises' if high >= low else 'falls'} from {number(low, 3)} in the most certain tenth"
    alt = f"Uncertainty-error plot of {len(loss):,} points: {change} to {number(high, 3)} in the least certain."
    x = axis("points, from certain to uncertain", len(titles) + 1)
    return {"alt": alt, "x": x, "y": y, "series": drawn, "titles": titles, "nearest": "xy"}


def _ranked(uncertainty: Vector) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Return the points shown from certain to uncertain, their ranks, the nodes of a line, a running mean's window."""
    N = min(len(uncertainty), MOST_POINTS)
    shown = np.sort(np.random.default_rng(0).choice(len(uncertainty), N, replace=False))
    order = shown[np.argsort(uncertainty[shown], kind="stable")]
    return order, np.arange(1, N + 1), scores.nodes(N), mean_window(N)
