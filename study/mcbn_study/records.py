"""An append-only file of records, one JSON object a line, that outlives a kill in the middle of a write.

An object cut off anywhere before its closing brace is no JSON, so a last line without a line end is either a whole
record or no record; `read` and `append` decide alike. One writer at a time.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from mcbn.errors import MCBNError

Record: TypeAlias = dict[str, Any]


def append(path: str | Path, record: Mapping[str, Any]) -> None:
    """Add one record at the end of the file, as `extend` does."""
    extend(path, [record])


def extend(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add records at the end of the file, on disk when this returns; folder and file are made if need be.

    What a killed writer left of its last line is removed first; whole records are never touched.
    """
    lines = b"".join(map(_line, records))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _mend_end(file)
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read(path: str | Path) -> list[Record]:
    """Return all records in the order of writing; none if the file does not exist yet.

    A last line that was cut off is left out with a warning; damage anywhere else raises MCBNError with its line number.
    """
    path = Path(path)
    whole, tail = _split_tail(path.read_bytes() if path.exists() else b"")
    found = [_parse_line(path, number, line) for number, line in enumerate(whole.split(b"\n"), 1) if line.strip()]
    last = _parse(tail)
    if tail and last is None:
        warnings.warn(f"mcbn: {path} ends in a line that was cut off ({len(tail)} bytes); it is left out", stacklevel=2)
    return found if last is None else [*found, last]


def digest(config: Mapping[str, Any]) -> str:
    """Name a configuration by 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _line(record: Mapping[str, Any]) -> bytes:
    if not isinstance(record, Mapping):
        raise MCBNError(f"a record is a mapping of names to values; got {type(record)}")
    try:
        return json.dumps(dict(record), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise MCBNError(
            f"cannot write this record as JSON: {error}; use plain numbers, strings, lists and dicts, and None for NaN"
            f" or infinity; got {dict(record)!r}"
        ) from error


def _mend_end(file: BinaryIO) -> None:
    """Make the file end at a line end: complete a whole last record, remove a cut-off one."""
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    whole, tail = _split_tail(file.read())
    if _parse(tail) is None:
        file.truncate(len(whole))
    else:
        file.write(b"\n")


def _split_tail(content: bytes) -> tuple[bytes, bytes]:
    """Split into whole lines and what follows the last line end."""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def _parse_line(path: Path, number: int, line: bytes) -> Record:
    record = _parse(line)
    if record is None:
        raise MCBNError(
            f"{path}, line {number} is damaged: it should be one JSON object, but is {line[:60]!r};"
            " restore the file or remove that line and run again what it held"
        )
    return record


def _parse(line: bytes) -> Record | None:
    """Return the JSON object in this line, None if it is anything else."""
    try:
        value = json.loads(line, parse_constant=_refuse)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
