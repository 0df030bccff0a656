"""The paper's figures from saved predictions, as charts that react."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mcbn.data import NAMES, describe
from mcbn.page import charts
from mcbn.page.html import Markup, element, figure, rounded
from mcbn.plots import Z50, Z95
from mcbn_study.regression.figures import SHAPES, first_split, load_arrays
from mcbn_study.regression.summary import METHODS
from mcbn_study.site.catalogue import COMMANDS
from mcbn_study.site.parts import not_run, provenance_part
from mcbn_study.site.provenance import Provenance

COLORS = {"mcbn": "blue", "mnf": "violet", "mcdo": "red", "ensemble": "green"}  # as in Figure 2


def figures_part(predictions: Path, made: Provenance) -> list[Markup]:
    """Show Figure 1, then the uncertainty-error plots of every method that has predictions, the paper's first."""
    order = ["mcbn", "mnf", "mcdo", *(m for m in METHODS if m not in ("mcbn", "mnf", "mcdo"))]
    parts = [*_toy(predictions / "toy.npz")]
    for method in order:
        files = {name: file for name in NAMES if (file := first_split(predictions, name, method))}
        if files:
            parts += _method(method, files, made)
    return parts


def _method(method: str, files: Mapping[str, Path], made: Provenance) -> list[Markup]:
    figures = [_errors(method, name, file) for name, file in files.items()]
    absent = [describe(name).title for name in NAMES if name not in files]
    note = f" Not run yet: {', '.join(absent)}." if absent else ""
    text = (
        "Test errors of the first seed in the order of predicted std, over 50 % and 95 % bands; dashes: constant std."
        " Teye et al. 2018, Figure 2 (left) and the appendix." + note
    )
    heading = element("h2", f"{METHODS[method]}: uncertainty and error", id=method)
    return [heading, element("p", text), provenance_part(made), element("div", *figures, class_="pair")]


def _errors(method: str, name: str, file: Path) -> Markup:
    arrays = load_arrays(file, SHAPES)
    error, std, constant = arrays["error"][0], arrays["std"][0], float(arrays["constant_std"][0])
    title = f"{describe(name).title}, split {file.stem.rpartition('-')[2]}"
    if not (np.isfinite(error).all() and np.isfinite(std).all()):
        return element("figure", element("figcaption", element("strong", title), "Not finite: the run diverged."))
    twin = constant if np.isfinite(constant) else None
    spec = charts.uncertainty_error(std, np.abs(error), constant_std=twin, color=COLORS.get(method, "blue"))
    return figure(f"{method}-{name}", title, spec)


def _toy(file: Path) -> list[Markup]:
    heading = element("h2", "Figure 1: the toy problem", id="toy")
    if not file.exists():
        return [heading, not_run(COMMANDS["toy"])]
    names = ("x_train", "y_train", "x_grid", "mean", "std")
    arrays = load_arrays(file, {**dict.fromkeys(names, 1), "constant_std": 0})
    made = element("p", "Made by ", element("code", COMMANDS["toy"]), ".", class_="muted")
    text = (
        "Three hidden layers of 30 units, 500 passes, as in the paper; its points are not published, so ours differ."
        " The paper's figure shows the same: bands narrow on the points, wide in the gap and beyond the ends."
    )
    return [heading, element("p", text), made, figure("toy-chart", "MCBN and constant uncertainty", _toy_spec(arrays))]


def _toy_spec(arrays: Mapping[str, Any]) -> charts.Spec:
    x, mean, std = arrays["x_grid"], arrays["mean"], arrays["std"]
    grid = rounded(x)

    def line(name: str, y: Any, **more: Any) -> charts.Spec:
        return {"name": name, "kind": "line", "color": "red", "dash": True, "x": grid, "y": rounded(y), **more}

    bands = [
        {"name": f"{level} interval", "kind": "band", "color": "blue", "deep": level == "50 %", "x": grid,
         "y": rounded(mean + z * std), "low": rounded(mean - z * std)}
        for level, z in (("95 %", Z95), ("50 %", Z50))
    ]  # fmt: skip
    constant = float(arrays["constant_std"])
    edges = [line(f"constant 95 %, {way}", mean + z * constant) for way, z in (("above", Z95), ("below", -Z95))]
    order = np.argsort(arrays["x_train"])
    points = {"name": "training points", "kind": "dots", "color": "ink", "quiet": True,
              "x": rounded(arrays["x_train"][order]), "y": rounded(arrays["y_train"][order])}  # fmt: skip
    low, high = float((mean - Z95 * std).min()), float((mean + Z95 * std).max())
    return {
        "alt": "Toy problem: the MCBN bands are narrow on the points and widen in the gap and beyond both ends.",
        "x": {"label": "x", "min": float(x.min()), "max": float(x.max())},
        "y": {"label": "y", "min": low, "max": high},
        "series": [*bands, line("mean", mean, color="blue", dash=False), *edges, points],
    }
