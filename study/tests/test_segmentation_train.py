"""Training of the segmentation study: views, loss, and going on where it stopped."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mcbn import MCBNError
from mcbn_study.data.scenes import CAMVID
from mcbn_study.networks import SegNet
from mcbn_study.segmentation import train as training
from segmented import TINY, scenes
from untouched import generators


def views(n: int, **changes: Any) -> training.Views:
    window = torch.zeros(n, 2, 3)
    window[:, 0, 0] = window[:, 1, 1] = 1
    return training.Views(torch.arange(n), window, torch.ones(n, 3))._replace(**changes)


def test_the_whole_image_as_a_view_is_the_image() -> None:
    own = scenes(3)
    x, y = training.show(own, views(3))
    torch.testing.assert_close(x, training.normalize(own.x), atol=1e-4, rtol=1e-4)
    assert torch.equal(y, own.y.long())


def test_a_flipped_view_is_the_mirror_image() -> None:
    own, flipped = scenes(2), views(2)
    flipped.window[:, 0, 0] = -1
    x, y = training.show(own, flipped)
    torch.testing.assert_close(x, training.normalize(own.x.flip(3)), atol=1e-4, rtol=1e-4)
    assert torch.equal(y, own.y.flip(2).long())


def test_a_zoomed_view_shows_its_part_and_labels_stay_whole() -> None:
    own, zoomed = scenes(1), views(1)
    zoomed.window[:, 0, 0] = zoomed.window[:, 1, 1] = 0.5
    zoomed.window[:, :, 2] = -0.5  # the upper left quarter
    _, y = training.show(own, zoomed)
    assert torch.equal(y, own.y[:, :18, :24].repeat_interleave(2, 1).repeat_interleave(2, 2).long())


def test_views_stay_within_reach_and_depend_on_seed_and_epoch_alone() -> None:
    before = generators()
    first, again, other = (list(training.epoch_views(10, 4, seed=1, epoch=epoch)) for epoch in (5, 5, 6))
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
    for batch in training.training_batches(own, 6, 3, seed=0):
        assert batch.shape == (6, 3, 36, 48)
        assert len(batch[:, 0, 0, 0].unique()) == 6


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [training.learning_rate(replace(TINY, learning_rate=2.0, warm_up=0.1), step, 100) for step in range(101)]
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
    found = training.class_weights(replace(TINY, dataset="voc", weight_power=1.0), own)
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
    loss = nn.functional.cross_entropy(logits, mixed.y.long(), ignore_index=mixed.kind.void)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[1:].abs().max() == 0


def test_training_depends_on_its_settings_alone_and_says_how_it_goes() -> None:
    own, val, told = scenes(7), scenes(2, seed=9), list[str]()
    (network, facts), (twin, again) = (training.train(TINY, own, val, echo=told.append) for _ in range(2))
    assert (facts["losses"], facts["val_miou"]) == (again["losses"], again["val_miou"])
    assert len(facts["losses"]) == 3
    assert [epoch for epoch, _ in facts["val_miou"]] == [2, 3]
    for name, value in network.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    assert not network.training
    assert told[-1].startswith(
        f"epoch 3: loss {facts['losses'][-1]:.4f}, val mIoU {facts['val_miou'][-1][1]:.1f} at 3, "
    )


def test_training_learns_and_leaves_the_global_generators_alone() -> None:
    before = generators()
    _, facts = training.train(replace(TINY, epochs=12, learning_rate=0.01), scenes(6), None)
    assert generators() == before
    assert facts["losses"][-1] < 0.95 * facts["losses"][0]


def test_too_few_images_for_a_batch_are_refused() -> None:
    with pytest.raises(MCBNError, match="2 training images make no batch of 3"):
        training.train(TINY, scenes(2), None)


def test_divergence_is_an_error() -> None:
    with pytest.raises(MCBNError, match="diverged in epoch"):
        training.train(replace(TINY, learning_rate=1e30, epochs=8), scenes(6), None)


def test_saved_networks_come_back_up_to_half_precision(tmp_path: Path) -> None:
    network = SegNet(11, widths=TINY.widths, seed=5)
    network(torch.randn(2, 3, 36, 48))  # moves the running statistics
    training.save_network(network, TINY, tmp_path / "n.safetensors")
    found = training.load_network(TINY, tmp_path / "n.safetensors").state_dict()
    for name, value in network.state_dict().items():
        expected = value.half().float() if value.ndim == 4 else value
        assert torch.equal(found[name], expected), name
    with pytest.raises(MCBNError, match="trained with other settings"):
        training.load_network(replace(TINY, epochs=4), tmp_path / "n.safetensors")
    (tmp_path / "n.safetensors").write_bytes(b"nothing")
    with pytest.raises(MCBNError, match=r"is not a whole safetensors file.*remove it to train anew"):
        training.load_network(TINY, tmp_path / "n.safetensors")
