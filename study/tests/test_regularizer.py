"""Training with the KL regulariser, small: the loop is that of the paper, choices come from validation alone."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcbn import data, metrics
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn_study import regularizer
from mcbn_study.journal import read
from mcbn_study.regularizer import UNIT_PRIOR, Experiment, Partition, scores, training_options
from mcbn_study.theory import implied_prior, kl_regularizer
from untouched import generators

SMALL = Experiment(
    splits=(1,),
    seeds=(0, 1),
    checkpoints=(1, 2),
    n_samples=10,
    grid={
        "none": ({},),
        "weight decay": ({"weight_decay": 1e-2}, {"weight_decay": 1e-4}),
        "KL, implied prior": ({"weight_decay": 1e-2, "tau": 10.0},),
        "KL, fixed prior": ({"tau": 10.0},),
    },
)


def boston(n: int = 200) -> tuple[Tensor, Tensor]:
    x, y = data.load("boston")
    return x[:n].float(), y[:n].float()


def part(n: int = 200) -> Partition:
    x, y = boston(n)
    return Partition(x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :], (0.01, 10.0))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_penalty_of_half_the_squares_is_weight_decay(decay: float) -> None:
    x, y = boston()
    networks = [Standardized(RegressionMLP(13, seed=3), x, y) for _ in range(2)]

    def penalty(network: nn.Module, _: Tensor) -> Tensor:
        return 0.5 * decay * torch.stack([p.square().sum() for p in network.parameters() if p.ndim > 1]).sum()

    options = training_options("weight decay" if decay else "none", {"weight_decay": decay}, networks[0], len(x))
    train_regression(networks[0], x, y, batch_size=64, epochs=3, seed=5, **options)
    train_regression(networks[1], x, y, batch_size=64, epochs=3, seed=5, weight_decay=0.0, penalty=penalty)
    for a, b in zip(networks[0].state_dict().values(), networks[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["KL, implied prior", "KL, fixed prior"])
def test_penalty_is_the_divergence_over_n_tau(method: str) -> None:
    x, _ = boston()
    network = RegressionMLP(13, seed=0)
    setting = {"weight_decay": 0.01, "tau": 4.0}
    prior = UNIT_PRIOR if method == "KL, fixed prior" else implied_prior(network, 0.01, 300, 4.0)
    options = training_options(method, setting, network, 300)
    assert options["weight_decay"] == 0
    found = options["penalty"](network, x[:64])
    torch.testing.assert_close(found, kl_regularizer(network, prior, x[:64]) / (300 * 4.0))


def test_scores_are_those_of_the_protocol() -> None:
    p = part()
    ((_, bayes),) = SMALL._trained(p, "none", {}, 0, (1,))
    bayes.tau = 0.5
    found = scores(bayes, p.x_score, p.y_score)
    samples = bayes.sample(p.x_score)
    mean, variance = samples.mean(0), samples.var(0, correction=0) + 2
    assert found["rmse"] == pytest.approx((mean - p.y_score).square().mean().sqrt().item(), rel=1e-5)
    assert found["crps"] == pytest.approx(metrics.crps_gaussian(mean, variance, p.y_score).mean().item(), rel=1e-5)
    mixture = torch.distributions.Normal(samples, 2**0.5).log_prob(p.y_score).logsumexp(0) - torch.tensor(10.0).log()
    assert found["pll"] == pytest.approx(mixture.mean().item(), rel=1e-4)


def test_choice_is_the_least_validation_rmse_and_tau_keeps_its_range() -> None:
    choice, rows = SMALL.select(part()._replace(tau_range=(0.2, 0.21)), "weight decay")
    assert len(rows) == 4
    best = min(rows, key=lambda row: row["rmse"])
    assert (choice["setting"], choice["epochs"]) == (best["setting"], best["epochs"])
    assert 0.2 <= choice["tau"] <= 0.21


def test_test_targets_do_not_enter_training() -> None:
    p = part()
    choice = {"setting": {"weight_decay": 1e-2}, "epochs": 2, "tau": 0.1}
    a = SMALL.test(p, "weight decay", choice, 0)
    b = SMALL.test(p._replace(y_score=p.y_score + 5), "weight decay", choice, 0)
    assert a["rmse"] != b["rmse"]
    assert (a["tau"], a["epochs"], a["setting"]) == (b["tau"], b["epochs"], b["setting"])


@pytest.mark.slow
def test_selection_sees_the_training_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil the test targets: everything of the validation stage stays."""
    honest = regularizer._run_split(SMALL, "boston", 1)
    x, y = data.load("boston")
    y = y.clone()
    y[data.split(len(y), 1).test] += 100
    monkeypatch.setattr(regularizer.data, "load", lambda _: data.Regression(x, y))
    spoilt = regularizer._run_split(SMALL, "boston", 1)
    for a, b in zip(honest, spoilt, strict=True):
        if a["stage"] == "validation":
            assert {**a, "seconds": 0} == {**b, "seconds": 0}
        else:
            assert (a["setting"], a["epochs"], a["tau"]) == (b["setting"], b["epochs"], b["tau"])
            assert b["rmse"] > a["rmse"] + 50


@pytest.mark.slow
def test_a_run_appends_records_and_writes_tables_from_them(tmp_path: Path) -> None:
    before = generators()
    regularizer.run(tmp_path, datasets=["boston"], experiment=SMALL)
    assert generators() == before
    records = read(tmp_path / "records.jsonl")
    tests = [r for r in records if r["stage"] == "test"]
    assert len(tests) == 4 * 2
    assert len(records) == 8 + 2 * 5
    assert {"seconds", "device", "commit", "config_hash"} <= set(records[0])
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "table.csv").read_text().splitlines())}
    for method, row in rows.items():
        own = {r["seed"]: r["crps"] for r in tests if r["method"] == method}
        base = {r["seed"]: r["crps"] for r in tests if r["method"] == "weight decay"}
        assert float(row["CRPS"]) == pytest.approx(sum(own.values()) / 2, abs=1e-5)
        difference = [own[seed] - base[seed] for seed in own]
        assert float(row["CRPS -"]) == pytest.approx(sum(difference) / 2, abs=1e-5)
        assert float(row["CRPS - se"]) == pytest.approx(abs(difference[0] - difference[1]) / 2, abs=1e-5)
    text = (tmp_path / "table.md").read_text()
    assert text.count(" boston |") == 4
    first = (tmp_path / "records.jsonl").read_text()
    regularizer.run(tmp_path, datasets=["boston"], experiment=SMALL)  # all of it is on record
    assert (tmp_path / "records.jsonl").read_text() == first
    assert json.loads(first.splitlines()[0])["dataset"] == "boston"
    regularizer.run(tmp_path, datasets=["boston"], experiment=SMALL._replace(seeds=(0, 1, 2)))
    assert {r["seed"] for r in read(tmp_path / "records.jsonl") if r["stage"] == "test"} == {0, 1, 2}
