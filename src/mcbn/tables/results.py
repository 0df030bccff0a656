"""Predictions written block by block: csv, parquet or npz."""

import csv
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.prediction import ClassificationPrediction, RegressionPrediction, central_interval
from mcbn.tables.formats import Array, CsvTable, ParquetTable, Table, pyarrow

COLUMN_NAMES = {"probs": "prob"}  # one column a class: prob_0, prob_1, ...


def arrays_of(pred: RegressionPrediction | ClassificationPrediction, coverage: float) -> dict[str, Array]:
    """Name what a prediction says of each input, each (N, ...); of many blocks, so that it never warns about tau."""
    values: dict[str, Tensor]
    if isinstance(pred, RegressionPrediction):
        low, high = central_interval(pred.mean, pred.std, coverage)
        values = {"mean": pred.mean, "std": pred.std, "low": low, "high": high}
    else:
        values = {
            "probs": pred.probs,
            "label": pred.label,
            "entropy": pred.entropy,
            "mutual_information": pred.mutual_information,
        }
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


class Results(ABC):
    """A file of predictions that grows by blocks; `with` closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack = ExitStack()

    @abstractmethod
    def add(self, arrays: Mapping[str, Array]) -> None:
        """Append a block, each array (n, ...)."""

    def finish(self) -> None:  # noqa: B027 - a format may have nothing left to write
        """Write what comes last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self.stack:
            if kind is None:
                self.finish()


class CsvResults(Results):
    """One row an input; numbers with all their digits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self.stack.enter_context(path.open("w", encoding="utf-8", newline=""))
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._begun = False

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Append a block as rows."""
        columns = as_columns(arrays)
        if not self._begun:
            self._writer.writerow(columns)
            self._begun = True
        self._writer.writerows(zip(*(_digits(column) for column in columns.values()), strict=True))


def _digits(column: Array) -> list[Any]:
    """Write numbers so that reading them back gives the same ones: 9 digits in single precision, 17 in double."""
    values: list[Any] = column.tolist()
    return [f"{value:.9g}" for value in values] if column.dtype == np.float32 else values


class ParquetResults(Results):
    """One row an input, through pyarrow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._arrow, self._parquet = pyarrow(path)
        self._writer: Any = None

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Append a block as a group of rows."""
        table = self._arrow.table(as_columns(arrays))
        if self._writer is None:
            self._writer = self.stack.enter_context(self._parquet.ParquetWriter(self.path, table.schema))
        self._writer.write_table(table)


class NpzResults(Results):
    """Arrays of any shape. Their values wait in files beside the result, as an archive takes one array at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts: dict[str, tuple[IO[bytes], Array]] = {}
        self._length = 0

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Append a block to every array."""
        for name, array in arrays.items():
            if name not in self._parts:
                part = self.stack.enter_context(self.path.with_name(f"{name}.part").open("w+b"))
                self._parts[name] = part, array[:0]
            file, empty = self._parts[name]
            if array.shape[1:] != empty.shape[1:]:
                raise MCBNError(f"{name} changes its shape from {empty.shape[1:]} to {array.shape[1:]} between inputs")
            file.write(np.ascontiguousarray(array).tobytes())
        self._length += len(next(iter(arrays.values())))

    def finish(self) -> None:
        """Put the arrays into one archive."""
        with zipfile.ZipFile(self.path, "w") as archive:
            for name, (file, empty) in self._parts.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    shape = (self._length, *empty.shape[1:])
                    descr = np.lib.format.dtype_to_descr(empty.dtype)
                    header = {"descr": descr, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    file.seek(0)
                    shutil.copyfileobj(file, member)


KINDS: dict[str, type[Results]] = {".csv": CsvResults, ".parquet": ParquetResults, ".npz": NpzResults}


def require_writable(path: Path, suffixes: tuple[str, ...] = tuple(KINDS)) -> Path:
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
    if path.suffix not in KINDS:
        raise MCBNError(f"{path} must end in {', '.join(KINDS)}, as `mcbn predict` writes it")
    columns = _read_npz(path) if path.suffix == ".npz" else _read_columns(path)
    classes = [columns[f"prob_{k}"] for k in range(len(columns)) if f"prob_{k}" in columns]
    if classes:
        columns["probs"] = np.stack(classes, 1)
    wanted = ("probs", "mutual_information") if "probs" in columns else ("mean", "std")
    found = {name: columns[name] for name in wanted if name in columns}
    if not {"probs"} <= set(found) and set(found) != {"mean", "std"}:
        raise MCBNError(
            f"{path} holds {', '.join(columns)}; one output's mean and std are needed, or prob_0, prob_1, ..."
        )
    return found


def _read_columns(path: Path) -> dict[str, Array]:
    table: Table = CsvTable(path) if path.suffix == ".csv" else ParquetTable(path)
    if table.names is None:
        raise MCBNError(f"{path} names no columns; a file of predictions begins with mean,std,... or prob_0,...")
    values = np.concatenate(list(table.read(range(table.width), 8192)))
    return dict(zip(table.names, values.T, strict=True))


def _read_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path) as file:
            return dict(file)
    except (ValueError, zipfile.BadZipFile) as error:
        raise MCBNError(f"{path} is not a file as `mcbn predict` writes it: {error}") from error
