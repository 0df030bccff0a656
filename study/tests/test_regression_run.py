"""The regression study end to end on a small profile, interrupted and gone on with."""

import itertools
import json
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

import mcbn
from mcbn.data import folds, load, split
from mcbn.errors import MCBNError
from mcbn_study import sensitivity
from mcbn_study.journal import CellJournal, read
from mcbn_study.profiles import TAU_RANGES
from mcbn_study.regression import run as regression, search
from mcbn_study.regression.profile import PAPER, Configuration
from mcbn_study.regression.search import Choice
from mcbn_study.regression.train import load_networks
from small_study import OURS, TINY, predictions

NEVER = {"seconds"}
KEYS = """kind study profile dataset method split seed config tau tau_constant n_samples n_test rmse crps pll
crps_constant pll_constant crps_optimum pll_optimum crps_normalized pll_normalized seconds device commit config_hash"""


def stripped(records):
    return sorted(json.dumps({k: v for k, v in r.items() if k not in NEVER}, sort_keys=True) for r in records)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    regression.run(TINY, folder, methods=OURS)
    return folder


def test_every_run_has_its_record(whole):
    records = read(whole / "records.jsonl")
    tests = [r for r in records if r["kind"] == "test"]
    found = {(r["method"], r["split"], r["seed"]) for r in tests}
    expected = set(itertools.product(OURS[:4], (1, 2), (1, 2))) | {("ensemble", 1, 1), ("ensemble", 2, 1)}
    assert found == expected
    assert len(tests) == len(expected)
    fields = {"config", "tau", "tau_constant", "n_samples", "n_test", "seconds", "device", "commit", "config_hash"}
    for r in tests:
        assert fields <= r.keys()
        assert r["n_test"] == 101
        assert TAU_RANGES["boston"][0] <= r["tau"] <= TAU_RANGES["boston"][1]
        stochastic = r["method"] in ("mcbn", "mcdo", "ensemble")
        assert (r["crps_normalized"] is not None) == stochastic
        assert r["n_samples"] == {"mcbn": 20, "mcdo": 20, "ensemble": 2}.get(r["method"], 1)
    selections = [r for r in records if r["kind"] == "selection"]
    assert {(r["family"], r["batch_size"], r["dropout"], r["split"]) for r in selections} == {
        *itertools.product(["bn"], [64, 128], [None], [1, 2]),
        *itertools.product(["dropout"], [32], [0.05, 0.01], [1, 2]),
    }


def test_the_lowest_validation_error_is_chosen(whole):
    records = read(whole / "records.jsonl")
    for method, family, criterion in (("mcbn", "bn", "mc"), ("do", "dropout", "plain")):
        for s in (1, 2):
            grid = []
            for r in records:
                if r["kind"] == "selection" and r["family"] == family and r["split"] == s:
                    rows = zip(r[f"rmse_{criterion}"], r["weight_decay"], r[f"epoch_{criterion}"], strict=True)
                    grid += [(rmse, decay, r["batch_size"], r["dropout"], epoch) for rmse, decay, epoch in rows]
            _, *best = min(grid)
            found = {tuple(r["config"].values()) for r in records if (r.get("method"), r["split"]) == (method, s)}
            assert found == {tuple(best)}


def test_each_criterion_and_split_chooses_among_all_cells(monkeypatch):
    """Two cells of two lambdas; rmse (criterion, split, lambda)."""
    rmse = {
        32: [[[3.0, 9.0], [4.0, 2.0]], [[5.0, 6.0], [1.5, 7.0]]],
        64: [[[8.0, 3.5], [2.5, 2.6]], [[4.0, 3.0], [1.6, 1.7]]],
    }
    found = {}
    for M, values in rmse.items():
        scores = torch.tensor(values, dtype=torch.float64)
        y = torch.linspace(-3, 3, 10, dtype=torch.float64).expand(2, 2, 2, 10)
        epoch = torch.arange(8).view(2, 2, 2) + M
        parts = {"mean": torch.zeros_like(y), "variance": torch.zeros_like(y), "y": y}
        result = dict(rmse=scores, epoch=epoch, stopped=epoch[0], winner=scores.argmin(2), **parts)
        found[str(M)] = result
    grids = {str(M): (Configuration(0.1, M), Configuration(0.2, M)) for M in rmse}
    monkeypatch.setattr(search, "cells", lambda *_: grids)
    monkeypatch.setattr(search, "search_cell", lambda study, family, cell, grid: found[cell])
    study = types.SimpleNamespace(profile=TINY, dataset="boston")
    chosen = {
        criterion: [
            (choice.configuration.weight_decay, choice.configuration.batch_size, choice.epochs)
            for choice in search.choose(study, "bn", criterion)
        ]
        for criterion in ("mc", "plain")
    }
    assert chosen == {"mc": [(0.1, 32, 32), (0.2, 32, 35)], "plain": [(0.2, 64, 69), (0.1, 32, 38)]}


def test_predictions_give_the_recorded_scores(whole):
    for r in read(whole / "records.jsonl"):
        if r["kind"] == "test":
            arrays = np.load(whole / "predictions" / f"boston-{r['method']}-{r['split']}.npz")
            error, std = (arrays[name][r["seed"] - 1].astype(float) for name in ("error", "std"))
            assert arrays["error"].dtype == np.float16
            assert np.sqrt((error**2).mean()) == pytest.approx(r["rmse"], rel=1e-2)
            crps = mcbn.metrics.crps_gaussian(np.zeros(101), std**2, error).mean()
            assert float(crps) == pytest.approx(r["crps"], rel=1e-2)
            assert arrays["constant_std"][r["seed"] - 1] == pytest.approx(r["tau_constant"] ** -0.5)


def test_networks_come_back_as_the_plain_networks_they_were(whole):
    loaded = load_networks(whole / "networks" / "boston.safetensors")
    data = load("boston")
    assert [(info["split"], info["seed"]) for _, info in loaded] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for network, info in loaded:
        train, test = split(506, info["split"])
        assert torch.equal(info["train"], train)
        # Statistics of the whole training part: MCBN with one batch of all rows is the plain network.
        with pytest.warns(UserWarning, match="takes in all 405 examples"):
            bayes = mcbn.MCBN(network, "regression").fit(data.x[train].float(), n_samples=1, batch_size=len(train))
        assert torch.allclose(bayes.predict(data.x[test].float()).mean, network(data.x[test].float()), atol=1e-3)
    records = {(r["split"], r["seed"]): r for r in CellJournal(whole, TINY.settings()).find(kind="test", method="mcbn")}
    for network, info in loaded:
        r = records[info["split"], info["seed"]]
        assert info["config"] == r["config"]
        assert info["tau"] == r["tau"]
        train, test = split(506, info["split"])
        M = min(info["config"]["batch_size"], len(train))
        bayes = mcbn.MCBN(network, "regression").fit(data.x[train].float(), n_samples=200, batch_size=M)
        rmse = mcbn.metrics.rmse(bayes.predict(data.x[test].float()).mean, data.y[test].float())
        assert float(rmse) == pytest.approx(r["rmse"], rel=0.1)  # other draws


def test_fold_networks_are_those_that_were_validated(whole):
    loaded = load_networks(whole / "networks" / "boston_folds.safetensors")
    assert [(info["split"], info["fold"]) for _, info in loaded] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    data, records = load("boston"), read(whole / "records.jsonl")
    for s in (1, 2):
        chosen = next(r for r in records if (r.get("method"), r["split"]) == ("mcbn", s))["config"]
        errors = []
        for network, info in loaded:
            if info["split"] == s:
                fold = folds(split(506, s).train, 2)[info["fold"]]
                assert torch.equal(info["train"], fold.train)
                bayes = mcbn.MCBN(network, "regression")
                bayes.fit(data.x[fold.train].float(), n_samples=100, batch_size=chosen["batch_size"])
                mean = bayes.predict(data.x[fold.validation].float()).mean
                errors.append(float(mcbn.metrics.rmse(mean, data.y[fold.validation].float())))
        selections = [r for r in records if r["kind"] == "selection" and r["family"] == "bn" and r["split"] == s]
        best = min(min(r["rmse_mc"]) for r in selections)
        assert sum(errors) / 2 == pytest.approx(best, rel=0.03)  # other draws


def test_foreign_files_are_refused(tmp_path, whole):
    with pytest.raises(MCBNError, match=r"there is no file .*mcbn reproduce regression"):
        load_networks(tmp_path / "missing")
    with pytest.raises(MCBNError, match="no networks of a study"):
        load_networks(whole / "cells" / "boston-bn-64.safetensors")


def test_a_finished_study_is_not_repeated(whole, monkeypatch):
    before = (whole / "records.jsonl").read_bytes()
    monkeypatch.setattr("mcbn_study.regression.train.Trainer.advance", lambda *_: pytest.fail("trained again"))
    regression.run(TINY, whole, methods=OURS)
    assert (whole / "records.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before the cell", "between cell and records"])
def test_interrupted_and_started_again_it_gives_the_same(whole, tmp_path, monkeypatch, where):
    name = "finish" if where == "before the cell" else "append"
    original = getattr(CellJournal, name)
    starts = 0

    def fail_the_second_time(self, *arguments):
        nonlocal passed
        arguments = [*arguments[:-1], list(arguments[-1])]
        passed += not all(self.has(**record) for record in arguments[-1])
        if passed > 1:
            raise KeyboardInterrupt
        return original(self, *arguments)

    for _ in range(20):
        passed = 0
        monkeypatch.setattr(CellJournal, name, fail_the_second_time)
        starts += 1
        try:
            regression.run(TINY, tmp_path, methods=OURS)
            break
        except KeyboardInterrupt:
            continue
        finally:
            monkeypatch.undo()
    assert starts > 5
    assert stripped(read(tmp_path / "records.jsonl")) == stripped(read(whole / "records.jsonl"))
    assert predictions(tmp_path / "predictions") == predictions(whole / "predictions")


def test_one_method_alone_gives_what_it_gives_in_company(whole, tmp_path):
    regression.run(TINY, tmp_path, methods=("ensemble",))
    store = CellJournal(whole, TINY.settings())
    alone = [r for r in read(tmp_path / "records.jsonl") if r["kind"] == "test"]
    assert stripped(alone) == stripped(store.find(kind="test", method="ensemble"))


def test_sensitivity_varies_batch_size_and_passes(whole, tmp_path):
    profile = replace(TINY, sensitivity_splits=(1, 2))
    store = sensitivity.run(profile, tmp_path / "s", regression=whole)
    runs = {(r["split"], r["seed"], r["batch_size"], r["n_samples"]) for r in store.records}
    assert runs == set(itertools.product((1, 2), (1, 2), (32,), (10,))) | set(
        itertools.product((1, 2), (1, 2), (128,), (10, 5))
    )
    assert len(store.records) == len(runs)
    chosen = {r["split"]: r["config"]["weight_decay"] for r in CellJournal(whole, TINY.settings()).find(method="mcbn")}
    assert all(r["config"]["weight_decay"] == chosen[r["split"]] for r in store.records)
    before = store.path.read_bytes()
    sensitivity.run(profile, tmp_path / "s", regression=whole)
    assert store.path.read_bytes() == before


@pytest.mark.slow
def test_sensitivity_at_the_chosen_batch_size_repeats_the_regression_study(tmp_path):
    T = {"n_samples": 12, "selection_samples": 12, "sensitivity_samples": 12, "sensitivity_pass_counts": (12,)}
    grid = {"weight_decays": (1e-3, 1e-6), "evaluate_every": 5, "patience": 3, "max_epochs": 120, "seeds": (1,)}
    splits = {
        "splits": (1, 2, 3),
        "sensitivity_splits": (1, 2, 3),
        "sensitivity_batch_sizes": (16,),
        "batch_sizes": (16,),
    }
    profile = replace(TINY, **T, **grid, **splits)
    study = regression.run(profile, tmp_path / "r", methods=("mcbn",))
    varied = sensitivity.run(profile, tmp_path / "s", regression=tmp_path / "r")
    assert any(r["epoch_mc"] != r["epoch_plain"] for r in study.find(kind="selection")), "criteria should differ"
    for r in study.find(method="mcbn"):
        (same,) = varied.find(split=r["split"], seed=r["seed"], batch_size=r["config"]["batch_size"])
        assert same["config"] == r["config"]
        for name in ("tau", "tau_constant", "rmse", "crps", "pll", "crps_normalized", "pll_normalized"):
            assert same[name] == pytest.approx(r[name], rel=1e-4, abs=1e-4)  # stacks of other sizes


def test_another_seed_of_the_search_trains_other_fold_networks(whole, tmp_path):
    other = replace(TINY, search_seed=2)
    again = regression.run(other, tmp_path, methods=["mcbn"])
    found = [r["rmse_mc"] for r in read(whole / "records.jsonl") if r["kind"] == "selection" and r["family"] == "bn"]
    assert found != [r["rmse_mc"] for r in again.find(kind="selection")]
    assert len(found) == len(again.find(kind="selection"))
    assert other.hash != TINY.hash
    assert PAPER.hash == "f4e97319e54a"  # the committed records carry it


def test_sensitivity_needs_the_regression_study(tmp_path):
    with pytest.raises(MCBNError, match=r"no MCBN runs of boston on split 1.*mcbn reproduce regression"):
        sensitivity.run(TINY, tmp_path / "s", regression=tmp_path / "none")


def test_sensitivity_covers_what_the_paper_prints():
    assert sensitivity.batch_sizes(PAPER, "boston") == [8, 16, 32, 64, 128, 256]
    assert sensitivity.batch_sizes(PAPER, "yacht") == [8, 16, 32, 64, 128]
    assert sensitivity.batch_sizes(PAPER, "concrete")[-1] == 1024
    assert sensitivity.pass_counts(PAPER, 128) == [50, 100, 250]
    assert sensitivity.pass_counts(PAPER, 64) == [100]


def test_paper_profile_is_the_protocol():
    assert PAPER.batch_sizes_of("energy") == (32, 64, 128, 256, 512)
    assert PAPER.batch_sizes_of("yacht") == (32, 64, 128)
    assert PAPER.batch_sizes_of("concrete") == (32, 64, 128, 256, 512)
    assert PAPER.batch_sizes_of("protein") == (32, 64, 128, 256, 512, 1024)
    assert PAPER.weight_decays == pytest.approx([10**-k for k in range(1, 16)])
    assert (len(PAPER.splits), len(PAPER.seeds), PAPER.n_samples, PAPER.max_epochs) == (5, 5, 500, 2000)
    assert set(TAU_RANGES) == set(PAPER.datasets)


# --- MNF --------------------------------------------------------------------------------------------------


def test_mnf_runs_are_recorded_split_by_split(tmp_path, monkeypatch):
    calls = []

    def search_mnf(dataset, splits, profile, device):
        calls.append((dataset, list(splits), profile.patience_epochs))
        return [Choice(Configuration(None, 100), 7, 2.0, 1 / 9) for _ in splits]

    def draw(dataset, splits, epochs, profile, device):
        assert epochs == [7] * len(splits)
        T = profile.n_samples
        return torch.arange(len(splits) * len(profile.seeds) * T * 101).view(-1, T, 101).float()

    monkeypatch.setattr(regression.mnf, "search", search_mnf)
    monkeypatch.setattr(regression.mnf, "train_and_draw", draw)
    journal = regression.run(TINY, tmp_path, methods=("mnf",))
    assert [(r["split"], r["seed"]) for r in journal.find(method="mnf")] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for r in journal.records:
        assert set(r) == set(KEYS.split())
        assert r["config"] == {"weight_decay": None, "batch_size": 100, "dropout": None, "epochs": 7}
    arrays = np.load(tmp_path / "predictions" / "boston-mnf-2.npz")
    assert arrays["error"].shape == arrays["std"].shape == (2, 101)
    assert arrays["constant_std"].tolist() == [3.0, 3.0]
    lines = journal.path.read_text().splitlines(keepends=True)
    journal.path.write_text("".join(lines[:2]))
    regression.run(TINY, tmp_path, methods=("mnf",))
    assert calls == [("boston", [1, 2], 20)] * 2
    assert journal.path.read_text().splitlines(keepends=True)[:2] == lines[:2]
