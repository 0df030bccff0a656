"""The study of shifts: corruptions by their formulas, baselines by theirs, and the study in small."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mcbn
from cifar import images, trained
from mcbn.field import watch
from mcbn_study.cifar10.train import save_network
from mcbn_study.journal import read
from mcbn_study.shift import corruptions, report, run as study
from mcbn_study.shift.baselines import batch_tests, blended, input_scores, tent
from mcbn_study.shift.corruptions import EXTRAS, KINDS, STRENGTHS, corrupt
from mcbn_study.shift.profile import QUICK, Inputs
from mcbn_study.shift.train import Features

FROST = torch.randint(0, 256, (5, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def smooth(n: int, seed: int = 0) -> Tensor:
    """Images with structure: a blurred field, bytes."""
    x = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(x, size=32, mode="bilinear") * 255).to(torch.uint8)


# Corruptions


def test_fifteen_kinds_and_three_extras_have_five_severities() -> None:
    assert (len(KINDS), EXTRAS) == (15, ("speckle_noise", "gaussian_blur", "saturate"))
    assert {len(strengths) for strengths in STRENGTHS.values()} == {5}


@pytest.mark.parametrize("kind", STRENGTHS)
def test_corruptions_change_bytes_by_their_seed_alone(kind: str) -> None:
    x = smooth(3)
    changed = corrupt(x, kind, 5, frost=FROST)
    assert (changed.dtype, changed.shape) == (torch.uint8, x.shape)
    assert not torch.equal(changed, x)
    assert torch.equal(changed, corrupt(x, kind, 5, frost=FROST))
    torch.testing.assert_close(corrupt(x[:1], "contrast", 5), corrupt(x, "contrast", 5)[:1])


def test_noise_has_the_published_strength() -> None:
    grey = torch.full((20, 3, 32, 32), 128, dtype=torch.uint8)
    for kind, deviation in {"gaussian_noise": 0.10, "shot_noise": math.sqrt(128 / 255 / 50)}.items():
        assert float(corrupt(grey, kind, 5).double().std()) / 255 == pytest.approx(deviation, rel=0.02)
    changed = corrupt(grey, "impulse_noise", 5)
    assert float((changed != 128).double().mean()) == pytest.approx(0.07, rel=0.05)
    assert set(changed.unique().tolist()) == {0, 128, 255}


def test_glass_copies_pixels_from_above_and_left() -> None:
    x = smooth(1)
    changed = corrupt(x, "glass_blur", 1)[0, :, :, :]  # its blur of 0.05 pixels is none
    for row, column in ((2, 2), (10, 20), (31, 31)):
        near = [x[0, :, row - up, column - left].tolist() for up in (0, 1) for left in (0, 1)]
        assert any(np.abs(np.subtract(changed[:, row, column].tolist(), pixel)).max() <= 1 for pixel in near)
    assert (changed[:, :2].int() - x[0, :, :2].int()).abs().max() <= 1


@pytest.mark.parametrize("edge", ["repeat", "pixels", "edges"])
def test_images_continue_beyond_their_edges_as_numpy_pads(edge: str) -> None:
    modes: dict[str, Any] = {"repeat": "edge", "pixels": "reflect", "edges": "symmetric"}
    blurs = {
        "repeat": lambda x: corruptions._gaussian(x, 1.5),
        "pixels": lambda x: corruptions._defocus(x, (1.5, 0.1), torch.Generator()),
        "edges": lambda x: corruptions._gaussian(x, 1.5, "reflect"),
    }
    x = torch.rand(1, 1, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padded = torch.from_numpy(np.pad(x, ((0, 0), (0, 0), (12, 12), (12, 12)), mode=modes[edge]))
    torch.testing.assert_close(blurs[edge](padded)[..., 12:-12, 12:-12], blurs[edge](x))


def test_formulas_are_those_of_imagecorruptions() -> None:
    theirs = pytest.importorskip("imagecorruptions").corruptions
    image, generator = smooth(1), torch.Generator().manual_seed(0)
    x = image.double() / 255
    pixels = image[0].permute(1, 2, 0).numpy()

    def ours(changed: Tensor) -> Any:
        return (changed.clamp(0, 1) * 255)[0].permute(1, 2, 0).numpy()

    expected = {
        "contrast": (corruptions.FORMULAS["contrast"](x, 0.2, generator), theirs.contrast(pixels, 3)),
        "brightness": (corruptions._brightness(x, 0.3, generator), theirs.brightness(pixels, 3)),
        "saturate": (corruptions._saturate(x, (5, 0.1), generator), theirs.saturate(pixels, 4)),
        "motion": (
            corruptions._motion(x, 6, 2.0, torch.tensor([30.0])),
            theirs._motion_blur(pixels.astype(np.float32), 6, 2.0, 30.0),
        ),
        "zoom": (corruptions._zoom(x, 1.15), 255 * theirs.clipped_zoom(pixels / 255, 1.15)),
    }
    for kind, (changed, value) in expected.items():
        assert np.abs(ours(changed) - value).max() < 1, kind
    point = torch.zeros(1, 1, 17, 17).double()
    point[..., 8, 8] = 1
    kernel = corruptions._defocus(point, (1.5, 0.1), generator)[0, 0].numpy()
    assert np.abs(kernel - theirs.disk(1.5, 0.1)).max() < 1e-5
    jpeg = corruptions._jpeg(corruptions.Image.fromarray(pixels), 15)
    assert np.array_equal(np.asarray(jpeg), np.asarray(theirs.jpeg_compression(corruptions.Image.fromarray(pixels), 3)))


# Baselines


def some_features(n: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return Features(*(torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (3, 4)))


def test_batch_tests_are_their_equations() -> None:
    home, batch = some_features(30, 1), some_features(5, 2)
    tests, one = batch_tests(home), Features(batch.logits[None], batch.hidden[None])
    values = {name: float(value) for name, value in tests(one).items()}
    p, q = home.logits.softmax(1).numpy(), batch.logits.softmax(1).numpy()
    gaps = [abs((p[:, k] < t).mean() - (q[:, k] < t).mean()) for k in range(3) for t in [*q[:, k], *(q[:, k] + 1e-9)]]
    assert values["bbsd"] == pytest.approx(max(gaps))
    a, b = batch.hidden.numpy(), home.hidden.numpy()
    within = [np.linalg.norm(a[i] - a[j]) for i in range(5) for j in range(5) if i != j]
    across = [np.linalg.norm(u - v) for u in a for v in b]
    assert values["energy"] == pytest.approx(2 * np.mean(across) - np.mean(within))
    width = float(torch.cdist(home.hidden, home.hidden).median())
    near = lambda d: np.exp(-0.5 * (np.array(d) / width) ** 2)  # noqa: E731
    assert values["mmd"] == pytest.approx(near(within).mean() - 2 * near(across).mean())


def test_scores_of_inputs_are_their_equations() -> None:
    home, new, y = some_features(60, 1), some_features(4, 2), torch.arange(60) % 3
    scores = input_scores(home, y)(new)
    means = [home.hidden[y == k].mean(0) for k in range(3)]
    centred = torch.stack([h - means[int(k)] for h, k in zip(home.hidden, y, strict=True)])
    inverse = torch.linalg.inv(centred.T @ centred / 60)
    unit = home.hidden / home.hidden.norm(dim=1, keepdim=True)
    for i, (logits, h) in enumerate(zip(*new, strict=True)):
        assert float(scores["mahalanobis"][i]) == pytest.approx(min(float((h - m) @ inverse @ (h - m)) for m in means))
        assert float(scores["knn"][i]) == pytest.approx(sorted((unit - h / h.norm()).norm(dim=1).tolist())[49])
        assert float(scores["energy"][i]) == pytest.approx(-math.log(float(logits.exp().sum())))


def test_blend_of_one_is_training_batch_norm_and_tent_begins_with_it() -> None:
    network, x = trained(), torch.randn(40, 3, 32, 32)
    expected = trained().train()(x)
    torch.testing.assert_close(blended(network, x, 40, 1.0), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(blended(network, x, 40, 0.0), network(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tent(network, x), expected, rtol=1e-4, atol=1e-4)


# The study

TINY = dataclasses.replace(
    QUICK,
    kinds=("contrast",),
    batch_size=4,
    n_reference=1100,
    alarm_sizes=(2,),
    clean_batches=4,
    power_sizes=(4,),
    power_batches=3,
    stream=(2, 20, 2),
    near=dataclasses.replace(QUICK.near, steps=4, rates=((0, 0.01),), batch_size=8),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics")
def test_study_measures_records_once_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FITTING", 30)
    monkeypatch.setattr(watch, "MOST_HELD_OUT", 99)
    monkeypatch.setattr(study, "NEAR_SEEDS", (1,))
    save_network(trained(), tmp_path / "nets" / "resnet8-seed1.safetensors", {"seed": 1})
    train, validation, test = (images(n, seed) for n, seed in ((60, 1), (20, 2), (1500, 3)))
    inputs = Inputs(train, validation, test, {"other": images(20, 9).x}, None)
    options: dict[str, Any] = {"networks": tmp_path / "nets", "datasets": ["concrete"]}
    path = study.run(TINY, inputs, tmp_path / "out", **options)
    records = read(path)
    assert {r["kind"] for r in records} == {*study.MEASUREMENTS, *study.AT_SEVERITIES, "ensemble", "near", "sensor"}
    study.run(TINY, inputs, tmp_path / "out", **options)
    study.run(TINY, inputs, tmp_path / "out", only=["resnet32 1"], **options)
    assert read(path) == records
    with pytest.raises(mcbn.MCBNError, match=r"only must be one of \['resnet32 1'\]"):
        study.run(TINY, inputs, tmp_path / "out", only=["resnet32 2"], **options)
    (table,) = report.write(tmp_path / "out")
    assert all(title in table.read_text() for title in ("False alarms", "Power", "AUROC", "CIFAR-10-C", "sensor"))


def test_no_records_no_tables(tmp_path: Path) -> None:
    with pytest.raises(mcbn.MCBNError, match="mcbn reproduce shift"):
        report.write(tmp_path)


@pytest.mark.parametrize("held_out", [100, 156])
def test_interval_of_alarms_is_that_of_exchangeable_batches(held_out: int) -> None:
    random = np.random.default_rng(0)
    rounds = random.random((4000, 4, held_out)).max(2)  # with so many held out only the largest of all is an alarm
    counts = random.binomial(500, 1 - rounds).sum(1)
    low, high = report.alarm_interval(2000, 4, held_out)
    assert np.mean((counts >= low) & (counts <= high)) == pytest.approx(0.99, abs=0.006)
    assert np.mean((counts >= 10) & (counts <= 32)) < 0.9  # the binomial one
