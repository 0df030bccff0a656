"""What `compare` says beside the studies: records, going on, and the page's arithmetic."""

import shutil
from pathlib import Path

import pytest
import torch

from mcbn_study import comparison
from mcbn_study.cifar10.profile import Split
from mcbn_study.cifar10.train import save_network
from mcbn_study.data.cifar import Images
from mcbn_study.journal import RECORDS, extend, read
from mcbn_study.networks import CifarResNet


def told(kind: str, losses: dict[str, float], **place: object) -> dict[str, object]:
    return {"kind": kind, **place, "rows": [{"method": m, "loss": v} for m, v in losses.items()], "advice": "Take it."}


def test_the_page_sets_what_is_told_beside_what_is_on_record(tmp_path: Path) -> None:
    here, regression = tmp_path / "comparison", tmp_path / "regression"
    classes = dict.fromkeys(("plain", "temperature", "MCBN, linear", "MCBN, sampled"), 0.3) | {
        "MCBN, tuned M = 64": 0.2
    }
    extend(here / RECORDS, [told("classes", classes, seed=seed) for seed in (1, 2)])
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
