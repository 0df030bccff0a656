"""The scikit-learn estimators with their default parameters: beside the paper's MCBN, and beside scikit-learn's own.

One record a data set, split and `random_state` on the embedded sets, where the paper's MCBN had weight decay and batch
size searched on each; one a data set, split and method on sets that served no choice of a default of ours.
"""

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mcbn import data, metrics
from mcbn.errors import extra
from mcbn.files import write_text
from mcbn.plots import Z95
from mcbn.tables.formats import Array
from mcbn_study import paper
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import Journal, Record, latest
from mcbn_study.tables import render

with extra("sklearn", "`mcbn reproduce estimators` needs scikit-learn"):
    from sklearn import datasets as bundled, ensemble, gaussian_process  # type: ignore[import-untyped]
    from sklearn.model_selection import cross_val_predict  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

    from mcbn.sklearn import MCBNClassifier, MCBNRegressor

METHODS = {
    "mcbn": (MCBNRegressor, MCBNClassifier),
    "gradient boosting": (ensemble.HistGradientBoostingRegressor, ensemble.HistGradientBoostingClassifier),
    "random forest": (ensemble.RandomForestRegressor, ensemble.RandomForestClassifier),
    "gaussian process": (gaussian_process.GaussianProcessRegressor, gaussian_process.GaussianProcessClassifier),
}
PLACES = product(("boston", "concrete"), range(1, 6), (0, 1))
RUNS = [{"dataset": d, "split": s, "random_state": r} for d, s, r in PLACES]
SHOWN = ("energy", "wine", "diabetes", "breast cancer")  # the last by its classes
PEER_RUNS = [{"dataset": d, "split": s, "method": m} for d, s, m in product(SHOWN, range(1, 6), METHODS)]
LOADERS = {"diabetes": bundled.load_diabetes, "breast cancer": bundled.load_breast_cancer}
GP_ROWS = 700  # its training takes their cube
LEAST = 1e-6  # of a probability: a forest gives 0, and would lose by an infinite likelihood


def run(out: str | Path) -> list[Path]:
    """Fit and score what is not on record yet, and write both tables."""
    return [*repeat(out), *compare(out)]


def repeat(out: str | Path, runs: Sequence[Record] = RUNS, **options: Any) -> list[Path]:
    """Fit and score on the embedded sets; options go to `MCBNRegressor`."""
    records = _measure(Journal(out, {"options": options}), "estimator", runs, options)
    page = render(__package__, "estimators.md.j2", records=records, find=paper.find, mean=mean_cell)
    return [write_text(Path(out) / "table.md", page)]


def compare(out: str | Path, runs: Sequence[Record] = PEER_RUNS) -> list[Path]:
    """Fit and score all methods on sets that they were not tuned on."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in _measure(Journal(out, {"gaussian process rows": GP_ROWS}, name="peers.jsonl"), "peer", runs, {}):
        groups.setdefault((record["dataset"], record["method"]), []).append(record)
    page = render(__package__, "estimators_peers.md.j2", groups=groups, mean=mean_cell)
    return [write_text(Path(out) / "peers.md", page)]


def _measure(journal: Journal, kind: str, runs: Sequence[Record], options: Record) -> list[Record]:
    """Score the runs that are not on record yet; return the last record of each."""
    for run in runs:
        if not journal.has(**run):
            journal.add([{"kind": kind, **run, **score(**run, **options)}])
    return latest(journal.records, list(runs[0]))


def score(dataset: str, split: int, method: str = "mcbn", *, random_state: int = 0, **options: Any) -> Record:
    """Fit a method on the training rows of a split and score its test rows."""
    x, y = LOADERS[dataset](return_X_y=True) if dataset in LOADERS else [array.numpy() for array in data.load(dataset)]
    train, test = (index.numpy() for index in data.split(len(x), split))
    if method == "gaussian process":
        train = np.random.default_rng(split).permutation(train)[:GP_ROWS]
    started, classify = time.perf_counter(), y.dtype.kind == "i"
    model = _estimator(method, x.shape[1], classify, random_state=random_state, **options)
    if classify:
        probs = model.fit(x[train], y[train]).predict_proba(x[test]).clip(LEAST)
        scores = {name: float(getattr(metrics, name)(probs, y[test])) for name in ("accuracy", "nll", "brier")}
    else:
        mean, std = _predict(model, x[train], y[train], x[test], gives_std=method in ("mcbn", "gaussian process"))
        crps = float(metrics.crps_gaussian(mean, std**2, y[test]).mean())
        inside = float((np.abs(mean - y[test]) <= Z95 * std).mean())
        scores = {"rmse": float(metrics.rmse(mean, y[test])), "crps": crps, "inside 95 %": inside}
    return scores | {"seconds": round(time.perf_counter() - started, 3)}


def _predict(model: Any, x: Array, y: Array, new: Array, *, gives_std: bool) -> tuple[Array, Array]:
    """Predict mean and std, (N,) each; the std of a method that gives none is that of residuals on held-out folds."""
    fitted = model.fit(x, y)
    if gives_std:
        mean, std = fitted.predict(new, return_std=True)
        return mean, std
    mean, residual = fitted.predict(new), cross_val_predict(model, x, y) - y
    return mean, np.full(len(mean), np.sqrt((residual**2).mean()))


def _estimator(method: str, n_inputs: int, classify: bool, **options: Any) -> Any:
    kind = METHODS[method][classify]
    if method != "gaussian process":
        return kind(**options)
    kernels = gaussian_process.kernels
    kernel = kernels.ConstantKernel() * kernels.RBF(np.ones(n_inputs))
    if not classify:
        kernel, options = kernel + kernels.WhiteKernel(), {"normalize_y": True, **options}
    return make_pipeline(StandardScaler(), kind(kernel, **options))
