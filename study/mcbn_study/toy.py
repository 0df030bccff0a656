"""The toy problem (Teye et al. 2018, Figure 1): three hidden layers of 30 units, 500 passes, CUBN beside MCBN."""

from pathlib import Path
from typing import Any

import numpy as np

from mcbn import data, demo
from mcbn.files import replacing
from mcbn.progress import bar


def run(out: str | Path) -> list[Path]:
    """Train, tune tau and the constant one on fresh points, and save what the figure shows in predictions/toy.npz."""
    with bar("training", demo.TOY.epochs, "epoch") as tick:
        arrays: dict[str, Any] = demo.predict_toy(demo.TOY, tick, held_out=data.toy(seed=1))
    path = Path(out) / "predictions" / "toy.npz"
    with replacing(path) as temporary:
        np.savez_compressed(temporary, **arrays)
    return [path]
