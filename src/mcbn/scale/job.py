"""A job of prediction: input files, cut into parts that one worker predicts, read in batches; and its settings."""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn import batches, saving
from mcbn.errors import MCBNError, MissingExtraError, extra, one_line, require_choice, require_number
from mcbn.field.watch import Watch
from mcbn.files import printable
from mcbn.model import MCBN, METHODS
from mcbn.moments import MEANS
from mcbn.prediction import warn_if_untuned
from mcbn.tables import EMPTY, Layout, find_columns, require_fits, rows_of_block
from mcbn.tables.formats import Array, ParquetTable, Table, open_table
from mcbn.tables.results import require_free_names

FORMAT = 2
TABLES = (".csv", ".parquet")
SPOOL = ".input"  # where the rows of a data set wait, in the folder of the results
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SPLIT_BYTES = 2**20  # parquet files from here on are opened to be cut
PARTS = 64  # wanted of a job: enough to share out evenly
LEAST = 2  # batches of a part: opening a row group in its middle costs as much as reading several
PART_ROWS = 2**20  # at most
PART_IMAGES = 2**11
Inputs = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Part:
    """Rows start to stop of one table, or some images of a list."""

    name: str  # of the file with its results
    files: Mapping[str, str]  # paths by what results call them
    start: int = 0  # row of the table, or place of the first image in the list of all
    stop: int | None = None  # None: to the end

    def source(self) -> str:
        """Tell the state of its files by their sizes and times of change: other content of old size is found out."""
        return _digest([[state.st_size, state.st_mtime_ns] for state in map(os.stat, self.files.values())])


def list_files(places: Sequence[Path]) -> dict[str, Path]:
    """List the tables, or the images, of files and folders: label -> path, sorted by label."""
    files: dict[str, Path] = {}
    for label, path in (pair for place in places for pair in _under(place)):
        if files.setdefault(label, path) != path:
            raise MCBNError(f"two input files are called {label!r}: {files[label]} and {path}; rename one")
    names = ", ".join(map(str, places))
    if not files:
        raise MCBNError(f"there are no tables ({', '.join(TABLES)}) or images in {names}")
    if len({path.suffix.lower() in TABLES for path in files.values()}) == 2:
        raise MCBNError(f"{names} holds both tables and images; name the ones to predict")
    return dict(sorted(files.items()))


def _under(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_dir():
        files = (path for path in place.rglob("*") if path.suffix.lower() in TABLES + IMAGES and path.is_file())
        yield from ((printable(path.relative_to(place).as_posix()), path.absolute()) for path in files)
    elif place.is_file():
        if place.suffix.lower() not in TABLES + IMAGES:
            raise MCBNError(f"{place} must end in {', '.join(TABLES)} or be an image, or a folder of such files")
        yield printable(place.name), place.absolute()  # a link keeps its name, and with it the kind of file
    else:
        raise MCBNError(f"there is no file or folder {place}")


def cut(files: dict[str, Path], batch_rows: int, part_rows: int | None) -> list[Part]:
    """Make parts of whole batches: of images in their order, or of every table, several of a large parquet file."""
    named, N = [(label, str(path)) for label, path in files.items()], len(files)
    if Path(named[0][1]).suffix.lower() not in TABLES:
        step = _step(N, batch_rows, part_rows, PART_IMAGES)
        starts = enumerate(range(0, N, step))
        return [Part(f"part-{i:06d}-00000", dict(named[a : a + step]), a, min(a + step, N)) for i, a in starts]
    counts = [_count(path, part_rows) for path in files.values()]
    step = _step(sum(rows or 0 for rows in counts), batch_rows, part_rows, PART_ROWS)
    return [
        Part(f"part-{i:06d}-{piece:05d}", dict([named[i]]), a, min(a + step, rows) if rows else None)
        for i, rows in enumerate(counts)
        for piece, a in enumerate(range(0, rows, step) if rows else [0])
    ]


def _count(path: Path, part_rows: int | None) -> int | None:
    """Count the rows of a table that is to be cut; None for one that stays whole."""
    if path.suffix.lower() != ".parquet" or (part_rows is None and path.stat().st_size < SPLIT_BYTES):
        return None
    try:
        return ParquetTable(path).n_rows
    except (MCBNError, OSError):  # whoever works on it says what is wrong with it
        return None


def _step(rows: int, batch_rows: int, asked: int | None, most: int) -> int:
    """Choose the rows of a part by the inputs alone, so that a job can be gone on with on other machines."""
    wanted = asked or max(LEAST * batch_rows, min(most, -(-rows // PARTS)))
    return -(-wanted // batch_rows) * batch_rows  # up to whole batches


class Batch(NamedTuple):
    """Inputs that go through the network together, and where they come from."""

    x: Tensor  # (n, ...)
    labels: list[str]  # file of each
    rows: Array  # row in the file, or place in the list of images, (n,)
    keys: Mapping[str, Any]  # columns passed on
    bad: Sequence[dict[str, Any]] = ()  # images left out


@dataclass(frozen=True)
class Reader:
    """How files become batches; found on the first file that can be read, the same for all."""

    batch_rows: int  # 0: to be chosen by `probe`
    keys: tuple[str, ...] = ()
    layout: Layout = EMPTY
    target: str | None = None
    transform: Callable[[Any], Tensor] | None = None
    shape: tuple[int, ...] = ()  # of one image; of a table there is none
    finite: bool = True  # refuse NaN in a table

    def probe(self, files: Mapping[str, Path]) -> "Reader":
        """Look at the first readable file: refuse missing columns, choose the batch size."""
        if next(iter(files.values())).suffix.lower() not in TABLES:
            image: Tensor = _first(files, lambda path: read_image(path, self.transform), "images")
            rows = self.batch_rows or rows_of_block(image.numel() * image.element_size())
            layout = Layout(classes=self.layout.classes)
            return Reader(rows, layout=layout, transform=self.transform, shape=tuple(image.shape))
        table: Table = _first(files, open_table, "input files")
        _, inputs, targets = find_columns(table, self.target, self.layout, self.keys)
        names = tuple(table.names[c] for c in inputs) if table.names else None
        layout = replace(self.layout, columns=self.layout.columns or names, width=len(inputs))
        rows = self.batch_rows or rows_of_block(8 * (len(inputs) + len(targets)))
        return replace(self, batch_rows=rows, layout=layout, transform=None)

    def describe(self) -> dict[str, Any]:
        """Return what results depend on, as JSON has it."""
        name = getattr(self.transform, "__qualname__", type(self.transform).__name__) if self.transform else None
        plain = {"batch_rows": self.batch_rows, "keys": list(self.keys), "target": self.target}
        return plain | {"layout": json.dumps(asdict(self.layout)), "transform": name, "shape": list(self.shape)}

    def read(self, part: Part) -> Iterator[Batch]:
        """Yield the batches of a part."""
        return self._read_images(part) if self.shape else self._read_table(part)

    def _read_table(self, part: Part) -> Iterator[Batch]:
        ((label, path),) = part.files.items()
        table = open_table(Path(path), finite=self.finite)
        keys, inputs, _ = find_columns(table, self.target, self.layout, self.keys)
        rows = (part.start, part.stop) if isinstance(table, ParquetTable) else ()  # a csv file is not cut
        for block in table.blocks(inputs, self.batch_rows, keys, *rows):
            places = np.arange(block.first, block.first + len(block.numbers))
            named = {name: block.keys[c] for name, c in zip(self.keys, keys, strict=True)}
            yield Batch(torch.from_numpy(block.numbers), [label] * len(places), places, named)

    def _read_images(self, part: Part) -> Iterator[Batch]:
        places = enumerate(part.files.items(), part.start)
        while group := list(islice(places, self.batch_rows)):
            good, bad = [], []
            for place, (label, path) in group:
                try:
                    image = read_image(Path(path), self.transform)
                    if tuple(image.shape) != self.shape:
                        raise MCBNError(f"its shape is {tuple(image.shape)}, that of the first {self.shape}: resize it")
                    good.append((image, label, place))
                except Exception as error:
                    bad.append({"file": label, "reason": one_line(error)})
            x = torch.stack([image for image, _, _ in good]) if good else torch.empty(0, *self.shape)
            rows = np.array([place for _, _, place in good], dtype=np.int64)
            yield Batch(x, [label for _, label, _ in good], rows, {}, bad)


def _first(files: Mapping[str, Path], read: Callable[[Path], Any], kind: str) -> Any:
    """Read the first file that can be read."""
    first: Exception | None = None
    for path in files.values():
        try:
            return read(path)
        except MissingExtraError:
            raise
        except Exception as error:
            first = first or error
    raise MCBNError(f"not one of {len(files)} {kind} can be read; the first: {first}")


def read_image(path: Path, transform: Callable[[Any], Tensor] | None) -> Tensor:
    """Read an image, (C, H, W): through the user's transform, or as RGB in [0, 1]."""
    with extra("ray", "images need Pillow"):
        from PIL import Image
    with Image.open(path) as file:
        image = file.convert("RGB")
    if transform is not None:
        return torch.as_tensor(transform(image))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255


@dataclass(frozen=True)
class Job:
    """All a worker needs beside the network: the same on every machine."""

    id: str  # of what its results depend on
    folder: Path
    parts: tuple[Part, ...]
    reader: Reader
    coverage: float
    options: dict[str, Any]  # of `MCBN.predict`
    settings: dict[str, Any]  # what the results depend on, to be told from another job
    watch: str | None = None  # the file of a watch that judges inputs
    reading: bool = False  # whole batches are read by the watch, nothing is predicted


def plan(
    inputs: Inputs,
    bayes: MCBN[Any],
    *,
    out: str | Path,
    key: str | Sequence[str] = (),
    columns: Sequence[str] | None = None,
    layout: Layout = EMPTY,
    target: str | None = None,
    transform: Callable[[Any], Tensor] | None = None,
    batch_size: int | None = None,
    part_rows: int | None = None,
    method: str = "sample",
    n_samples: int | None = None,
    mean: str = "drawn",
    coverage: float = 0.95,
    watch: str | Path | None = None,
    reading: bool = False,
) -> Job:
    """Cut the inputs into parts; refuse what no worker could do, before any work is given out."""
    require_choice("method", method, METHODS)
    require_choice("mean", mean, MEANS)
    require_number("coverage", coverage)
    bayes.engine_for(n_samples, None)
    if not reading:
        warn_if_untuned(bayes.noise_precision)
    if batch_size is not None:
        batches.require_int("batch_size", batch_size, 1)
    if columns is not None:
        layout = Layout(tuple(columns), len(columns), target)
    keys = (key,) if isinstance(key, str) else tuple(key)
    require_free_names(keys, "file", "row")
    places = [Path(place) for place in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    files, folder = list_files(places), Path(out).resolve()
    if any(place.is_dir() and folder.is_relative_to(place.resolve()) for place in places):
        raise MCBNError(f"the folder of the results, {folder}, lies among the inputs; name another one")
    reader = Reader(batch_size or 0, keys, layout, target, transform, finite=not reading).probe(files)
    parts = tuple(cut(files, reader.batch_rows, part_rows))
    _require_first(bayes, reader, parts[0])
    options = {"method": method, "n_samples": n_samples} | ({} if mean == "drawn" else {"mean": mean})
    settings = {
        "format": FORMAT,
        "network and posterior": identify(bayes),
        "inputs": _digest(list(files)),
        "parts": _digest([[part.name, part.start, part.stop] for part in parts]),
        "reading": reader.describe(),
        "options": options | {"coverage": coverage},
    }
    if watch is not None:
        Watch.load(watch, bayes)  # one of another network is refused before any work is given out
        settings["watch"] = [hashlib.sha256(Path(watch).read_bytes()).hexdigest(), reading]
    place = None if watch is None else str(Path(watch).resolve())
    return Job(_digest(settings), folder, parts, reader, coverage, options, settings, place, reading)


def read_folder(folder: Path, *, key: Sequence[str], **how: Any) -> Tensor:
    """Read all rows or images of a folder, (N, ...); options as of `plan`."""
    files = list_files([folder])
    reader, blocks = Reader(0, tuple(key), **how).probe(files), []
    for batch in (batch for part in cut(files, reader.batch_rows, None) for batch in reader.read(part)):
        if batch.bad:
            raise MCBNError(f"{batch.bad[0]['file']} of {folder} cannot be used: {batch.bad[0]['reason']}")
        blocks.append(batch.x)
    return torch.cat(blocks)


def _require_first(bayes: MCBN[Any], reader: Reader, part: Part) -> None:
    """Try the network on inputs of the first part, to refuse what it cannot take before a cluster is at work."""
    try:
        batch = next(reader.read(part), None)
    except Exception:  # a file that cannot be read is one of many
        return
    if batch is not None and len(batch.rows):
        what = f"images {reader.shape}" if reader.shape else f"the {reader.layout.width} input columns"
        cure = "name its inputs by columns=, leave out others by key= and target=, or give a transform="
        require_fits(bayes, batch.x, f"{what} of {batch.labels[0]}", cure)


def identify(bayes: MCBN[Any]) -> str:
    """Hash all that predictions depend on: weights, draws, tau, calibration."""
    drawn = bayes.posterior
    sums = [saving.checksums(tensors, {}) for tensors in (drawn.mean, drawn.var, {"tau": bayes.noise_precision})]
    sums += [] if bayes.calibration is None else [saving.checksums(*bayes.calibration.pack())]
    return _digest([saving.fingerprint(bayes.engine.network.module), sums])


def on_device(bayes: MCBN[Any], device: torch.device) -> MCBN[Any]:
    """Copy a fitted MCBN to a device, without the network it was made from."""
    return bayes.with_posterior(bayes.posterior.to(device), model=copy.deepcopy(bayes.engine.network.module).to(device))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
