"""CIFAR-10: images held out, and augmentation against the naive one."""

import math

import numpy as np
import pytest
import torch

import mcbn
from cifar import images, trained
from mcbn_study.cifar10.profile import held_out
from mcbn_study.cifar10.train import (
    OFFSETS,
    PADDING,
    Augmented,
    Choices,
    epoch_choices,
)
from mcbn_study.networks import standardize


def choices(rows: list[int], top: int, left: int, flip: bool) -> Choices:
    n = len(rows)
    return Choices(torch.tensor(rows), torch.full((n,), top), torch.full((n,), left), torch.full((n,), flip))


def crop(x: torch.Tensor, chosen: Choices) -> torch.Tensor:
    return Augmented(x, prepare=lambda images: images).batch(chosen)


def test_held_out_images_are_fixed_disjoint_and_all_there_are() -> None:
    train_index, validation = held_out()
    assert (len(train_index), len(validation)) == (48_000, 2_000)
    assert torch.equal(torch.cat([train_index, validation]).sort().values, torch.arange(50_000))
    assert torch.equal(held_out()[1], validation)
    assert torch.equal(held_out(50_000)[0], torch.arange(50_000))
    assert len(held_out(50_000)[1]) == 0


def test_crop_in_the_middle_without_flip_is_the_image() -> None:
    x = images().x
    assert torch.equal(crop(x, choices([3, 0], PADDING, PADDING, False)), x[[3, 0]])


@pytest.mark.parametrize(("top", "left", "flip"), [(0, 4, False), (4, 1, True), (2, 2, True), (0, 0, True)])
def test_crop_is_the_naive_one(top: int, left: int, flip: bool) -> None:
    x = images().x
    framed = np.zeros((3, 36, 36), np.uint8)
    framed[:, 2:34, 2:34] = x[5].numpy()
    expected = framed[:, top : top + 32, left : left + 32]
    expected = expected[:, :, ::-1] if flip else expected
    assert np.array_equal(crop(x, choices([5], top, left, flip))[0].numpy(), expected)


def test_each_image_of_a_batch_has_its_own_crop() -> None:
    x, chosen = images().x, epoch_choices(40, 12, 0, 0)
    together = crop(x, Choices(*(part[0] for part in chosen)))
    alone = [crop(x, Choices(*(part[0, i : i + 1] for part in chosen))) for i in range(12)]
    assert torch.equal(together, torch.cat(alone))


def test_an_epoch_shows_each_image_once_and_is_its_seed_and_number_alone() -> None:
    first = epoch_choices(43, 8, 1, 0)
    assert first.rows.shape == (5, 8)
    assert len(first.rows.unique()) == 40
    assert all(torch.equal(a, b) for a, b in zip(first, epoch_choices(43, 8, 1, 0), strict=True))
    for other in (epoch_choices(43, 8, 2, 0), epoch_choices(43, 8, 1, 1)):
        assert not torch.equal(first.rows, other.rows)


def test_crops_and_flips_are_uniform() -> None:
    chosen = epoch_choices(20_000, 10, 1, 0)
    for part, kinds in ((chosen.top, OFFSETS), (chosen.left, OFFSETS), (chosen.flip.long(), 2)):
        counts = torch.bincount(part.flatten(), minlength=kinds)
        assert len(counts) == kinds
        assert ((counts - 20_000 / kinds).abs() < 5 * math.sqrt(20_000 / kinds)).all()
    pairs = torch.stack([chosen.top.flatten(), chosen.left.flatten(), chosen.flip.flatten().long()]).double()
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 5 / math.sqrt(20_000)


def test_augmented_items_are_standardised_crops_of_their_image() -> None:
    x = images().x
    data = Augmented(x)
    crops = [
        standardize(crop(x, choices([7], top, left, flip)))[0]
        for top in range(OFFSETS)
        for left in range(OFFSETS)
        for flip in (False, True)
    ]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [data[7] for _ in range(20)]
    assert all(any(torch.equal(one, known) for known in crops) for one in drawn)
    assert len({tuple(one.flatten()[:50].tolist()) for one in drawn}) > 5


def test_fit_takes_augmented_images_reproducibly() -> None:
    network, data = trained(), Augmented(images().x)
    posteriors = [
        mcbn.MCBN(network, "classification").fit(data, n_samples=3, batch_size=8, seed=s).posterior for s in (0, 0, 1)
    ]
    first, again, other = (p.mean["norm"] for p in posteriors)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
