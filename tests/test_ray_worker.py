"""What an actor does, Ray aside: on a GPU where there is one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from inputs import by_row, regressor, write_tables
from mcbn import ray, scale
from mcbn.scale import Outcome, collect, read_results
from mcbn.scale.job import plan

OPTIONS = {"key": "id", "batch_size": 32, "part_rows": 64}


def itself(payload: object) -> object:
    return payload


def test_a_worker_predicts_on_the_gpu_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bayes = regressor()
    write_tables(tmp_path / "in")
    scale.predict(tmp_path / "in", bayes, out=tmp_path / "alone", **OPTIONS)
    job = plan(tmp_path / "in", bayes, out=tmp_path / "out", **OPTIONS)
    job.folder.mkdir()
    monkeypatch.setattr(ray, "require_ray", lambda _="": SimpleNamespace(get=itself, loads=itself))
    worker = ray.Worker([(bayes, job)], threads=torch.get_num_threads())
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in worker.bayes.model.parameters()} == {expected}
    outcomes = (Outcome(**json.loads(worker({"item": [part.name]})["answer"][0])) for part in job.parts)
    assert not collect(job, {}, outcomes, None).bad_files
    found, alone = (by_row(read_results(tmp_path / name)) for name in ("out", "alone"))
    assert found.keys() == alone.keys()
    for place, (key, *numbers) in alone.items():
        assert found[place][0] == key
        assert found[place][1:] == pytest.approx(numbers, rel=1e-4)


def test_a_worker_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(tmp_path / "in")
    bayes = regressor()
    job = plan(tmp_path / "in", bayes, out=tmp_path / "out", **OPTIONS)
    monkeypatch.setattr(ray, "require_ray", lambda _="": SimpleNamespace(get=itself, loads=itself))
    worker = ray.Worker([(bayes, job)], threads=torch.get_num_threads())
    (tmp_path / "out").touch()  # where a folder should be
    (answer,) = worker({"item": [job.parts[0].name]})["answer"]
    outcome = Outcome(**json.loads(answer))
    assert (outcome.part, outcome.status) == (job.parts[0].name, "failed")
    assert "cannot write results" in outcome.reason
