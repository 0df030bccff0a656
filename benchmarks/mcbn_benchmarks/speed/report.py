"""Records as ratios beside their targets."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from mcbn_benchmarks.speed.records import Record
from mcbn_benchmarks.speed.targets import CRPS_DIFFERENCE, LESS_DRAWS, Target, show_ratio, targets
from mcbn_study.machine import Environment

OURS = ("mcbn", "mcbn compiled", "linear", "fit")
HEADER = ("case", "N", "T", "ours", "against", "theirs", "ratio", "target", "")
Group = tuple[str, int]  # case, N


class Comparison(NamedTuple):
    """Ours against one other, as a ratio above 1 where ours is faster; for memory and scores, smaller is better."""

    case: str
    n: int | None
    n_samples: int | None
    ours: str
    against: str
    theirs: str
    ratio: float | None
    note: str = ""


def table(records: Sequence[Record], where: Environment) -> str:
    """Lay out every comparison and every target of the device as a Markdown table, then the single values."""
    goals = {(goal.case, goal.n, goal.against): goal for goal in targets(where.device)}
    found = compare(records)
    rows = [_row(row, _goal(goals, row)) for row in found]
    met = {id(_goal(goals, row)) for row in found if row.ratio is not None}
    missing = [goal for goal in goals.values() if id(goal) not in met]
    said = {id(_goal(goals, row)) for row in found}
    rows += [_unmeasured(goal) for goal in missing if id(goal) not in said]
    heading = f"{where.hardware}; torch {where.torch}; commit {where.commit[:12]}; {where.date}"
    summary = _summary([(row, goal) for row in found if (goal := _goal(goals, row))], len(missing))
    return "\n".join([heading, "", *_align([HEADER, *rows]), "", *summary, "", *_values(records)])


def _summary(judged: Sequence[tuple[Comparison, Target]], unmeasured: int) -> list[str]:
    """Count the targets reached; list what was missed, and by how much."""
    verdicts = [(row, goal, goal.verdict(row.ratio, row.n_samples)) for row, goal in judged if row.ratio is not None]
    reached = sum(verdict == "reached" for _, _, verdict in verdicts)
    lines = [f"Targets: {reached} reached, {len(verdicts) - reached} missed, {unmeasured} not measured."]
    for row, goal, verdict in verdicts:
        if verdict != "reached" and row.ratio is not None:
            size = "" if row.n is None else f" N={row.n:,}"
            found = show_ratio(row.against, row.ratio)
            lines.append(f"- {row.case}{size} against {row.against}: {found}, target {goal.text}: {verdict}")
    return lines


def compare(records: Sequence[Record]) -> list[Comparison]:
    """Compute every ratio: theirs / ours in time, T=500 / T=5 in memory, mean difference in score."""
    found: list[Comparison] = []
    for (case, n), group in _groups(records).items():
        if case.startswith("memory"):
            found += _compare_memory(case, n, group)
        else:
            found += _compare_times(case, n, group)
            found += _compare_scores(case, group)
    return found


def _groups(records: Sequence[Record]) -> Mapping[Group, list[Record]]:
    """Collect records by case and N, in order; splits of one data set count as one case."""
    groups: dict[Group, list[Record]] = {}
    for record in records:
        groups.setdefault((record.case, record.n), []).append(record)
    return groups


def _compare_times(case: str, n: int, group: Sequence[Record]) -> list[Comparison]:
    ours = [record for record in group if record.method in OURS]
    others = dict.fromkeys(record.method for record in group if record.method not in OURS and record.value is None)
    found = []
    for method in dict.fromkeys(record.method for record in ours):
        for other in others:
            mine, theirs = _mean_time(group, method), _mean_time(group, other)
            ratio = theirs / mine if mine and theirs else None
            against = other if method != "mcbn compiled" else f"{other} (ours compiled)"
            note = next((_remark(r) for r in group if r.method == other), "")
            size = None if method == "linear" else n
            T = ours[0].n_samples
            found.append(Comparison(case, size, T, _time(mine), against, _time(theirs), ratio, note))
    return found


def _remark(theirs: Record) -> str:
    """Say why a method was not timed, or on how many draws."""
    if theirs.milliseconds is None:
        return theirs.note
    few = theirs.draws_timed or theirs.n_samples
    return f"theirs scaled from {few} draws" if few < theirs.n_samples else ""


def _mean_time(group: Sequence[Record], method: str) -> float | None:
    times = [r.milliseconds for r in group if r.method == method and r.milliseconds is not None]
    return mean(times) if times else None


def _compare_memory(case: str, n: int, group: Sequence[Record]) -> list[Comparison]:
    peaks = {record.n_samples: record.peak_bytes for record in group if record.peak_bytes is not None}
    if len(peaks) < 2:
        return []
    few, many = min(peaks), max(peaks)
    ratio = peaks[many] / max(peaks[few], 1)
    return [Comparison(case, n, many, _size(peaks[many]), LESS_DRAWS, _size(peaks[few]), ratio)]


def _compare_scores(case: str, group: Sequence[Record]) -> list[Comparison]:
    splits = [r.value for r in group if r.method == CRPS_DIFFERENCE and r.value is not None]
    if not splits:
        return []
    each = ", ".join(f"{value:+.2%}" for value in splits)
    return [Comparison(case, None, group[0].n_samples, "", CRPS_DIFFERENCE, "", mean(splits), f"splits: {each}")]


def _goal(goals: Mapping[tuple[str, int | None, str], Target], row: Comparison) -> Target | None:
    return goals.get((row.case, row.n, row.against))


def _row(row: Comparison, goal: Target | None) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else show_ratio(row.against, row.ratio)
    verdict = goal.verdict(row.ratio, row.n_samples) if goal and row.ratio is not None else ""
    words = "; ".join(filter(None, (verdict, row.note)))
    size, T = ("" if value is None else f"{value:,}" for value in (row.n, row.n_samples))
    return row.case, size, T, row.ours, row.against, row.theirs, ratio, goal.text if goal else "", words


def _unmeasured(goal: Target) -> tuple[str, ...]:
    size = "" if goal.n is None else f"{goal.n:,}"
    return goal.case, size, "", "", goal.against, "", "", goal.text, "not measured"


def _values(records: Iterable[Record]) -> list[str]:
    """List what is no ratio: errors, correlations, peak memory, notes."""
    lines = []
    for r in records:
        title = f"- {r.case} N={r.n:,} T={r.n_samples}: {r.method}"
        if r.value is not None and r.method != CRPS_DIFFERENCE:
            lines.append(f"{title} {r.value:.3g}{f' ({r.note})' if r.note else ''}")
        elif r.peak_bytes is not None and not r.case.startswith("memory"):
            lines.append(f"{title} peak memory {_size(r.peak_bytes)}")
        elif r.milliseconds is None and r.peak_bytes is None and r.value is None:
            lines.append(f"{title}: {r.note}")
    return lines


def _time(milliseconds: float | None) -> str:
    return (
        "" if milliseconds is None else f"{milliseconds:,.3g} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"
    )


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad the columns of a Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
