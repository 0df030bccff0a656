"""One record a measurement, appended to a JSON-lines file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mcbn_study.machine import Environment


@dataclass(frozen=True)
class Record:
    """One measurement; what does not apply is None."""

    case: str
    n: int
    n_samples: int
    method: str
    milliseconds: float | None = None  # of all T draws
    draws_timed: int | None = None  # below T: milliseconds are scaled from these
    peak_bytes: int | None = None  # growth over what was held before the call
    value: float | None = None  # of a measurement that is no time, such as a relative error
    note: str = ""
    seconds: float | None = None  # spent measuring, all repeats


def append(path: Path, records: Iterable[Record], where: Environment) -> None:
    """Add records at the end of the file; what is there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(asdict(record) | asdict(where)) + "\n")


def latest(path: Path, where: Environment) -> list[Record]:
    """Read the newest finished run of every case and N on this hardware, in the order of the cases' first records.

    A case that was skipped, and so has no N, is left out once it has been measured.
    """
    names = [field.name for field in fields(Record)]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    runs: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for row in rows:
        if row["hardware"] == where.hardware:
            dated = runs.setdefault((row["case"], row["n"]), {})
            dated.setdefault(row["date"], []).append(Record(**{name: row[name] for name in names}))
    newest = {key: dated[_newest(dated)] for key, dated in runs.items()}
    measured = {case for (case, _), found in newest.items() if _done(found)}
    return [r for (case, n), found in newest.items() if n or case not in measured for r in found]


def _newest(dated: dict[str, list[Record]]) -> str:
    return max(dated, key=lambda date: (_done(dated[date]), date))


def _done(records: Sequence[Record]) -> bool:
    """Tell a run that measured something from one that was cut short."""
    return any(record.milliseconds is not None or record.peak_bytes is not None for record in records)
