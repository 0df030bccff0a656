"""What the commands on models do with their options: open, fit, tune, save, load, with a bar on a terminal."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mcbn import batches
from mcbn import saving as storage
from mcbn.cli.mistakes import one_line_errors, one_line_warnings
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.progress import Tick, bar, counting
from mcbn.tables import scoring
from mcbn.tables.columns import Layout
from mcbn.tables.source import Pair, Source


@contextmanager
def session() -> Iterator[None]:
    """Run a command: mistakes and warnings as single lines."""
    with one_line_errors(), one_line_warnings():
        yield


def counted(pairs: Iterable[Pair], tick: Tick) -> Iterator[Any]:
    """Pass blocks on, counting their examples."""
    for x, y in pairs:
        yield x, y
        tick(len(x) if isinstance(x, Tensor) else 1 if y is None else len(y))


class _Rows(Dataset[Any]):
    """Rows of a tensor, fetched many at a time."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, rows: list[int]) -> Tensor:
        return self.x[rows]


def _same(batch: Any) -> Any:
    return batch


class _Ready(Dataset[Any]):
    """Batches that are ready."""

    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> Any:
        return self.pairs[number]


def training_data(source: Source, batch_size: int | None) -> Any:
    """Give the data as `MCBN.fit` takes it: a loader over rows, or what the user's factory made."""
    if source.loader is not None:
        return source.loader
    return DataLoader(_Rows(source.inputs()), batch_size=batch_size, collate_fn=_same)


def validation_data(source: Source) -> DataLoader[Any]:
    """Give the data as `MCBN.tune` takes it: the user's own loader, or one over blocks."""
    if isinstance(source.loader, DataLoader):
        return source.loader
    return DataLoader(_Ready(list(source.blocks())), batch_size=None, collate_fn=_same)


def draw(bayes: MCBN[Any], train: Source, *, n_samples: int, batch_size: int | None, **options: Any) -> None:
    """Fit the posterior."""
    if train.loader is None and batch_size is None:
        raise MCBNError("give --batch-size, the M of training: the spread of the draws depends on it")
    if batch_size is not None:
        batches.require_int("batch_size", batch_size, 1)
    if train.layout.width is not None:
        _require_fits(bayes, train)
    with bar("drawing", n_samples, "batch") as tick, counting(bayes, keys(bayes), tick):
        bayes.fit(training_data(train, batch_size), n_samples=n_samples, batch_size=batch_size, **options)


def _require_fits(bayes: MCBN[Any], train: Source) -> None:
    """Try the network on a few rows, to say in the words of a table why it cannot run."""
    x, _ = next(train.blocks())
    try:
        bayes.plain(x[:2])
    except MCBNError as error:
        raise MCBNError(
            f"the network does not take the {train.layout.width} input columns of {train.name} "
            f"({error.__cause__ or error}); --target leaves targets out"
        ) from error


def tune(bayes: MCBN[Any], held_out: Source) -> Tensor | None:
    """Tune tau on validation data; for regression return the constant twin's, tuned there too, (D,)."""
    data = validation_data(held_out)
    stream = isinstance(data.dataset, IterableDataset)
    with bar("tuning", None if stream else len(data), "batch") as tick, counting(bayes, keys(bayes), tick):
        bayes.tune(data)
    if bayes.task != "regression":
        return None
    with bar("tuning the constant twin", held_out.count(), "row") as tick:
        return scoring.constant_tau(bayes, counted(held_out.blocks(), tick))


def require_tau(bayes: MCBN[Any], path: Path) -> None:
    """Refuse to score a regression without noise: its log likelihood does not exist."""
    if bool(torch.isinf(torch.as_tensor(bayes.tau)).any()):
        raise MCBNError(f"{path} knows no noise precision tau; give validation data by --tune, here or to mcbn fit")


def keys(bayes: MCBN[Any]) -> tuple[list[str], list[str]]:
    """Return the arguments of the network's forward: all, and those it must have."""
    return Network(bayes.model).accepted_keys()


def save(bayes: MCBN[Any], path: Path, layout: Layout, constant: Tensor | None) -> None:
    """Write what `MCBN.save` writes, with the layout of the table and the constant twin's tau beside it."""
    settings = {
        "task": bayes.task,
        "tau": json.dumps(torch.as_tensor(bayes.tau).tolist()),
        "table": layout.to_json(),
    }
    if constant is not None:
        settings["constant_tau"] = json.dumps(constant.tolist())
    storage.save(path, *storage.pack(bayes.posterior, bayes.model, settings))


def load(path: Path, network: nn.Module) -> tuple[MCBN[Any], Layout, Tensor | None]:
    """Read a posterior with the layout it was fitted on and the constant twin's tau, where the file has them."""
    from safetensors import safe_open

    bayes: MCBN[Any] = MCBN.load(path, network)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    constant = metadata.get("constant_tau")
    tau = torch.tensor(json.loads(constant), dtype=torch.float64) if constant else None
    return bayes, Layout.from_json(metadata.get("table")), tau


def read_layers(text: str | None) -> int | list[str] | None:
    """Read --layers: a number of first layers, or names."""
    if text is None:
        return None
    return int(text) if text.isdigit() else [name.strip() for name in text.split(",")]


def read_whole(source: Source) -> tuple[Any, Tensor]:
    """Read inputs and targets of held-out data at once, (N, ...) each."""
    with bar("reading", source.count(), "row") as tick:
        pairs = list(counted(source.blocks(), tick))
    y = torch.cat([target for _, target in pairs if target is not None])
    if all(isinstance(x, Tensor) for x, _ in pairs):
        return torch.cat([x for x, _ in pairs]), y
    if len(pairs) == 1:
        return pairs[0][0], y
    raise MCBNError(f"a report needs inputs that are one tensor; the batches of {source.name} hold several")
