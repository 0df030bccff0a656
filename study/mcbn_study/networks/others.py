"""Networks to time: the usual residual networks and a UNet, written out so that nothing else need be installed."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Basic(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (He et al. 2016, CIFAR variant A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(inputs, outputs, 3, stride), _conv(outputs, outputs, 3)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C', H / stride, W / stride)."""
        y = self.second(F.relu(self.first(x)))
        if self.stride > 1 or self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(y + x)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a projected shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = _conv(inputs, width, 1), _conv(width, width, 3, stride)
        self.three = _conv(width, 4 * width, 1)
        projected = stride > 1 or inputs != 4 * width
        self.shortcut = _conv(inputs, 4 * width, 1, stride) if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, 4 width, H / stride, W / stride)."""
        y = self.three(F.relu(self.two(F.relu(self.one(x)))))
        return F.relu(y + self.shortcut(x))


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Average over the image."""
        return x.mean((2, 3))


def resnet32() -> nn.Module:
    """Build ResNet-32 for 32x32 images, 10 classes: 31 batch norm layers."""
    return cifar_resnet(5)


def cifar_resnet(units: int) -> nn.Module:
    """Build ResNet of depth 6 n + 2 for 32x32 images, 10 classes, n blocks a stage (He et al. 2016, section 4.2)."""
    widths = [16] * (units + 1) + [32] * units + [64] * units
    blocks = [Basic(a, b, 1 + (b > a)) for a, b in pairwise(widths)]
    return nn.Sequential(_conv(3, 16, 3), nn.ReLU(), *blocks, _Pool(), nn.Linear(64, 10))


def resnet50() -> nn.Module:
    """Build ResNet-50 for 224x224 images, 1000 classes: 53 batch norm layers."""
    blocks: list[nn.Module] = []
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    stem = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, _Pool(), nn.Linear(2048, 1000))


class UNet(nn.Module):
    """Four levels of two 3x3 convolutions with skip connections (Ronneberger et al. 2015), 16 channels at the top."""

    def __init__(self, classes: int = 11, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList([self._double(a, b) for a, b in zip([3, *widths], widths, strict=False)])
        self.up = nn.ModuleList([self._double(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)])
        self.last = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(_conv(inputs, outputs, 3), nn.ReLU(), _conv(outputs, outputs, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to class scores (N, K, H, W)."""
        skips = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        scores: Tensor = self.last(x)
        return scores
