"""Parts read in batches whose edges depend on the files alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.scale.parts import Part
from mcbn.tables import Layout, find_inputs, find_targets, listing, rows_of_block
from mcbn.tables.formats import Array, CsvTable, ParquetTable

Bad = dict[str, Any]


class Batch(NamedTuple):
    """Inputs that go through the network together, and where they come from."""

    x: Tensor  # (n, ...)
    labels: list[str]  # file of each, or the one of all
    rows: Array  # row in the file, or place in the list of images, (n,)
    keys: Mapping[str, Any]  # columns passed on
    bad: tuple[Bad, ...] = ()  # images left out


@dataclass(frozen=True)
class Reader:
    """How files become batches; found on the first file that can be read, the same for all."""

    is_table: bool
    batch_rows: int
    keys: tuple[str, ...] = ()
    layout: Layout = Layout()  # noqa: RUF009 - frozen
    target: str | None = None
    transform: Callable[[Any], Tensor] | None = None
    shape: tuple[int, ...] = ()  # of one image

    @classmethod
    def probe(
        cls,
        files: Mapping[str, Path],
        keys: tuple[str, ...],
        layout: Layout,
        target: str | None,
        transform: Callable[[Any], Tensor] | None,
        batch_size: int | None,
    ) -> "Reader":
        """Look at the first readable file: refuse missing columns, choose the batch size."""
        if batch_size is not None:
            batches.require_int("batch_size", batch_size, 1)
        is_table = next(iter(files.values())).suffix.lower() in (".csv", ".parquet")
        if not is_table:
            shape, size = _first_image(files, transform)
            return cls(False, batch_size or rows_of_block(size), transform=transform, shape=shape)
        table = _first_table(files)
        _, inputs, targets = _columns(table, keys, layout, target)
        names = tuple(table.names[c] for c in inputs) if table.names else None
        found = Layout(layout.columns or names, len(inputs), layout.target)
        return cls(True, batch_size or rows_of_block(8 * (len(inputs) + len(targets))), keys, found, target)

    def describe(self) -> dict[str, Any]:
        """Return what results depend on, as JSON has it."""
        name = getattr(self.transform, "__qualname__", type(self.transform).__name__) if self.transform else None
        return {
            "batch_rows": self.batch_rows,
            "keys": list(self.keys),
            "layout": self.layout.to_json(),
            "target": self.target,
            "transform": name,
            "shape": list(self.shape),
        }

    def read(self, part: Part) -> Iterator[Batch]:
        """Yield the batches of a part."""
        return self._read_table(part) if self.is_table else self._read_images(part)

    def _read_table(self, part: Part) -> Iterator[Batch]:
        table = open_table(Path(part.files[0]))
        keys, inputs, _ = _columns(table, self.keys, self.layout, self.target)
        for block in table.blocks(inputs, keys, self.batch_rows, part.start, part.stop):
            n = len(block.numbers)
            rows = np.arange(block.first, block.first + n)
            named = {name: block.keys[c] for name, c in zip(self.keys, keys, strict=True)}
            yield Batch(torch.from_numpy(block.numbers), [part.labels[0]], rows, named)

    def _read_images(self, part: Part) -> Iterator[Batch]:
        places = iter(zip(range(part.start, part.start + len(part.files)), part.files, part.labels, strict=True))
        while group := list(islice(places, self.batch_rows)):
            good, bad = [], []
            for place, path, label in group:
                try:
                    image = read_image(Path(path), self.transform)
                    if tuple(image.shape) != self.shape:
                        raise MCBNError(f"its shape is {tuple(image.shape)}, that of the first {self.shape}: resize it")
                    good.append((image, label, place))
                except Exception as error:
                    bad.append({"file": label, "reason": reason(error)})
            x = torch.stack([image for image, _, _ in good]) if good else torch.empty(0, *self.shape)
            rows = np.array([place for _, _, place in good], dtype=np.int64)
            yield Batch(x, [label for _, label, _ in good], rows, {}, tuple(bad))


def _columns(
    table: CsvTable | ParquetTable, keys: tuple[str, ...], layout: Layout, target: str | None
) -> tuple[list[int], list[int], list[int]]:
    """Find the columns of a table: keys, inputs, targets."""
    missing = [name for name in keys if name not in (table.names or ())]
    if missing:
        raise MCBNError(f"{table.path} has no key column {missing[0]!r}; it has {listing(table)}")
    own = [(table.names or ()).index(name) for name in keys]
    targets = find_targets(table, target, layout)
    return own, find_inputs(table, [*targets, *own], layout), targets


def open_table(path: Path) -> CsvTable | ParquetTable:
    """Open a csv or parquet file."""
    return CsvTable(path) if path.suffix.lower() == ".csv" else ParquetTable(path)


def _first_table(files: Mapping[str, Path]) -> CsvTable | ParquetTable:
    """Open the first table that can be opened."""
    first: MCBNError | None = None
    for path in files.values():
        try:
            return open_table(path)
        except MCBNError as error:
            first = first or error
    raise MCBNError(f"not one of {len(files)} input files can be read; the first: {first}")


def read_image(path: Path, transform: Callable[[Any], Tensor] | None) -> Tensor:
    """Read an image, (C, H, W): through the user's transform, or as RGB in [0, 1]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MCBNError("images need Pillow: pip install 'mcbn[ray]'") from error
    with Image.open(path) as file:
        image = file.convert("RGB")
    if transform is not None:
        return torch.as_tensor(transform(image))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255


def _first_image(files: Mapping[str, Path], transform: Callable[[Any], Tensor] | None) -> tuple[tuple[int, ...], int]:
    """Return shape and bytes of the first image that can be read."""
    first: Exception | None = None
    for path in files.values():
        try:
            image = read_image(path, transform)
            return tuple(image.shape), image.numel() * image.element_size()
        except MCBNError:
            raise
        except Exception as error:
            first = first or error
    raise MCBNError(f"not one of {len(files)} images can be read; the first: {first}")


def reason(error: BaseException) -> str:
    """Say in one line why a file is left out."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MCBNError) else f"{type(error).__name__}: {text}"
