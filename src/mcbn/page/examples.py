"""The most and the least certain inputs: as pictures where they are pictures, as rows where they are rows."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.page.curves import Vector
from mcbn.page.html import Markup, element, table

COUNT = 6  # of each kind
MOST_PIXELS = 192  # a side; larger pictures are thinned
MOST_COLUMNS = 30  # of a table of features
Pixels = NDArray[np.uint8]
_COLORS = 12  # of classes in a map, before they repeat


def is_image(x: Any) -> bool:
    """Tell whether inputs are pictures: (N, 1 or 3, H, W)."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) >= 4


def ends(uncertainty: Vector, inputs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the inputs of highest and of lowest mean uncertainty over their points, the extreme first."""
    count = np.bincount(inputs)
    known = np.flatnonzero(count)
    mean = np.bincount(inputs, weights=uncertainty)[known] / count[known]
    order = known[np.argsort(mean, kind="stable")]
    return order[::-1][:COUNT], order[:COUNT]


def pictures(
    x: Tensor, chosen: Sequence[int], captions: Sequence[str], maps: Sequence[dict[str, Pixels]] = ()
) -> Markup:
    """Show inputs as pictures, with maps beside them where there are any."""
    cards = []
    for place, (i, caption) in enumerate(zip(chosen, captions, strict=True)):
        tiles = {"input": grayscale_or_color(x[i]), **(maps[place] if maps else {})}
        cards.append(
            element("figure", element("div", *_tiles(tiles, int(i)), class_="tiles"), element("figcaption", caption))
        )
    return element("div", *cards, class_="examples wide" if maps else "examples")


def _tiles(tiles: dict[str, Pixels], i: int) -> list[Markup]:
    alone = len(tiles) == 1
    shown = []
    for name, pixels in tiles.items():
        image = element("img", src=data_address(pixels), alt=f"input {i}" if alone else f"{name} of input {i}")
        shown.append(element("div", image, "" if alone else name, class_="tile"))
    return shown


def rows(
    x: Any, chosen: Sequence[int], columns: Mapping[str, Sequence[str] | Sequence[float]], names: Sequence[str] | None
) -> Markup:
    """Show inputs as rows: the prediction, then up to 30 features where x is a table."""
    header = ["input", *columns]
    body: list[list[str | float]] = [[str(i), *(c[k] for c in columns.values())] for k, i in enumerate(chosen)]
    if isinstance(x, Tensor) and x.ndim == 2:
        header += feature_names(x, names)[:MOST_COLUMNS]
        for line, i in zip(body, chosen, strict=True):
            line += [float(v) for v in x[i, :MOST_COLUMNS]]
    return table(header, body)


def feature_names(x: Tensor, names: Sequence[str] | None) -> list[str]:
    """Return one name a column of x (N, Q)."""
    if names is None:
        return [f"x{j + 1}" for j in range(x.shape[1])]
    if len(names) != x.shape[1]:
        raise MCBNError(f"names holds {len(names)} names, but x has {x.shape[1]} columns")
    return [str(name) for name in names]


def grayscale_or_color(x: Tensor) -> Pixels:
    """Bring one picture (C, H, W) of any scale to bytes (H, W) or (H, W, 3)."""
    thin = max(1, -(-max(x.shape[1:]) // MOST_PIXELS))
    values = x.detach().cpu().double()[:, ::thin, ::thin]
    low, high = values.min(), values.max()
    scaled = ((values - low) / (high - low if high > low else 1) * 255).round().to(torch.uint8)
    pixels: Pixels = (scaled[0] if len(scaled) == 1 else scaled.movedim(0, -1)).numpy()
    return pixels


def heat(values: NDArray[np.float64], top: float) -> Pixels:
    """Color a map (H, W) from dark blue over violet to yellow, 0 to `top`."""
    stops = np.array([[13, 8, 60], [126, 30, 140], [230, 90, 80], [252, 230, 80]], dtype=float)
    share = np.clip(_thin(values) / (top or 1.0), 0, 1) * (len(stops) - 1)
    mixed = np.stack([np.interp(share, np.arange(len(stops)), stops[:, c]) for c in range(3)], -1)
    return mixed.round().astype(np.uint8)


def label_colors(labels: NDArray[np.int64]) -> Pixels:
    """Give every class of a map (H, W) a color of its own; below 0, what is left out, is gray."""
    hue = np.arange(_COLORS) / _COLORS * 6
    wheel = np.clip(np.abs((hue[:, None] + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    palette = (np.vstack([[0.2, 0.2, 0.2], 0.2 + 0.75 * wheel, [0.5, 0.5, 0.5]]) * 255).astype(np.uint8)
    place = np.where(labels < 0, _COLORS + 1, np.where(labels == 0, 0, 1 + (labels * 5) % _COLORS))
    pixels: Pixels = _thin(palette[place])
    return pixels


def color_key(names: Mapping[int, str], top: float) -> Markup:
    """Tell what the colors of maps mean: one swatch a class, and the scale of the entropy from 0 to `top`."""
    patch = np.ones((2, 2), dtype=np.int64)
    shown = [(label_colors(patch * number), name, "") for number, name in names.items()]
    shown.append((heat(np.linspace(0, top, 64)[None], top), f"entropy, 0 to {top:.2f} nats", "scale"))
    items = [
        element("li", element("img", src=data_address(pixels), alt="", class_=kind or None), name)
        for pixels, name, kind in shown
    ]
    return element("ul", *items, class_="colors")


def _thin(values: Any) -> Any:
    step = max(1, -(-max(values.shape[:2]) // MOST_PIXELS))
    return values[::step, ::step]


def data_address(pixels: Pixels) -> str:
    """Write a picture (H, W) or (H, W, 3) as PNG in a data address."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def png(pixels: Pixels) -> bytes:
    """Encode (H, W) grayscale or (H, W, 3) color as PNG (RFC 2083)."""
    H, W = pixels.shape[:2]
    kind = 0 if pixels.ndim == 2 else 2
    lines = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))
    header = struct.pack(">IIBBBBB", W, H, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
