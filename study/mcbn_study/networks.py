"""Networks of images: the paper's for CIFAR-10, SegNet, and the usual ones to time, so that no package is needed."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random

N = TypeVar("N", bound=nn.Module)
RESNET_WIDTHS = (16, 32, 64)  # of the three stages; Teye et al. 2018, code
SLOPE = 0.1  # of leaky ReLU; section 4.3
EPSILON = 1e-3  # of batch norm; code
IMAGE = (3, 32, 32)
CLASSES = 10
_three_by_three = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
SEGNET_WIDTHS = (64, 96, 128, 128, 128)  # VGG-16 has 64, 128, 256, 512, 512
SEGNET_DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each stage, as in VGG-16
# Sandler et al. 2018, Table 2: expansion, channels, blocks, stride of the first; then blocks the decoder sees
MOBILENET = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
Scale = tuple[Sequence[float], Sequence[float]]  # mean and deviation of each channel, of 1 = white
IMAGENET: Scale = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the trainer of foreign ResNets too
LEVELS = {3: 24, 6: 32, 13: 96, 18: 1280}  # block: channels


class CifarResNet(nn.Module):
    """ResNet of depth 6n + 2 for 32x32 images: a convolution, three stages of n units, batch norm, mean, linear.

    Teye et al. 2018, section 4.3: depth 32, 5 units a stage. Weights of a k x k convolution to C channels start as
    N(0, 2 / (k^2 C)) (He et al. 2015, fan-out), those of the linear layer as U(-a, a) with a = sqrt(3 / inputs), as the
    authors' code has them. Running statistics have momentum 0.1: the moving average with decay 0.9 of that code.
    dropout: rate before the second convolution of each unit; 0 as in the paper. seed: of the initial weights.
    """

    def __init__(self, depth: int = 32, *, dropout: float = 0.0, seed: int) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise MCBNError(f"depth must be 6 n + 2 with n >= 1, such as 20 or 32; got {depth!r}")
        if not 0 <= dropout < 1:
            raise MCBNError(f"dropout must be a rate from 0 up to 1; got {dropout!r}")
        self.depth, self.dropout = depth, float(dropout)
        widths = [RESNET_WIDTHS[0], *(width for width in RESNET_WIDTHS for _ in range(depth // 6))]
        with isolated_random():  # layers draw first weights of their own
            self.first = _three_by_three(IMAGE[0], RESNET_WIDTHS[0])
            units = [Unit(a, b, dropout, activate_shortcut=i == 0) for i, (a, b) in enumerate(pairwise(widths))]
            self.units = nn.Sequential(*units)
            self.norm = nn.BatchNorm2d(RESNET_WIDTHS[-1], eps=EPSILON)
            self.last = nn.Linear(RESNET_WIDTHS[-1], CLASSES)
        _initialize(self, torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        """Map standardised images (N, 3, 32, 32) to logits (N, 10)."""
        if x.shape[1:] != IMAGE:
            raise MCBNError(f"the network takes images (N, 3, 32, 32), made by `standardize`; got {tuple(x.shape)}")
        x = F.leaky_relu(self.norm(self.units(self.first(x))), SLOPE)  # (N, 64, 8, 8)
        return cast(Tensor, self.last(x.mean((2, 3))))


class Unit(nn.Module):
    """Batch norm, leaky ReLU, 3x3 convolution, twice, added to a shortcut (He et al. 2016, arXiv 1603.05027).

    The shortcut pools and adds zero channels where the unit widens; in the first unit it starts after the activation.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float, *, activate_shortcut: bool) -> None:
        super().__init__()
        self.stride, self.extra, self.activate_shortcut = 1 + (outputs > inputs), outputs - inputs, activate_shortcut
        self.norm1 = nn.BatchNorm2d(inputs, eps=EPSILON)
        self.conv1 = _three_by_three(inputs, outputs, stride=self.stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs, eps=EPSILON), _three_by_three(outputs, outputs)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C', H / stride, W / stride)."""
        y = F.leaky_relu(self.norm1(x), SLOPE)
        shortcut = y if self.activate_shortcut else x
        y = F.leaky_relu(self.norm2(self.conv1(y)), SLOPE)
        if self.extra:
            shortcut = F.pad(F.avg_pool2d(shortcut, self.stride), (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return cast(Tensor, self.conv2(self.drop(y))) + shortcut


def standardize(images: Tensor) -> Tensor:
    """Bring each image to mean 0 and deviation 1 over its own pixels and channels: bytes (N, 3, H, W) to float32.

    (x - mean) / max(std, 1 / sqrt(n)), n = 3 H W, std with 1/n: the authors' `per_image_standardization` of TensorFlow.
    """
    if images.ndim != 4 or images.shape[1] != IMAGE[0] or images.is_floating_point():
        wanted = "bytes of colour images, (N, 3, H, W) in 0..255"
        raise MCBNError(f"standardize takes {wanted}; got {tuple(images.shape)}, {str(images.dtype)[6:]}")
    x = images.float()
    std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)  # (N, 1, 1, 1)
    return (x - mean) / std.clamp(min=1 / math.sqrt(x[0].numel() if len(x) else 1))


def normalise(images: Tensor, scale: Scale = IMAGENET) -> Tensor:
    """Bring bytes (..., 3, H, W) to what networks of photographs take: (x / 255 - mean) / std of each channel."""
    mean, std = (torch.tensor(values, device=images.device).reshape(3, 1, 1) for values in scale)
    return (images.float() / 255 - mean) / std


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


class SegNet(nn.Module):
    """Label every pixel (Badrinarayanan et al. 2017): x (N, 3, H, W) -> logits (N, K, H, W), for any H and W.

    Encoder: stages of 3x3 convolution -> batch norm -> ReLU, each followed by 2x2 max-pooling that remembers where the
    maxima were. Decoder: the stages mirrored, each after putting values back to those places (zeros elsewhere). 13 + 13
    convolutions, as in Kendall et al. 2015, whose weights Teye et al. 2018 used; all but the last have batch norm.
    Differs: narrower (2.9 instead of 29.5 million weights), no dropout, trained from scratch. widths: of each stage.
    """

    def __init__(self, n_classes: int, *, widths: Sequence[int] = SEGNET_WIDTHS, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        encoder, decoder = list[nn.Module](), list[nn.Module]()
        for level, (width, depth) in enumerate(zip(widths, SEGNET_DEPTHS[: len(widths)], strict=True)):
            above = list(widths[level - 1 : level])  # empty at full resolution
            encoder.append(_stage([*(above or [3]), *[width] * depth], generator))
            decoder.insert(0, _stage([*[width] * depth, *above], generator))
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.classifier = _he_convolution(widths[0], n_classes, generator, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, K, H, W)."""
        least = 2 ** len(self.encoder)
        if x.ndim != 4 or x.shape[1] != 3 or min(x.shape[-2:]) < least or not x.is_floating_point():
            wanted = f"RGB images (N, 3, H, W) of floating point, H and W at least {least}"
            raise MCBNError(f"SegNet takes {wanted}; got {tuple(x.shape)}, {str(x.dtype)[6:]}")
        places, sizes = [], []
        for stage in self.encoder:
            x = stage(x)
            sizes.append(x.shape[-2:])
            x, place = F.max_pool2d(x, 2, return_indices=True)
            places.append(place)
        for stage in self.decoder:
            x = stage(unpool(x, places.pop(), sizes.pop()))
        return cast(Tensor, self.classifier(x))


def unpool(x: Tensor, place: Tensor, size: Sequence[int]) -> Tensor:
    """Put values (N, C, h, w) to the places they were pooled from in (N, C, H, W), zeros elsewhere.

    What `F.max_unpool2d` does, by an operation that `torch.vmap` knows. 45 rows pool to 22, so the size is given.
    """
    (N, C), (H, W) = x.shape[:2], size
    return x.new_zeros(N, C, H * W).scatter(2, place.flatten(2), x.flatten(2)).view(N, C, H, W)


def _stage(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Convolution -> batch norm -> ReLU from each width to the next."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [_he_convolution(inputs, outputs, generator), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _he_convolution(inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = False) -> nn.Conv2d:
    # built on "meta": PyTorch's own initial draw would move the global generator
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias, device="meta").to_empty(device="cpu")
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu", generator=generator)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    return convolution


def _normalised(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def _rectified(*how: int) -> nn.Sequential:
    return _normalised(*how).append(nn.ReLU6())


class Basic(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (He et al. 2016, CIFAR variant A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _normalised(inputs, outputs, 3, stride), _normalised(outputs, outputs, 3)
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
        self.one, self.two = _normalised(inputs, width, 1), _normalised(width, width, 3, stride)
        self.three = _normalised(width, 4 * width, 1)
        projected = stride > 1 or inputs != 4 * width
        self.shortcut = _normalised(inputs, 4 * width, 1, stride) if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, 4 width, H / stride, W / stride)."""
        return F.relu(self.three(F.relu(self.two(F.relu(self.one(x))))) + self.shortcut(x))


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def cifar_resnet(units: int) -> nn.Module:
    """Build ResNet of depth 6 n + 2 for 32x32 images, 10 classes, n blocks a stage (He et al. 2016, section 4.2)."""
    blocks = [Basic(a, b, 1 + (b > a)) for a, b in pairwise([16] * (units + 1) + [32] * units + [64] * units)]
    return nn.Sequential(_normalised(3, 16, 3), nn.ReLU(), *blocks, _Pool(), nn.Linear(64, 10))


def resnet50() -> nn.Module:
    """Build ResNet-50 for 224x224 images, 1000 classes: 53 batch norm layers."""
    widths = [64] * 3 + [128] * 4 + [256] * 6 + [512] * 3
    blocks = [Bottleneck(64, 64, 1), *(Bottleneck(4 * a, b, 1 + (b > a)) for a, b in pairwise(widths))]
    stem = [_normalised(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, _Pool(), nn.Linear(2048, 1000))


class InvertedResidual(nn.Module):
    """1x1 to more channels, 3x3 of each, 1x1 to few, added to the input where it fits (Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide, self.fits = inputs * expansion, stride == 1 and inputs == outputs
        first = [_rectified(inputs, wide, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(*first, _rectified(wide, wide, 3, stride, wide), *_normalised(wide, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C', H / stride, W / stride)."""
        return x + self.conv(x) if self.fits else cast(Tensor, self.conv(x))


class MobileSegmenter(nn.Module):
    """Label every pixel by a frozen MobileNetV2 and a decoder: x (N, 3, H, W) -> logits (N, K, H, W).

    Decoder, from the smallest level up: 1x1 of the encoder's level, plus what came before at that size, then 3x3. The
    encoder stays in eval mode, with torchvision's names. widths: channels of the decoder.
    """

    def __init__(self, n_classes: int, *, widths: Sequence[int] = (64,), seed: int = 0) -> None:
        super().__init__()
        stages = [(32, 1, 1), *((c, e, s if i == 0 else 1) for e, c, n, s in MOBILENET for i in range(n))]
        with isolated_random(seed):
            blocks = [InvertedResidual(a[0], *b) for a, b in pairwise(stages)]
            ends, width = (_rectified(3, 32, 3, 2), _rectified(320, LEVELS[18], 1)), widths[0]
            self.features = nn.Sequential(ends[0], *blocks, ends[1]).requires_grad_(False)
            self.sides = nn.ModuleList([_normalised(channels, width, 1) for channels in LEVELS.values()])
            self.joins = nn.ModuleList([_rectified(width, width, 3) for _ in LEVELS])
            self.classifier = nn.Conv2d(width, n_classes, 3, padding=1)

    def train(self, mode: bool = True) -> Self:
        """Change the mode of the decoder alone."""
        super().train(mode).features.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, K, H, W)."""
        size, sides = x.shape[-2:], list[Tensor]()
        for number, block in enumerate(self.features):
            x = block(x)
            if number in LEVELS:
                sides.append(self.sides[len(sides)](x))
        x = torch.zeros_like(sides[-1])
        for side, join in zip(sides[::-1], self.joins, strict=True):
            x = join(side + F.interpolate(x, side.shape[-2:], mode="bilinear"))
        return F.interpolate(self.classifier(x), size, mode="bilinear")


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
        return nn.Sequential(_normalised(inputs, outputs, 3), nn.ReLU(), _normalised(outputs, outputs, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to class scores (N, K, H, W)."""
        skips = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return cast(Tensor, self.last(x))


def load_weights(network: N, tensors: Mapping[str, Tensor], path: Path) -> N:
    """Load the weights that a file holds, which must fit; return the network in eval mode."""
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise MCBNError(f"{path} does not fit the network it names: {error}; remove it to train anew") from error
    return network.eval()
