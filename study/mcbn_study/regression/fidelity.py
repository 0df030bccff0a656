"""How far the reproduction agrees with the paper, and what it cost."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from mcbn.data import NAMES, describe
from mcbn_study import paper
from mcbn_study.journal import Record
from mcbn_study.regression.estimates import ours, theirs, triple
from mcbn_study.regression.summary import METHODS, METRICS, Row, Summary
from mcbn_study.site.provenance import total_seconds
from mcbn_study.tables import MISSING, Table

_COMPARED = [(method, metric) for metric in ("rmse", "crps") for method in ("mcbn", "mcdo")]
_TARGET_WITHIN, _TARGET_SIGNIFICANT = 7, 6  # of the eight data sets
_SIGNIFICANT = 0.05
_FAR_OUT = 3.0  # times our standard error, over as many runs: a few of theirs decide their mean


class Gap(NamedTuple):
    """Our mean beside a printed one."""

    row: Row
    printed: paper.Printed
    excess: float  # ours minus the paper's
    combined: float  # standard error of the difference: sqrt(e^2 + e_paper^2), as printed

    def within(self, *, rounding: bool = False) -> bool:
        """Whether ours, an error where lower is better, is at most 2 combined standard errors above the paper's."""
        return self.excess - (self.printed.half_unit if rounding else 0.0) <= 2 * self.combined

    def differs(self, *, rounding: bool = False) -> bool:
        """Whether the means are more than 2 combined standard errors apart, in either direction."""
        return abs(self.excess) - (self.printed.half_unit if rounding else 0.0) > 2 * self.combined


def fidelity_tables(summary: Summary, repeats: Sequence[Summary] = (), by_epochs: Sequence[Record] = ()) -> list[Table]:
    """Count the data sets on which we agree with the paper, then list where we differ.

    repeats: of other searches; by_epochs: records of `mcbn_study.mnf_epochs.run`.
    """
    return [_counts(summary), _differences(summary, repeats, by_epochs)]


def coverage_table(summary: Summary) -> Table:
    """Lay out the number of runs behind every cell; a run without a score counts for RMSE alone."""
    rows = []
    for name in NAMES:
        found = [summary.get((name, method, "rmse")) for method in METHODS]
        rows.append((describe(name).title, *(str(row.n) if row else MISSING for row in found)))
    note = "25 runs are 5 splits with 5 seeds each. CUBN and CUDO share the runs of MCBN and MCDO."
    return Table("Runs", "table:runs", ("Dataset", *METHODS.values()), tuple(rows), note)


def cost_table(records: Iterable[Record]) -> Table:
    """Sum the recorded seconds per study, kind and device; those that records of one run share count once."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        key = tuple(str(record.get(name, MISSING)) for name in ("study", "profile", "kind", "device"))
        groups.setdefault(key, []).append(record)
    seconds = {key: total_seconds(key[0], group) for key, group in groups.items()}
    rows = [(*key, str(len(groups[key])), f"{seconds[key]:.0f}") for key in sorted(groups)]
    rows.append(("Total", "", "", "", str(sum(map(len, groups.values()))), f"{math.fsum(seconds.values()):.0f}"))
    header = ("Study", "Profile", "Kind", "Device", "Records", "Seconds")
    note = (
        "Seconds as recorded, also of what was run again; those that the records of one run share count once. Programs"
        " that ran side by side on one device count each in full, so the time by the clock is shorter."
    )
    return Table("Time and devices", "table:cost", header, tuple(rows), note)


def gaps(summary: Summary, method: str, metric: str) -> list[Gap]:
    """Return the gap of every data set that has two runs or more and a printed number."""
    rows = [summary.get((name, method, metric)) for name in NAMES]
    return [gap for row in rows if row and (gap := _gap(row))]


def n_significant(summary: Summary) -> tuple[int, int]:
    """Count the data sets on which MCBN's normalised CRPS is significantly above 0 (p < .05), and all with two runs."""
    found = [summary.get((name, "mcbn", "crps_normalized")) for name in NAMES]
    rows = [(row.mean, row.p_value) for row in found if row and row.n > 1]
    return sum(mean > 0 and p is not None and p < _SIGNIFICANT for mean, p in rows), len(rows)


def _gap(row: Row) -> Gap | None:
    found = paper.find(row.dataset, row.method, row.metric)
    if found is None or found.standard_error is None or row.standard_error is None:
        return None
    return Gap(row, found, row.mean - found.mean, math.hypot(row.standard_error, found.standard_error))


def _counts(summary: Summary) -> Table:
    rows = []
    for method, metric in _COMPARED:
        found = gaps(summary, method, metric)
        strict, lenient = (sum(gap.within(rounding=rounding) for gap in found) for rounding in (False, True))
        claim = f"{METHODS[method]}: {METRICS[metric]} within 2 combined standard errors of the paper or better"
        rows.append((claim, *_verdict(strict, len(found), _TARGET_WITHIN), f"{lenient} of {len(found)}"))
    n, tested = n_significant(summary)
    rows.append(("MCBN: normalised CRPS significantly above 0", *_verdict(n, tested, _TARGET_SIGNIFICANT), MISSING))
    header = ("Claim", "Data sets", "Target", "Met", "Data sets, allowing for rounding")
    note = (
        "The paper prints its means to two decimals; the last column grants half a unit of the last printed digit."
        " A data set counts once it has two runs."
    )
    return Table("Fidelity", "table:fidelity", header, tuple(rows), note)


def _verdict(n: int, tested: int, target: int) -> tuple[str, str, str]:
    short = "no" if tested == len(NAMES) else "incomplete"
    return f"{n} of {tested}", f"{target} of {len(NAMES)}", "yes" if n >= target else short


def _differences(summary: Summary, repeats: Sequence[Summary], by_epochs: Sequence[Record]) -> Table:
    compared = [gap for metric in METRICS for method in METHODS for gap in gaps(summary, method, metric)]
    found = [gap for gap in compared if gap.differs()]
    searches = [summary, *repeats]
    rows = tuple((*_describe(gap), _cause(gap, searches, by_epochs)) for gap in found) or (("none", *[""] * 7),)
    header = ("Metric", "Method", "Dataset", "Ours", "Paper", "Difference (95 % interval)", "Ours is", "Likely cause")
    note = (
        "All methods and scores whose means are more than 2 combined standard errors apart, as printed; by rounding:"
        " apart by no more than that and half a unit of the last printed digit. The search: means with other seeds of"
        " the fold networks, below. Fewer epochs: our networks of one seed, trained as long, are as far off as the"
        " paper's (`python -m mcbn_study.mnf_epochs.run`); ours stop where validation says."
        f" {len(compared)} means are compared: by chance alone some {0.05 * len(compared):.0f} would be as far apart."
    )
    return Table("Where ours differs from the paper", "table:differences", header, rows, note)


def _describe(gap: Gap) -> tuple[str, ...]:
    names = (METRICS[gap.row.metric], METHODS[gap.row.method], describe(gap.row.dataset).title)
    higher_is_better = gap.row.metric not in ("rmse", "crps")
    better = "better" if (gap.excess > 0) == higher_is_better else "worse"
    return (*names, *triple(ours(gap.row), theirs(gap.printed)), better)


def _cause(gap: Gap, searches: Sequence[Summary], by_epochs: Sequence[Record]) -> str:
    """Name what is known to move a mean as far."""
    if not gap.differs(rounding=True):
        return "rounding"
    rows = [found.get((gap.row.dataset, gap.row.method, gap.row.metric)) for found in searches]
    means = sorted(row.mean for row in rows if row)
    if len(means) > 1:
        return f"the search: {means[0]:.3g} to {means[-1]:.3g} in {len(means)}"
    wider = (gap.row.paper_standard_error or 0.0) / (gap.row.standard_error or math.inf)
    if wider >= _FAR_OUT:
        return f"runs far out there: standard error {wider:.0f} times ours"
    return _fewer_epochs(gap.row, by_epochs) or "not found"


def _fewer_epochs(row: Row, records: Iterable[Record]) -> str | None:
    """Say between which numbers of epochs our RMSE passes the printed one."""
    errors: dict[int, list[float]] = {}
    for record in records:
        if (record["dataset"], record["method"]) == (row.dataset, row.method):
            errors.setdefault(record["epochs"], []).append(record["rmse"])
    printed = paper.find(row.dataset, row.method, "rmse")
    for (early, high), (late, low) in pairwise((n, statistics.fmean(errors[n])) for n in sorted(errors)):
        if printed is not None and high >= printed.mean >= low:
            return f"fewer epochs: ours has RMSE {high:.3g} after {early}, {low:.3g} after {late}"
    return None
