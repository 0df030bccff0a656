"""Corrupted images at five severities: noise, blur, lost contrast, glare, coarse pixels.

In the spirit of Hendrycks and Dietterich 2019, with formulas and strengths of our own, so that their numbers do not
compare with published ones. Each kind is the identity at severity 0 and departs further at each severity; the noise
is one seeded field that grows.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn_study.data.cifar import require_images

SEVERITIES = (1, 2, 3, 4, 5)
NOISE = (0.0, 0.03, 0.06, 0.09, 0.13, 0.18)  # standard deviation, of 1 = white
BLUR = (0.0, 0.5, 0.7, 0.9, 1.2, 1.6)  # standard deviation in pixels
CONTRAST = (1.0, 0.7, 0.5, 0.35, 0.22, 0.12)  # factor on the distance from the image's mean
BRIGHTNESS = (0.0, 0.08, 0.16, 0.24, 0.32, 0.42)  # added, of 1 = white
BLOCKS = (1.0, 0.875, 0.75, 0.5, 0.375, 0.25)  # pixels a side that are left, as a share


def noise(x: Tensor, severity: int, seed: int) -> Tensor:
    """x + sigma e, e standard normal of (seed, row), sigma by severity; x (N, 3, H, W) in 0..1."""
    field = np.stack(
        [np.random.default_rng([seed, row]).standard_normal(x.shape[1:], np.float32) for row in range(len(x))]
    )
    return x + NOISE[severity] * torch.from_numpy(field)


def blur(x: Tensor, severity: int, seed: int) -> Tensor:
    """Convolve rows and columns with exp(-d^2 / 2 sigma^2), normalised, edges mirrored."""
    if severity == 0:
        return x
    radius = 4
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / BLUR[severity]).square())
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)  # (3, 1, 1, 9)
    padded = F.pad(x, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, weights, groups=x.shape[1]), weights.transpose(2, 3), groups=x.shape[1])


def contrast(x: Tensor, severity: int, seed: int) -> Tensor:
    """Return m + c (x - m), m the mean of the image."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + CONTRAST[severity] * (x - mean)


def brightness(x: Tensor, severity: int, seed: int) -> Tensor:
    """Return x + b."""
    return x + BRIGHTNESS[severity]


def pixelate(x: Tensor, severity: int, seed: int) -> Tensor:
    """Average to fewer pixels, and give each old pixel the mean of those that cover it."""
    height, width = x.shape[2:]
    coarse = [max(1, round(BLOCKS[severity] * side)) for side in (height, width)]
    return F.adaptive_avg_pool2d(F.adaptive_avg_pool2d(x, (coarse[0], coarse[1])), (height, width))


KINDS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "noise": noise,
    "blur": blur,
    "contrast": contrast,
    "brightness": brightness,
    "pixelate": pixelate,
}


def corrupt(images: Tensor, kind: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt bytes (N, 3, H, W) in one way; severity 0 to 5. Row i depends on (seed, i) alone."""
    if kind not in KINDS:
        raise MCBNError(f"corruption must be one of {list(KINDS)}, got {kind!r}")
    if batches.require_int("severity", severity, 0) > SEVERITIES[-1]:
        raise MCBNError(f"severity must be 0 to {SEVERITIES[-1]}, got {severity}")
    require_images(images)
    changed = KINDS[kind](images.float() / 255, severity, seed)
    return (changed * 255).round().clamp(0, 255).to(torch.uint8)


def mixture(images: Tensor, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt image i by kind i modulo 5, so that every kind has its share of the images."""
    result = images.clone()
    for position, kind in enumerate(KINDS):
        result[position :: len(KINDS)] = corrupt(images[position :: len(KINDS)], kind, severity, seed=seed)
    return result
