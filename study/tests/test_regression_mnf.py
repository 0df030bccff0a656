"""The MNF runs of the reproduction: records, their scores, the protocol, and independence of what trains beside."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mcbn import data, metrics
from mcbn_study.journal import read
from mcbn_study.regression import mnf, run as regression
from small_study import TINY

BRIEF = replace(TINY, name="brief", max_epochs=6, n_samples=20, patience_epochs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("mnf")
    regression.run(BRIEF, out, methods=["mnf"])
    return out


@pytest.fixture(scope="module")
def records(folder):
    return read(folder / "records.jsonl")


def arrays(folder, s):
    return {name: torch.from_numpy(value).double() for name, value in np.load(folder / f"boston-mnf-{s}.npz").items()}


def test_seeds_of_a_split_share_its_choice_and_differ_in_scores(records):
    assert [(r["split"], r["seed"]) for r in records] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    first, second = records[:2]
    assert (first["tau"], first["config"]) == (second["tau"], second["config"])
    assert first["rmse"] != second["rmse"]
    assert all(1 <= r["config"]["epochs"] <= 6 for r in records)


def test_scores_are_those_of_the_predictions(folder, records):
    for record in records:
        kept, k = arrays(folder / "predictions", record["split"]), record["seed"] - 1
        error, std, constant_std = kept["error"][k], kept["std"][k], kept["constant_std"][k]  # errors in half precision
        zero = torch.zeros_like(error)
        assert error.shape == std.shape == (record["n_test"],) == (101,)
        assert record["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-3)
        crps = metrics.crps_gaussian(zero, std.square(), error).mean().item()
        assert record["crps"] == pytest.approx(crps, rel=1e-3)
        constant = metrics.crps_gaussian(zero, constant_std.square().expand_as(error), error).mean().item()
        assert record["crps_constant"] == pytest.approx(constant, rel=1e-3)
        gap = record["crps_optimum"] - record["crps_constant"]
        assert record["crps_normalized"] == pytest.approx(100 * (record["crps"] - record["crps_constant"]) / gap)


def test_errors_are_target_minus_mean_in_original_units(folder):
    y = data.load("boston").y[data.split(506, 2).test]
    mean = y - arrays(folder / "predictions", 2)["error"][0]
    assert 10 < mean.mean() < 35
    assert mean.std() > 0


def test_run_alone_equals_the_run_in_a_stack():
    choices = mnf.search("boston", [1, 2], BRIEF, "cpu")
    (alone,) = mnf.search("boston", [2], BRIEF, "cpu")
    assert alone.epochs == choices[1].epochs
    assert alone[2:4] == pytest.approx(choices[1][2:4], rel=1e-3)
    epochs = [choice.epochs for choice in choices]
    drawn = mnf.train_and_draw("boston", [1, 2], epochs, replace(BRIEF, seeds=(1, 2), n_samples=20), "cpu")
    own = mnf.train_and_draw("boston", [2], epochs[1:], replace(BRIEF, seeds=(2,), n_samples=20), "cpu")
    torch.testing.assert_close(own[0], drawn[3], rtol=1e-3, atol=1e-3)


def test_search_validates_on_the_last_fifth_and_the_test_trains_on_all(monkeypatch):
    asked, problem_of = [], mnf.make_problem

    def noted(rows, parts, device):
        asked.append([part[:2] for part in parts])
        return problem_of(rows, parts, device)

    monkeypatch.setattr(mnf, "make_problem", noted)
    mnf.search("yacht", [3], replace(BRIEF, max_epochs=1, n_samples=2), "cpu")
    mnf.train_and_draw("yacht", [3], [1], replace(BRIEF, seeds=(1,), n_samples=2), "cpu")
    train, test = data.split(308, 3)  # 246 and 62 rows
    (searched,), (tested,) = asked
    assert torch.equal(torch.cat(searched), train)
    assert len(searched[1]) == 50
    assert torch.equal(tested[0], train)
    assert torch.equal(tested[1], test)
