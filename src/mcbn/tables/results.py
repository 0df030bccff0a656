"""Predictions written block by block: csv, parquet or npz."""

import csv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.prediction import ClassificationPrediction, RegressionPrediction, central_interval
from mcbn.tables.formats import Array, open_table, pyarrow

Add = Callable[[Mapping[str, Array]], None]  # appends a block to a file, each array (n, ...)
COLUMN_NAMES = {"probs": "prob"}  # one column a class: prob_0, prob_1, ...


def arrays_of(pred: RegressionPrediction | ClassificationPrediction, coverage: float) -> dict[str, Array]:
    """Name what a prediction says of each input, each (N, ...); of many blocks, so that it never warns about tau."""
    values: dict[str, Tensor]
    if isinstance(pred, RegressionPrediction):
        std = pred.variance.sqrt()  # whoever predicts has said if tau was never tuned
        low, high = central_interval(pred.mean, std, coverage)
        values = {"mean": pred.mean, "std": std, "low": low, "high": high}
    else:
        values = {name: getattr(pred, name) for name in ("probs", "label", "entropy", "mutual_information")}
    return {name: value.cpu().numpy() for name, value in values.items()}


def as_columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Lay arrays (N,) or (N, D) out as columns (N,): a single output keeps its name, several are numbered from 0."""
    columns: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.ndim > 2:
            raise MCBNError(f"{name} has shape {array.shape} and does not fit a table; write to a .npz file")
        name = COLUMN_NAMES.get(name, name)
        if array.ndim == 1 or array.shape[1] == 1:
            columns[name] = array.reshape(len(array))
        else:
            columns |= {f"{name}_{number}": array[:, number] for number in range(array.shape[1])}
    return columns


@contextmanager
def write_csv(path: Path) -> Iterator[Add]:
    """Write one row an input; numbers with all their digits."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def add(arrays: Mapping[str, Array]) -> None:
            columns = as_columns(arrays)
            if not file.tell():
                writer.writerow(columns)
            writer.writerows(zip(*(_digits(column) for column in columns.values()), strict=True))

        yield add


def _digits(column: Array) -> list[Any]:
    """Write numbers so that reading them back gives the same ones: 9 digits in single precision, 17 in double."""
    values: list[Any] = column.tolist()
    return [f"{value:.9g}" for value in values] if column.dtype == np.float32 else values


@contextmanager
def write_parquet(path: Path) -> Iterator[Add]:
    """Write one row an input, through pyarrow; a block is a group of rows."""
    arrow, parquet = pyarrow(path)
    with ExitStack() as stack:
        writers: list[Any] = []  # one, once the first block tells the columns

        def add(arrays: Mapping[str, Array]) -> None:
            table = arrow.table(as_columns(arrays))
            if not writers:
                writers.append(stack.enter_context(parquet.ParquetWriter(path, table.schema)))
            writers[0].write_table(table)

        yield add


@contextmanager
def write_npz(path: Path) -> Iterator[Add]:
    """Write arrays of any shape. Values wait in files beside the result: an archive takes one array at a time."""
    waiting: dict[str, tuple[IO[bytes], Array]] = {}  # file of the values, and an array of no rows
    with ExitStack() as stack:

        def add(arrays: Mapping[str, Array]) -> None:
            for name, array in arrays.items():
                if name not in waiting:
                    waiting[name] = stack.enter_context(path.with_name(f"{name}.part").open("w+b")), array[:0]
                file, empty = waiting[name]
                if array.shape[1:] != empty.shape[1:]:
                    raise MCBNError(
                        f"{name} changes its shape from {empty.shape[1:]} to {array.shape[1:]} between inputs"
                    )
                file.write(np.ascontiguousarray(array).tobytes())

        yield add
        with zipfile.ZipFile(path, "w") as archive:
            for name, (file, empty) in waiting.items():
                file.flush()
                values = np.memmap(file, empty.dtype, "r").reshape(-1, *empty.shape[1:])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, values, allow_pickle=False)


Writer = Callable[[Path], AbstractContextManager[Add]]
WRITERS: dict[str, Writer] = {".csv": write_csv, ".parquet": write_parquet, ".npz": write_npz}


def require_writable(path: Path, suffixes: tuple[str, ...] = tuple(WRITERS)) -> Path:
    """Refuse an output that cannot be written, before any work is done for it."""
    if suffixes and path.suffix not in suffixes:
        raise MCBNError(f"--out {path} must end in {', '.join(suffixes)}")
    if path.is_dir():
        raise MCBNError(f"--out {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise MCBNError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.suffix == ".parquet":
        pyarrow(path)
    return path


def read_predictions(path: Path) -> dict[str, Array]:
    """Read what `mcbn predict` wrote: mean and std (N,), or probs (N, K) and mutual_information (N,)."""
    if not path.is_file():
        raise MCBNError(f"there is no file {path}")
    if path.suffix not in WRITERS:
        raise MCBNError(f"{path} must end in {', '.join(WRITERS)}, as `mcbn predict` writes it")
    columns = _read_npz(path) if path.suffix == ".npz" else _read_columns(path)
    classes = [columns[f"prob_{k}"] for k in range(len(columns)) if f"prob_{k}" in columns]
    if classes:
        columns["probs"] = np.stack(classes, 1)
    wanted = ("probs", "mutual_information") if "probs" in columns else ("mean", "std")
    predicted = {name: columns[name] for name in wanted if name in columns}
    if "probs" not in predicted and set(predicted) != {"mean", "std"}:
        raise MCBNError(
            f"{path} holds {', '.join(columns)}; one output's mean and std are needed, or prob_0, prob_1, ..."
        )
    return predicted


def _read_columns(path: Path) -> dict[str, Array]:
    table = open_table(path)
    if table.names is None:
        raise MCBNError(f"{path} names no columns; a file of predictions begins with mean,std,... or prob_0,...")
    values = np.concatenate([block.numbers for block in table.blocks(range(table.width), 8192)])
    return dict(zip(table.names, values.T, strict=True))


def _read_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path) as file:
            return dict(file)
    except (ValueError, zipfile.BadZipFile) as error:
        raise MCBNError(f"{path} is not a file as `mcbn predict` writes it: {error}") from error
