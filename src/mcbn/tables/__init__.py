"""What a person has on disk: inputs and targets block by block, from a file or a loader of their own code."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.progress import bar
from mcbn.tables import specs
from mcbn.tables.formats import Array, Block, StoredArray, Table, is_number, members, name_of, open_table

BLOCK_BYTES = 2**25  # of inputs held at once, beside a pass through the network
MOST_ROWS = 8192
INPUT_KEYS = ("x", "X", "inputs", "input", "features")
TARGET_KEYS = (*batches.TARGET_KEYS, "Y")
SUFFIXES = (".csv", ".parquet", ".npy", ".npz")
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
Keys = tuple[list[str], list[str]]  # arguments of the network's forward: all, and those it must have


class InputBlock(NamedTuple):
    """Some examples."""

    x: Any  # inputs (n, ...)
    y: Any  # targets (n, ...), or None
    keys: Mapping[str, Any] = {}  # columns passed on as they are, n values each


@dataclass(frozen=True)
class Layout:
    """What of a table went to the network: kept with the posterior, so that later tables are read alike."""

    columns: Sequence[str] | None = None  # names of the inputs
    width: int | None = None  # number of inputs; None where an input is not a row of a table
    target: str | None = None  # as the option --target named it
    classes: Sequence[str] | None = None  # names of the classes in the order of the outputs, where they are text


EMPTY = Layout()


class Columns(NamedTuple):
    """Where a table has what, by place."""

    keys: list[int]
    inputs: list[int]
    targets: list[int]


def find_columns(table: Table, target: str | None, fitted: Layout, keys: Sequence[str] = ()) -> Columns:
    """Find keys by name, targets as asked for or else of the fit, inputs by the names of the fit or else all others."""
    places = {name: place for place, name in enumerate(table.names or ())}
    key_places, targets = _places(table, keys, places, "key"), _find_targets(table, target, fitted, places)
    if places and fitted.columns:
        inputs = _places(table, fitted.columns, places, "input", ", named by columns= or at the fit")
        return Columns(key_places, inputs, targets)
    inputs = [c for c in range(table.width) if c not in {*targets, *key_places}]
    if fitted.width is not None and len(inputs) != fitted.width:
        counts = f"{len(inputs)} input columns, the posterior was fitted on {fitted.width}"
        raise MCBNError(f"{table.path} has {counts}; give it the same columns (--target and --key leave others out)")
    if not inputs:
        raise MCBNError(f"{table.path} has no input columns beside its target(s)")
    return Columns(key_places, inputs, targets)


def _find_targets(table: Table, target: str | None, fitted: Layout, places: Mapping[str, int]) -> list[int]:
    wanted = fitted.target if target is None else target
    names = [name.strip() for name in wanted.split(",")] if wanted is not None else []
    numbered = {str(c): c % table.width for c in range(-table.width, table.width)}
    placed = set(names) <= set(numbered) and table.width == (fitted.width or 0) + len(names)
    if target is None and not placed and not set(names) <= set(places):
        return []
    return _places(table, names, numbered | dict(places), "target")


def _places(table: Table, names: Sequence[str], known: Mapping[str, int], kind: str, origin: str = "") -> list[int]:
    if lacking := ", ".join(repr(name) for name in names if name not in known):
        raise MCBNError(f"{table.path} lacks the {kind} column(s) {lacking}{origin}; it has {listing(table)}")
    return [known[name] for name in names]


def listing(table: Table) -> str:
    """Name the columns there are, for error messages."""
    shown = ", ".join(map(repr, (table.names or ())[:20]))
    return f"columns {shown}{', ...' if table.width > 20 else ''}" if table.names else f"{table.width} columns"


@dataclass(frozen=True)
class Examples:
    """Blocks of inputs and targets, to be run through any number of times."""

    name: str
    layout: Layout
    read: Callable[[], Iterator[InputBlock]]
    loader: Any = None  # what the user's own factory made

    def blocks(self, title: str = "reading") -> Iterator[InputBlock]:
        """Yield the blocks, with a bar that counts their rows; refuse data without a row."""
        block = None
        with bar(title, None, "row") as tick:
            for block in self.read():
                yield block
                tick(batches.size_of(block.x))
        if block is None:
            raise MCBNError(f"{self.name} holds no rows")

    def training_data(self) -> Any:
        """Give the data as `MCBN.fit` takes it: what the user's factory made, or all inputs of a file, (N, ...)."""
        return torch.cat([block.x for block in self.blocks()]) if self.loader is None else self.loader


def open_examples(
    spec: str,
    *,
    target: str | None = None,
    fitted: Layout = EMPTY,
    need_targets: bool = False,
    keys: Keys = ([], []),
    passed_on: Sequence[str] = (),
    classify: bool = False,
    finite: bool = True,
) -> Examples:
    """Open a csv, parquet, npy or npz file, or a `module:loader_factory`, as a posterior was `fitted` on such data.

    target: columns by name or place ("price", "a,b", "-1"), or an array of an npz file; keys: entries of dict batches
    that it takes; passed_on: columns that are no inputs; classify: sorted texts of a target are names of classes.
    """
    path = Path(spec)
    is_table = path.suffix.lower() in (".csv", ".parquet")
    if passed_on and not is_table:
        raise MCBNError(f"--key {','.join(passed_on)} names columns of a csv or parquet file; {spec} is none")
    if not path.exists() and FACTORY.fullmatch(spec):
        return _from_factory(spec, keys, need_targets)
    if not path.is_file():
        raise MCBNError(f"there is no file {path}" if not path.exists() else f"{path} is a folder or pipe, not a file")
    if path.suffix.lower() not in SUFFIXES:
        raise MCBNError(f"{path} must end in {', '.join(SUFFIXES)}, or be a package.module:loader_factory")
    if path.suffix.lower() == ".npz":
        return _from_npz(path, target, fitted, need_targets, finite)
    table: Table = open_table(path, finite=finite) if is_table else StoredArray(path, finite=finite)
    if isinstance(table, StoredArray) and len(table.shape) != 2:
        return _from_arrays(path, table, None, fitted, need_targets)
    columns = find_columns(table, target, fitted, passed_on)
    if need_targets and not columns.targets:
        raise MCBNError(f"name the target column(s) of {table.path} by --target; it has {listing(table)}")
    names = tuple(table.names[c] for c in columns.inputs) if table.names else None
    classes = fitted.classes or (_class_names(table, columns.targets) if classify and is_table else None)
    layout = Layout(names, len(columns.inputs), target or fitted.target, classes)
    return Examples(str(path), layout, lambda: _read_table(table, columns, classes if is_table else None))


def _read_table(table: Table, columns: Columns, classes: Sequence[str] | None) -> Iterator[InputBlock]:
    """Read inputs and targets block by block; where classes have names, the target is one of them."""
    keys, inputs, targets = columns
    numbers, texts = ([*inputs, *targets], []) if classes is None else (inputs, targets)
    for block in table.blocks(numbers, rows_of_block(8 * (len(inputs) + len(targets))), [*keys, *texts]):
        x, y = block.numbers[:, : len(inputs)], block.numbers[:, len(inputs) :]  # (n, C), (n, D)
        if classes is not None and targets:
            y = _class_numbers(table, block, targets[0], classes)
        elif len(targets) == 1:
            y = y[:, 0]
        passed_on = {(table.names or ())[c]: block.keys[c] for c in keys}
        yield InputBlock(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()) if targets else None, passed_on)


def _class_names(table: Table, targets: Sequence[int]) -> Sequence[str] | None:
    """List the different texts of a single target column, sorted; None where all are numbers."""
    if len(targets) != 1:
        return None
    names = {label for block in table.blocks([], MOST_ROWS, targets) for label in _labels(table, block, targets[0])}
    return None if all(map(is_number, names)) else tuple(sorted(names))


def _class_numbers(table: Table, block: Block, column: int, classes: Sequence[str]) -> Array:
    """Return the place of each label among the classes, (n,); a label may be that place itself."""
    places = {str(place): place for place in range(len(classes))} | {name: place for place, name in enumerate(classes)}
    labels = _labels(table, block, column)
    if unknown := [row for row, label in enumerate(labels) if label not in places]:
        known = ", ".join(map(repr, classes[:20]))
        where = f"{table.path}: row {block.first + unknown[0] + 1}, column {name_of(table.names, column)}"
        raise MCBNError(f"{where}: {labels[unknown[0]]!r} is no class of the fit; they are {known}")
    return np.array([places[label] for label in labels], dtype=np.int64)


def _labels(table: Table, block: Block, column: int) -> list[str]:
    labels = ["" if value is None else str(value).strip() for value in block.keys[column].tolist()]
    if "" in labels:
        where = f"row {block.first + labels.index('') + 1}, column {name_of(table.names, column)}"
        raise MCBNError(f"{table.path}: {where} has no label; leave the row out")
    return labels


def _from_npz(path: Path, target: str | None, fitted: Layout, need_targets: bool, finite: bool) -> Examples:
    names = members(path)
    if target is not None and target not in names:
        raise MCBNError(f"{path} has no array {target!r}; it holds {names}")
    y = target or next((name for name in (fitted.target, *TARGET_KEYS) if name in names), None)
    rest = [name for name in names if name != y]
    x = next((name for name in INPUT_KEYS if name in rest), rest[0] if len(rest) == 1 else None)
    if x is None:
        raise MCBNError(f"{path} holds the arrays {names}; call the inputs 'x' and the targets 'y'")
    fitted = replace(fitted, target=target or fitted.target)
    inputs, targets = StoredArray(path, x, finite=finite), StoredArray(path, y) if y else None
    return _from_arrays(path, inputs, targets, fitted, need_targets)


def _from_arrays(path: Path, x: StoredArray, y: StoredArray | None, fitted: Layout, need_targets: bool) -> Examples:
    if need_targets and y is None:
        raise MCBNError(f"{path} holds no targets; write numpy.savez({str(path.with_suffix('.npz'))!r}, x=..., y=...)")
    if y is not None and len(x) != len(y):
        raise MCBNError(f"{x.label} holds {len(x)} examples, {y.label} {len(y)}")
    width = x.shape[1] if len(x.shape) == 2 else None
    if None not in (width, fitted.width) and width != fitted.width:
        raise MCBNError(f"{x.label} has {width} columns, the posterior was fitted on {fitted.width}")
    size = rows_of_block(x.dtype.itemsize * x.width)

    def read() -> Iterator[InputBlock]:
        targets: Iterable[Tensor | None] = repeat(None) if y is None else map(torch.from_numpy, y.arrays(size))
        return map(InputBlock, map(torch.from_numpy, x.arrays(size)), targets)

    return Examples(str(path), Layout(None, width, fitted.target, fitted.classes), read)


def _from_factory(spec: str, keys: Keys, need_targets: bool) -> Examples:
    data: Any = specs.make(spec, "--data")
    whole = isinstance(data, Tensor | np.ndarray | tuple)
    if not isinstance(data, Tensor | np.ndarray | Iterable | Dataset):
        raise MCBNError(f"--data {spec} gives {batches.describe(data)}; return a DataLoader, a Dataset or tensors")

    def read() -> Iterator[InputBlock]:
        again = specs.make(spec, "--data") if isinstance(data, Iterator) else data  # a generator gives out once
        for batch in DataLoader(again, batch_size=256) if isinstance(again, Dataset) else [again] if whole else again:
            x, y = batches.pick_inputs(batch, None, keys), None
            with nullcontext() if need_targets else suppress(MCBNError):
                y = batches.pick_targets(batch, None)
            yield InputBlock(x, y)

    return Examples(spec, Layout(), read, data)


def require_fits(bayes: Any, x: Tensor, what: str, cure: str) -> None:
    """Try the network of an `MCBN` on two inputs of x (N, ...), to say in the user's words why it cannot run."""
    try:
        bayes.plain(x[:2])
    except MCBNError as error:
        raise MCBNError(f"the network does not take {what} ({error.__cause__ or error}); {cure}") from error


def rows_of_block(row_bytes: int) -> int:
    """Choose how many rows make a block: as many as fit 32 MB, at most 8192."""
    return max(1, min(MOST_ROWS, BLOCK_BYTES // max(1, row_bytes)))  # rounding depends on it, and so do the results
