"""What a GPU does in one kernel: convolution, bias, residual and rectifier; seen here is the pass that would run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawn import check_equal, fit, loop, program_of
from mcbn.engine.fuse import fuse_activations, fuse_kernels


class Residual(nn.Module):
    """A block in the manner of torchvision's ResNet."""

    def __init__(self, alpha: int) -> None:
        super().__init__()
        self.before, self.first = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.bn, self.relu, self.alpha = nn.BatchNorm2d(4), nn.ReLU(inplace=True), alpha

    def forward(self, x: Tensor) -> Tensor:
        identity = self.before(x)
        out = self.bn(self.first(identity))
        if self.alpha == 1:
            out += identity
        else:
            out.add_(identity, alpha=self.alpha)
        return self.relu(out)


@pytest.mark.parametrize(("alpha", "fused"), [(1, 1), (2, 0)])
def test_residual_added_in_place_is_fused_into_its_convolution(alpha: int, fused: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 6, 6, dtype=torch.float64)
    bayes = fit(Residual(alpha).double(), x)
    check_equal(bayes.sample(x, chunk_size=1), loop(bayes, x), 1e-12)
    program = program_of(bayes, x, fold=True)
    targets = [node.target for node in fuse_activations(program.each).graph.nodes]
    assert targets.count(torch.cudnn_convolution_add_relu) == fused
    assert targets.count(torch.nn.functional.conv2d) == 1 - fused


class Straight(Residual):
    """A shortcut that is the fused result of the block before, as in every ResNet."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.first(x))
        out += x
        return self.relu(out)


def test_a_fused_result_is_the_shortcut_of_the_next_block() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 6, 6)
    net = nn.Sequential(nn.BatchNorm2d(4), *(Straight(1) for _ in range(3)))
    program = program_of(fit(net, x), x, fold=True)
    targets = [node.target for node in fuse_activations(program.each).graph.nodes]
    assert targets.count(torch.cudnn_convolution_add_relu) == 3


def relu_of_sum(x: Tensor, weight: Tensor, z: Tensor, alpha: float, bias: Tensor, *where: Any) -> Tensor:
    """What `torch.cudnn_convolution_add_relu` computes, on any device."""
    return torch.relu(torch.nn.functional.conv2d(x, weight, bias, *where) + alpha * z)


class Projected(nn.Module):
    """A block whose shortcut is a convolution with batch norm of its own."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.before, self.main, self.short = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1)
        self.bn, self.bn_short, self.shared = nn.BatchNorm2d(6), nn.BatchNorm2d(6), shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        short = self.bn_short(self.short(x))
        out = torch.relu(self.bn(self.main(x)) + short)
        return out + short if self.shared else out


@pytest.mark.parametrize("shared", [False, True])
def test_bias_of_a_projected_shortcut_goes_into_the_convolution_it_is_added_to(shared: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 6, 6, dtype=torch.float64)
    bayes = fit(Projected(shared).double(), x)
    program = program_of(bayes, x, fold=True)
    with torch.no_grad():
        omega = program.scales_and_shifts(bayes.posterior.mean, bayes.posterior.var)
        expected = program.run(program.run_shared(x), omega[1:2])
        program = replace(program, each=fuse_activations(program.each))
        for node in program.each.graph.nodes:
            if node.target is torch.cudnn_convolution_add_relu:
                node.target = relu_of_sum
        program.each.recompile()
        check_equal(program.run(program.run_shared(x), omega[1:2]), expected, 1e-12)
    (left,) = (node for node in program.each.graph.nodes if node.target is torch.nn.functional.conv2d)
    assert (left.args[2] is None) != shared  # where something else reads the shortcut, its bias must stay


class Meddling(nn.Module):
    """A network that changes a convolution's input in place before the convolution's result is used."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.conv, self.bn = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = self.conv(x)
        x.mul_(3)
        return torch.relu(self.bn(y) + x)


def test_nothing_is_fused_across_a_change_in_place() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 16, 8, 8)
    bayes = fit(Meddling(), x)
    for folded in (True, False):
        program = program_of(bayes, x, fold=folded)
        each = (fuse_activations if folded else fuse_kernels)(program.each)
        targets = [node.target for node in each.graph.nodes]
        assert targets.count(torch.nn.functional.conv2d) == 1
    check_equal(bayes.sample(x, chunk_size=1), loop(bayes, x), 1e-5)


class Joined(nn.Module):
    """Two values put together, one of them doubled in size, as in a UNet."""

    def __init__(self, *, order: int = 1, mode: str = "nearest", meddles: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.before, self.conv, self.bn = nn.BatchNorm2d(16), nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.order, self.up, self.meddles, self.reads = order, nn.Upsample(scale_factor=2, mode=mode), meddles, reads

    def forward(self, x: Tensor) -> Tensor:
        skip = self.before(x)
        small = nn.functional.max_pool2d(skip, 2)
        both = torch.cat([self.up(small), skip][:: self.order], dim=-3)
        if self.meddles:
            skip.mul_(3)
        y = torch.relu(self.bn(self.conv(both)))
        return y + both.mean() + skip.mean() if self.reads else y


@pytest.mark.parametrize(
    ("network", "doubled", "left"),  # left: interpolations and concatenations
    [
        (Joined(), 1, 0),
        (Joined(order=-1), 2, 0),
        (Joined(mode="bilinear"), 0, 1),
        (Joined(meddles=True), 0, 2),
        (Joined(reads=True), 0, 2),
    ],
    ids=["nearest", "other way round", "bilinear", "changed in place", "read elsewhere"],
)
def test_kernel_reads_both_parts_of_a_concatenation(network: Joined, doubled: int, left: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16, 8, 8)
    bayes = fit(network, x)
    program = program_of(bayes, x, fold=False)
    graph = fuse_kernels(program.each).graph
    (made,) = (node for node in graph.nodes if node.target is torch.ops.mcbn.narrow.default)
    assert made.args[2] == doubled
    assert (made.args[1] is None) == (left == 2)
    assert sum(node.target in (torch.cat, nn.functional.interpolate) for node in graph.nodes) == left
