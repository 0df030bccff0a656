"""Files of numbers read in blocks, a bad cell named by row and column: csv and parquet, npy and npz; no pickle."""

import csv
import importlib
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcbn.errors import MCBNError, extra, one_line
from mcbn.files import require_sane

Array = NDArray[Any]
Line = tuple[int, list[str]]  # its number in the file, its cells
DELIMITERS = ",;\t"
MOST_CHARACTERS = 2**24  # of a line of csv


class Block(NamedTuple):
    """Some rows of a table."""

    first: int  # its first row, counted from 0
    numbers: Array  # (n, columns)
    keys: dict[int, Any]  # column -> n values as the file has them


def name_of(names: Sequence[str] | None, column: int) -> str:
    """Call a column by its name, or by its place counted from 1."""
    return repr(names[column]) if names else str(column + 1)


def require_finite(label: object, block: Array, first: int, names: Sequence[object]) -> None:
    """Refuse NaN, infinity, also in single precision, in rows (n, ...) from `first` on; names are of columns (n, C)."""
    with np.errstate(over="ignore"):
        usable = np.isfinite(block.astype(np.float32, copy=False))
    if block.dtype.kind != "f" or usable.all():
        return
    row, *place = np.argwhere(~usable)[0].tolist()
    value = block[row, *place]
    fault = f" is {'too large' if np.isfinite(value) else 'not finite'}{f' at {place}' if place else ''}"
    if block.ndim == 2:
        fault = f", column {names[place[0]]} is {value}"
    limit = " (single precision ends at 3.4e38)" if np.isfinite(value) else ""
    raise MCBNError(f"{label}: row {first + row + 1}{fault}{limit}; clean or impute it first")


class CsvTable:
    """A csv file (, ; or tab): a first row not all numbers is the header; finite: refuse NaN, infinity, empty cells."""

    def __init__(self, path: Path, *, finite: bool = True) -> None:
        self.path, self.finite = path, finite
        cells, *below = [cells for _, cells in islice(self._lines(), 2)] or [[]]
        if not cells:
            raise MCBNError(f"{path} is empty; it should hold rows of numbers")
        self.width = len(cells)
        self.names = None if all(map(is_number, cells)) else tuple(cell.strip() for cell in cells)
        texts = [cell for first, cell in zip(cells, *below or [cells], strict=False) if not is_number(first or "0")]
        if self.names and any(map(is_number, cells)) and not any(map(is_number, texts)):  # text stands above text
            what = f"{path}: its first line, {','.join(cells)[:60]!r}, is taken for the names of columns"
            warnings.warn(f"mcbn: {what}; if it is a row, put names above it", stacklevel=2)
        (name, count), *_ = Counter(self.names or ("",)).most_common(1)
        if count > 1:
            raise MCBNError(f"{path} has several columns named {name!r}; give each its own name")

    def blocks(self, columns: Sequence[int], size: int, keys: Sequence[int] = ()) -> Iterator[Block]:
        """Yield blocks of `size` rows: `columns` as numbers, `keys` as they are written."""
        lines = islice(self._lines(), int(self.names is not None), None)
        first = 0
        while block := list(islice(lines, size)):
            numbers = self._numbers(block, columns, first)
            if self.finite:
                require_finite(self.path, numbers, first, [name_of(self.names, c) for c in columns])
            yield Block(first, numbers, {c: np.array([cells[c] for _, cells in block], dtype=object) for c in keys})
            first += len(block)

    def _numbers(self, block: list[Line], columns: Sequence[int], first: int) -> Array:
        for row, (line, cells) in enumerate(block, first + 1):
            if len(cells) != self.width:
                here = f"row {row} (line {line}) has {len(cells)} columns"
                raise MCBNError(f"{self.path}: {here}, the first line {self.width}")
        empty = "" if self.finite else "nan"
        try:
            return np.array([[float(cells[c] or empty) for c in columns] for _, cells in block], dtype=np.float64)
        except ValueError:
            texts = ((r, b[0], c, b[1][c]) for r, b in enumerate(block, first + 1) for c in columns)
            row, line, c, cell = next(text for text in texts if not is_number(text[-1]))
            place = f"row {row} (line {line}), column {name_of(self.names, c)}"
            cure = f"; mend it, or leave the column out by --key {self.names[c]}" if self.names else ""
            raise MCBNError(f"{self.path}: {place}: {cell[:80]!r} is not a number{cure}") from None

    def _lines(self) -> Iterator[Line]:
        """Yield lines that are not blank."""
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            try:
                delimiter = max(DELIMITERS, key=file.readline(MOST_CHARACTERS).count)
                file.seek(0)
                lines = map(self._require_short, iter(lambda: file.readline(MOST_CHARACTERS + 1), ""), count(1))
                reader = csv.reader(lines, delimiter=delimiter)
                yield from ((reader.line_num, cells) for cells in reader if cells)
            except UnicodeDecodeError as error:
                raise MCBNError(f"{self.path} is not a text file in UTF-8: {error}; save it as such") from error
            except csv.Error as error:
                raise MCBNError(f"{self.path}: line {reader.line_num} is no csv: {error}") from error

    def _require_short(self, line: str, number: int) -> str:
        if len(line) > MOST_CHARACTERS:
            most = f"has more than {MOST_CHARACTERS:,} characters"
            raise MCBNError(f"{self.path}: line {number} {most}: no row of a table; write large arrays as npy")
        return line


def is_number(cell: str) -> bool:
    """Tell whether text is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


class ParquetTable:
    """A parquet file, through pyarrow; finite: as of a csv file."""

    def __init__(self, path: Path, *, finite: bool = True) -> None:
        self.path, self.finite = path, finite
        self._arrow, parquet = pyarrow(path)
        try:
            self._file = parquet.ParquetFile(self._arrow.OSFile(os.fsencode(path)))  # of any name, UTF-8 or not
        except self._arrow.ArrowInvalid as error:
            raise MCBNError(f"{path} is not a parquet file: {one_line(error)}") from error
        self._schema = self._file.schema_arrow
        self.names: tuple[str, ...] = tuple(self._schema.names)
        self.width = len(self.names)
        self.n_rows: int = self._file.metadata.num_rows

    def blocks(
        self, columns: Sequence[int], size: int, keys: Sequence[int] = (), start: int = 0, stop: int | None = None
    ) -> Iterator[Block]:
        """Yield blocks of `size` rows from start to stop: `columns` as numbers, `keys` as arrow arrays as they are."""
        names = [self.names[c] for c in columns]
        self._require_numbers(names)
        chosen = list(dict.fromkeys(self.names[c] for c in (*columns, *keys)))
        first = start
        for rows in self._slices(chosen, size, start, self.n_rows if stop is None else stop):
            numbers = np.empty((len(rows), len(names)))
            for place, name in enumerate(names):
                if (array := rows.column(name)).null_count and self.finite:
                    row = first + array.is_null().to_pylist().index(True) + 1
                    raise MCBNError(f"{self.path}: row {row}, column {name!r} is empty; clean or impute it first")
                numbers[:, place] = array.to_numpy(zero_copy_only=False)
            if self.finite:
                require_finite(self.path, numbers, first, [repr(name) for name in names])
            yield Block(first, numbers, {c: rows.column(self.names[c]) for c in keys})
            first += len(numbers)

    def _slices(self, names: Sequence[str], size: int, start: int, stop: int) -> Iterator[Any]:
        """Yield record batches of `size` rows from start to stop, reading only the row groups that hold them."""
        groups, skip = self._groups(start, stop)
        held, left = [], stop - start
        for batch in self._file.iter_batches(batch_size=size, row_groups=groups, columns=list(names)):
            batch, skip = batch.slice(min(skip, len(batch))), max(0, skip - len(batch))
            held.append(batch.slice(0, left))
            left -= len(held[-1])
            if (rows := sum(map(len, held))) >= size or not left:
                joined = self._arrow.Table.from_batches(held).combine_chunks()
                whole = rows if not left else rows - rows % size
                for first in range(0, whole, size):
                    yield from joined.slice(first, min(size, whole - first)).to_batches()
                held = joined.slice(whole).to_batches()

    def _groups(self, start: int, stop: int) -> tuple[list[int], int]:
        """Find the row groups that hold rows start to stop, and how many rows of the first come before them."""
        edges = np.cumsum([0, *(self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups))])
        groups = [g for g in range(len(edges) - 1) if edges[g] < stop and edges[g + 1] > start]
        return groups, start - int(edges[groups[0]]) if groups else 0

    def _require_numbers(self, names: Sequence[str]) -> None:
        types = self._arrow.types
        for name, kind in ((name, self._schema.field(name).type) for name in names):
            if not any(f(kind) for f in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)):
                fault = f"column {name!r} is not a number: the column holds {kind}"
                raise MCBNError(f"{self.path}: row 1, {fault}; --key {name} leaves it out")


def pyarrow(path: Path) -> tuple[Any, Any]:
    """Import pyarrow and its parquet part, or say how to get them."""
    with extra("parquet", f"{path.name} needs pyarrow, which csv and npz files do not"):
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


def open_table(path: Path, *, finite: bool = True) -> CsvTable | ParquetTable:
    """Open a csv or parquet file."""
    return (CsvTable if path.suffix.lower() == ".csv" else ParquetTable)(path, finite=finite)


class StoredArray:
    """An npy file, mapped from disk, or one array of an npz file, read whole; (N, C) is a table too."""

    names: tuple[str, ...] | None = None

    def __init__(self, path: Path, member: str | None = None, *, finite: bool = True) -> None:
        self.path, self.finite = path, finite
        self.label = str(path) if member is None else f"{path}[{member}]"
        self._values = self._load(member)
        self.shape, self.dtype = self._values.shape, self._values.dtype
        if self.dtype.kind not in "biuf":
            raise MCBNError(f"{self.label} holds {self.dtype}, not numbers")
        if not self.shape:
            raise MCBNError(f"{self.label} is a single number; its first axis should count examples")
        self.width = int(np.prod(self.shape[1:], dtype=np.int64))  # numbers of one example

    def __len__(self) -> int:
        return int(self.shape[0])

    def blocks(self, columns: Sequence[int], size: int, keys: Sequence[int] = ()) -> Iterator[Block]:
        """Yield blocks of these columns of an array (N, C), which has no columns of text."""
        return (Block(i * size, array[:, list(columns)], {}) for i, array in enumerate(self.arrays(size)))

    def arrays(self, size: int) -> Iterator[Array]:
        """Yield blocks (n, ...), n = size but for the last; refuse NaN and infinity, unless they are to pass."""
        for first in range(0, len(self), size):
            block = self._values[first : first + size]
            if self.finite:
                require_finite(self.label, block, first, range(1, self.width + 1))
            yield np.array(block, self.dtype.newbyteorder("="), order="C")  # torch takes the machine's own byte order

    def _load(self, member: str | None) -> Array:
        try:
            stored = np.load(self.path, "r" if os.path.getsize(self.path) else None)
            if member is None:
                return np.asanyarray(stored)
            with stored as archive:
                size = archive.zip.getinfo(f"{member}.npy")
                require_sane(self.label, size.compress_size, size.file_size)
                return np.asarray(archive[member])
        except MCBNError:
            raise
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise MCBNError(f"{self.label} is damaged, or not an array of numbers that numpy wrote: {error}") from error


Table = CsvTable | ParquetTable | StoredArray  # rows of numbers under columns that may have names


def members(path: Path) -> list[str]:
    """List the arrays of an npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except zipfile.BadZipFile as error:
        raise MCBNError(f"{path} is not a file as numpy.savez writes it: {error}") from error
