"""The toy problem (Teye et al. 2018, Figure 1): three hidden layers of 30 units, 500 passes, CUBN beside MCBN."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcbn import data, demo
from mcbn.files import replacing
from mcbn.noise import constant_tau
from mcbn.progress import bar

GRID = (-7.0, 7.0, 400)  # two beyond both ends of the data


def run(out: str | Path = "results/regression") -> list[Path]:
    """Train, tune tau and the constant one on fresh points, and save what the figure shows in predictions/toy.npz."""
    x, y = (column.float() for column in data.toy())
    x_val, y_val = (column.float() for column in data.toy(seed=1))
    with bar("training", demo.TOY.epochs, "epoch") as tick:
        bayes = demo.train_and_fit(x, y, demo.TOY, 0, tick, hidden=(30, 30, 30)).tune((x_val, y_val))
    constant = float(constant_tau(bayes.predict(x_val).mean, y_val))
    grid = torch.linspace(*GRID)[:, None]  # (G, 1)
    pred = bayes.predict(grid)
    vectors = {"x_train": x[:, 0], "y_train": y, "x_grid": grid[:, 0], "mean": pred.mean, "std": pred.std}
    arrays: dict[str, Any] = {name: vector.numpy() for name, vector in vectors.items()}
    arrays["constant_std"] = constant**-0.5
    path = Path(out) / "predictions" / "toy.npz"
    with replacing(path) as temporary:
        np.savez_compressed(temporary, **arrays)
    return [path]
