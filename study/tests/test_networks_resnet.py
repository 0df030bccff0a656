"""The paper's ResNet: shapes, sizes, initial weights, and images brought to its scale."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mcbn
from mcbn_study.networks import EPSILON, SLOPE, CifarResNet, standardize


def images(n: int = 4, size: int = 32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def test_depth_32_has_the_layers_and_parameters_of_the_paper() -> None:
    network = CifarResNet(seed=1)
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert (len(convolutions), len(norms)) == (31, 31)  # with the linear layer 32 layers of weights
    assert all(m.eps == 1e-3 and m.momentum == 0.1 for m in norms)
    weights = 3 * 16 * 9 + 10 * 16 * 16 * 9 + 9 * 32 * 32 * 9 + 16 * 32 * 9 + 9 * 64 * 64 * 9 + 32 * 64 * 9
    normed = 2 * (11 * 16 + 10 * 32 + 10 * 64)  # the first norm of a widening unit has its inputs' channels
    assert sum(p.numel() for p in network.parameters()) == weights + normed + 650 == 464_154


def test_unit_is_its_formula() -> None:
    network = CifarResNet(8, seed=0).double().eval()
    unit = network.units[1]  # widens 16 -> 32
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)

    def norm(layer: nn.BatchNorm2d, h: torch.Tensor) -> torch.Tensor:
        return h / math.sqrt(1 + EPSILON) * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)

    def leaky(h: torch.Tensor) -> torch.Tensor:
        return torch.where(h > 0, h, SLOPE * h)

    h = F.conv2d(leaky(norm(unit.norm1, x)), unit.conv1.weight, stride=2, padding=1)
    h = F.conv2d(leaky(norm(unit.norm2, h)), unit.conv2.weight, padding=1)
    h[:, 8:24] += x.reshape(2, 16, 4, 2, 4, 2).mean((3, 5))
    torch.testing.assert_close(unit(x), h, rtol=1e-12, atol=1e-12)


def test_first_unit_adds_the_activated_input_and_later_ones_the_raw_one() -> None:
    network = CifarResNet(14, seed=0).double().eval()
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64)
    for unit, expected in zip(network.units[:2], (F.leaky_relu(x / math.sqrt(1 + EPSILON), SLOPE), x), strict=True):
        nn.init.zeros_(unit.conv2.weight)
        torch.testing.assert_close(unit(x), expected, rtol=1e-12, atol=1e-12)


def test_initial_weights_follow_the_seed_alone_and_have_he_variance() -> None:
    a, b, c = CifarResNet(seed=1), CifarResNet(seed=1), CifarResNet(seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.first.weight, c.first.weight)
    weight = a.units[-1].conv2.weight
    assert weight.var().item() == pytest.approx(2 / (9 * 64), rel=5 / math.sqrt(weight.numel()) * math.sqrt(2))
    assert a.last.weight.abs().max() <= math.sqrt(3 / 64)


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    CifarResNet(8, seed=5)
    assert torch.equal(torch.rand(2), expected)


def test_dropout_acts_in_training_alone() -> None:
    network, plain = CifarResNet(8, dropout=0.5, seed=0), CifarResNet(8, seed=0)
    x = standardize(images())
    assert torch.equal(network.eval()(x), plain.eval()(x))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(network.train()(x), network.train()(x))


def test_standardize_is_the_formula() -> None:
    x = images(3)
    for image, found in zip(x.double(), standardize(x).double(), strict=True):
        n = image.numel()
        mean = image.sum() / n
        std = ((image - mean).square().sum() / n).sqrt()
        torch.testing.assert_close(found, (image - mean) / max(std.item(), 1 / math.sqrt(n)), rtol=1e-5, atol=1e-5)


def test_standardize_gives_zeros_for_a_constant_image_and_bounds_the_scale_of_a_nearly_constant_one() -> None:
    x = torch.full((2, 3, 32, 32), 7, dtype=torch.uint8)
    x[1, 0, 0, 0] = 8
    found = standardize(x)
    assert torch.equal(found[0], torch.zeros(3, 32, 32))
    assert found[1].max().item() == pytest.approx((1 - 1 / 3072) * math.sqrt(3072), rel=1e-4)


@pytest.mark.parametrize("bad", [images(2)[:, :1], images(2)[0], images(2).float()])
def test_standardize_refuses_what_is_no_colour_image_in_bytes(bad: torch.Tensor) -> None:
    with pytest.raises(mcbn.MCBNError, match=r"bytes of colour images.*got \("):
        standardize(bad)


def test_another_size_of_image_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"\(N, 3, 32, 32\).*got \(2, 3, 28, 28\)"):
        CifarResNet(8, seed=0)(standardize(images(2, 28)))


@pytest.mark.parametrize(("depth", "dropout"), [(31, 0.0), (2, 0.0), (8, 1.0), (8, -0.1)])
def test_impossible_networks_are_refused(depth: int, dropout: float) -> None:
    with pytest.raises(mcbn.MCBNError, match=r"depth must be|dropout must be"):
        CifarResNet(depth, dropout=dropout, seed=0)


def test_mcbn_takes_it() -> None:
    network = CifarResNet(8, seed=0).eval()
    x = standardize(images(12))
    with pytest.warns(UserWarning, match="disagree"):  # running statistics of an untrained network
        bayes = mcbn.MCBN(network, "classification").fit(x, n_samples=3, batch_size=6)
    assert bayes.predict(x).probs.shape == (12, 10)
    assert len(bayes.posterior.layers) == 7
