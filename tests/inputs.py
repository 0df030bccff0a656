"""Input files for prediction at scale: tables with a key, images, and some that are broken."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import kinds
import mcbn
from workplace import write_csv

COLUMNS = ("age", "height", "weight")


def regressor(seed: int = 0, n_samples: int = 40) -> mcbn.MCBN[Any]:
    """A fitted MCBN of three inputs, tau set."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 17), nn.BatchNorm1d(17))
        network.append(nn.Tanh()).append(nn.Linear(17, 1))
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    bayes = mcbn.MCBN(kinds.settle(network, x), "regression").fit(x, n_samples=n_samples, batch_size=16)
    bayes.tau = 4.0
    return bayes


class Head(nn.Module):
    """A layer that only this file defines: workers get it by value."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(inputs, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


def darker(image: Any) -> Tensor:
    """A transform that only this file defines."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 300


def classifier(*, pooled: bool = False) -> mcbn.MCBN[Any]:
    """A fitted MCBN of RGB images of 8 x 8; pooling makes torch.vmap warn."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        if pooled:
            network.append(nn.AdaptiveAvgPool2d(1))
        network.append(Head(6 if pooled else 216))
    x = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return mcbn.MCBN(kinds.settle(network, x), "classification").fit(x, n_samples=20, batch_size=16)


def rows(count: int, seed: int) -> tuple[Tensor, list[str]]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)).double()
    return x, [f"id-{seed}-{i}" for i in range(count)]


def write_tables(folder: Path, counts: tuple[int, ...] = (50, 70, 1, 64), suffix: str = ".parquet") -> None:
    """Write tables with the columns id, age, height, weight."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        x, ids = rows(count, number)
        path = folder / f"table{number}{suffix}"
        if suffix == ".csv":
            write_csv(path, ("id", *COLUMNS), [[i, *row] for i, row in zip(ids, x.tolist(), strict=True)])
        else:
            columns = {name: x[:, c].numpy() for c, name in enumerate(COLUMNS)}
            pq.write_table(pa.table({"id": ids, **columns}), path, row_group_size=23)


def write_images(folder: Path, count: int = 23) -> None:
    """Write PNG images of 8 x 8 in two folders."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


def spoil(path: Path) -> None:
    """Cut a file off in the middle."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def by_row(table: pa.Table) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Index results by (file, row), refusing a row that is there twice."""
    columns = table.to_pydict()
    places = list(zip(columns.pop("file"), columns.pop("row"), strict=True))
    assert len(set(places)) == len(places)
    return dict(zip(places, zip(*columns.values(), strict=True), strict=True))
