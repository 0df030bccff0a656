"""Figures as small PNG files: few colours, and the same bytes for the same figure."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcbn import plots
from mcbn.files import replacing

PLOT, PHOTOGRAPH = 48, 256  # colours; a plot has a handful and their edges


def save_figure(
    figure: "plots.Figure", path: Path, colours: int = PLOT, exact: Sequence[tuple[int, int, int]] = ()
) -> Path:
    """Write a PNG with a palette of that many colours, a third of the size; `exact` ones are kept as they are."""
    from PIL import Image  # matplotlib depends on it

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png")
    full = Image.open(pixels).convert("RGB")
    image = full.quantize(colours - len(exact), dither=Image.Dither.NONE)
    if exact:
        few = np.array(image.getpalette() or [], np.uint8).reshape(-1, 3)
        palette = np.pad(few, ((0, 256 - len(few)), (0, 0)))
        index, rgb = np.array(image), np.asarray(full)
        for place, colour in enumerate(exact, colours - len(exact)):
            palette[place] = colour
            index[(rgb == colour).all(2)] = place
        image = Image.fromarray(index)
        image.putpalette(palette.tobytes())
    with replacing(path) as temporary:
        image.save(temporary, format="png", optimize=True)
    return path
