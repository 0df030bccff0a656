"""Records as ratios beside their targets: what was set out to be reached, and what was."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from mcbn_study.machine import Environment
from mcbn_study.tables import render

CRPS_DIFFERENCE, LESS_DRAWS = "CRPS difference", "T=5"
OURS = ("mcbn", "linear", "fit")
TARGETS = Path(__file__).parent / "targets.csv"  # what was set out to be reached


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


class Target(NamedTuple):
    """A ratio to reach against something, or to stay below."""

    case: str
    n: int | None  # None: whatever the test part holds
    against: str
    bound: str  # at least, or at most
    value: float

    @property
    def text(self) -> str:
        """The target in words, such as "at least 300x"."""
        return f"{self.bound} {show_ratio(self.against, self.value)}"

    def verdict(self, ratio: float) -> str:
        """Say whether a ratio reaches the target, or how far it is from it."""
        if ratio >= self.value if self.bound == "at least" else ratio <= self.value:
            return "reached"
        word, missing = "short" if self.bound == "at least" else "over", abs(ratio / self.value - 1)
        return f"{word} by {missing:.0%}" if missing >= 0.005 else f"{word} by {missing:.1%}"


class Comparison(NamedTuple):
    """Ours against one other, as a ratio above 1 where ours is faster; for memory and scores, smaller is better."""

    case: str
    n: int | None
    n_samples: int | None
    ours: str
    against: str
    theirs: str = ""
    ratio: float | None = None
    note: str = ""


def targets(device: str) -> list[Target]:
    """Read every target for this kind of device."""
    rows = (row for kind, *row in csv.reader(TARGETS.read_text().splitlines()) if kind == device)
    return [
        Target(case, int(n) if n else None, against, bound, float(value)) for case, n, against, bound, value in rows
    ]


def table(records: Sequence[Record], where: Environment, *, quick: bool = False, merged: bool = False) -> str:
    """Lay out every comparison and target of the device as a Markdown table, then the single values.

    A quick run has too few draws to be held against a target. merged: of the newest run of every case.
    """
    goals = {(goal.case, goal.n, goal.against): goal for goal in targets(where.device) if not quick}
    compared = {(row.case, row.n, row.against): row for row in compare(records)}
    for place, goal in goals.items():
        compared.setdefault(place, Comparison(goal.case, goal.n, None, "", goal.against, note="not measured"))
    rows = [(row, goals.get(place)) for place, row in compared.items()]
    judged = [(row, goal, row.ratio) for row, goal in rows if goal and row.ratio is not None]
    missed = [(row, goal) for row, goal, ratio in judged if goal.verdict(ratio) != "reached"]
    counts = {"reached": len(judged) - len(missed), "unmeasured": len(goals) - len(judged), "missed": missed}
    shown = {"where": where, "rows": rows, "records": records, "show_ratio": show_ratio, "size": _size}
    return render(__package__, merged=merged, **counts, **shown).rstrip()


def compare(records: Sequence[Record]) -> list[Comparison]:
    """Compute every ratio: theirs / ours in time, T=500 / T=5 in memory, mean difference in score."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:  # splits of one data set count as one case
        groups.setdefault((record.case, record.n), []).append(record)
    rows: list[Comparison] = []
    for (case, n), group in groups.items():
        peaks = {record.n_samples: record.peak_bytes for record in group if record.peak_bytes is not None}
        if not case.startswith("memory"):
            rows += _compare_times(case, n, group)
        elif len(peaks) > 1:
            few, many = peaks[min(peaks)], peaks[max(peaks)]
            rows.append(Comparison(case, n, max(peaks), _size(many), LESS_DRAWS, _size(few), many / max(few, 1)))
    return rows


def _compare_times(case: str, n: int, group: Sequence[Record]) -> Iterator[Comparison]:
    methods: dict[str, list[Record]] = {}
    for record in (record for record in group if record.value is None):
        methods.setdefault(record.method, []).append(record)
    for mine in (name for name in methods if name in OURS):
        for other in (name for name in methods if name not in OURS):
            taken = ([r.milliseconds for r in methods[name] if r.milliseconds is not None] for name in (mine, other))
            times, theirs = [mean(each) if each else None for each in taken], methods[other][0]
            ratio = times[1] / times[0] if times[0] and times[1] else None
            few = theirs.draws_timed or theirs.n_samples
            scaled = f"theirs scaled from {few} draws" if few < theirs.n_samples else ""
            shown = _time(times[0]), other, _time(times[1]), ratio, scaled if theirs.milliseconds else theirs.note
            yield Comparison(case, None if mine == "linear" else n, methods[mine][0].n_samples, *shown)
    if splits := [r.value for r in group if r.method == CRPS_DIFFERENCE and r.value is not None]:
        each = f"splits: {', '.join(f'{value:+.2%}' for value in splits)}"
        yield Comparison(case, None, group[0].n_samples, "", CRPS_DIFFERENCE, "", mean(splits), each)


def show_ratio(against: str, ratio: float) -> str:
    """Print a ratio in its unit: percent for scores, times for the rest."""
    return f"{ratio:+.2%}" if against == CRPS_DIFFERENCE else f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:,.3g} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
