"""Input files cut into parts: what one worker predicts at a time and writes as one file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.tables.formats import ParquetTable

TABLES = (".csv", ".parquet")
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
    files: tuple[str, ...]  # paths
    labels: tuple[str, ...]  # the same, as results call them
    start: int = 0  # row of the table, or place of the first image in the list of all
    stop: int | None = None  # None: to the end

    @property
    def is_table(self) -> bool:
        """Tell a part of a table from one of images."""
        return Path(self.files[0]).suffix.lower() in TABLES

    def to_json(self) -> str:
        """Write as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Part":
        """Read what `to_json` wrote."""
        stored: dict[str, Any] = json.loads(text)
        return cls(**stored | {"files": tuple(stored["files"]), "labels": tuple(stored["labels"])})


def list_files(inputs: Inputs) -> dict[str, Path]:
    """List the tables, or the images, of files and folders: label -> path, sorted by label."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found: dict[str, Path] = {}
    for place in map(Path, given):
        for label, path in _under(place):
            if found.setdefault(label, path) != path:
                raise MCBNError(f"two input files are called {label!r}: {found[label]} and {path}; rename one")
    kinds = {path.suffix.lower() in TABLES for path in found.values()}
    if not found:
        raise MCBNError(f"there are no tables ({', '.join(TABLES)}) or images in {', '.join(map(str, given))}")
    if len(kinds) == 2:
        raise MCBNError(f"{', '.join(map(str, given))} holds both tables and images; name the ones to predict")
    return dict(sorted(found.items()))


def _under(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_dir():
        files = (path for path in place.rglob("*") if path.suffix.lower() in TABLES + IMAGES and path.is_file())
        yield from ((path.relative_to(place).as_posix(), path.resolve()) for path in files)
    elif place.is_file():
        if place.suffix.lower() not in TABLES + IMAGES:
            raise MCBNError(f"{place} must end in {', '.join(TABLES)} or be an image, or a folder of such files")
        yield place.name, place.resolve()
    else:
        raise MCBNError(f"there is no file or folder {place}")


def cut_tables(files: dict[str, Path], batch_rows: int, part_rows: int | None) -> list[Part]:
    """Make a part of every table, several of a large parquet file: each of a whole number of batches."""
    counts = {label: _count(path, part_rows) for label, path in files.items()}
    step = _step(sum(count or 0 for count in counts.values()), batch_rows, part_rows, PART_ROWS)
    parts = []
    for number, (label, path) in enumerate(files.items()):
        for piece, (start, stop) in enumerate(_edges(counts[label], step)):
            name = f"part-{number:06d}-{piece:05d}"
            parts.append(Part(name, (str(path),), (label,), start, stop))
    return parts


def _count(path: Path, part_rows: int | None) -> int | None:
    """Count the rows of a table that is to be cut; None for one that stays whole."""
    if path.suffix.lower() != ".parquet" or (part_rows is None and path.stat().st_size < SPLIT_BYTES):
        return None
    try:
        return ParquetTable(path).count()
    except (MCBNError, OSError):  # whoever works on it says what is wrong with it
        return None


def _edges(rows: int | None, step: int) -> list[tuple[int, int | None]]:
    return [(start, min(start + step, rows)) for start in range(0, rows, step)] if rows else [(0, None)]


def _step(rows: int, batch_rows: int, asked: int | None, most: int) -> int:
    """Choose the rows of a part by the inputs alone, so that a job can be gone on with on other machines."""
    return whole_batches(asked or max(LEAST * batch_rows, min(most, -(-rows // PARTS))), batch_rows)


def cut_images(files: dict[str, Path], batch_rows: int, part_rows: int | None) -> list[Part]:
    """Make parts of a whole number of batches each, in the order of the labels."""
    labels, step = list(files), _step(len(files), batch_rows, part_rows, PART_IMAGES)
    parts = []
    for number, start in enumerate(range(0, len(labels), step)):
        own = labels[start : start + step]
        paths = tuple(str(files[label]) for label in own)
        parts.append(Part(f"part-{number:06d}-00000", paths, tuple(own), start, start + len(own)))
    return parts


def whole_batches(rows: int, batch_rows: int) -> int:
    """Round a number of rows up to whole batches."""
    return -(-rows // batch_rows) * batch_rows
