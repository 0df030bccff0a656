"""Records and tables of experiments on the theory: where a record was made, Markdown and CSV."""

import csv
import io
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


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table, numbers to the right."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def comma_separated(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay out a CSV table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([list(head), *rows])
    return out.getvalue()
