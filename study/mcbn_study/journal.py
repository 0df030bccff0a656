"""The records of an experiment: an append-only file, one JSON object a line, what is asked of it, where it is from.

An object cut off anywhere before its closing brace is no JSON, so a last line without a line end is either a whole
record or no record; `read` and `extend` decide alike. Any number of runs may add to a folder: each holds it meanwhile.
"""

import hashlib
import json
import math
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.files import held, write_text
from mcbn.saving import read_tensors, write_tensors
from mcbn_study.machine import environment

Record: TypeAlias = dict[str, Any]
RECORDS = "records.jsonl"
_FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
KEYS, _TIMED, _SHARED = (_FACTS[name] for name in ("keys", "timed", "shared"))


class _Line(dict[str, Any]):
    """A record as it was read: the first field it should have and lacks is named, with its place."""

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(record)
        self.place = place

    def __missing__(self, name: str) -> Any:
        cure = "use that version, or remove the line and run again what it held"
        maker = self.get("commit", "unknown")[:12]
        raise MCBNError(f"{self.place}: the record has no {name!r}; another version wrote it, commit {maker}; {cure}")


class Journal:
    """The records of one experiment, `folder`/records.jsonl, and the configuration and device of those to come."""

    def __init__(
        self, folder: str | Path, config: Mapping[str, Any] | None = None, device: str = "cpu", *, name: str = RECORDS
    ) -> None:
        self.folder, self.config, self.device = Path(folder), dict(config or {}), device
        self.path, self.size = self.folder / name, 0
        self.records: list[Record] = []
        self._refresh()

    def find(self, **fields: object) -> list[Record]:
        """Return the records with these fields."""
        return [r for r in self.records if all(r.get(name) == value for name, value in fields.items())]

    def has(self, **fields: object) -> bool:
        """Tell whether a record with these fields, of this configuration, is there already, from any run."""
        self._refresh()
        return bool(self.find(**fields | {"config_hash": digest(self.config)}))

    def _refresh(self) -> None:
        """Read again where another run has added to the file."""
        if (size := self.path.stat().st_size if self.path.exists() else 0) != self.size:
            with held(self.folder, wait=True):  # or a line that is being written would look cut off
                self.records, self.size = read(self.path), size

    def append(self, records: Iterable[Record]) -> None:
        """Add records as they are, each a whole line."""
        new = [dict(record) for record in records]
        extend(self.path, new)
        self.records += new

    def add(self, rows: Iterable[Record]) -> None:
        """Append rows, each with the configuration, its hash, and where it was made."""
        where = {"config": self.config, "config_hash": digest(self.config), **asdict(environment(self.device))}
        self.append({**row, **where} for row in rows)


class CellJournal(Journal):
    """The journal of a study of one configuration (settings.json), done in cells; no record is there twice.

    A cell is one unit of work. Its file `cells/<name>.safetensors` holds tensors and, as metadata, the records it
    gave; it is written first, the records after it, so that an interruption between the two loses nothing.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        super().__init__(folder, config)
        if not (path := self.folder / "settings.json").exists():
            if self.path.exists():
                raise MCBNError(f"{folder} holds records but no settings.json; use another folder with --out")
            write_text(path, json.dumps(self.config, indent=1) + "\n")
        before = json.loads(path.read_text())
        for name in ["name", *sorted(before.keys() | self.config.keys())]:
            old, new = before.get(name), self.config.get(name)
            if old != new:
                change = f"{name} is {old!r} there, {new!r} now; use the same, or another folder with --out"
                raise MCBNError(f"{folder} was made with another configuration: {change}")

    def append(self, records: Iterable[Record]) -> None:
        """Add the records that are not there yet, whichever run adds them."""
        (cells := self.folder / "cells").mkdir(parents=True, exist_ok=True)
        with held(cells, wait=True):
            self._refresh()
            known = set(map(record_key, self.records))
            super().append(record for record in records if record_key(record) not in known)

    def finish(self, cell: str, tensors: Mapping[str, Tensor], records: list[Record]) -> None:
        """Write a cell's file, then its records."""
        write_tensors(self._cell(cell), tensors, {"records": json.dumps(records), "settings": json.dumps(self.config)})
        (self.folder / "cells" / ".gitignore").write_text("*\n")  # to go on from, not to publish
        self.append(records)

    def load(self, cell: str) -> dict[str, Tensor] | None:
        """Return the tensors of a finished cell, None if there is none; records it still owes are added."""
        if not (path := self._cell(cell)).exists():
            return None
        tensors, metadata = read_tensors(path, hint="remove it")
        if json.loads(metadata["settings"]) != self.config:
            raise MCBNError(f"{path} belongs to another configuration; remove it, or use another folder with --out")
        self.append(json.loads(metadata["records"]))
        return tensors

    def _cell(self, name: str) -> Path:
        return self.folder / "cells" / f"{name}.safetensors"


def record_key(record: Record) -> tuple[object, ...]:
    """Return what makes a record the record of one run."""
    return (record["kind"], *(record.get(name) for name in KEYS[record["kind"]]))


def latest(records: Iterable[Record], keys: Sequence[str]) -> list[Record]:
    """Keep the last record of each key: runs again replace runs before in tables, never in the file."""
    return list({tuple(record[key] for key in keys): record for record in records}.values())


def extend(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add records, on disk when this returns, after what a killed writer left of a last line is removed."""
    lines = b"".join(map(_line, records))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with held(path.parent, wait=True), path.open("a+b") as file:
        file.seek(0)
        tail = file.read().rpartition(b"\n")[2]
        whole = _parse(tail) is not None
        if not whole:
            file.truncate(file.tell() - len(tail))
        file.write(b"\n" * whole + lines)
        file.flush()
        os.fsync(file.fileno())


def read(path: str | Path) -> list[Record]:
    """Return all records in the order of writing; none if the file does not exist yet.

    A last line that was cut off is left out with a warning; damage anywhere else raises MCBNError with its line number.
    """
    path = Path(path)
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")
    if (tail := lines[-1]) and _parse(tail) is None:
        warnings.warn(f"mcbn: {path} ends in a line that was cut off ({len(tail)} bytes); it is left out", stacklevel=2)
        lines.pop()
    records: list[Record] = []
    for number, line in ((number, line) for number, line in enumerate(lines, 1) if line.strip()):
        place = f"{path}, line {number}"
        if (record := _parse(line)) is None:
            cure = "restore the file or remove that line and run again what it held"
            raise MCBNError(f"{place} is damaged: {line[:60]!r} is not one JSON object; {cure}")
        records.append(_Line(record, place))
    return records


def digest(config: Mapping[str, Any]) -> str:
    """Name a configuration by 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(record), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        cure = "use plain numbers, strings, lists and dicts, and None for NaN or infinity"
        raise MCBNError(f"cannot write this record as JSON: {error}; {cure}; got {dict(record)!r}") from error


def _parse(line: bytes) -> Record | None:
    """Return the JSON object in this line, None if it is anything else."""
    try:
        value = json.loads(line, parse_constant=int)  # NaN and infinity, which are no JSON, are no int either
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Provenance(NamedTuple):
    """What made the records of a study."""

    command: str
    hardware: str
    seconds: float
    records: int
    commits: tuple[str, ...]

    @property
    def time(self) -> str:
        """Show the seconds as people say them."""
        if not self.seconds:
            return "time not on record" if self.records else "\N{EN DASH}"
        minutes, seconds = divmod(round(self.seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def trace(study: str, records: Sequence[Record], command: str) -> Provenance:
    """Collect hardware, seconds (once where shared) and commits; the command gets options that records tell of."""
    hardware = sorted({str(record.get("hardware") or record.get("device") or "unknown") for record in records})
    commits = sorted({str(record.get("commit") or "unknown")[:12] for record in records})
    profiles = {str(record["profile"]) for record in records if record.get("profile")}
    command += f" --profile {profiles.pop()}" if len(profiles) == 1 else ""
    command += " --device cuda" * any("NVIDIA" in str(r.get("device")) for r in records if r.get("profile"))
    return Provenance(command, ", ".join(hardware), total_seconds(study, records), len(records), tuple(commits))


def total_seconds(study: str, records: Iterable[Record]) -> float:
    """Sum the seconds of records, once for those that share a run."""
    by_run: dict[Any, float] = {}
    for number, record in enumerate(records):
        kind, seconds = str(record.get("kind") or study), float(record.get("seconds") or 0.0)
        if kind in _SHARED:
            run: Any = (kind, *(record.get(name) for name in _SHARED[kind]))
        else:  # all records of one run of an untimed study bear its seconds, to the digit
            run = number if study in _TIMED else (kind, record.get("seed"), seconds)
        by_run[run] = max(seconds, by_run.get(run, 0.0))
    return math.fsum(by_run.values())
