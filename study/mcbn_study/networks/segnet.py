"""SegNet (Badrinarayanan et al. 2017): a VGG-like encoder and its mirror image, which unpools by remembered indices."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn.errors import MCBNError

WIDTHS = (64, 96, 128, 128, 128)  # VGG-16 has 64, 128, 256, 512, 512
DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each stage, as in VGG-16


class SegNet(nn.Module):
    """Label every pixel: x (N, 3, H, W) -> logits (N, K, H, W), for any H and W.

    Encoder: stages of 3x3 convolution -> batch norm -> ReLU, each followed by 2x2 max-pooling that remembers where the
    maxima were. Decoder: the stages mirrored, each after putting values back to those places (zeros elsewhere). The
    last convolution gives the logits; all others have batch norm. 13 + 13 convolutions by default, as in Kendall et
    al. 2015 (Bayesian SegNet), whose weights Teye et al. 2018 used.
    Differs: narrower (2.9 instead of 29.5 million weights), no dropout, trained from scratch.

    Args:
        n_classes: K.
        widths: channels of each stage, from full resolution down.
        depths: convolutions of each stage.
        seed: draws the weights (He et al. 2015) and leaves the global generator alone.
    """

    def __init__(
        self, n_classes: int, *, widths: Sequence[int] = WIDTHS, depths: Sequence[int] = DEPTHS, seed: int = 0
    ) -> None:
        super().__init__()
        if n_classes < 2 or not widths or len(widths) != len(depths) or min(*widths, *depths) < 1 or depths[0] < 2:
            raise MCBNError(
                "SegNet needs at least 2 classes, and for every stage a width and a depth of at least 1 (the first "
                f"stage 2); got n_classes={n_classes}, widths={tuple(widths)}, depths={tuple(depths)}"
            )
        generator = torch.Generator().manual_seed(seed)
        encoder, decoder = list[nn.Module](), list[nn.Module]()
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            above = list(widths[level - 1 : level])  # empty at full resolution
            encoder.append(_stage([*(above or [3]), *[width] * depth], generator))
            decoder.insert(0, _stage([*[width] * depth, *above], generator))
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.classifier = _convolution(widths[0], n_classes, generator, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, K, H, W)."""
        self._require_image(x)
        places, sizes = [], []
        for stage in self.encoder:
            x = stage(x)
            sizes.append(x.shape[-2:])
            x, place = F.max_pool2d(x, 2, return_indices=True)
            places.append(place)
        for stage in self.decoder:
            x = stage(unpool(x, places.pop(), sizes.pop()))
        logits: Tensor = self.classifier(x)
        return logits

    def _require_image(self, x: Tensor) -> None:
        least = 2 ** len(self.encoder)
        if x.ndim != 4 or x.shape[1] != 3 or min(x.shape[-2:]) < least or not x.is_floating_point():
            raise MCBNError(
                f"SegNet takes RGB images (N, 3, H, W) of floating point, H and W at least {least}; got "
                f"{tuple(x.shape)}, {str(x.dtype)[6:]}"
            )


def unpool(x: Tensor, place: Tensor, size: Sequence[int]) -> Tensor:
    """Put values (N, C, h, w) to the places they were pooled from in (N, C, H, W), zeros elsewhere.

    What `F.max_unpool2d` does, by an operation that `torch.vmap` knows, so that several draws can share a pass. The
    size is given, as 45 rows pool to 22, which alone would come back as 44.
    """
    N, C = x.shape[:2]
    H, W = size
    empty = x.new_zeros(N, C, H * W)
    return empty.scatter(2, place.flatten(2), x.flatten(2)).view(N, C, H, W)


def _stage(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Convolution -> batch norm -> ReLU from each width to the next."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [_convolution(inputs, outputs, generator), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _convolution(inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = False) -> nn.Conv2d:
    # built on "meta": PyTorch's own initial draw would move the global generator
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias, device="meta").to_empty(device="cpu")
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu", generator=generator)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    return convolution
