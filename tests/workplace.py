"""A folder as a user of the command line has it: a module that makes networks, weights, tables and arrays."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kinds import settle

MODULE = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

constant = 3


def make():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def wider():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def classes():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def pair():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def pixels():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))


def needs_an_argument(width):
    return None


def number():
    return 7


def stored(name):
    with np.load(name) as file:
        return TensorDataset(*(torch.from_numpy(file[key]) for key in ("x", "y")))


def train_loader():
    return DataLoader(stored("train.npz"), batch_size=16, shuffle=True)


def by_workers():
    return DataLoader(stored("train.npz"), batch_size=16, shuffle=True, num_workers=1)


def test_loader():
    return DataLoader(stored("test.npz"), batch_size=10)


def dataset():
    return stored("test.npz")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(stored("test.npz"))


def streamed():
    return DataLoader(Stream(), batch_size=10)


def tensors():
    return stored("test.npz").tensors


def dicts():
    return [{"input": x, "y": y, "id": "row"} for x, y in test_loader()]


def generated():
    yield from test_loader()


def nothing():
    return iter(())


def failing():
    yield torch.zeros(5, 3)
    raise IndexError("no such row")


def interrupted():
    def batches():
        yield torch.zeros(5, 3)
        raise KeyboardInterrupt

    return batches()
"""
NAMES = ("age", "height", "weight", "price")
PARTS = {"train": 120, "val": 60, "test": 50}


def furnish(folder: Path, module: str) -> None:
    """Write the module, trained weights and data files into the folder."""
    (folder / f"{module}.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        made = __import__(module)
    finally:
        sys.path.remove(str(folder))
    generator = torch.Generator().manual_seed(0)
    for name, count in PARTS.items():
        x = torch.randn(count, 3, generator=generator)
        y = x[:, 0] - x[:, 1].tanh() + 0.3 * torch.randn(count, generator=generator)
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())
        np.savez(folder / f"{name}_labels.npz", x=x.numpy(), y=(y > 0).long().numpy() + (x[:, 2] > 0).long().numpy())
        np.save(folder / f"{name}_x.npy", x.numpy())
        write_csv(folder / f"{name}.csv", NAMES, torch.cat([x, y[:, None]], 1).tolist())
    for name in ("make", "classes", "pair"):
        save_weights(getattr(made, name)(), folder, name)


def save_weights(network: nn.Module, folder: Path, name: str) -> None:
    """Train a little, let running statistics settle, save."""
    with np.load(folder / f"train{'_labels' if name == 'classes' else ''}.npz") as file:
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in network.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        optimizer = torch.optim.Adam(network.parameters(), 0.02)
        for _ in range(60):
            optimizer.zero_grad()
            loss(network(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    settle(network, x, batch_size=16)
    torch.save(network.state_dict(), folder / f"{name}.pt")


def loss(output: Tensor, y: Tensor) -> Tensor:
    if not y.is_floating_point():
        return nn.functional.cross_entropy(output, y)
    return (output - (y if output.ndim == 1 else torch.stack([y, -y], 1))).square().mean()


def write_csv(path: Path, names: Sequence[str] | None, rows: Sequence[Sequence[Any]], **options: Any) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, **options)
        if names:
            writer.writerow(names)
        writer.writerows(rows)


def read_csv(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="") as file:
        names, *rows = csv.reader(file)
    return {
        name: np.array(column, dtype=np.float64) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def command(*arguments: str) -> list[str]:
    """Return the command line of a real `mcbn` process."""
    return [sys.executable, "-c", "from mcbn.cli import app; app(prog_name='mcbn')", *arguments]


def environment() -> dict[str, str]:
    """Import this mcbn, run on one thread."""
    import mcbn

    source = str(Path(mcbn.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a real `mcbn` process in the folder."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


@contextmanager
def working_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder and take away afterwards what was made there."""
    monkeypatch.chdir(folder)
    before = set(os.listdir())
    yield
    for name in set(os.listdir()) - before:
        os.unlink(name)
