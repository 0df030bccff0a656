"""The paper's regression tables with its own columns; per data set three rows: ours, the paper's, the difference."""

from collections.abc import Sequence
from typing import NamedTuple

from mcbn.data import NAMES, describe
from mcbn_study import paper
from mcbn_study.regression.estimates import Triple, cell, ours, theirs, three_rows, triple
from mcbn_study.regression.summary import METHODS, METRICS, Summary
from mcbn_study.tables import Table

_METHODS = ("mcbn", "mcdo", "mnf")
_INTERVAL = (
    "Difference: ours minus the paper's, with Welch's 95 % interval from the two means and standard errors"
    " (25 runs there); printed numbers are rounded, which the interval leaves out."
)
_RUNS = "Mean ± standard error over the runs, which are counted as independent, as in the paper."
_PERCENT = "Percent of the way from constant uncertainty (0) to the optimum (100): higher is better."
_STARS = (
    "One-sample t-test against 0, two-sided: * < .05, ** < .01, *** < .001, **** < .0001, ns otherwise. The paper's"
    " figures are those of its appendix, from which Table 1 of the text differs by rounding; its stars follow from its"
    " p-values (for Power, PLL, MCBN the text prints **)."
)


class Column(NamedTuple):
    """What a column shows: the mean with its "error" or "stars", or the "p" value."""

    method: str
    metric: str
    show: str = "error"


def paper_tables(summary: Summary) -> list[Table]:
    """Lay out the text's Table 1 and the appendix tables of scores; what was not run is a dash."""
    return [
        _compare(
            "Uncertainty quality measured on eight regression datasets",
            "table:main_results",
            [Column(m, metric, "stars") for metric in ("crps_normalized", "pll_normalized") for m in _METHODS],
            summary,
            f"Table 1 of the text. {_PERCENT} {_STARS}",
        ),
        _normalised(summary, "crps", "CRPS"),
        _normalised(summary, "pll", "PLL"),
        _compare(
            "Raw (unnormalised) CRPS and PLL scores on regression datasets",
            "table:rawcrpspll",
            [Column(method, metric) for metric in ("crps", "pll") for method in _METHODS],
            summary,
            f"Lower CRPS and higher PLL are better. {_RUNS}",
        ),
        _compare(
            "Prediction accuracy measured by RMSE on regression datasets",
            "table:rmse_results",
            [Column(method, "rmse") for method in ("mcbn", "bn", "mcdo", "do", "mnf")],
            summary,
            f"Lower is better. {_RUNS}",
        ),
    ]


def further_tables(summary: Summary) -> list[Table]:
    """Lay out MCBN beside what the paper's tables do not hold, constant twins and further methods, where they ran."""
    printed = {number.method for number in paper.numbers()}
    tables = []
    for metric in METRICS:
        run = {method for _, method, scored in summary if scored == metric}
        if methods := [method for method in METHODS if method in run - printed]:
            tables.append(_further(metric, ["mcbn", *methods], summary))
    return tables


def _normalised(summary: Summary, metric: str, name: str) -> Table:
    columns = [Column(method, f"{metric}_normalized", show) for method in _METHODS for show in ("error", "p")]
    title = f"Uncertainty quality measured by normalised {name} on regression datasets"
    return _compare(title, f"table:{metric}_results", columns, summary, f"{_PERCENT} {_RUNS}")


def _compare(title: str, label: str, columns: Sequence[Column], summary: Summary, note: str) -> Table:
    rows = [row for name in NAMES for row in three_rows(name, [_triple(summary, name, c) for c in columns])]
    return Table(title, label, ("Dataset", "", *_headings(columns)), tuple(rows), f"{note} {_INTERVAL}")


def _triple(summary: Summary, dataset: str, column: Column) -> Triple:
    key = (dataset, column.method, column.metric)
    return triple(ours(summary.get(key)), theirs(paper.find(*key)), column.show)


def _headings(columns: Sequence[Column]) -> list[str]:
    several = len({column.metric for column in columns}) > 1
    scores = {"crps": "CRPS", "pll": "PLL", "crps_normalized": "CRPS", "pll_normalized": "PLL", "rmse": "RMSE"}
    return [
        "p-value" if c.show == "p" else f"{METHODS[c.method]} {scores[c.metric]}" if several else METHODS[c.method]
        for c in columns
    ]


def _further(metric: str, methods: Sequence[str], summary: Summary) -> Table:
    rows = [(describe(d).title, *(cell(ours(summary.get((d, method, metric)))) for method in methods)) for d in NAMES]
    note = f"Ours alone; CUBN and CUDO have the means of MCBN and MCDO with one constant variance. {_RUNS}"
    header = ("Dataset", *(METHODS[method] for method in methods))
    return Table(f"Further methods, {METRICS[metric]}", f"table:further_{metric}", header, tuple(rows), note)
