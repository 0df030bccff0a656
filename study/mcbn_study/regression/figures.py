"""Figures from saved predictions: uncertainty against error for every method, and the toy problem."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcbn import data, demo, plots
from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.progress import bar
from mcbn_study.machine import tracked
from mcbn_study.tables import MISSING, read_words, save_figure

METHODS: dict[str, str] = read_words(__package__)["methods"]
# MCBN, MNF and MCDO as in Teye et al. 2018, Figure 2
COLORS = {"mcbn": "tab:blue", "mnf": "tab:purple", "mcdo": "tab:red", "ensemble": "tab:green"}
SHAPES = {"error": 2, "std": 2, "constant_std": 1}
TOY = {"x_train": 1, "y_train": 1, "x_grid": 1, "mean": 1, "std": 1, "constant_std": 0}


def write_figures(predictions: Path, out: Path) -> list[Path]:
    """Write a PNG per method with predictions (first seed, lowest split), Figure 2 (left), and toy.png, Figure 1."""
    written = []
    for method in tracked(METHODS, "drawing figures", "method"):
        if files := {name: file for name in NAMES if (file := first_split(predictions, name, method))}:
            written.append(save_figure(_grid(method, files), out / f"uncertainty_error_{method}.png"))
    if (predictions / "toy.npz").exists():
        *vectors, constant_std = load_arrays(predictions / "toy.npz", TOY).values()
        figure = plots.new_figure(6.5, 4.2, dpi=100)
        plots.toy(*vectors, constant_std=float(constant_std), ax=figure.subplots())
        written.append(save_figure(figure, out / "toy.png"))
    return written


def toy(out: str | Path) -> list[Path]:
    """Fit the toy problem, 500 passes, CUBN beside MCBN, tau of both on fresh points; save predictions/toy.npz."""
    with bar("training", demo.TOY.epochs, "epoch") as tick:
        arrays: dict[str, Any] = demo.predict_toy(demo.TOY, tick, held_out=data.toy(seed=1))
    path = Path(out) / "predictions" / "toy.npz"
    with replacing(path) as temporary:
        np.savez_compressed(temporary, **arrays)
    return [path]


def first_split(predictions: Path, dataset: str, method: str) -> Path | None:
    """Return the file with the lowest split number, None if there is none."""
    start = f"{dataset}-{method}-"
    files = {file.stem.removeprefix(start): file for file in predictions.glob(f"{start}*.npz")}
    return min(((int(split), file) for split, file in files.items() if split.isdecimal()), default=(0, None))[1]


def _grid(method: str, files: dict[str, Path]) -> "plots.Figure":
    figure = plots.new_figure(15.0, 6.8, dpi=100)
    panels: NDArray[Any] = figure.subplots(2, 4)
    for ax, name in zip(panels.flat, NAMES, strict=True):
        title, shown = describe(name).title, False
        if name in files:
            error, std, constant = (of_seeds[0] for of_seeds in load_arrays(files[name], SHAPES).values())
            shown = bool(np.isfinite([error, std]).all())  # else it diverged, beyond float16
            title += f", split {files[name].stem.rpartition('-')[2]}"
        ax.set_title(title if shown else f"{title}: {'not finite' if name in files else MISSING}", fontsize="medium")
        if not shown:
            ax.set_axis_off()
            continue
        twin = float(constant) if np.isfinite(constant) else None  # None: the method has no constant twin
        color = COLORS.get(method, "tab:cyan")
        plots.uncertainty_error(np.zeros_like(error), std, error, constant_std=twin, ax=ax, color=color)
        ax.legend().remove()
        ax.set(xlabel="", ylabel="")
    figure.suptitle(f"{METHODS[method]}: absolute test errors in the order of predicted std, target units")
    if drawn := [ax for ax in panels.flat if ax.lines]:
        handles, labels = drawn[0].get_legend_handles_labels()
        # the number of points in a running mean differs from panel to panel
        labels = ["running mean of a tenth" if label.startswith("running mean") else label for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def load_arrays(file: Path, dimensions: Mapping[str, int]) -> dict[str, plots.Vector]:
    """Read the named arrays as float64, each with that many dimensions and not empty."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as saved:
            arrays = {name: saved[name].astype(np.float64) for name in dimensions}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        cure = "remove it and run `mcbn reproduce regression` again"
        raise MCBNError(f"{file} is no whole predictions file ({error}); {cure}") from error
    for name, array in arrays.items():
        if array.ndim != dimensions[name] or array.size == 0:
            raise MCBNError(f"{file}: {name} should have {dimensions[name]} dimensions; it has shape {array.shape}")
    return arrays
