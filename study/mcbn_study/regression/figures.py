"""Figures from saved predictions: uncertainty against error for every method, and the toy problem."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mcbn import plots
from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.progress import tracked
from mcbn_study.regression.summary import METHODS
from mcbn_study.tables import MISSING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# MCBN, MNF and MCDO as in Teye et al. 2018, Figure 2
COLORS = {"mcbn": "tab:blue", "mnf": "tab:purple", "mcdo": "tab:red", "ensemble": "tab:green"}
_PALETTE = 48  # colours; the figures have a handful and their edges
SHAPES = {"error": 2, "std": 2, "constant_std": 1}


def write_figures(predictions: Path, out: Path) -> list[Path]:
    """Write one PNG per method that has predictions, a panel per data set, and toy.png where toy.npz is there.

    Shown is the first seed of the lowest split. Teye et al. 2018, Figure 2 (left) and the appendix; Figure 1.
    """
    written = []
    for method in tracked(METHODS, "drawing figures", "method"):
        files = {name: file for name in NAMES if (file := first_split(predictions, name, method))}
        if files:
            written.append(_save(_grid(method, files), out / f"uncertainty_error_{method}.png"))
    if (predictions / "toy.npz").exists():
        written.append(_save(_toy(predictions / "toy.npz"), out / "toy.png"))
    return written


def first_split(predictions: Path, dataset: str, method: str) -> Path | None:
    """Return the file with the lowest split number, None if there is none."""
    found = {
        int(split): file
        for file in predictions.glob(f"{dataset}-{method}-*.npz")
        if (split := file.stem.removeprefix(f"{dataset}-{method}-")).isdecimal()
    }
    return found[min(found)] if found else None


def _grid(method: str, files: dict[str, Path]) -> "Figure":
    figure = plots.new_figure(15.0, 6.8, dpi=100)
    panels: NDArray[Any] = figure.subplots(2, 4)
    for ax, name in zip(panels.flat, NAMES, strict=True):
        if name in files:
            _draw_panel(ax, name, files[name], COLORS.get(method, "tab:cyan"))
        else:
            _leave_empty(ax, f"{describe(name).title}: {MISSING}")
    figure.suptitle(f"{METHODS[method]}: absolute test errors in the order of predicted std, target units")
    _add_legend(figure, [ax for ax in panels.flat if ax.lines])
    return figure


def _add_legend(figure: "Figure", drawn: Sequence["Axes"]) -> None:
    """One legend for all panels; the number of points in a running mean differs from panel to panel."""
    if drawn:
        handles, labels = drawn[0].get_legend_handles_labels()
        labels = ["running mean of a tenth" if label.startswith("running mean") else label for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _leave_empty(ax: "Axes", title: str) -> None:
    ax.set_axis_off()
    ax.set_title(title, fontsize="medium")


def _draw_panel(ax: "Axes", name: str, file: Path, color: str) -> None:
    arrays = load_arrays(file, SHAPES)
    error, std = arrays["error"][0], arrays["std"][0]  # (N,)
    title = f"{describe(name).title}, split {file.stem.rpartition('-')[2]}"
    if not (np.isfinite(error).all() and np.isfinite(std).all()):  # a run that diverged, beyond float16
        _leave_empty(ax, f"{title}: not finite")
        return
    constant = float(arrays["constant_std"][0])
    twin = constant if np.isfinite(constant) else None  # NaN: the method has no constant twin
    plots.uncertainty_error(np.zeros_like(error), std, error, constant_std=twin, ax=ax, color=color)
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    ax.set(xlabel="", ylabel="")
    ax.set_title(title, fontsize="medium")


def _toy(file: Path) -> "Figure":
    names = ("x_train", "y_train", "x_grid", "mean", "std")
    arrays = load_arrays(file, {**dict.fromkeys(names, 1), "constant_std": 0})
    figure = plots.new_figure(6.5, 4.2, dpi=100)
    vectors = [arrays[name] for name in names]
    plots.toy(*vectors, constant_std=float(arrays["constant_std"]), ax=figure.subplots())
    return figure


def load_arrays(file: Path, dimensions: Mapping[str, int]) -> dict[str, NDArray[np.float64]]:
    """Read the named arrays as float64, each with that many dimensions and not empty."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as saved:
            arrays = {name: saved[name].astype(np.float64) for name in dimensions}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise MCBNError(
            f"{file} is no whole predictions file ({error}); remove it and run `mcbn reproduce regression` again"
        ) from error
    for name, array in arrays.items():
        if array.ndim != dimensions[name] or array.size == 0:
            raise MCBNError(f"{file}: {name} should have {dimensions[name]} dimensions; it has shape {array.shape}")
    return arrays


def _save(figure: "Figure", path: Path) -> Path:
    """Write a PNG with a palette: a third of the size, and the same bytes for the same figure."""
    from PIL import Image  # matplotlib depends on it

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png")
    with replacing(path) as temporary:
        Image.open(pixels).convert("RGB").quantize(_PALETTE).save(temporary, format="png", optimize=True)
    return path
