"""Where a result comes from: hardware, time, commit and the command that makes its records."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mcbn_study.journal import Record
from mcbn_study.tables import MISSING

_TIMED = ("regression", "sensitivity", "statistics", "objective", "regularizer", "speed")  # record by record
_SHARED = {  # kinds of records that carry the seconds of a whole run, which they share: what tells it from others
    "score": ("method", "seed", "config_hash"),  # seconds since a method began: its last record has them all
    "selection": ("cell", "seconds"),  # a cell may have been run twice
    "statistics": ("config_hash", "seconds"),
    "regularizer": ("dataset", "split", "method", "seconds"),
}


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
        if not self.records:
            return MISSING
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
