"""Figures of Teye et al. 2018: uncertainty against error, the toy problem, batch statistics and their Gaussians.

Each function draws into `ax`, or into a new figure where none is given, and returns the Axes; save it with
`ax.figure.savefig(...)`. Nothing is shown and pyplot is not touched. Bands are those of a Gaussian: 50 % within
0.674 std, 95 % within 1.960 std. The legend sits above the axes; `ax.get_legend().remove()` suits panels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mcbn.errors import MCBNError, extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

Vector: TypeAlias = NDArray[np.float64]
VectorLike: TypeAlias = torch.Tensor | ArrayLike

Z50 = 0.6744897501960817  # half of a standard normal lies within +-Z50
Z95 = 1.959963984540054


def uncertainty_error(
    mean: VectorLike,
    std: VectorLike,
    y: VectorLike,
    *,
    constant_std: float | None = None,
    ax: "Axes | None" = None,
    color: str = "tab:blue",
) -> "Axes":
    """Draw absolute errors |mean - y| in the order of predicted std, over the bands in which they should lie.

    Dark band up to 0.674 std (half of the errors), light band up to 1.960 std (95 %); gray dots are errors, those above
    the axis marked and counted, the gray line their running mean over N / 10 points, at least 10; dashed, both bounds
    for one constant std. Bands that rise with the gray line mean that the uncertainty knows where errors are large.
    Teye et al. 2018, Figure 2, left (there MCBN is blue, MNF violet, MCDO red).

    mean, std, y (N,) in target units; std is that of the predictive distribution, noise included.
    """
    mean, std, y = _vectors(mean=mean, std=std, y=y)
    order = np.argsort(std, kind="stable")
    std, error = std[order], np.abs(mean - y)[order]  # (N,) each
    N = len(error)
    rank, window = np.arange(1.0, N + 1), mean_window(N)
    ax = ax or new_figure().add_subplot()
    _draw_bands(ax, rank, np.zeros(N), std, color, constant_std, sides=(1,))
    size, alpha = 3 + 30 / np.sqrt(N), min(0.8, (2000 / N) ** 0.5 * 0.8)  # bands show through many points
    ax.plot(rank, error, ".", color="0.4", markersize=size, markeredgewidth=0, alpha=alpha, label="absolute error")
    ax.plot(rank, running_mean(error, window), color="0.25", linewidth=1.6, label=f"running mean of {window}")
    _mark_above(ax, rank, error, bulk_height(error, std, constant_std))
    ax.set_xlim(0, N + 1)
    return _finish(ax, "points sorted by predicted std", "absolute error (target units)")


def toy(
    x_train: VectorLike,
    y_train: VectorLike,
    x_grid: VectorLike,
    mean: VectorLike,
    std: VectorLike,
    *,
    constant_std: float | None = None,
    ax: "Axes | None" = None,
    color: str = "tab:blue",
) -> "Axes":
    """Draw training points, predictive mean and its 50 % and 95 % bands; dashed, the bands of one constant std.

    Teye et al. 2018, Figure 1. x_train, y_train (N,); x_grid, mean, std (G,) in any order of x.
    """
    x_train, y_train = _vectors(x_train=x_train, y_train=y_train)
    x, *moments = _vectors(x_grid=x_grid, mean=mean, std=std)
    order = np.argsort(x, kind="stable")
    x, mean, std = (vector[order] for vector in (x, *moments))  # (G,) each
    ax = ax or new_figure().add_subplot()
    _draw_bands(ax, x, mean, std, color, constant_std, sides=(-1, 1))
    ax.plot(x, mean, color=color, linewidth=1.8, label="predictive mean")
    ax.plot(x_train, y_train, "o", color="0.15", markersize=3, label="training data", zorder=4)
    ax.set_xlim(x[0], x[-1])
    return _finish(ax, "x", "y")


def statistics(
    drawn: VectorLike,
    mean: float | None = None,
    std: float | None = None,
    *,
    xlabel: str = "batch mean",
    ax: "Axes | None" = None,
    color: str = "tab:blue",
) -> "Axes":
    """Draw the histogram of one unit's batch statistic over T draws, under the analytic Gaussian N(mean, std^2).

    Teye et al. 2018, appendix "Batch normalization statistics". Dashed, the Gaussian with the draws' own moments: it
    shows whether their shape is Gaussian where the analytic moments are off.

    drawn (T,), such as `bayes.posterior.mean[name][:, unit]` (its `var` under the square root for xlabel "batch std");
    mean and std as in `mcbn_study.theory.analytic_moments`. There are sqrt(T) bins, 8 to 40.
    """
    (values,) = _vectors(drawn=drawn)
    if (mean is None) != (std is None) or (std is not None and not std > 0):
        raise MCBNError(f"the analytic Gaussian takes mean and a positive std, or neither; got {mean} and {std}")
    centre, spread = float(values.mean()), float(values.std())
    if not spread > 1e-9 * np.abs(values).max():
        raise MCBNError(f"all {len(values)} draws are {centre:.6g}: a unit that does not vary has no histogram")
    ax = ax or new_figure().add_subplot()
    n_bins = int(np.clip(np.sqrt(len(values)), 8, 40))
    ax.hist(values, n_bins, density=True, color=color, alpha=0.45, label="drawn batches")
    gaussians = [(centre, spread, "--", "0.25", 1.0, "Gaussian of their moments")]
    if mean is not None and std is not None:
        gaussians.append((mean, std, "-", "tab:red", 1.6, "analytic Gaussian"))
    ends = [m + side * 3.5 * s for m, s, *_ in gaussians for side in (-1, 1)]
    at = np.linspace(min(values.min(), *ends), max(values.max(), *ends), 400)
    for m, s, dashes, line_color, width, label in gaussians:
        density = np.exp(-0.5 * ((at - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))
        ax.plot(at, density, dashes, color=line_color, linewidth=width, label=label)
    ax.set_xlim(at[0], at[-1])
    return _finish(ax, xlabel, "density")


def new_figure(width: float = 5.5, height: float = 3.7, *, dpi: int = 150) -> "Figure":
    """Make an empty figure of its own, in inches, without pyplot and its global state."""
    with extra("plots", "plots need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained", dpi=dpi)


def _draw_bands(
    ax: "Axes", x: Vector, centre: Vector, std: Vector, color: str, constant_std: float | None, *, sides: Sequence[int]
) -> None:
    """Fill centre + side z std over x, and dash the same for the constant std; one side only starts at centre."""
    from matplotlib.colors import to_rgb

    if not (std >= 0).all() or (constant_std is not None and not constant_std >= 0):
        raise MCBNError(f"std must not be negative; smallest is {std.min()}, constant_std is {constant_std}")
    for z, strength, label in ((Z95, 0.22, "95 % interval"), (Z50, 0.55, "50 % interval")):
        tint = 1 - strength * (1 - np.array(to_rgb(color)))  # opaque, so that the legend shows the same shade
        low = centre - z * std if -1 in sides else centre
        ax.fill_between(x, low, centre + z * std, color=tuple(tint), linewidth=0, label=label)
    if constant_std is None:
        return
    for i, bound in enumerate(side * z * constant_std for side in sides for z in (Z50, Z95)):
        label = "_constant" if i else "constant std: 50 %, 95 %"
        ax.plot(x, centre + bound, color="black", linestyle=(0, (5, 3)), linewidth=1.0, label=label, zorder=3)


def mean_window(N: int) -> int:
    """Return how many of N points a running mean takes: a tenth, but not below ten."""
    return min(N, max(10, N // 10))


def running_mean(value: Vector, window: int) -> Vector:
    """Return the centred mean of `window` neighbours, of fewer at the ends: (N,)."""
    N = len(value)
    total = np.concatenate([[0.0], np.cumsum(value)])
    start, stop = np.clip(np.arange(N) - (window - 1) // 2, 0, N), np.clip(np.arange(N) + window // 2 + 1, 0, N)
    return np.asarray((total[stop] - total[start]) / (stop - start))


def bulk_height(error: Vector, std: Vector, constant_std: float | None) -> float:
    """Return the top of an axis for the 95 % bands and the bulk of the errors, not for a few far ones."""
    far_std, far_error = (np.quantile(v, q, method="lower") for v, q in ((std, 0.99), (error, 0.95)))  # no mixing
    band = Z95 * max(far_std, constant_std or 0.0)
    bulk = max(1.08 * band, min(1.5 * far_error, 1.05 * error.max()))
    return float(max(bulk, 1.05 * error[error <= 1.4 * bulk].max(initial=0.0))) or 1.0


def _mark_above(ax: "Axes", rank: Vector, error: Vector, top: float) -> None:
    """Cut the axis at its top; mark and count the errors above."""
    ax.set_ylim(0, top)
    above = rank[error > top]
    if len(above) == 0:
        return
    heights, place = np.full(len(above), 0.985), ax.get_xaxis_transform()  # a share of the axes
    ax.plot(above, heights, "^", color="0.25", markersize=4, label="_above", transform=place)
    note = f"errors above: {len(above)}, largest {error.max():.3g}"
    ax.text(0.02, 0.955, note, transform=ax.transAxes, ha="left", va="top", fontsize="small", color="0.25")


def _finish(ax: "Axes", xlabel: str, ylabel: str) -> "Axes":
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize="small")
    return ax


def _vectors(**values: VectorLike) -> list[Vector]:
    """Return all arguments as finite float vectors of one length."""
    arrays: dict[str, Vector] = {}
    for name, value in values.items():
        try:
            plain = value.detach().cpu() if isinstance(value, torch.Tensor) else value
            arrays[name] = np.asarray(plain, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise MCBNError(f"{name} must be a vector of numbers; got {type(value)}: {error}") from error
        if not np.isfinite(arrays[name]).all():
            raise MCBNError(f"{name} holds NaN or infinity, which cannot be drawn; leave those points out")
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1 or any(len(shape) != 1 or shape[0] == 0 for shape in shapes):
        received = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise MCBNError(f"need vectors of one length; got {received}; pass one output, for example mean[:, 0]")
    return list(arrays.values())
