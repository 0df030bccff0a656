"""Records and tables of experiments on the theory: append-only JSON lines, Markdown and CSV written whole."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcbn.bench.records import environment

Row = Mapping[str, Any]


def append(path: Path, rows: Iterable[Row], config: Mapping[str, Any], device: str = "cpu") -> None:
    """Add rows at the end of a file, each with its configuration, the configuration's hash, and where it was made."""
    where = asdict(environment(device))
    key = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
    lines = [json.dumps({**row, "config": dict(config), "config_hash": key, **where}) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    """Read every record of a file, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def latest(records: Iterable[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Keep the last record of each key: runs again replace runs before in tables, never in the file."""
    return list({tuple(record[key] for key in keys): record for record in records}.values())


def write(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(temporary, path)


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
