"""The largest of 2 x 2 pixels by a kernel against PyTorch's pooling."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drawn import fit, program_of
from mcbn.engine import kernels
from mcbn.engine.fuse import fuse_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_kernel_equals_pooling_for_one_draw_and_many() -> None:
    x = torch.randn(3, 2, 12, 6, 10, device=DEVICE)
    x[0, 0, 0, 0, 0], x[1, 1, 3, 2, 5], x[2, 0, 4] = torch.nan, torch.inf, -torch.inf
    expected = torch.stack([F.max_pool2d(part, 2) for part in x])
    torch.testing.assert_close(kernels.halved(x[0]), expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(torch.vmap(kernels.halved)(x), expected, rtol=0, atol=0, equal_nan=True)
    apart = torch.vmap(kernels.halved, in_dims=1)(x)
    torch.testing.assert_close(apart, expected.transpose(0, 1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"kernel_size": 2}, True),
        ({"kernel_size": (2, 2), "stride": 2}, True),
        ({"kernel_size": 2, "stride": 1}, False),
        ({"kernel_size": 2, "padding": 1}, False),
        ({"kernel_size": 3, "stride": 2, "padding": 1}, False),
        ({"kernel_size": 2, "dilation": 2}, False),
        ({"kernel_size": 2, "ceil_mode": True}, False),
    ],
)
def test_other_poolings_are_left_to_pytorch(options: dict[str, Any], taken: bool) -> None:
    network = nn.Sequential(nn.BatchNorm2d(4), nn.MaxPool2d(**options))
    x = torch.randn(4, 4, 8, 8)
    bayes = fit(network, x)
    program = program_of(bayes, x, fold=False)
    targets = [node.target for node in fuse_kernels(program.each).graph.nodes]
    assert (torch.ops.mcbn.halved.default in targets) == taken
    assert (F.max_pool2d in targets) != taken


def test_images_of_odd_sides_and_channels_are_left_to_pytorch() -> None:
    for shape, taken in (((1, 4, 8, 6), True), ((1, 4, 7, 6), False), ((1, 6, 8, 6), False), ((4, 8, 6), False)):
        assert kernels.suits_halved(shape, 2, None, 0, 1, False) == taken
