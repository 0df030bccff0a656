"""Corrupted images: each kind by its formula, further from the original at each severity."""

import math

import pytest
import torch

from mcbn.errors import MCBNError
from mcbn_study.alternatives.inputs import KINDS, SEVERITIES, corrupt, mixture


def photograph(n=5):
    """Images with shapes of all sizes, away from black and white, so that nothing is cut off."""
    place, generator = torch.linspace(0, 3, 32), torch.Generator().manual_seed(0)
    waves = torch.stack([torch.sin(place[:, None] * (i + 1)) * torch.cos(place * (i + 2)) for i in range(3 * n)])
    grain = torch.rand(waves.shape, generator=generator)
    return (60 + 20 * waves + 25 * grain).reshape(n, 3, 32, 32).round().to(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_corruption_begins_at_the_identity_and_departs_further_at_each_severity(kind):
    x = photograph()
    assert torch.equal(corrupt(x, kind, 0), x)
    distance = [float((corrupt(x, kind, s).float() - x.float()).square().mean()) for s in (0, *SEVERITIES)]
    assert distance == sorted(set(distance))
    assert corrupt(x, kind, 5).dtype == torch.uint8


def test_corruptions_are_their_formulas():
    x = photograph(1)
    value = x.double() / 255

    def near(kind, severity, expected):
        return bool(((corrupt(x, kind, severity) - 255 * expected).abs() < 0.501).all())  # rounded to a byte

    assert near("brightness", 3, value + 0.24)
    assert near("contrast", 2, value.mean() + 0.5 * (value - value.mean()))
    blocks = value.reshape(1, 3, 16, 2, 16, 2).mean((3, 5))  # severity 3: half the pixels a side
    assert near("pixelate", 3, blocks.repeat_interleave(2, 2).repeat_interleave(2, 3))
    weights = [math.exp(-0.5 * (d / 0.7) ** 2) for d in range(-4, 5)]
    mixed = sum(  # one pixel far from the edges
        value[0, 1, 10 + i, 20 + j] * weights[i + 4] * weights[j + 4] for i in range(-4, 5) for j in range(-4, 5)
    )
    assert abs(int(corrupt(x, "blur", 2)[0, 1, 10, 20]) - 255 * float(mixed) / sum(weights) ** 2) < 0.51
    noise = (corrupt(x, "noise", 2).float() - x.float()) / 255
    assert float(noise.std()) == pytest.approx(0.06, rel=0.05)


def test_noise_follows_the_row_alone():
    x = photograph(4)
    assert torch.equal(corrupt(x, "noise", 3), corrupt(x, "noise", 3))
    assert torch.equal(corrupt(x, "noise", 3)[:2], corrupt(x[:2], "noise", 3))
    state = torch.get_rng_state()
    corrupt(x, "noise", 3)
    assert torch.equal(state, torch.get_rng_state())


def test_a_mixture_gives_each_kind_its_share():
    x = photograph(10)
    mixed = mixture(x, 4)
    for position, kind in enumerate(KINDS):
        assert torch.equal(mixed[position::5], corrupt(x[position::5], kind, 4))


def test_images_that_are_no_bytes_are_refused():
    with pytest.raises(MCBNError, match=r"RGB bytes, uint8 of shape \(N, 3, H, W\); got float32"):
        corrupt(photograph().float(), "blur", 1)
