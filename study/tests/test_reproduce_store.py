"""The results folder: nothing half-written, nothing lost, nothing twice."""

import json

import pytest
import torch

from mcbn.errors import MCBNError
from mcbn_study import store as module
from mcbn_study.records import read
from mcbn_study.store import Store

SETTINGS = {"name": "toy", "folds": 5}


def record(split, **more):
    return {"kind": "test", "dataset": "boston", "method": "mcbn", "split": split, "seed": 1, **more}


def test_records_are_appended_once(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.append([record(1, rmse=2.0)])
    before = store.path.read_bytes()
    store.append([record(1, rmse=3.0), record(2)])
    assert store.path.read_bytes().startswith(before)
    assert [r["split"] for r in read(store.path)] == [1, 2]
    assert store.has([record(1), record(2)])
    assert not store.has([record(3)])
    assert store.find(split=1)[0]["rmse"] == 2.0


def test_a_cut_off_line_is_dropped_with_a_warning_and_nothing_else(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.append([record(1), record(2), record(3)])
    store.path.write_bytes(store.path.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="ends in a line that was cut off"):
        assert [r["split"] for r in read(store.path)] == [1, 2]
    with pytest.warns(UserWarning, match="was cut off"):
        again = Store(tmp_path, SETTINGS)
    again.append([record(4)])
    assert [r["split"] for r in read(store.path)] == [1, 2, 4]


def test_another_configuration_is_refused_by_name(tmp_path):
    Store(tmp_path, SETTINGS)
    with pytest.raises(MCBNError, match=r"folds is 5 there, 3 now.*--out"):
        Store(tmp_path, SETTINGS | {"folds": 3})
    with pytest.raises(MCBNError, match="seeds is None there, 2 now"):
        Store(tmp_path, SETTINGS | {"seeds": 2})


def test_records_without_settings_are_refused(tmp_path):
    (tmp_path / "records.jsonl").write_text(json.dumps(record(1)) + "\n")
    with pytest.raises(MCBNError, match=r"no settings.json.*--out"):
        Store(tmp_path, SETTINGS)


def test_a_cell_comes_back_with_the_records_it_owes(tmp_path, monkeypatch):
    store = Store(tmp_path, SETTINGS)
    monkeypatch.setattr(Store, "append", lambda self, records: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.finish("cell", {"a": torch.arange(3)}, [record(1)])
    monkeypatch.undo()
    again = Store(tmp_path, SETTINGS)
    assert again.records == []
    assert again.load("cell")["a"].tolist() == [0, 1, 2]
    assert again.has([record(1)])
    assert again.load("other") is None


def test_infinite_scores_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Store(tmp_path, SETTINGS).append([record(1, rmse=float("inf"))])


def test_every_kind_of_record_has_a_key():
    assert set(module.KEYS) == {"test", "selection", "sensitivity", "posterior"}
