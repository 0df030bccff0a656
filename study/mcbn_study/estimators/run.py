"""The scikit-learn estimator with its default parameters on the paper's splits of the embedded sets.

One record a data set, split and `random_state`.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcbn import data, metrics
from mcbn_study.journal import Journal, Record

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
) -> Path:
    """Fit and score what is not on record yet; options go to `MCBNRegressor`."""
    journal = Journal(out, {"options": options})
    for key in ((name, s, state) for name in datasets for s in splits for state in states):
        fields = dict(zip(KEYS, key, strict=True))
        if not journal.has(**fields):
            journal.add([{"kind": "estimator", **fields, **score(*key, **options)}])
    return journal.path


def score(dataset: str, split: int, state: int, **options: Any) -> Record:
    """Fit on the training rows of a split and score its test rows."""
    from mcbn.sklearn import MCBNRegressor

    x, y = (part.numpy() for part in data.load(dataset))
    train, test = data.split(len(x), split)
    started = time.perf_counter()
    model = MCBNRegressor(random_state=state, **options).fit(x[train], y[train])
    mean, std = model.predict(x[test], return_std=True)
    crps = metrics.crps_gaussian(mean, std**2, y[test]).mean()
    seconds = round(time.perf_counter() - started, 3)
    return {"rmse": float(metrics.rmse(mean, y[test])), "crps": float(crps), "seconds": seconds}
