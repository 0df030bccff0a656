"""Records of experiments on the theory, each with where it was made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcbn_study.provenance import environment
from mcbn_study.records import Record, digest, extend

Row = Mapping[str, Any]


def append(path: Path, rows: Iterable[Row], config: Mapping[str, Any], device: str = "cpu") -> None:
    """Add rows at the end of a file, each with its configuration, the configuration's hash, and where it was made."""
    made = {"config": dict(config), "config_hash": digest(config), **asdict(environment(device))}
    extend(path, ({**row, **made} for row in rows))


def latest(records: Iterable[Record], keys: Sequence[str]) -> list[Record]:
    """Keep the last record of each key: runs again replace runs before in tables, never in the file."""
    return list({tuple(record[key] for key in keys): record for record in records}.values())
