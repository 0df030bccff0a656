"""Arrays in npy and npz files, read in blocks of their first axis without loading the whole; no pickle."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from mcbn.errors import MCBNError
from mcbn.tables.tables import Array, require_finite

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class StoredArray:
    """An npy file, or one array of an npz file: its shape at once, its values in blocks."""

    def __init__(self, path: Path, member: str | None = None) -> None:
        self.path, self.member = path, member
        self.label = str(path) if member is None else f"{path}[{member}]"
        with self._open() as file:
            self.shape, self._fortran, self.dtype = self._header(file)
        if self.dtype.kind not in "biuf":
            raise MCBNError(f"{self.label} holds {self.dtype}, not numbers")
        if not self.shape:
            raise MCBNError(f"{self.label} is a single number; its first axis should count examples")

    def __len__(self) -> int:
        return int(self.shape[0])

    def blocks(self, size: int) -> Iterator[Array]:
        """Yield blocks (n, ...), n = size but for the last; refuse NaN and infinity."""
        for first, block in zip(range(0, len(self), size), self._parts(size), strict=True):
            self._require_finite(block, first)
            yield block.astype(self.dtype.newbyteorder("="), copy=False)  # torch takes the machine's own byte order

    def _parts(self, size: int) -> Iterator[Array]:
        if self._fortran:  # columns first: a row is all over the file
            with self._open() as file:
                whole = np.lib.format.read_array(file, allow_pickle=False)
            yield from (whole[i : i + size] for i in range(0, len(self), size))
            return
        with self._open() as file:
            self._header(file)
            width = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
            for first in range(0, len(self), size):
                rows = min(size, len(self) - first)
                content = file.read(rows * width)
                if len(content) != rows * width:
                    raise MCBNError(f"{self.label} is cut off: it ends before row {first + rows} of {len(self)}")
                yield np.frombuffer(bytearray(content), dtype=self.dtype).reshape(rows, *self.shape[1:])

    def _require_finite(self, block: Array, first: int) -> None:
        if block.ndim == 2:
            require_finite(Path(self.label), block, first, range(block.shape[1]), None)
        elif block.dtype.kind == "f" and not np.isfinite(block).all():
            row, *place = np.argwhere(~np.isfinite(block))[0].tolist()
            where = f" at {place}" if place else ""
            raise MCBNError(f"{self.label}: row {first + row + 1} is not finite{where}; clean or impute it first")

    def _header(self, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            return HEADERS[np.lib.format.read_magic(file)](file)
        except (ValueError, KeyError) as error:
            raise MCBNError(f"{self.label} is not an array as numpy.save writes it: {error}") from error

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            if self.member is None:
                with self.path.open("rb") as file:
                    yield file
                return
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.member}.npy") as member:
                yield member
        except zipfile.BadZipFile as error:
            raise MCBNError(f"{self.label} is damaged, or not a file as numpy.savez writes it: {error}") from error


class ArrayTable:
    """A two-dimensional array as a table without column names."""

    def __init__(self, array: StoredArray) -> None:
        self.names: tuple[str, ...] | None = None
        self.array, self.path, self.width = array, array.path, array.shape[1]

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.array)

    def read(self, columns: Sequence[int], size: int) -> Iterator[Array]:
        """Yield blocks of these columns, (n, len(columns))."""
        return (block[:, list(columns)] for block in self.array.blocks(size))


def members(path: Path) -> list[str]:
    """List the arrays of an npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except zipfile.BadZipFile as error:
        raise MCBNError(f"{path} is not a file as numpy.savez writes it: {error}") from error
