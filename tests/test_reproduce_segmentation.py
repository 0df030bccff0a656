"""The segmentation study: scores against loops, the paper's estimator by hand, training that resumes, a tiny run."""

import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from kinds import norms_in_training
from mcbn import MCBNError, metrics, records
from mcbn.cli import app
from mcbn.data.scenes import CAMVID, Scenes
from mcbn.networks.segnet import SegNet
from mcbn.report import segmentation as report
from mcbn.reproduce.segmentation import augmentation, estimators, saved, scores, study, training
from mcbn.reproduce.segmentation.profiles import Profile, find_profile
from scene_files import write_part
from untouched import generators, untouched

K, VOID = 4, 9
TINY = Profile(
    "tiny",
    "camvid",
    "test",
    batch_size=3,
    epochs=3,
    widths=(4, 4, 4, 4, 4),
    n_samples=3,
    memory_samples=(2, 4),
    check_every=2,
    save_every=1,
    tuned_batch_sizes=(2, 3),
    examples=2,
    size=(36, 48),
)
UNSETTLED = pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics disagree")  # trained for a few steps


def scenes(n: int = 6, size: tuple[int, int] = (36, 48), seed: int = 0) -> Scenes:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 11, (n, size[0] // 6, size[1] // 6), generator=generator)
    y = y.repeat_interleave(6, 1).repeat_interleave(6, 2)
    noise = torch.randint(0, 40, (n, 3, *size), generator=generator)
    x = (y.unsqueeze(1) * 18 + noise).byte()
    return Scenes(x, y.byte(), tuple(f"s{i}" for i in range(n)), CAMVID.classes, CAMVID.colours, CAMVID.void)


def random_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (N, K, H, W), an uncertainty of few bits, so that no histogram can blur it, and the truth."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(3, K, 11, 13, generator=generator), 1)
    uncertainty = torch.randint(0, 40, (3, 11, 13), generator=generator) / 64
    y = torch.randint(0, K, (3, 3, 4), generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :11, :13]
    y = torch.cat([y, y[:, :, :1].expand(-1, -1, 13 - y.shape[2])], 2)
    y[0, :3, :5] = VOID
    return probs, uncertainty, y.byte()


def scored(*cases: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    found = scores.PixelScores([f"c{k}" for k in range(K)], VOID)
    for probs, uncertainty, y in cases:
        found.add(probs, {"map": uncertainty}, y)
    return found.result()


def test_iou_and_accuracy_are_those_of_a_loop() -> None:
    probs, uncertainty, y = random_case()
    found = scored((probs, uncertainty, y))
    label = probs.argmax(1)
    expected, hits, n = [], 0, 0
    for k in range(K):
        both = either = 0
        for a, b in zip(label.flatten().tolist(), y.flatten().tolist(), strict=True):
            if b != VOID:
                both += a == k and b == k
                either += a == k or b == k
        expected.append(100 * both / either)
        assert found[f"iou_c{k}"] == pytest.approx(expected[-1])
    for a, b in zip(label.flatten().tolist(), y.flatten().tolist(), strict=True):
        hits, n = hits + (b != VOID and a == b), n + (b != VOID)
    assert found["miou"] == pytest.approx(sum(expected) / K)
    assert found["pixel_accuracy"] == pytest.approx(100 * hits / n)


def test_a_class_that_never_occurs_does_not_count() -> None:
    counts = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    assert math.isnan(scores.iou(counts)[2])
    assert scores.mean_iou(counts) == pytest.approx((75 + 80) / 2)


def test_nll_ece_and_auroc_are_those_of_the_metrics_on_valid_pixels() -> None:
    probs, uncertainty, y = random_case()
    found = scored((probs, uncertainty, y))
    valid = y != VOID
    rows = probs.movedim(1, -1)[valid].double()  # (n, K)
    truth = y[valid].long()
    wrong = rows.argmax(1) != truth
    assert found["nll"] == pytest.approx(metrics.nll(rows, truth).item(), rel=1e-6)
    assert found["ece"] == pytest.approx(metrics.ece(rows, truth).item(), rel=1e-5)
    assert found["error_auroc_map"] == pytest.approx(metrics.auroc(uncertainty[valid].double(), wrong).item())


def test_refusal_is_that_of_sorting_with_ties_shared() -> None:
    probs, uncertainty, y = random_case()
    found = scored((probs, uncertainty, y))
    valid = y != VOID
    right = (probs.argmax(1) == y)[valid].double()
    values = uncertainty[valid]
    n = len(values)
    assert found["accuracy_refused_0_map"] == pytest.approx(found["pixel_accuracy"])
    for percent in scores.REFUSED:
        left, hits = (1 - percent / 100) * n, 0.0
        for value in values.unique().tolist():  # ascending
            own = right[values == value]
            taken = min(left, len(own))
            hits, left = hits + taken * own.mean().item(), left - taken
        assert found[f"accuracy_refused_{percent}_map"] == pytest.approx(100 * hits / ((1 - percent / 100) * n))


def test_boundary_is_that_of_a_loop_and_gives_the_ratio() -> None:
    probs, uncertainty, y = random_case()
    N, H, W = y.shape
    expected = torch.zeros_like(y, dtype=torch.bool)
    for n in range(N):
        for i in range(H):
            for j in range(W):
                window = y[n, max(0, i - 2) : i + 3, max(0, j - 2) : j + 3]
                expected[n, i, j] = bool((window != y[n, i, j]).any())
    near = scores.boundary(y)
    assert torch.equal(near, expected)
    valid = y != VOID
    ratio = uncertainty[near & valid].mean() / uncertainty[~near & valid].mean()
    assert scored((probs, uncertainty, y))["boundary_ratio_map"] == pytest.approx(ratio.item(), rel=1e-5)


def test_images_added_one_by_one_score_like_all_at_once() -> None:
    probs, uncertainty, y = random_case()
    parts = [(probs[i : i + 1], uncertainty[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    assert scored(*parts) == pytest.approx(scored((probs, uncertainty, y)))


def test_histograms_keep_the_order_of_any_positive_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.exp(40 * torch.rand(1, 60, 60, generator=generator) - 35)  # 1e-15 to 1e2
    values[0, 0, :3] = torch.tensor([0.0, -0.0, 1e-40])
    probs = torch.softmax(torch.randn(1, K, 60, 60, generator=generator), 1)
    y = torch.randint(0, K, (1, 60, 60), generator=generator).byte()
    exact = metrics.auroc(values.double(), probs.argmax(1) != y).item()
    assert scored((probs, values, y))["error_auroc_map"] == pytest.approx(exact, abs=1e-3)


def test_scores_that_do_not_exist_are_nan() -> None:
    probs, uncertainty, _ = random_case()
    found = scored((probs, uncertainty, probs.argmax(1).fill_(2)))  # one label: no boundary
    assert math.isnan(found["boundary_ratio_map"])
    found = scored((probs, uncertainty, probs.argmax(1)))  # no error
    assert math.isnan(found["error_auroc_map"])
    assert found["miou"] == 100


def test_a_map_that_is_not_finite_is_refused() -> None:
    probs, uncertainty, y = random_case()
    uncertainty[0, 0, 0] = math.nan
    with pytest.raises(MCBNError, match="map 'map' is not finite"):
        scored((probs, uncertainty, y))


def segnet(classes: int = 11) -> SegNet:
    network = SegNet(classes, widths=(4, 4, 4, 4, 4), seed=1).double()
    data = augmentation.normalize(scenes(8).x).double()
    network.train()
    with torch.no_grad():
        for _ in range(30):
            network(data)
    return network.eval()


def test_query_inside_is_a_training_pass_of_the_first_two_layers() -> None:
    network, train, query = segnet(), scenes(5, seed=1).x, scenes(2, seed=2).x
    M, T, seed = 4, 3, 7
    with untouched(network):
        found = estimators.query_inside(network, train, batch_size=M, n_samples=T, seed=seed)(query)
    by_hand = norms_in_training(segnet())
    for name, module in by_hand.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
            module.training = name in ("encoder.0.1", "encoder.0.4")
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(query)):
        probs = []
        for rows in torch.randint(len(train), (T, M - 1), generator=generator):
            batch = torch.cat([query[i : i + 1], train[rows]])
            with torch.no_grad():
                probs.append(torch.softmax(by_hand(augmentation.normalize(batch).double())[0], 0))
        drawn = torch.stack(probs)  # (T, K, H, W)
        mean = drawn.mean(0)
        torch.testing.assert_close(found.probs[i], mean, rtol=1e-9, atol=1e-12)
        variance = (drawn - mean).square().mean(0).mean(0)
        assert variance.max() > 1e-9
        torch.testing.assert_close(found.maps["variance"][i], variance, rtol=1e-6, atol=1e-14)
        entropy = -(mean * mean.log()).sum(0)
        torch.testing.assert_close(found.maps["entropy"][i], entropy, rtol=1e-9, atol=1e-12)
        expected = entropy + (drawn * drawn.log()).sum(1).mean(0)
        torch.testing.assert_close(found.maps["mutual_information"][i], expected, rtol=1e-6, atol=1e-12)


def test_query_inside_has_no_spread_where_the_batch_is_always_the_same() -> None:
    only = scenes(1, seed=1).x
    found = estimators.query_inside(segnet(), only, batch_size=3, n_samples=4)(scenes(1, seed=2).x)
    assert found.maps["variance"].max() == 0


def test_query_inside_needs_a_companion() -> None:
    with pytest.raises(MCBNError, match="at least one training image; got batch_size=1"):
        estimators.query_inside(segnet(), scenes(2).x, batch_size=1, n_samples=2)


def test_plain_is_the_softmax_of_the_network() -> None:
    network, x = SegNet(11, widths=(4, 4, 4, 4, 4)).eval(), scenes(2).x
    found = estimators.plain(network)(x)
    with torch.no_grad():
        probs = torch.softmax(network(augmentation.normalize(x)), 1)
    torch.testing.assert_close(found.probs, probs)
    torch.testing.assert_close(found.maps["entropy"], -(probs * probs.log()).sum(1))


def test_normalize_is_the_usual_scaling() -> None:
    x = scenes(2).x
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (augmentation.MEAN, augmentation.STD))
    torch.testing.assert_close(augmentation.normalize(x), (x / 255 - mean) / std)


def views(n: int, **changes: Any) -> augmentation.Views:
    window = torch.zeros(n, 2, 3)
    window[:, 0, 0] = window[:, 1, 1] = 1
    return augmentation.Views(torch.arange(n), window, torch.ones(n, 3))._replace(**changes)


def test_the_whole_image_as_a_view_is_the_image() -> None:
    own = scenes(3)
    x, y = augmentation.show(own, views(3))
    torch.testing.assert_close(x, augmentation.normalize(own.x), atol=1e-4, rtol=1e-4)
    assert torch.equal(y, own.y.long())


def test_a_flipped_view_is_the_mirror_image() -> None:
    own, flipped = scenes(2), views(2)
    flipped.window[:, 0, 0] = -1
    x, y = augmentation.show(own, flipped)
    torch.testing.assert_close(x, augmentation.normalize(own.x.flip(3)), atol=1e-4, rtol=1e-4)
    assert torch.equal(y, own.y.flip(2).long())


def test_a_zoomed_view_shows_its_part_and_labels_stay_whole() -> None:
    own, zoomed = scenes(1), views(1)
    zoomed.window[:, 0, 0] = zoomed.window[:, 1, 1] = 0.5
    zoomed.window[:, :, 2] = -0.5  # the upper left quarter
    _, y = augmentation.show(own, zoomed)
    assert torch.equal(y, own.y[:, :18, :24].repeat_interleave(2, 1).repeat_interleave(2, 2).long())


def test_views_stay_within_reach_and_depend_on_seed_and_epoch_alone() -> None:
    before = generators()
    first, again, other = (list(augmentation.epoch_views(10, 4, seed=1, epoch=epoch)) for epoch in (5, 5, 6))
    assert generators() == before
    assert [len(view.rows) for view in first] == [4, 4]  # the last partial batch is left out
    assert len(set(torch.cat([view.rows for view in first]).tolist())) == 8
    for one, same, new in zip(first, again, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
        assert not torch.equal(one.window, new.window)
        extent = one.window[:, 1, 1]
        assert ((extent >= 1 / 1.75 - 1e-6) & (extent <= 1 / 0.75 + 1e-6)).all()
        assert (one.window[:, :, 2].abs() <= (1 - extent).abs().unsqueeze(1) + 1e-6).all()


def test_training_batches_hold_different_images() -> None:
    own = replace(scenes(6), x=torch.arange(6).byte().view(6, 1, 1, 1).expand(6, 3, 36, 48) * 40)
    for batch in augmentation.training_batches(own, 6, 3, seed=0):
        assert batch.shape == (6, 3, 36, 48)
        assert len(batch[:, 0, 0, 0].unique()) == 6


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [training.learning_rate(step, 100, peak=2.0, warm_up=0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)


def test_class_weights_are_median_over_frequency() -> None:
    own = scenes(2)
    y = torch.zeros(2, 36, 48, dtype=torch.uint8)
    y[0, :9] = 1  # a quarter of the one image that shows it
    y[1, :, :6] = CAMVID.void
    own = replace(own, y=y)
    frequency = {0: (0.75 * 1728 + 1728 - 216) / (2 * 1728), 1: 0.25}
    found = training.median_frequency(own)
    median = min(frequency.values())  # the lower of two, as torch takes it
    assert found[:2].tolist() == pytest.approx([median / frequency[0], median / frequency[1]])
    assert found[2:].eq(0).all()
    profile = replace(TINY, dataset="voc", weight_power=0.5)
    assert training.class_weights(profile, own)[:2].tolist() == pytest.approx(found[:2].sqrt().tolist())
    published = training.class_weights(replace(TINY, weight_power=1.0), own)
    assert published.tolist() == pytest.approx(list(CAMVID.weights or ()))


def test_void_pixels_have_no_gradient() -> None:
    own = scenes(3)
    blind = replace(own, y=torch.full_like(own.y, CAMVID.void))
    mixed = replace(own, y=torch.cat([own.y[:1], blind.y[1:]]))
    logits = torch.randn(3, 11, 36, 48, requires_grad=True)
    loss = nn.functional.cross_entropy(logits, mixed.y.long(), ignore_index=mixed.void)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[1:].abs().max() == 0


class StopError(Exception):
    """Stands for a kill."""


def test_training_resumes_to_the_very_same_network(tmp_path: Path) -> None:
    own, val = scenes(7), scenes(2, seed=9)
    whole = training.train(TINY, own, val, tmp_path / "whole.pt")

    def stop(run: training.Run) -> None:
        if run.epoch == 2:
            raise StopError

    with pytest.raises(StopError):
        training.train(TINY, own, val, tmp_path / "cut.pt", on_epoch=stop)
    epochs: list[int] = []
    resumed = training.train(TINY, own, val, tmp_path / "cut.pt", on_epoch=lambda run: epochs.append(run.epoch))
    assert epochs == [3]
    assert (resumed.losses, resumed.checks) == (whole.losses, whole.checks)
    assert [epoch for epoch, _ in whole.checks] == [2, 3]
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, resumed.network.state_dict()[name]), name
    assert not whole.network.training


def test_training_learns_and_leaves_the_global_generators_alone(tmp_path: Path) -> None:
    before = generators()
    run = training.train(replace(TINY, epochs=12, learning_rate=0.01), scenes(6), None, tmp_path / "c.pt")
    assert generators() == before
    assert run.losses[-1] < 0.95 * run.losses[0]


def test_checkpoints_of_other_settings_or_none_at_all_are_refused(tmp_path: Path) -> None:
    training.train(replace(TINY, epochs=1), scenes(4), None, tmp_path / "c.pt")
    with pytest.raises(MCBNError, match="other settings; remove it"):
        training.train(TINY, scenes(4), None, tmp_path / "c.pt")
    (tmp_path / "c.pt").write_bytes(b"nothing")
    with pytest.raises(MCBNError, match="no checkpoint of this training"):
        training.train(TINY, scenes(4), None, tmp_path / "c.pt")
    with pytest.raises(MCBNError, match="2 training images make no batch of 3"):
        training.train(TINY, scenes(2), None, tmp_path / "d.pt")


def test_divergence_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MCBNError, match="diverged in epoch"):
        training.train(replace(TINY, learning_rate=1e30, epochs=8), scenes(6), None, tmp_path / "c.pt")


def test_saved_networks_come_back_up_to_half_precision(tmp_path: Path) -> None:
    network = SegNet(11, widths=TINY.widths, seed=5)
    network(torch.randn(2, 3, 36, 48))  # moves the running statistics
    saved.save_network(network, TINY, tmp_path / "n.safetensors")
    found = saved.load_network(TINY, 11, tmp_path / "n.safetensors").state_dict()
    for name, value in network.state_dict().items():
        expected = value.half().float() if value.ndim == 4 else value
        assert torch.equal(found[name], expected), name
    with pytest.raises(MCBNError, match="trained with other settings"):
        saved.load_network(replace(TINY, epochs=4), 11, tmp_path / "n.safetensors")
    (tmp_path / "n.safetensors").write_bytes(b"nothing")
    with pytest.raises(MCBNError, match="no network of this study"):
        saved.load_network(TINY, 11, tmp_path / "n.safetensors")


def test_profiles_hold_the_settings_of_the_paper() -> None:
    camvid, voc = find_profile("paper", "camvid"), find_profile("paper", "voc")
    assert (camvid.batch_size, voc.batch_size) == (10, 36)
    assert camvid.n_samples == voc.n_samples == 20
    assert estimators.PAPER_LAYERS == 2
    assert voc.tuned_batch_sizes == ()  # its val part is the test part
    with pytest.raises(MCBNError, match="no profile 'paper' for 'cityscapes'"):
        find_profile("paper", "cityscapes")


def test_examples_are_spread_evenly() -> None:
    assert study.examples(233, 4) == [29, 87, 145, 203]
    assert study.examples(2, 4) == [0, 1]


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
    rows = records.read(path)
    assert [row["method"] for row in rows] == ["training", *study.METHODS]
    assert len({row["config_hash"] for row in rows[1:]}) == 1
    assert all(row["seconds"] >= 0 and row["commit"] and row["hardware"] for row in rows)
    tuned = rows[-1]["scores"]
    assert tuned["batch_size"] == min((2, 3), key=lambda M: tuned[f"val_nll_at_{M}"])
    study.run(TINY, data)  # everything is there: nothing is added
    assert records.read(path) == rows
    written = report.main(data)
    assert [file.name for file in written] == ["summary.csv", "table.md", "refusal.png", "camvid.png"]
    with (data / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["dataset", "method", "metric", "value"]
    value = {(row["method"], row["metric"]): row["value"] for row in table}
    for method in study.METHODS:
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


@UNSETTLED
def test_predictions_of_the_study_are_those_of_mcbn(data: Path) -> None:
    study.train_network(TINY, data)
    evaluation = study.Evaluation(TINY, data / "networks" / "camvid.safetensors", "cpu")
    _, shown = evaluation.score("mcbn")
    assert len(evaluation.bayes.posterior.layers) == 25
    assert evaluation.bayes.posterior.batch_size == TINY.batch_size
    row = study.examples(3, 2)[0]
    pred = evaluation.bayes.predict(augmentation.normalize(evaluation.test.x[row : row + 1]), n_samples=TINY.n_samples)
    assert np.array_equal(shown["label"][0], pred.label[0].numpy())
    largest = float(shown["entropy_scale"])
    assert np.allclose(shown["entropy"][0] * largest, pred.entropy[0], atol=largest)
    before = evaluation.bayes.posterior
    evaluation.score("mcbn_tuned")
    assert evaluation.bayes.posterior is before


def test_evaluation_without_a_network_or_of_unknown_methods_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MCBNError, match="train first"):
        study.evaluate(TINY, tmp_path)
    with pytest.raises(MCBNError, match="no method 'best'"):
        study.evaluate(TINY, tmp_path, methods=["best"])


def test_a_report_without_scores_or_with_damaged_maps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MCBNError, match="holds no scores yet; run `mcbn reproduce segmentation"):
        report.main(tmp_path)
    (tmp_path / "camvid-mcbn.npz").write_bytes(b"nothing")
    with pytest.raises(MCBNError, match="no whole file of maps"):
        report.load_shown(tmp_path / "camvid-mcbn.npz")


def test_the_command_names_unknown_data_sets_and_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("MCBN_CACHE_DIR", str(tmp_path))
    for options, says in (
        (["--dataset", "kitti"], "no profile 'paper' for 'kitti'"),
        (["--profile", "quick"], "run `mcbn data camvid`"),
    ):
        result = CliRunner().invoke(app, ["reproduce", "segmentation", "--out", str(tmp_path / "out"), *options])
        assert result.exit_code == 2
        assert says in result.output
