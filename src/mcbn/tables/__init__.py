"""What a person has on disk: inputs and targets block by block, from a file or a loader of their own code."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.tables import specs
from mcbn.tables.formats import StoredArray, Table, members, open_table

BLOCK_BYTES = 2**25  # of inputs held at once, beside a pass through the network
MOST_ROWS = 8192
INPUT_KEYS = ("x", "X", "inputs", "input", "features")
TARGET_KEYS = (*batches.TARGET_KEYS, "Y")
SUFFIXES = (".csv", ".parquet", ".npy", ".npz")
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
Keys = tuple[list[str], list[str]]  # arguments of the network's forward: all, and those it must have
Pair = tuple[Any, Tensor | None]  # inputs (n, ...), targets (n, ...)


@dataclass(frozen=True)
class Layout:
    """What of a table went to the network: kept with the posterior, so that later tables are read alike."""

    columns: tuple[str, ...] | None = None  # names of the inputs
    width: int | None = None  # number of inputs; None where an input is not a row of a table
    target: str | None = None  # as the option --target named it

    def to_json(self) -> str:
        """Write as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> "Layout":
        """Read what `to_json` wrote; None is an empty layout."""
        stored = json.loads(text or "{}")
        return cls(tuple(stored.get("columns") or ()) or None, stored.get("width"), stored.get("target"))


EMPTY = Layout()


def find_targets(table: Table, target: str | None, fitted: Layout) -> list[int]:
    """Find the target columns: those asked for, else those of the fit where this table has them."""
    wanted = fitted.target if target is None else target
    names = [name.strip() for name in wanted.split(",")] if wanted is not None else []
    if target is None:
        named = table.names and all(name in table.names for name in names)
        placed = all(map(_is_place, names)) and table.width == (fitted.width or 0) + len(names)
        if not named and not placed:
            return []
    return [_column(table, name) for name in names]


def _column(table: Table, name: str) -> int:
    if table.names and name in table.names:
        return table.names.index(name)
    if _is_place(name) and -table.width <= int(name) < table.width:
        return int(name) % table.width
    raise MCBNError(f"{table.path} has no column {name!r}; it has {listing(table)}")


def _is_place(name: str) -> bool:
    return re.fullmatch(r"-?\d+", name) is not None


def find_inputs(table: Table, targets: Sequence[int], fitted: Layout) -> list[int]:
    """Find the input columns: by the names of the fit, else all that are no targets."""
    if table.names and fitted.columns:
        lacking = [name for name in fitted.columns if name not in table.names]
        if lacking:
            raise MCBNError(f"{table.path} lacks the input column(s) {', '.join(map(repr, lacking))} of the fit")
        return [table.names.index(name) for name in fitted.columns]
    inputs = [c for c in range(table.width) if c not in targets]
    if fitted.width is not None and len(inputs) != fitted.width:
        raise MCBNError(
            f"{table.path} has {len(inputs)} input columns, the posterior was fitted on {fitted.width}; "
            "give it the same columns (--target leaves targets out)"
        )
    if not inputs:
        raise MCBNError(f"{table.path} has no input columns beside its target(s)")
    return inputs


def listing(table: Table) -> str:
    """Name the columns there are, for error messages."""
    shown = ", ".join(map(repr, (table.names or ())[:20]))
    return f"columns {shown}{', ...' if table.width > 20 else ''}" if table.names else f"{table.width} columns"


@dataclass(frozen=True)
class Examples:
    """Blocks of inputs and targets, to be run through any number of times."""

    name: str
    layout: Layout
    count: Callable[[], int | None]  # examples, where known
    read: Callable[[], Iterator[Pair]]
    loader: Any = None  # what the user's own factory made

    def blocks(self) -> Iterator[Pair]:
        """Yield the blocks; refuse data without a row."""
        pairs = self.read()
        first = next(pairs, None)
        if first is None:
            raise MCBNError(f"{self.name} holds no rows")
        yield from chain([first], pairs)

    def training_data(self) -> Any:
        """Give the data as `MCBN.fit` takes it: what the user's factory made, or all inputs of a file, (N, ...)."""
        return torch.cat([x for x, _ in self.blocks()]) if self.loader is None else self.loader


def open_examples(
    spec: str, *, target: str | None = None, fitted: Layout = EMPTY, need_targets: bool = False, keys: Keys = ([], [])
) -> Examples:
    """Open a csv, parquet, npy or npz file, or a `module:loader_factory`.

    Args:
        spec: path or factory.
        target: columns of a table by name or place ("price", "a,b", "-1"), or an array of an npz file.
        fitted: the layout a posterior was fitted with; columns are found by its names, whatever their order.
        need_targets: refuse data without targets.
        keys: which entries of a loader's dict batches the network takes (`Network.accepted_keys`).
    """
    path = Path(spec)
    if not path.exists() and FACTORY.fullmatch(spec):
        return _from_factory(spec, keys, need_targets)
    if not path.is_file():
        raise MCBNError(f"there is no file {path}" if not path.exists() else f"{path} is a folder, not a file")
    if path.suffix not in SUFFIXES:
        raise MCBNError(f"{path} must end in {', '.join(SUFFIXES)}, or be a package.module:loader_factory")
    if path.suffix == ".npz":
        return _from_npz(path, target, fitted, need_targets)
    table = StoredArray(path) if path.suffix == ".npy" else open_table(path)
    if isinstance(table, StoredArray) and len(table.shape) != 2:
        return _from_arrays(path, table, None, fitted, need_targets)
    return _from_table(table, target, fitted, need_targets)


def _from_table(table: Table, target: str | None, fitted: Layout, need_targets: bool) -> Examples:
    targets = find_targets(table, target, fitted)
    if need_targets and not targets:
        raise MCBNError(f"name the target column(s) of {table.path} by --target; it has {listing(table)}")
    inputs = find_inputs(table, targets, fitted)

    def read() -> Iterator[Pair]:
        for _, numbers, _ in table.blocks([*inputs, *targets], rows_of_block(8 * (len(inputs) + len(targets)))):
            x, y = numbers[:, : len(inputs)], numbers[:, len(inputs) :]  # (n, C), (n, D)
            y = y[:, 0] if len(targets) == 1 else y
            yield torch.from_numpy(x.copy()), torch.from_numpy(y.copy()) if targets else None

    columns = tuple(table.names[c] for c in inputs) if table.names else None
    layout = Layout(columns, len(inputs), target or fitted.target)
    return Examples(str(table.path), layout, table.count, read)


def _from_npz(path: Path, target: str | None, fitted: Layout, need_targets: bool) -> Examples:
    names = members(path)
    if target is not None and target not in names:
        raise MCBNError(f"{path} has no array {target!r}; it holds {names}")
    y = target or next((name for name in (fitted.target, *TARGET_KEYS) if name in names), None)
    rest = [name for name in names if name != y]
    x = next((name for name in INPUT_KEYS if name in rest), rest[0] if len(rest) == 1 else None)
    if x is None:
        raise MCBNError(f"{path} holds the arrays {names}; call the inputs 'x' and the targets 'y'")
    fitted = replace(fitted, target=target or fitted.target)
    return _from_arrays(path, StoredArray(path, x), StoredArray(path, y) if y else None, fitted, need_targets)


def _from_arrays(path: Path, x: StoredArray, y: StoredArray | None, fitted: Layout, need_targets: bool) -> Examples:
    if need_targets and y is None:
        raise MCBNError(f"{path} holds no targets; write numpy.savez({str(path.with_suffix('.npz'))!r}, x=..., y=...)")
    if y is not None and len(x) != len(y):
        raise MCBNError(f"{x.label} holds {len(x)} examples, {y.label} {len(y)}")
    width = x.shape[1] if len(x.shape) == 2 else None
    if None not in (width, fitted.width) and width != fitted.width:
        raise MCBNError(f"{x.label} has {width} columns, the posterior was fitted on {fitted.width}")
    size = rows_of_block(x.dtype.itemsize * x.width)

    def read() -> Iterator[Pair]:
        targets: Iterable[Tensor | None] = repeat(None) if y is None else map(torch.from_numpy, y.arrays(size))
        return zip(map(torch.from_numpy, x.arrays(size)), targets, strict=False)

    return Examples(str(path), Layout(None, width, fitted.target), lambda: len(x), read)


def _from_factory(spec: str, keys: Keys, need_targets: bool) -> Examples:
    data = specs.make(spec, "--data")

    def read() -> Iterator[Pair]:
        again = specs.make(spec, "--data") if isinstance(data, Iterator) else data  # a generator gives out once
        for batch in _as_batches(again, spec):
            x, y = batches.pick_inputs(batch, None, keys), None
            with nullcontext() if need_targets else suppress(MCBNError):
                y = batches.pick_targets(batch, None)
            yield x, y

    return Examples(spec, Layout(), lambda: _examples(data), read, data)


def _as_batches(data: Any, spec: str) -> Iterable[Any]:
    if isinstance(data, Tensor | np.ndarray | tuple):
        return [data]
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=256)
    if isinstance(data, Iterable):
        return data
    raise MCBNError(f"--data {spec} gives {batches.describe(data)}; return a DataLoader, a Dataset or tensors")


def _examples(data: Any) -> int | None:
    if isinstance(data, Tensor | np.ndarray | tuple):
        return batches.size_of(data)
    try:
        return len(getattr(data, "dataset", data))
    except TypeError:  # a stream
        return None


def require_fits(bayes: Any, x: Tensor, what: str, cure: str) -> None:
    """Try the network of an `MCBN` on two inputs of x (N, ...), to say in the user's words why it cannot run."""
    try:
        bayes.plain(x[:2])
    except MCBNError as error:
        raise MCBNError(f"the network does not take {what} ({error.__cause__ or error}); {cure}") from error


def rows_of_block(row_bytes: int) -> int:
    """Choose how many rows make a block: as many as fit 32 MB, at most 8192.

    Part of the results: rounding depends on which rows go through the network together.
    """
    return max(1, min(MOST_ROWS, BLOCK_BYTES // max(1, row_bytes)))
