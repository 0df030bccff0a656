"""The scikit-learn estimator with its default parameters on the paper's splits of the embedded sets.

One record a data set, split and `random_state`. The paper's MCBN beside it had weight decay and batch size searched on
each set.
"""

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from mcbn import data, metrics
from mcbn.files import write_text
from mcbn_study import paper
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.tables import read_words, table, to_page

DATASETS = ("boston", "concrete")
SPLITS = (1, 2, 3, 4, 5)
STATES = (0, 1)  # random_state
KEYS = ("dataset", "split", "random_state")


def run(
    out: str | Path = "results/estimators",
    *,
    datasets: Sequence[str] = DATASETS,
    splits: Sequence[int] = SPLITS,
    states: Sequence[int] = STATES,
    **options: Any,
) -> list[Path]:
    """Fit and score what is not on record yet, and write the table; options go to `MCBNRegressor`."""
    journal = Journal(out, {"options": options})
    for key in product(datasets, splits, states):
        fields = dict(zip(KEYS, key, strict=True))
        if not journal.has(**fields):
            journal.add([{"kind": "estimator", **fields, **score(*key, **options)}])
    return [report(out)]


def score(dataset: str, split: int, state: int, **options: Any) -> Record:
    """Fit on the training rows of a split and score its test rows."""
    from mcbn.sklearn import MCBNRegressor

    x, y = (array.numpy() for array in data.load(dataset))
    train, test = data.split(len(x), split)
    started = time.perf_counter()
    model = MCBNRegressor(random_state=state, **options).fit(x[train], y[train])
    mean, std = model.predict(x[test], return_std=True)
    crps = metrics.crps_gaussian(mean, std**2, y[test]).mean()
    seconds = round(time.perf_counter() - started, 3)
    return {"rmse": float(metrics.rmse(mean, y[test])), "crps": float(crps), "seconds": seconds}


def report(out: str | Path = "results/estimators") -> Path:
    """Write table.md from the records: mean ± standard error over splits and states beside the paper's."""
    records = latest(read(Path(out) / RECORDS), KEYS)
    rows = []
    for dataset, metric in product(sorted({r["dataset"] for r in records}), ("rmse", "crps")):
        values = [r[metric] for r in records if r["dataset"] == dataset]
        printed = paper.find(dataset, "mcbn", metric)
        shown = f"{printed.mean} ± {printed.standard_error}" if printed else ""
        rows.append((dataset, metric.upper(), str(len(values)), mean_cell(values, decimals=3), shown))
    return write_text(Path(out) / "table.md", to_page(table(read_words(__package__)["estimators"], rows)))
