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
STRENGTHS = {  # by severity, from 0
    "noise": (0.0, 0.03, 0.06, 0.09, 0.13, 0.18),  # standard deviation, of 1 = white
    "blur": (0.0, 0.5, 0.7, 0.9, 1.2, 1.6),  # standard deviation in pixels
    "contrast": (1.0, 0.7, 0.5, 0.35, 0.22, 0.12),  # factor on the distance from the image's mean
    "brightness": (0.0, 0.08, 0.16, 0.24, 0.32, 0.42),  # added, of 1 = white
    "pixelate": (1.0, 0.875, 0.75, 0.5, 0.375, 0.25),  # pixels a side that are left, as a share
}


def noise(x: Tensor, sigma: float, seed: int) -> Tensor:
    """x + sigma e, e standard normal of (seed, row); x (N, 3, H, W) in 0..1."""
    rows = [np.random.default_rng([seed, row]).standard_normal(x.shape[1:], np.float32) for row in range(len(x))]
    return x + sigma * torch.from_numpy(np.stack(rows))


def blur(x: Tensor, sigma: float) -> Tensor:
    """Convolve rows and columns with exp(-d^2 / 2 sigma^2), normalised, edges mirrored."""
    if sigma == 0:
        return x
    radius = 4
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma).square())
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)  # (3, 1, 1, 9)
    padded = F.pad(x, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, weights, groups=x.shape[1]), weights.transpose(2, 3), groups=x.shape[1])


def contrast(x: Tensor, factor: float) -> Tensor:
    """Return m + c (x - m), m the mean of the image."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + factor * (x - mean)


def pixelate(x: Tensor, share: float) -> Tensor:
    """Average to fewer pixels, and give each old pixel the mean of those that cover it."""
    height, width = x.shape[2:]
    coarse = max(1, round(share * height)), max(1, round(share * width))
    return F.adaptive_avg_pool2d(F.adaptive_avg_pool2d(x, coarse), (height, width))


KINDS: dict[str, Callable[[Tensor, float, int], Tensor]] = {
    "noise": noise,
    "blur": lambda x, sigma, seed: blur(x, sigma),
    "contrast": lambda x, factor, seed: contrast(x, factor),
    "brightness": lambda x, added, seed: x + added,
    "pixelate": lambda x, share, seed: pixelate(x, share),
}


def corrupt(images: Tensor, kind: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt bytes (N, 3, H, W) in one way; severity 0 to 5. Row i depends on (seed, i) alone."""
    if kind not in KINDS:
        raise MCBNError(f"corruption must be one of {list(KINDS)}, got {kind!r}")
    if batches.require_int("severity", severity, 0) > SEVERITIES[-1]:
        raise MCBNError(f"severity must be 0 to {SEVERITIES[-1]}, got {severity}")
    require_images(images)
    changed = KINDS[kind](images.float() / 255, STRENGTHS[kind][severity], seed)
    return (changed * 255).round().clamp(0, 255).to(torch.uint8)


def mixture(images: Tensor, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt image i by kind i modulo 5, so that every kind has its share of the images."""
    result = images.clone()
    for position, kind in enumerate(KINDS):
        result[position :: len(KINDS)] = corrupt(images[position :: len(KINDS)], kind, severity, seed=seed)
    return result
