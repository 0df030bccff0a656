"""The study of coverage: what it counts, what it calls near a promise, its records and its table."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mcbn import conformal
from mcbn_study.cifar10.profile import Split
from mcbn_study.cifar10.train import save_network
from mcbn_study.coverage import run as coverage
from mcbn_study.data.cifar import Images
from mcbn_study.networks import CifarResNet

SMALL = {"splits": [1], "seeds": [1, 2], "steps": 20, "n_samples": 8}


def test_records_table_and_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = coverage.run(tmp_path, datasets=["boston"], **SMALL)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["kind"] for r in records] == ["coverage", "coverage", "ensemble", "ensemble"]
    for record in records[:2]:
        for counted in record["methods"].values():
            assert counted["inside"] == sorted(counted["inside"])
            assert counted["width"] == sorted(counted["width"])
    monkeypatch.setattr(coverage, "measure", None)  # nothing is measured again
    coverage.run(tmp_path, datasets=["boston"], **SMALL)
    page = coverage.report(tmp_path).read_text()
    row = next(line for line in page.splitlines() if "boston" in line)
    assert [cell.strip() for cell in row.split("|")][2:4] == ["2", "101"]
    assert "CIFAR-10" not in page


def one_run(inside: list[float], split: int) -> dict[str, Any]:
    counted = {"inside": inside, "width": [1.0] * 5}
    methods = dict.fromkeys(coverage.INTERVALS, counted)
    facts = {"n_calibration": 100, "n_test": 50, "varied": 0.1, "exact": [1.0] * 5}
    return {"dataset": "boston", "split": split, "methods": methods, **facts}


def test_a_known_spread_is_wider_than_one_width_for_half_of_the_targets_and_narrower_for_most() -> None:
    std = torch.exp(torch.randn(400, generator=torch.Generator().manual_seed(0)))
    targets = std * torch.randn(5000, 400, generator=torch.Generator().manual_seed(1))  # each Gaussian, known spread
    for level, within in ((0.5, 0.02), (0.9, 0.02), (0.99, 0.04)):
        one = targets.abs().flatten().quantile(level)
        known = (targets.abs() / std).flatten().quantile(level) * std.mean()
        assert coverage.exact_width(std, level) == pytest.approx(float(known / one), rel=within)
    assert coverage.exact_width(std, 0.5) > 1.2 > 0.8 > coverage.exact_width(std, 0.99)
    assert coverage.exact_width(torch.full((5,), 3.0), 0.9) == pytest.approx(1)


def test_shares_far_from_the_promise_are_marked() -> None:
    ensembles = [{"method": name, "crps": 1.0} for name in coverage.ENSEMBLES]
    near = [0.53, 0.8, 0.9, 0.95, 0.99]
    assert coverage.summarize([one_run(near, s) for s in range(5)], ensembles)["kept"] == [True] * 5
    far = [0.62, 0.8, 0.83, 0.95, 0.99]
    assert coverage.summarize([one_run(far, s) for s in range(5)], ensembles)["kept"] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert coverage.summarize([one_run(far, 1)] * 5, ensembles)["kept"][0]  # seeds of one split count as one


def labelled(n: int = 400, K: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(n, K, generator=generator, dtype=torch.float64)).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def test_sets_and_risks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "HALVES", 20)
    monkeypatch.setattr(coverage, "RESAMPLINGS", 50)
    monkeypatch.setattr(coverage, "RISK", 0.2)
    probs, y = labelled(2000)
    plain = coverage.count_sets(probs, y, **coverage.SETS["aps"])
    by_class = coverage.count_sets(probs, y, **coverage.SETS["aps by class"])
    assert 0.88 < plain["inside"] < 0.96
    assert by_class["inside"] == pytest.approx(sum(by_class["classes"]) / 4, abs=0.01)
    assert min(by_class["classes"]) > coverage.SET_LEVEL - 0.01
    assert 1 <= plain["size"] <= 4
    everything = conformal.set_scores(probs).gather(1, y[:, None]).double()
    assert -1 < everything.mean() < 0
    risk = coverage.count_risk(probs, y)
    assert risk["exceeded"] <= 0.1
    assert 0 < risk["kept"] < 1


def test_randomised_sets_hold_no_more_than_promised_where_the_first_label_alone_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coverage, "HALVES", 20)
    first = torch.linspace(0.9, 0.99, 4000, dtype=torch.float64)
    probs, y = torch.stack([first, 1 - first], 1), (torch.arange(4000) % 50 == 0).long()  # right in 49 of 50
    firsts = coverage.count_sets(probs, y, **coverage.SETS["aps by class"])
    assert firsts["classes"][0] == 1
    drawn = coverage.count_sets(probs, y, **coverage.SETS["aps by class, randomised"])
    assert drawn["classes"][0] == pytest.approx(coverage.SET_LEVEL, abs=0.01)


def test_sets_of_images_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HALVES": 2, "RESAMPLINGS": 2}.items():
        monkeypatch.setattr(coverage, name, value)
    generator = torch.Generator().manual_seed(1)
    split = Split(*(Images(torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), labels(n)) for n in (48, 20, 500)))
    for seed in (1, 2):
        network = CifarResNet(8, seed=seed)
        with torch.no_grad():
            network.train()(torch.randn(32, 3, 32, 32, generator=generator))
        save_network(network.eval(), tmp_path / "networks" / f"resnet8-{seed}.safetensors", {"seed": seed})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = coverage.run_cifar(tmp_path / "networks", tmp_path, n_samples=2, images=split)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["method"], r["seed"]) for r in records] == [
        *(("plain", 1), ("mcbn", 1), ("plain", 2), ("mcbn", 2), ("ensemble", None))
    ]
    page = coverage.report(tmp_path).read_text()
    assert page.count("aps by class") == 2 * 5
    assert page.count("aps by class, randomised") == 5


def labels(n: int) -> torch.Tensor:
    return torch.arange(n) % 10
