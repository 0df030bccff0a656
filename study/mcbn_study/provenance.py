"""Where a result comes from: hardware, time, commit and the command that makes its records."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mcbn_study.journal import Record
from mcbn_study.tables import MISSING

_TIMED = ("regression", "sensitivity", "statistics", "objective", "regularizer", "speed")  # record by record
# Records that carry the seconds of a whole run, which they share: what tells one run from another.
_SHARED: dict[str, Callable[[Record], Any]] = {
    "selection": lambda record: (record.get("cell"), record.get("seconds")),  # a cell may have been run twice
    "statistics": lambda record: (record.get("config_hash"), record.get("seconds")),
    "regularizer": lambda record: tuple(record.get(name) for name in ("dataset", "split", "method", "seconds")),
}
_CLOCK = "score"  # of `alternatives`: the seconds since a method began, so that its last record has them all


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
    """Collect hardware, seconds and commits of a study's records; a time shared by many is counted once."""
    hardware = sorted({str(record.get("hardware") or record.get("device") or "unknown") for record in records})
    commits = sorted({str(record.get("commit") or "unknown")[:12] for record in records})
    seconds, command = total_seconds(study, records), command + _options(records)
    return Provenance(command, ", ".join(hardware), seconds, len(records), tuple(commits))


def _options(records: Sequence[Record]) -> str:
    """Options that the records tell of: the profile, and a GPU."""
    profiles = {str(record["profile"]) for record in records if record.get("profile")}
    devices = {str(record.get("device")) for record in records if record.get("profile")}
    profile = f" --profile {profiles.pop()}" if len(profiles) == 1 else ""
    return profile + (" --device cuda" if any("NVIDIA" in device for device in devices) else "")


def total_seconds(study: str, records: Iterable[Record]) -> float:
    """Sum the seconds of records, once for those that share a run."""
    shared: dict[Any, float] = {}
    alone = []
    for record in records:
        kind = str(record.get("kind") or study)
        seconds = float(record.get("seconds") or 0.0)
        if kind == _CLOCK:
            run = kind, *(record.get(name) for name in ("method", "seed", "config_hash"))
            shared[run] = max(seconds, shared.get(run, 0.0))
        elif study not in _TIMED:  # all records of one run bear its seconds, to the digit
            shared[kind, record.get("seed"), seconds] = seconds
        elif kind in _SHARED:
            shared[kind, _SHARED[kind](record)] = seconds
        else:
            alone.append(seconds)
    return math.fsum([*alone, *shared.values()])
