"""The paper's network for CIFAR-10: a residual network with pre-activation units and leaky ReLU."""

import math
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random

WIDTHS = (16, 32, 64)  # of the three stages; Teye et al. 2018, code
SLOPE = 0.1  # of leaky ReLU; section 4.3
EPSILON = 1e-3  # of batch norm; code
IMAGE = (3, 32, 32)
CLASSES = 10


class CifarResNet(nn.Module):
    """ResNet of depth 6n + 2 for 32x32 images: a convolution, three stages of n units, batch norm, mean, linear.

    Teye et al. 2018, section 4.3: depth 32, 5 units a stage. Weights of a k x k convolution to C channels start as
    N(0, 2 / (k^2 C)) (He et al. 2015, fan-out), those of the linear layer as U(-a, a) with a = sqrt(3 / inputs), as the
    authors' code has them. Running statistics have momentum 0.1: the moving average with decay 0.9 of that code.

    Args:
        depth: 8, 14, 20, 26, 32, ...
        dropout: rate before the second convolution of each unit; 0 as in the paper, more for MC dropout.
        seed: of the initial weights.
    """

    def __init__(self, depth: int = 32, *, dropout: float = 0.0, seed: int) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise MCBNError(f"depth must be 6 n + 2 with n >= 1, such as 20 or 32; got {depth!r}")
        if not 0 <= dropout < 1:
            raise MCBNError(f"dropout must be a rate from 0 up to 1; got {dropout!r}")
        self.depth, self.dropout = depth, float(dropout)
        units = depth // 6
        widths = [WIDTHS[0], *(width for width in WIDTHS for _ in range(units))]
        with isolated_random():  # layers draw first weights of their own
            self.first = _convolution(IMAGE[0], WIDTHS[0])
            self.units = nn.Sequential(
                *(Unit(a, b, dropout=dropout, activate_shortcut=i == 0) for i, (a, b) in enumerate(pairwise(widths)))
            )
            self.norm = nn.BatchNorm2d(WIDTHS[-1], eps=EPSILON)
            self.last = nn.Linear(WIDTHS[-1], CLASSES)
        _initialize(self, torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        """Map standardised images (N, 3, 32, 32) to logits (N, 10)."""
        if x.shape[1:] != IMAGE:
            raise MCBNError(f"the network takes images (N, 3, 32, 32), made by `standardize`; got {tuple(x.shape)}")
        x = F.leaky_relu(self.norm(self.units(self.first(x))), SLOPE)  # (N, 64, 8, 8)
        logits: Tensor = self.last(x.mean((2, 3)))
        return logits


class Unit(nn.Module):
    """Batch norm, leaky ReLU, 3x3 convolution, twice, added to a shortcut (He et al. 2016, arXiv 1603.05027).

    The shortcut has no parameters: where the unit widens, average pooling and zero channels on both sides. In the
    first unit of a network the shortcut starts after the activation.
    """

    def __init__(self, inputs: int, outputs: int, *, dropout: float, activate_shortcut: bool) -> None:
        super().__init__()
        self.stride, self.extra = (2 if outputs > inputs else 1), outputs - inputs
        self.activate_shortcut = activate_shortcut
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs, eps=EPSILON), _convolution(inputs, outputs, self.stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs, eps=EPSILON), _convolution(outputs, outputs)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C', H / stride, W / stride)."""
        y = F.leaky_relu(self.norm1(x), SLOPE)
        shortcut = y if self.activate_shortcut else x
        y = F.leaky_relu(self.norm2(self.conv1(y)), SLOPE)
        y = cast(Tensor, self.conv2(self.drop(y)))
        if self.extra:
            shortcut = F.avg_pool2d(shortcut, self.stride)
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return y + shortcut


def standardize(images: Tensor) -> Tensor:
    """Bring each image to mean 0 and deviation 1 over its own pixels and channels: bytes (N, 3, H, W) to float32.

    (x - mean) / max(std, 1 / sqrt(n)), n = 3 H W values, std with 1/n: TensorFlow's `per_image_standardization`,
    which the authors' code calls. A constant image becomes 0.
    """
    if images.ndim != 4 or images.shape[1] != IMAGE[0] or images.is_floating_point():
        raise MCBNError(
            f"standardize takes bytes of colour images, (N, 3, H, W) in 0..255; got {tuple(images.shape)}, "
            f"{str(images.dtype)[6:]}"
        )
    x = images.float()
    std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)  # (N, 1, 1, 1)
    return (x - mean) / std.clamp(min=1 / math.sqrt(x[0].numel() if len(x) else 1))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


@torch.no_grad()
def _initialize(network: CifarResNet, generator: torch.Generator) -> None:
    """Draw all weights from one generator, in the order of the modules."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            module.weight.normal_(0, math.sqrt(2 / fan_out), generator=generator)
        elif isinstance(module, nn.Linear):
            bound = math.sqrt(3 / module.in_features)
            module.weight.uniform_(-bound, bound, generator=generator)
            module.bias.zero_()
