"""CIFAR-10-C: fifteen corruptions at five severities, and three more of its extra ones to choose settings by.

Hendrycks and Dietterich 2019 (Benchmarking neural network robustness to common corruptions and perturbations, ICLR);
formulas and strengths of github.com/hendrycks/robustness, commit ca36008, ImageNet-C/create_c/make_cifar_c.py, whose
libraries (OpenCV, scikit-image, ImageMagick) are replaced by torch and PIL; random numbers differ. As published, values
are cut off to bytes, not rounded, and glass blur copies pixels where it means to exchange them: numpy gives views.
Frost needs five photographs, which come with the PyPI package imagecorruptions: without them it is left out. The
fourth extra, spatter, is left out.
"""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from mcbn.errors import MCBNError
from mcbn_study.data.cifar import require_images

STRENGTHS: dict[str, tuple[Any, ...]] = {  # by severity 1 to 5, as published
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation, of 1 = white
    "shot_noise": (500, 250, 100, 75, 50),  # photons of white
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius of a disk, its own blur
    "glass_blur": ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)),  # blur, rounds; neighbours by one pixel
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, standard deviation
    "zoom_blur": (6, 11, 16, 21, 26),  # how many of the factors 1, 1.01, 1.02, ...
    "snow": (  # mean and deviation of flakes, zoom, threshold, motion blur (radius, deviation), share of the image
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # shares of image and frost
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # strength, decay of the plasma fractal
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added to the value of HSV
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor on the distance from the mean of each channel
    "elastic": ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),  # pixels
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # pixels a side that are left, as a share
    "jpeg": (80, 65, 58, 50, 40),  # quality
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),  # saturation of HSV: factor, added
}
KINDS, EXTRAS = tuple(STRENGTHS)[:15], tuple(STRENGTHS)[15:]
Formula = Callable[[Tensor, Any, Generator], Tensor]  # images (N, 3, H, W) in 0..1, a strength


def corrupt(
    images: Tensor, kind: str, severity: int, *, seed: int = 0, frost: Tensor | None = None, device: str = "cpu"
) -> Tensor:
    """Corrupt bytes (N, 3, 32, 32) on a device; severity 0 leaves them as they are.

    Args:
        images: on any device.
        kind: of `KINDS` or `EXTRAS`.
        severity: 0 to 5.
        seed: of all random numbers.
        frost: bytes (n, 3, h, w), photographs of frost as `load_frost` reads them; for the kind frost alone.
        device: to compute on.
    """
    if kind not in STRENGTHS or severity not in range(6):
        raise MCBNError(f"corruptions are {', '.join(STRENGTHS)}, severities 0 to 5; got {kind!r}, {severity!r}")
    require_images(images)
    if severity == 0:
        return images.to(device)
    strength, generator = STRENGTHS[kind][severity - 1], torch.Generator().manual_seed(1000 * seed + severity)
    if kind in _BY_PIL:
        return _by_pil(images, kind, strength).to(device)
    if kind == "frost":
        return _frost(images.to(device), strength, generator, frost)
    changed = FORMULAS[kind](images.to(device).double() / 255, strength, generator)
    return (changed.clamp(0, 1) * 255).to(torch.uint8)


def load_frost(folder: Path) -> Tensor:
    """Read the first five pictures frost1.png ... of imagecorruptions, a fifth of their size: bytes (5, 3, h, w)."""
    names = [f"frost{n}.{'png' if n < 4 else 'jpg'}" for n in range(1, 6)]
    pictures = [torch.from_numpy(np.array(Image.open(folder / name).convert("RGB"))) for name in names]
    small = [F.interpolate(p.permute(2, 0, 1)[None].float(), scale_factor=0.2, mode="bilinear")[0] for p in pictures]
    height, width = (min(p.shape[side] for p in small) for side in (1, 2))
    return torch.stack([p[:, :height, :width] for p in small]).round().to(torch.uint8)


def _normal(x: Tensor, generator: Generator, shape: tuple[int, ...] | None = None) -> Tensor:
    return torch.randn(shape or x.shape, generator=generator, dtype=torch.float64).to(x.device)


def _uniform(x: Tensor, generator: Generator, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(x.device)


def _shot(x: Tensor, photons: float, generator: Generator) -> Tensor:
    return torch.poisson((x * photons).cpu(), generator).to(x.device) / photons


def _impulse(x: Tensor, share: float, generator: Generator) -> Tensor:
    u = _uniform(x, generator, x.shape, 0, 1)
    return torch.where(u < share / 2, 0.0, torch.where(u < share, 1.0, x))


def _filter(x: Tensor, weights: Tensor, padding: str) -> Tensor:
    """Correlate every channel with weights (h, w); padding: replicate, reflect (101) or symmetric."""
    for side, size in ((3, weights.shape[1] // 2), (2, weights.shape[0] // 2)):
        n = x.shape[side]
        place = torch.arange(-size, n + size, device=x.device)
        if padding == "replicate":
            place = place.clamp(0, n - 1)
        elif padding == "reflect":
            place = (n - 1) - ((place.abs() % (2 * n - 2)) - (n - 1)).abs()
        else:
            place = torch.where(place % (2 * n) < n, place % (2 * n), 2 * n - 1 - place % (2 * n))
        x = x.index_select(side, place)
    return F.conv2d(x, weights.to(x).expand(x.shape[1], 1, -1, -1), groups=x.shape[1])


def _gaussian(x: Tensor, sigma: float, padding: str = "replicate", truncate: float = 4.0) -> Tensor:
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return x
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma).square())
    weights = weights / weights.sum()
    return _filter(_filter(x, weights[None], padding), weights[:, None], padding)


def _defocus(x: Tensor, strength: tuple[float, float], generator: Generator) -> Tensor:
    radius, blur = strength
    place = torch.arange(-8, 9, dtype=torch.float64)
    disk = (place[:, None].square() + place.square() <= radius**2).double()
    soft = torch.exp(-0.5 * (torch.arange(-1, 2, dtype=torch.float64) / blur).square())
    soft = torch.outer(soft, soft) / soft.sum().square()
    return _filter(x, F.conv2d((disk / disk.sum())[None, None], soft[None, None], padding=1)[0, 0], "reflect")


def _glass(x: Tensor, strength: tuple[float, int], generator: Generator) -> Tensor:
    """Blur, give each pixel the value of itself or of a neighbour above or left, blur."""
    sigma, rounds = strength
    x = (_gaussian(x, sigma) * 255).to(torch.uint8).double() / 255
    N, _, H, W = x.shape
    image, row, column = (torch.arange(n, device=x.device) for n in (N, H, W))
    for _ in range(rounds):
        up, left = torch.randint(0, 2, (2, N, H, W), generator=generator).to(x.device)
        inside = (row[:, None] >= 2) & (column >= 2)  # as the published loops have it
        x = x[image[:, None, None], :, row[:, None] - up * inside, column - left * inside].permute(0, 3, 1, 2)
    return _gaussian(x, sigma)


def _motion(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Average along a line that begins at each pixel, one angle (N,) an image, edges repeated, as ImageMagick does."""
    steps = torch.arange(2 * radius + 1, device=x.device, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / sigma).square())
    down, right = (torch.ceil(steps * f(torch.deg2rad(degrees))[:, None] - 0.5).long() for f in (torch.sin, torch.cos))
    N, _, H, W = x.shape
    image, row, column = (torch.arange(n, device=x.device) for n in (N, H, W))
    blurred = torch.zeros_like(x)
    for k, weight in enumerate(weights / weights.sum()):
        rows = (row + down[:, k, None]).clamp(0, H - 1)  # (N, H)
        columns = (column + right[:, k, None]).clamp(0, W - 1)
        blurred += weight * x[image[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
    return blurred


def _motion_blur(x: Tensor, strength: tuple[int, float], generator: Generator) -> Tensor:
    return _motion(x, *strength, _uniform(x, generator, (len(x),), -45, 45))


def _zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of images, linearly, and cut off what is too much."""
    side = x.shape[-1]
    kept = math.ceil(side / factor)
    top = (side - kept) // 2
    size = round(kept * factor)
    large = F.interpolate(x[..., top : top + kept, top : top + kept], size=size, mode="bilinear", align_corners=True)
    trim = (size - side) // 2
    return large[..., trim : trim + side, trim : trim + side]


def _zoom_blur(x: Tensor, factors: int, generator: Generator) -> Tensor:
    return torch.stack([x, *(_zoom(x, 1 + 0.01 * step) for step in range(factors))]).mean(0)


def _snow(x: Tensor, strength: tuple[float, ...], generator: Generator) -> Tensor:
    mean, deviation, zoom, threshold, radius, sigma, share = strength
    flakes = _zoom(mean + deviation * _normal(x, generator, (len(x), 1, *x.shape[2:])), zoom)
    flakes = (torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1) * 255).floor() / 255
    flakes = (_motion(flakes, int(radius), sigma, _uniform(x, generator, (len(x),), -135, -45)) * 255).round() / 255
    grey = (x * torch.tensor([0.299, 0.587, 0.114]).to(x).reshape(3, 1, 1)).sum(1, keepdim=True)
    whitened = share * x + (1 - share) * torch.maximum(x, grey * 1.5 + 0.5)
    return whitened + flakes + flakes.flip(2, 3)


def _frost(images: Tensor, strength: tuple[float, float], generator: Generator, frost: Tensor | None) -> Tensor:
    if frost is None:
        raise MCBNError("frost needs its photographs: corrupt(frost=load_frost(folder)) with those of imagecorruptions")
    (N, _, H, W), (n, _, h, w) = images.shape, frost.shape
    which, top, left = (torch.randint(0, most, (N,), generator=generator) for most in (n, h - H, w - W))
    rows, columns = top[:, None] + torch.arange(H), left[:, None] + torch.arange(W)
    crops = frost[which[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2).to(images.device)
    return (strength[0] * images.double() + strength[1] * crops).clamp(0, 255).to(torch.uint8)


def _plasma(x: Tensor, decay: float, generator: Generator) -> Tensor:
    """Diamond-square height maps (N, H, H) in 0..1, H a power of two."""
    N, _, side, _ = x.shape
    field, step, wibble = torch.zeros(N, side, side, dtype=torch.float64), side, 100.0

    def mean(total: Tensor) -> Tensor:
        return total / 4 + wibble * wibble * (2 * torch.rand(total.shape, generator=generator).double() - 1)

    while step >= 2:
        half, corners = step // 2, field[:, ::step, ::step]
        sums = corners + corners.roll(-1, 1)
        field[:, half::step, half::step] = mean(sums + sums.roll(-1, 2))
        middle = field[:, half::step, half::step]
        field[:, ::step, half::step] = mean(middle + middle.roll(1, 1) + corners + corners.roll(-1, 2))
        field[:, half::step, ::step] = mean(middle + middle.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wibble = half, wibble / decay
    field -= field.amin((1, 2), keepdim=True)
    return (field / field.amax((1, 2), keepdim=True)).to(x.device)


def _fog(x: Tensor, strength: tuple[float, float], generator: Generator) -> Tensor:
    most = x.amax((1, 2, 3), keepdim=True)
    return (x + strength[0] * _plasma(x, strength[1], generator)[:, None]) * most / (most + strength[0])


def _brightness(x: Tensor, added: float, generator: Generator) -> Tensor:
    value = x.amax(1, keepdim=True)
    brighter = (value + added).clamp(0, 1)
    return torch.where(value > 0, x * brighter / value.clamp(min=1e-12), brighter)


def _saturate(x: Tensor, strength: tuple[float, float], generator: Generator) -> Tensor:
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    saturation = chroma / value.clamp(min=1e-12)
    wanted = (saturation * strength[0] + strength[1]).clamp(0, 1)
    grey = torch.tensor([0.0, 1.0, 1.0]).to(x).reshape(3, 1, 1) * value  # hue 0, red, where there is none
    return value - wanted * torch.where(chroma > 0, (value - x) / saturation.clamp(min=1e-12), grey)


def _contrast(x: Tensor, factor: float, generator: Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _elastic(x: Tensor, strength: tuple[float, float, float], generator: Generator) -> Tensor:
    """Move three corners of a square at random, take the affine map that does it, then move each pixel smoothly."""
    (N, _, side, _), (alpha, sigma, most) = x.shape, strength
    centre, reach = side // 2, side // 3
    corners = [[centre + reach] * 2, [centre + reach, centre - reach], [centre - reach] * 2]
    before = torch.tensor(corners, dtype=torch.float64, device=x.device).expand(N, 3, 2)  # x, y
    after = before + _uniform(x, generator, (N, 3, 2), -most, most)
    ones = torch.ones_like(before[..., :1])
    back = torch.linalg.solve(torch.cat([after, ones], 2), before)  # (N, 3, 2): from the result to the image
    place = torch.arange(side, dtype=torch.float64, device=x.device)
    y, x_place = torch.meshgrid(place, place, indexing="ij")
    source = torch.stack([x_place, y, torch.ones_like(y)], 2).reshape(1, -1, 3) @ back  # (N, side^2, 2)
    x = _bilinear(x, source.reshape(N, side, side, 2), edge=False)
    moved = _uniform(x, generator, (N, 2, side, side), -1, 1)
    moved = _gaussian(moved, sigma, "symmetric", 3.0) * alpha
    return _bilinear(x, torch.stack([x_place, y], 2) + moved.permute(0, 2, 3, 1), edge=True)


def _bilinear(x: Tensor, source: Tensor, *, edge: bool) -> Tensor:
    """Read images at places (N, H, W, 2) in pixels; beyond the border mirrored about its edge, or about its pixels."""
    side = x.shape[-1]
    grid = (2 * source + 1) / side - 1 if edge else 2 * source / (side - 1) - 1
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=not edge)


def _pixelate(image: Image.Image, share: float) -> Image.Image:
    small = int(image.width * share), int(image.height * share)
    return image.resize(small, Image.Resampling.BOX).resize(image.size, Image.Resampling.BOX)


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


_BY_PIL: dict[str, Callable[[Image.Image, Any], Image.Image]] = {"pixelate": _pixelate, "jpeg": _jpeg}


def _by_pil(images: Tensor, kind: str, strength: Any) -> Tensor:
    pixels = images.permute(0, 2, 3, 1).cpu().numpy()
    changed = [np.asarray(_BY_PIL[kind](Image.fromarray(image), strength)) for image in pixels]
    return torch.from_numpy(np.stack(changed)).permute(0, 3, 1, 2).contiguous()


FORMULAS: dict[str, Formula] = {
    "gaussian_noise": lambda x, deviation, generator: x + deviation * _normal(x, generator),
    "shot_noise": _shot,
    "impulse_noise": _impulse,
    "defocus_blur": _defocus,
    "glass_blur": _glass,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic": _elastic,
    "speckle_noise": lambda x, deviation, generator: x + x * deviation * _normal(x, generator),
    "gaussian_blur": lambda x, sigma, generator: _gaussian(x, sigma),
    "saturate": _saturate,
}
