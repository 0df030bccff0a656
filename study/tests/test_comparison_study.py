"""What `compare` says beside the studies: records, going on, and the page's arithmetic."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from mcbn import algorithm, data
from mcbn_study import comparison
from mcbn_study.cifar10.profile import Split
from mcbn_study.cifar10.train import save_network
from mcbn_study.data.cifar import Images
from mcbn_study.journal import RECORDS, extend, read
from mcbn_study.networks import CifarResNet
from mcbn_study.regression.train import load_networks


def told(kind: str, losses: dict[str, float], **place: object) -> dict[str, object]:
    return {"kind": kind, **place, "rows": [{"method": m, "loss": v} for m, v in losses.items()], "advice": "Take it."}


def test_the_page_sets_what_is_told_beside_what_is_on_record(tmp_path: Path) -> None:
    here, regression = tmp_path / "comparison", tmp_path / "regression"
    classes = dict.fromkeys(("plain", "temperature", "MCBN, linear", "MCBN, sampled"), 0.3) | {
        "MCBN, tuned M = 64": 0.2
    }
    before = dict.fromkeys(classes, 9.0)  # measured again since
    extend(here / RECORDS, [told("classes", losses, seed=seed) for losses in (before, classes) for seed in (1, 2)])
    known = {("plain", False): 0.27} | {(method, True): 0.25 for method in comparison.STUDIED.values()}
    scores = [{"method": m, "tempered": t, "data": "test", "kind": "score", "nll": v} for (m, t), v in known.items()]
    extend(tmp_path / "alternatives" / RECORDS, [score | {"seed": seed} for score in scores for seed in (1, 2, 3)])
    values = {comparison.SAMPLED: 0.9, comparison.CONSTANT: 1.0}
    for dataset in comparison.DATASETS:
        extend(here / RECORDS, [told("values", values, dataset=dataset, split=s, fold=0) for s in (1, 2)])
        run = {"kind": "test", "dataset": dataset, "method": "mcbn", "crps": 1.6, "crps_constant": 2.0}
        extend(regression / RECORDS, [run, run | {"crps": 1.8}, run | {"method": "bn"}])
    page = comparison.report(here, regression=regression).read_text()
    lines = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("|")}
    cells = [cell.strip() for cell in lines["MCBN, tuned M"].split("|")][2:5]
    assert cells == ["-0.1000 ± 0.0000", "-0.0200 ± 0.0000", "-0.0800 ± 0.0000"]
    assert page.count("- Take it.") == 2
    assert "0.900" in lines["yacht"]
    assert "0.850 ± 0.050" in lines["yacht"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mcbn")  # small networks, hardly trained
def test_networks_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = Path(__file__).parents[2] / "results" / "regression" / "networks" / "yacht_folds.safetensors"
    if not networks.is_file():
        pytest.skip("no results beside these tests")
    monkeypatch.setattr(comparison, "DATASETS", ("yacht",))
    load = comparison.load_networks
    monkeypatch.setattr(comparison, "load_networks", lambda path: load(path)[:1])
    (tmp_path / "networks").mkdir()
    shutil.copy(networks, tmp_path / "networks")
    (tmp_path / "cifar").mkdir()
    save_network(CifarResNet(8, seed=1).eval(), tmp_path / "cifar" / "resnet8.safetensors", {"seed": 1})
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator)
    split = Split(*(Images(x, torch.arange(40) % 10) for _ in range(3)))
    monkeypatch.setattr(comparison, "report", lambda *_, **__: None)
    for _ in range(2):
        comparison.run(tmp_path / "out", images=split, networks=tmp_path / "cifar", regression=tmp_path)
    assert [r["kind"] for r in read(tmp_path / "out" / RECORDS)] == ["values", "classes"]


def crps(mean: np.ndarray, variance: np.ndarray, y: np.ndarray) -> float:
    std = np.sqrt(variance)
    z = (y - mean) / std
    return float((std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5)).mean())


def best_noise(mean: np.ndarray, variance: np.ndarray, y: np.ndarray) -> float:
    """Variance of the noise that gives the least CRPS: a grid, then a search about its best."""
    grid = np.linspace(-12, 6, 300)
    best = grid[np.argmin([crps(mean, variance + np.exp(log), y) for log in grid])]
    found = minimize_scalar(
        lambda log: crps(mean, variance + np.exp(log), y), bounds=(best - 0.1, best + 0.1), method="bounded"
    )
    return float(np.exp(found.x))


@pytest.mark.slow
def test_compare_gives_on_networks_of_folds_what_the_loop_of_algorithm_1_gives() -> None:
    records = [
        r for r in read(Path("results/comparison") / RECORDS) if r.get("dataset") == "energy" and r["split"] == 1
    ]
    told = [comparison._loss(r, comparison.SAMPLED) / comparison._loss(r, comparison.CONSTANT) for r in records]
    looped = []
    for network, info in list(load_networks(Path("results/regression/networks/energy_folds.safetensors")))[:5]:
        x, y = (values.float() for values in data.load("energy"))
        part, train = data.split(len(x), info["split"]), x[info["train"]]
        held = sorted(set(part.train.tolist()) - set(info["train"].tolist()))
        rows = [torch.randperm(len(train))[: info["config"]["batch_size"]] for _ in range(500)]
        samples = (
            algorithm.sample(network, [train[r] for r in rows], torch.cat([x[held], x[part.test]])).double().numpy()
        )
        mean, variance = (moment.reshape(-1) for moment in (samples.mean(0), samples.var(0)))
        y_held, y_test, n = y[held].double().numpy().ravel(), y[part.test].double().numpy().ravel(), len(held)
        losses = []
        for spread in (variance, 0 * variance):
            noise = best_noise(mean[:n], spread[:n], y_held)
            losses.append(crps(mean[n:], spread[n:] + noise, y_test))
        looped.append(losses[0] / losses[1])
    assert len(told) == len(looped)
    assert np.mean(looped) == pytest.approx(np.mean(told), abs=0.002)
