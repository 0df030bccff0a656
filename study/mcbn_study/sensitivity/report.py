"""The appendix tables of MCBN over batch size M (at T = 100) and over forward passes T (at M = 128)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from mcbn.data import NAMES
from mcbn_study import paper, student
from mcbn_study.journal import Record
from mcbn_study.regression.estimates import Estimate, Triple, theirs, three_rows, triple
from mcbn_study.regression.summary import METRICS, check_names, score
from mcbn_study.tables import Table

BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
FORWARD_PASSES = (250, 100, 50)
_SCORES = {"crps_normalized": "CRPS", "pll_normalized": "PLL"}
Setting: TypeAlias = tuple[int, int]  # M, T
Values: TypeAlias = Mapping[tuple[str, str, Setting], Sequence[float]]  # by data set, metric, setting


def sensitivity_tables(runs: Iterable[Record]) -> list[Table]:
    """Lay out the four tables from one record a run; what was not run is a dash."""
    values = _collect(runs)
    sizes = {str(M): (M, 100) for M in BATCH_SIZES}
    passes = {str(T): (128, T) for T in FORWARD_PASSES}
    return [
        _table(varied, f"table:{label}_{name}", metric, settings, values)
        for varied, label, settings in (("batch size", "batch_size", sizes), ("forward passes", "forward_pass", passes))
        for metric, name in _SCORES.items()
    ]


def _collect(runs: Iterable[Record]) -> Values:
    values: dict[tuple[str, str, Setting], list[float]] = {}
    for run in runs:
        check_names(run)
        for metric in _SCORES:
            value = score(run, metric)
            if run["method"] == "mcbn" and value is not None:
                key = (run["dataset"], metric, (run["batch_size"], run["n_samples"]))
                values.setdefault(key, []).append(value)
    return values


def _table(varied: str, label: str, metric: str, settings: Mapping[str, Setting], values: Values) -> Table:
    rows = [row for name in NAMES for row in three_rows(name, _triples(name, label, metric, settings, values))]
    fixed = "T = 100" if varied == "batch size" else "M = 128"
    note = (
        f"{METRICS[metric]} of MCBN at {fixed}; higher is better. Ours: mean ± standard error over the runs. The paper"
        " prints no standard errors here (3 splits with 5 seeds each), so that no interval can be given."
    )
    title = f"Uncertainty quality sensitivity to {varied}, normalised {_SCORES[metric]}"
    return Table(title, label, ("Dataset", varied.capitalize(), *settings), tuple(rows), note)


def _triples(dataset: str, table: str, metric: str, settings: Mapping[str, Setting], values: Values) -> list[Triple]:
    triples = []
    for setting in settings.values():
        runs = values.get((dataset, metric, setting))
        mine = Estimate(*student.mean_error(runs), None, len(runs)) if runs else None
        triples.append(triple(mine, theirs(paper.find_sensitivity(table, dataset, metric, *setting))))
    return triples
