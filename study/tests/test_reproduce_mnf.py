"""The MNF runs of the reproduction: records, their scores, the protocol, and independence of what trains beside."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mcbn
from mcbn import data, metrics
from mcbn_study.journal import read
from mcbn_study.mnf_epochs import run as mnf_epochs
from mcbn_study.regression import mnf


@dataclass(frozen=True)
class Brief:
    max_epochs: int = 6
    n_samples: int = 20
    patience_epochs: int = 3
    name: str = "brief"


KEYS = """kind study profile dataset method split seed config tau tau_constant n_samples n_test rmse crps pll
crps_constant pll_constant crps_optimum pll_optimum crps_normalized pll_normalized seconds device commit config_hash
_predictions"""


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return list(mnf.run("boston", [1, 2], [1, 2], Brief(), "cpu"))


def test_one_record_for_each_split_and_seed_with_all_keys(records: list[dict[str, Any]]) -> None:
    assert [(r["split"], r["seed"]) for r in records] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for record in records:
        assert set(record) == set(KEYS.split())
        assert (record["kind"], record["method"], record["profile"]) == ("test", "mnf", "brief")
        assert 1 <= record["config"]["epochs"] <= 6
        json.dumps({key: value for key, value in record.items() if key != "_predictions"}, allow_nan=False)


def test_seeds_of_a_split_share_its_choice_and_differ_in_scores(records: list[dict[str, Any]]) -> None:
    first, second = records[:2]
    assert (first["tau"], first["config"]) == (second["tau"], second["config"])
    assert first["rmse"] != second["rmse"]


def test_scores_are_those_of_the_predictions(records: list[dict[str, Any]]) -> None:
    for record in records:
        error, std, constant_std = record["_predictions"]
        zero = torch.zeros_like(error)
        assert error.shape == std.shape == (record["n_test"],) == (101,)
        assert record["rmse"] == pytest.approx(error.square().mean().sqrt().item())
        assert record["crps"] == pytest.approx(metrics.crps_gaussian(zero, std.square(), error).mean().item())
        constant = torch.full_like(error, constant_std**2)
        assert record["crps_constant"] == pytest.approx(metrics.crps_gaussian(zero, constant, error).mean().item())
        gap = record["crps_optimum"] - record["crps_constant"]
        assert record["crps_normalized"] == pytest.approx(100 * (record["crps"] - record["crps_constant"]) / gap)


def test_errors_are_target_minus_mean_in_original_units(records: list[dict[str, Any]]) -> None:
    y = data.load("boston").y[data.split(506, 2).test]
    mean = y - records[2]["_predictions"][0]
    assert 10 < mean.mean() < 35
    assert mean.std() > 0


def test_run_alone_equals_the_run_in_a_stack(records: list[dict[str, Any]]) -> None:
    (alone,) = mnf.run("boston", [2], [2], Brief(), "cpu")
    assert alone["config"] == records[3]["config"]
    for key in ("tau", "tau_constant", "rmse", "crps", "pll"):
        assert alone[key] == pytest.approx(records[3][key], rel=1e-3)
    torch.testing.assert_close(alone["_predictions"][0], records[3]["_predictions"][0], rtol=1e-3, atol=1e-3)


def test_search_validates_on_the_last_fifth_and_the_test_trains_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[Tensor, Tensor]]] = []
    gather = mnf._gather

    def noted(dataset: str, rows: Any, device: Any) -> mnf.Parts:
        asked.append(list(rows))
        return gather(dataset, rows, device)

    monkeypatch.setattr(mnf, "_gather", noted)
    list(mnf.run("yacht", [3], [1], Brief(max_epochs=1, n_samples=2), "cpu"))
    train, test = data.split(308, 3)  # 246 and 62 rows
    (searched,), (tested,) = asked
    assert torch.equal(torch.cat(searched), train)
    assert len(searched[1]) == 50
    assert torch.equal(tested[0], train)
    assert torch.equal(tested[1], test)


def test_rows_are_standardised_by_the_training_rows_and_draws_brought_back() -> None:
    train, new = data.split(506, 1)
    parts = mnf._gather("boston", [(train, new)], torch.device("cpu"))
    torch.testing.assert_close(parts.x.mean(1), torch.zeros(1, 13), atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.x.std(1, correction=0), torch.ones(1, 13), atol=1e-5, rtol=0)
    back = (parts.y_new * parts.y_std + parts.y_mean).squeeze(2).double()
    torch.testing.assert_close(back, parts.target, rtol=1e-5, atol=1e-5)
    assert torch.equal(parts.target[0], data.load("boston").y[new])


def test_nothing_asked_gives_nothing() -> None:
    assert list(mnf.run("boston", [], [1], Brief())) == []


def test_mistakes_are_told() -> None:
    with pytest.raises(mcbn.MCBNError, match="no dataset 'iris'"):
        list(mnf.run("iris", [1], [1], Brief()))
    with pytest.raises(mcbn.MCBNError, match="n_samples"):
        list(mnf.run("boston", [1], [1], Brief(n_samples=0)))


def test_error_by_epochs_is_that_of_networks_trained_as_long(tmp_path, capsys):
    settings = mnf.Settings(max_epochs=5, n_samples=4)
    mnf_epochs.measure("boston", 2, settings, "cpu", tmp_path)
    mnf_epochs.measure("boston", 3, settings, "cpu", tmp_path)
    found = read(tmp_path / "records.jsonl")
    assert [(r["epochs"], r["split"]) for r in found] == [(n, s) for n in (2, 3) for s in mnf_epochs.SPLITS]
    choices = [mnf.Choice(3, 1.0, 1.0)]
    draws, y = mnf.train_and_draw("boston", [2], [mnf_epochs.SEED], choices, settings, torch.device("cpu"))
    assert found[6]["rmse"] == pytest.approx(float((draws.double().mean(1) - y).square().mean().sqrt()), rel=1e-5)
    assert capsys.readouterr().out.startswith("boston, 2 epochs: RMSE ")
