"""The study on a real cluster of several nodes: the records of one process, whatever is killed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray", reason="Ray is not installed: pip install 'mcbn[ray]'")

from mcbn_study import sensitivity
from mcbn_study.journal import CellJournal, read
from mcbn_study.regression import run as regression
from small_study import TINY, predictions
from test_ray import cluster, one_killed, pytestmark  # noqa: F401  # a fixture, and marks

SMALL = replace(TINY, weight_decays=(1e-4,), max_epochs=10, splits=(1, 2), sensitivity_batch_sizes=(32,))


def without_place(path: Path) -> list[str]:
    left_out = {"seconds", "commit", "device"}
    kept = [{k: v for k, v in record.items() if k not in left_out} for record in read(path)]
    return sorted(json.dumps(record, sort_keys=True) for record in kept)


def test_the_study_gives_the_records_of_a_local_run(cluster, tmp_path):  # noqa: F811
    methods = ("mcbn", "bn", "mcdo", "ensemble")
    regression.run(SMALL, tmp_path / "local", methods=methods)
    regression.run(SMALL, tmp_path / "ray", methods=methods, engine="ray")
    local, there = (without_place(tmp_path / name / "records.jsonl") for name in ("local", "ray"))
    assert there == local
    assert predictions(tmp_path / "ray" / "predictions") == predictions(tmp_path / "local" / "predictions")
    for path in (tmp_path / "local" / "networks").iterdir():
        here, elsewhere = load_file(path), load_file(tmp_path / "ray" / "networks" / path.name)
        assert here.keys() == elsewhere.keys()
        assert all(torch.equal(here[name], elsewhere[name]) for name in here)
    before = (tmp_path / "ray" / "records.jsonl").read_bytes()
    regression.run(SMALL, tmp_path / "ray", methods=methods, engine="ray")
    assert (tmp_path / "ray" / "records.jsonl").read_bytes() == before
    sensitivity.run(SMALL, tmp_path / "a", regression=tmp_path / "local")
    sensitivity.run(SMALL, tmp_path / "b", regression=tmp_path / "ray", engine="ray")
    assert without_place(tmp_path / "a" / "records.jsonl") == without_place(tmp_path / "b" / "records.jsonl")


def test_an_interrupted_study_goes_on(cluster, tmp_path, monkeypatch):  # noqa: F811
    regression.run(SMALL, tmp_path / "whole", methods=("bn",), engine="ray")
    real, written = CellJournal.append, []

    def interrupted(self: Any, records: Any) -> None:
        real(self, records)
        written.append(self.folder)
        if len(written) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CellJournal, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regression.run(SMALL, tmp_path / "cut", methods=("bn",), engine="ray")
    assert len(list((tmp_path / "cut" / "cells").glob("*.safetensors"))) == 1
    regression.run(SMALL, tmp_path / "cut", methods=("bn",), engine="ray")
    whole, cut = (without_place(tmp_path / name / "records.jsonl") for name in ("whole", "cut"))
    assert whole == cut


def test_a_study_whose_worker_is_killed_loses_nothing(cluster, tmp_path):  # noqa: F811
    regression.run(SMALL, tmp_path / "whole", methods=("bn",))
    with one_killed(cluster, b"ray::_work"):
        regression.run(SMALL, tmp_path / "cut", methods=("bn",), engine="ray")
    whole, cut = (without_place(tmp_path / name / "records.jsonl") for name in ("whole", "cut"))
    assert whole == cut
