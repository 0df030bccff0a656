"""Predictions written block by block: csv, parquet or npz."""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.files import require_output
from mcbn.prediction import RegressionPrediction, central_interval
from mcbn.tables.formats import Array, StoredArray, members, open_table, pyarrow

Blocks = Iterable[Mapping[str, Any]]  # each array (n, ...)
REGRESSION = ("mean", "std", "low", "high")
CLASSIFICATION = ("probs", "label", "entropy", "mutual_information")
ROWS = 8192  # of old predictions read at a time
PROBABILITY = "prob_"  # one column a class: prob_0, prob_1, ... or by name
NOVELTY = ("p_value", "distance", "combined")  # of each input, where a watch judged them
PREFIXES = {"probs": PROBABILITY, "set": "set_"}


def arrays_of(pred: Any, coverage: float, classes: Sequence[str] | None, first: int) -> dict[str, Array]:
    """Name what a prediction says of each input, (N, ...) each; of what is not finite say the row, from `first` on."""
    if isinstance(pred, RegressionPrediction):
        std = pred.variance.sqrt()  # whoever predicts has said if tau was never tuned
        low, high = pred.interval(coverage) if pred.calibration else central_interval(pred.mean, std, coverage)
        values: dict[str, Tensor] = {"mean": pred.mean, "std": std, "low": low, "high": high}
    else:
        values = {name: getattr(pred, name) for name in CLASSIFICATION}
        values |= {} if pred.calibration is None else {"set": pred.set(coverage, seed=first)}
    arrays: dict[str, Array] = {name: value.cpu().numpy() for name, value in values.items()}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            row = first + int(np.argwhere(~np.isfinite(array))[0][0]) + 1
            raise MCBNError(f"the network gives no finite {name} for row {row}: look at that input, and at its weights")
    if pred.novelty is not None:
        arrays |= {f"novelty_{name}": getattr(pred.novelty, name).cpu().numpy() for name in NOVELTY}
    return arrays if classes is None else arrays | {"label": np.array(classes)[arrays["label"]]}


def as_columns(arrays: Mapping[str, Any], classes: Sequence[str] | None = None) -> dict[str, Any]:
    """Lay arrays (N,) or (N, D) out as columns (N,): a single output keeps its name, several are numbered from 0."""
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        if getattr(array, "ndim", 1) > 2:
            raise MCBNError(f"{name} has shape {array.shape} and does not fit a table; write to a .npz file")
        if name in PREFIXES:
            names = classes or range(array.shape[1])
            columns |= {f"{PREFIXES[name]}{k}": array[:, place] for place, k in enumerate(names)}
        elif getattr(array, "ndim", 1) == 1 or array.shape[1] == 1:
            columns[name] = array.reshape(len(array)) if isinstance(array, np.ndarray) else array
        else:
            columns |= {f"{name}_{number}": array[:, number] for number in range(array.shape[1])}
    return columns


def require_free_names(keys: Iterable[str], *more: str) -> None:
    """Refuse to pass on columns that are called like those of results."""
    names, prefixes = "|".join((*REGRESSION, *CLASSIFICATION[1:])), "|".join(PREFIXES.values())
    taken = re.compile(rf"({names})(_\d+)?|({prefixes}).*|ask_human|novelty_({'|'.join(NOVELTY)})")
    for name in keys:
        if taken.fullmatch(name) or name in more:
            raise MCBNError(f"the key column {name!r} is called like a result; rename it")


def write_csv(path: Path, blocks: Blocks, classes: Sequence[str] | None = None) -> None:
    """Write one row an input; numbers with all their digits."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for arrays in blocks:
            columns = as_columns(arrays, classes)
            if not file.tell():
                writer.writerow(columns)
            for name, column in columns.items():  # digits that give the same numbers back: 9 in single precision
                single = getattr(column, "dtype", None) == np.float32
                columns[name] = [f"{value:.9g}" for value in column.tolist()] if single else column.tolist()
            writer.writerows(zip(*columns.values(), strict=True))


def write_parquet(path: Path, blocks: Blocks, classes: Sequence[str] | None = None) -> None:
    """Write one row an input, through pyarrow; a block is a group of rows."""
    arrow, parquet = pyarrow(path)
    with ExitStack() as stack:
        writer: Any = None  # the first block tells the columns
        for arrays in blocks:
            table = arrow.table(as_columns(arrays, classes))
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def write_npz(path: Path, blocks: Blocks, classes: Sequence[str] | None = None) -> None:
    """Write arrays of any shape, which wait in memory: an archive takes one array at a time."""
    waiting: dict[str, list[Any]] = {}
    for name, array in (named for arrays in blocks for named in arrays.items()):
        waiting.setdefault(name, []).append(array)
        if array.shape[1:] != (shape := waiting[name][0].shape[1:]):
            raise MCBNError(f"{name} changes its shape from {shape} to {array.shape[1:]} between inputs")
    np.savez(path, **{name: np.concatenate(arrays) for name, arrays in waiting.items()})  # type: ignore[arg-type]


WRITERS: dict[str, Callable[[Path, Blocks, Sequence[str] | None], None]]
WRITERS = {".csv": write_csv, ".parquet": write_parquet, ".npz": write_npz}


def require_writable(
    path: Path, inputs: Mapping[str, Any], keys: Sequence[str], *, overwrite: bool, columns: Set[str] = frozenset()
) -> None:
    """Refuse an output that cannot or must not be written; an old result, told by its columns, may be replaced."""
    if path.suffix not in WRITERS:
        raise MCBNError(f"--out {path} must end in {', '.join(WRITERS)}")
    if path.suffix == ".npz" and keys:
        raise MCBNError(f"--out {path} holds arrays alone; write --key {','.join(keys)} to csv or parquet")
    if path.suffix == ".parquet":
        pyarrow(path)
    require_free_names(keys)
    require_output(path, inputs, partial(is_result, columns=columns), overwrite=overwrite)


def is_result(path: Path, columns: Set[str] = frozenset()) -> bool:
    """Tell whether a file has these columns, or where none are named those that `mcbn predict` writes."""
    with suppress(MCBNError):
        names = set(_names(path))
        if columns:
            return columns <= names
        singly = {name.removesuffix("_0") for name in names}
        return set(REGRESSION) <= singly or set(CLASSIFICATION[1:]) <= singly
    return False


def _names(path: Path) -> list[str]:
    if path.suffix not in WRITERS:
        raise MCBNError(f"{path} must end in {', '.join(WRITERS)}, as `mcbn predict` writes it")
    return members(path) if path.suffix == ".npz" else list(open_table(path).names or ())


def read_predictions(path: Path) -> tuple[dict[str, Array], tuple[str, ...] | None]:
    """Read what `mcbn predict` wrote: mean and std, or probs (N, K) and mutual_information; and names of classes."""
    if not path.is_file():
        raise MCBNError(f"there is no file {path}")
    names = _names(path)
    classes = [name for name in names if name.startswith(PROBABILITY)]
    wanted = [*classes, "mutual_information"] if classes else ["probs", "mutual_information", "mean", "std"]
    columns = _read(path, [name for name in wanted if name in names])
    if classes:
        columns["probs"] = np.stack([columns.pop(name) for name in classes], 1)
    if "probs" not in columns and set(columns) != {"mean", "std"}:
        there = f"holds {', '.join(names)}" if names else "names no columns"
        raise MCBNError(f"{path} {there}; one output's mean and std are needed, or prob_0, prob_1, ...")
    texts = tuple(name.removeprefix(PROBABILITY) for name in classes)
    return columns, None if not texts or texts == tuple(map(str, range(len(texts)))) else texts


def _read(path: Path, names: Sequence[str]) -> dict[str, Array]:
    if path.suffix == ".npz":
        stored = {name: StoredArray(path, name) for name in names}
        return {name: np.concatenate(list(array.arrays(ROWS))) for name, array in stored.items()}
    table = open_table(path)
    places = [(table.names or ()).index(name) for name in names]
    values = np.concatenate([np.empty((0, len(names))), *(block.numbers for block in table.blocks(places, ROWS))])
    return dict(zip(names, values.T, strict=True))
