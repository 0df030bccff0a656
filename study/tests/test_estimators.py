"""The estimator's scores: each run once, the table from the records alone."""

import importlib
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from sklearn.ensemble import RandomForestRegressor

from mcbn import data
from mcbn.errors import MissingExtraError
from mcbn_study import estimators
from mcbn_study.journal import read

SMALL = {"hidden": [8], "epochs": 3, "n_samples": 5}


def test_runs_are_recorded_once_and_the_table_is_their_mean(tmp_path: Path) -> None:
    runs = [run for run in estimators.RUNS if run["dataset"] == "boston" and run["split"] < 3][::2]
    path = tmp_path / "records.jsonl"
    estimators.repeat(tmp_path, runs, **SMALL)
    before = path.read_text()
    estimators.repeat(tmp_path, runs, **SMALL)
    assert path.read_text() == before
    found = read(path)
    assert [(r["split"], r["random_state"]) for r in found] == [(1, 0), (2, 0)]
    assert all(r["commit"] and r["hardware"] and r["seconds"] > 0 for r in found)
    text = (tmp_path / "table.md").read_text()
    a, b = (r["rmse"] for r in found)
    assert f"{(a + b) / 2:.3f} ± {abs(a - b) / 2:.3f}" in text
    assert "2.75 ± 0.05" in text


def test_score_depends_on_the_random_state_alone() -> None:
    first, again, other = (estimators.score("boston", 1, random_state=state, **SMALL) for state in (0, 0, 1))
    assert first["rmse"] == pytest.approx(again["rmse"])
    assert first["rmse"] != other["rmse"]


def test_committed_scores_are_no_worse_than_the_papers() -> None:
    committed = read(Path(__file__).parents[2] / "results" / "estimators" / "records.jsonl")
    for dataset, (rmse, crps) in {"boston": (2.75, 1.45), "concrete": (4.78, 2.40)}.items():
        own = [r for r in committed if r["dataset"] == dataset and not r["config"]["options"]]
        assert len(own) == 10
        assert sum(r["rmse"] for r in own) / len(own) <= rmse
        assert sum(r["crps"] for r in own) / len(own) <= crps


def test_peers_are_scored_once_on_the_same_rows_and_laid_out(tmp_path: Path) -> None:
    pairs = product(("diabetes", "breast cancer"), ("random forest", "gradient boosting"))
    runs = [{"dataset": dataset, "split": 1, "method": method} for dataset, method in pairs]
    (path,) = estimators.compare(tmp_path, runs)
    before = (tmp_path / "peers.jsonl").read_text()
    estimators.compare(tmp_path, runs)
    assert (tmp_path / "peers.jsonl").read_text() == before
    forest = next(r for r in read(tmp_path / "peers.jsonl") if r["method"] == "random forest")
    x, y = load_diabetes(return_X_y=True)
    train, test = data.split(len(x), 1)
    fitted = RandomForestRegressor(random_state=0).fit(x[train], y[train])
    assert forest["rmse"] == pytest.approx(np.sqrt(((fitted.predict(x[test]) - y[test]) ** 2).mean()))
    assert f"| {forest['rmse']:.3f} |" in path.read_text()
    assert "accuracy" in path.read_text()


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "mcbn_study.estimators")
    with pytest.raises(MissingExtraError, match=r"pip install 'mcbn\[sklearn\]'"):
        importlib.import_module("mcbn_study.estimators")
