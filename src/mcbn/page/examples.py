"""The most and the least certain inputs: as pictures where they are pictures, as rows where they are rows."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.page.evidence import Names, Spread, Vector, Votes

COUNT = 6  # of each kind
MOST_PIXELS = 192  # a side; larger pictures are thinned
MOST_COLUMNS = 30  # of a table of features
Pixels: TypeAlias = NDArray[np.uint8]
Group: TypeAlias = dict[str, Any]  # inputs under one heading, or one of them: what a template shows


def show_ends(
    shown: Spread | Votes, order: Vector, columns: Mapping[str, NDArray[Any]], x: Any, names: Names
) -> list[Group]:
    """Show the inputs highest and lowest in `order` (N,), with the mean of each column over their points, or its text.

    They are pictures, or else rows: the columns, then up to 30 features where x is a table.
    """
    count = np.bincount(shown.inputs)
    known = np.flatnonzero(count)
    mean = np.bincount(shown.inputs, weights=order)[known] / count[known]
    inputs = known[np.argsort(mean, kind="stable")]  # from certain to uncertain
    groups: list[Group] = []
    for heading, chosen in (("Least certain", inputs[::-1][:COUNT]), ("Most certain", inputs[:COUNT])):
        points = [np.flatnonzero(shown.inputs == i) for i in chosen]
        cells = [[str(c[p[0]]) if c.dtype == object else float(c[p].mean()) for c in columns.values()] for p in points]
        rows = [[str(i), *row] for i, row in zip(chosen, cells, strict=True)]
        groups.append({"heading": heading, **show_inputs(x, chosen, ["input", *columns], rows, names)})
    return groups


def show_inputs(x: Any, chosen: NDArray[np.int64], header: list[str], rows: list[list[Any]], names: Names) -> Group:
    """Show inputs of x, each with its row."""
    if is_image(x):
        pairs = zip(chosen, rows, strict=True)
        return {"cards": [{"tiles": [tile(to_pixels(x[i]), alt=f"input {i}")], "row": row} for i, row in pairs]}
    if isinstance(x, Tensor) and x.ndim == 2:
        header = header + feature_names(x, names)[:MOST_COLUMNS]
        rows = [row + x[i, :MOST_COLUMNS].tolist() for row, i in zip(rows, chosen, strict=True)]
    return {"cards": [], "header": header, "rows": rows}


def tile(pixels: Pixels, name: str = "", alt: str = "") -> dict[str, str]:
    """Hold a picture, (H, W) gray or (H, W, 3) in color, as PNG in an address of its own."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"address": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", "name": name, "alt": alt}


def is_image(x: Any) -> bool:
    """Tell whether inputs are pictures: (N, 1 or 3, H, W)."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) >= 4


def feature_names(x: Tensor, names: Names) -> list[str]:
    """Return one name a column of x (N, Q)."""
    if names is None:
        return [f"x{j + 1}" for j in range(x.shape[1])]
    if len(names) != x.shape[1]:
        raise MCBNError(f"names holds {len(names)} names, but x has {x.shape[1]} columns")
    return [str(name) for name in names]


def map_examples(
    bayes: MCBN[Any], votes: Votes, x: Tensor, y: Tensor, ignore_index: int | None, classes: Sequence[str]
) -> dict[str, list[Group]]:
    """Show segmented inputs with truth, answer and entropy beside them, and tell what the colors mean."""
    top = float(np.log(bayes.plain(x[:1]).shape[1]))  # the entropy of knowing nothing
    truth = y if ignore_index is None else y.where(y != ignore_index, -1)
    groups = show_ends(votes, votes.entropy, {"entropy": votes.entropy, "error": votes.error}, x, None)
    for cards in (group["cards"] for group in groups):
        chosen = [int(card["row"][0]) for card in cards]
        pred = bayes.predict(x[chosen])
        for i, card, label, entropy in zip(chosen, cards, pred.label.cpu(), pred.entropy.double().cpu(), strict=True):
            true = label_colors(truth[i].reshape(label.shape).cpu().numpy())
            maps = {"truth": true, "answer": label_colors(label.numpy()), "entropy": heat(entropy.numpy(), top)}
            card["tiles"][0]["name"] = "input"
            card["tiles"] += [tile(pixels, name, f"{name} of input {i}") for name, pixels in maps.items()]
    present = {k: classes[k] for k in np.union1d(votes.truth, votes.label).tolist()}
    names = present if ignore_index is None else present | {-1: "left out"}
    colors = [tile(label_colors(np.full((2, 2), k)), name) for k, name in names.items()]
    scale = tile(heat(np.linspace(0, top, 64)[None], top), f"entropy, 0 to {top:.2f} nats")
    return {"examples": groups, "colors": [*colors, scale]}


def to_pixels(x: Tensor) -> Pixels:
    """Bring one picture (C, H, W) of any scale to bytes (H, W) or (H, W, 3)."""
    values = _thin(x.detach().cpu().double().movedim(0, -1))  # (H, W, C)
    low, high = values.min(), values.max()
    scaled = ((values - low) / (high - low if high > low else 1) * 255).round().to(torch.uint8)
    return np.asarray(scaled[..., 0] if scaled.shape[-1] == 1 else scaled)


def heat(values: NDArray[np.float64], top: float) -> Pixels:
    """Color a map (H, W) from dark blue over violet to yellow, 0 to `top`."""
    from matplotlib import colormaps

    return np.asarray(colormaps["plasma"](_thin(values) / (top or 1.0), bytes=True))[..., :3]


def label_colors(labels: NDArray[np.int64]) -> Pixels:
    """Give every class of a map (H, W) a color of its own, up to twenty; below 0, what is left out, is gray."""
    from matplotlib import colormaps

    labels, colors = _thin(labels), colormaps["tab20"].with_extremes(under="gray")
    return np.asarray(colors(np.where(labels < 0, -1, labels % 20), bytes=True))[..., :3]


def _thin(values: Any) -> Any:
    step = max(1, -(-max(values.shape[:2]) // MOST_PIXELS))
    return values[::step, ::step]
