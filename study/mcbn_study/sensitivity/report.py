"""The appendix tables of MCBN over batch size M (at T = 100) and over forward passes T (at M = 128)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from mcbn_study import paper
from mcbn_study.estimates import Triple, comparison, estimate, triple
from mcbn_study.journal import Record
from mcbn_study.regression.summary import METRICS, check_names, score
from mcbn_study.tables import Table, read_words

BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
FORWARD_PASSES = (250, 100, 50)
Values: TypeAlias = Mapping[tuple[str, str, int, int], Sequence[float]]  # by data set, metric, M, T


def sensitivity_tables(runs: Iterable[Record]) -> list[Table]:
    """Lay out the four tables from one record a run; what was not run is a dash."""
    values: dict[tuple[str, str, int, int], list[float]] = {}
    for run in runs:
        check_names(run)
        for metric in ("crps_normalized", "pll_normalized"):
            value = score(run, metric)
            if run["method"] == "mcbn" and value is not None:
                values.setdefault((run["dataset"], metric, run["batch_size"], run["n_samples"]), []).append(value)
    return [_table(values, over_sizes, name) for over_sizes in (True, False) for name in ("CRPS", "PLL")]


def _table(values: Values, over_sizes: bool, name: str) -> Table:
    varied, fixed = ("batch size", "T = 100") if over_sizes else ("forward passes", "M = 128")
    settings = [(M, M, 100) for M in BATCH_SIZES] if over_sizes else [(T, 128, T) for T in FORWARD_PASSES]
    label, metric = f"{'batch_size' if over_sizes else 'forward_pass'}_{name}", f"{name.lower()}_normalized"

    def column(M: int, T: int, dataset: str) -> Triple:
        measured = values.get((dataset, metric, M, T))
        printed = paper.find_sensitivity(f"table:{label}", dataset, metric, M, T)
        return triple(estimate(measured) if measured else None, printed)

    columns = [(str(value), partial(column, M, T)) for value, M, T in settings]
    fields = {"varied": varied, "fixed": fixed, "name": name, "label": label, "metric": METRICS[metric]}
    return comparison(read_words(__package__)["sensitivity"], columns, varied.capitalize(), **fields)
