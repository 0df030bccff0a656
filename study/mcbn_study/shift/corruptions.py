"""CIFAR-10-C: fifteen corruptions at five severities, and three more of its extra ones to choose settings by.

Hendrycks and Dietterich 2019 (Benchmarking neural network robustness to common corruptions and perturbations, ICLR);
formulas and strengths (corruptions.toml) of github.com/hendrycks/robustness, commit ca36008, make_cifar_c.py, whose
libraries (OpenCV, scikit-image, ImageMagick) are replaced by torch and PIL; random numbers differ. As published, values
are cut off to bytes, not rounded, and glass blur copies pixels where it means to exchange them: numpy gives views.
Frost needs five photographs, which come with the PyPI package imagecorruptions: without them it is left out, and of
each only a corner as large as the smallest is used. The fourth extra, spatter, is left out.
"""

import io
import math
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped]
from torch import Generator, Tensor

STRENGTHS: dict[str, list[Any]] = tomllib.loads(Path(__file__).with_name("corruptions.toml").read_text("utf-8"))
KINDS, EXTRAS = tuple(STRENGTHS)[:15], tuple(STRENGTHS)[15:]


def corrupt(images: Tensor, kind: str, severity: int, *, frost: Tensor | None = None) -> Tensor:
    """Corrupt bytes (N, 3, 32, 32) in one of the ways of `STRENGTHS`, severity 1 to 5; frost: of `load_frost`."""
    strength, generator = STRENGTHS[kind][severity - 1], torch.Generator().manual_seed(severity)
    if kind in BY_PIL:
        pixels = (Image.fromarray(image) for image in images.permute(0, 2, 3, 1).cpu().numpy())
        changed = np.stack([np.asarray(BY_PIL[kind](image, strength)) for image in pixels])
        return torch.from_numpy(changed).permute(0, 3, 1, 2).to(images.device)
    formula = FORMULAS[kind] if kind != "frost" else partial(_frost, frost=frost)
    return (formula(images.double() / 255, strength, generator).clamp(0, 1) * 255).to(torch.uint8)


def load_frost(folder: Path) -> Tensor:
    """Read the first five pictures frost1.png ... of imagecorruptions, a fifth of their size: bytes (5, 3, h, w)."""
    files = [folder / f"frost{n}.{'png' if n < 4 else 'jpg'}" for n in range(1, 6)]
    pictures = [torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) for file in files]
    small = [F.interpolate(p[None].float(), scale_factor=0.2, mode="bilinear")[0] for p in pictures]
    height, width = (min(p.shape[side] for p in small) for side in (1, 2))
    return torch.stack([p[:, :height, :width] for p in small]).round().to(torch.uint8)


def _uniform(x: Tensor, generator: Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(x.device)


def _normal(x: Tensor, generator: Generator, channels: int = 3) -> Tensor:
    return torch.randn(len(x), channels, *x.shape[2:], generator=generator, dtype=torch.float64).to(x.device)


def _gaussian(x: Tensor, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    blurred = ndimage.gaussian_filter(x.cpu().numpy(), sigma, mode=mode, truncate=truncate, axes=(2, 3))
    return torch.from_numpy(blurred).to(x.device)


def _defocus(x: Tensor, strength: tuple[float, float], generator: Generator) -> Tensor:
    place = np.arange(-3, 4)  # radii below 2, and their blur
    disk = (place[:, None] ** 2 + place**2 <= strength[0] ** 2).astype(float)
    kernel = ndimage.gaussian_filter(disk / disk.sum(), strength[1], mode="constant", radius=1)
    return torch.from_numpy(ndimage.correlate(x.cpu().numpy(), kernel[None, None], mode="mirror")).to(x.device)


def _read(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Read images at rows and columns that broadcast to (N, H, W)."""
    return x[torch.arange(len(x), device=x.device)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


def _glass(x: Tensor, strength: tuple[float, int], generator: Generator) -> Tensor:
    """Blur, give each pixel the value of itself or of a neighbour above or left, blur."""
    x = (_gaussian(x, strength[0]) * 255).to(torch.uint8).double() / 255
    place = torch.arange(x.shape[-1], device=x.device)
    inside = (place[:, None] >= 2) & (place >= 2)  # as the published loops have it
    for _ in range(int(strength[1])):
        up, left = torch.randint(0, 2, (2, len(x), *x.shape[2:]), generator=generator).to(x.device) * inside
        x = _read(x, place[:, None] - up, place - left)
    return _gaussian(x, strength[0])


def _motion(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Average along a line that begins at each pixel, one angle (N,) an image, edges repeated, as ImageMagick does."""
    weights = torch.exp(-0.5 * (torch.arange(2 * radius + 1, dtype=torch.float64) / sigma).square())
    place, blurred = torch.arange(x.shape[-1], device=x.device), torch.zeros_like(x)
    for step, weight in enumerate(weights / weights.sum()):
        down, right = (torch.ceil(step * f(torch.deg2rad(degrees)) - 0.5).long() for f in (torch.sin, torch.cos))
        rows, columns = ((place + moved[:, None]).clamp(0, x.shape[-1] - 1) for moved in (down, right))  # (N, H)
        blurred += weight * _read(x, rows[:, :, None], columns[:, None])
    return blurred


def _zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of images, linearly, and cut off what is too much."""
    side, kept = x.shape[-1], math.ceil(x.shape[-1] / factor)
    top, size = (side - kept) // 2, round(kept * factor)
    large = F.interpolate(x[..., top : top + kept, top : top + kept], size=size, mode="bilinear", align_corners=True)
    trim = (size - side) // 2
    return large[..., trim : trim + side, trim : trim + side]


def _snow(x: Tensor, strength: tuple[float, ...], generator: Generator) -> Tensor:
    mean, deviation, zoom, threshold, radius, sigma, share = strength
    flakes = _zoom(mean + deviation * _normal(x, generator, 1), zoom)
    flakes = (torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1) * 255).floor() / 255
    degrees = _uniform(x, generator, len(x), low=-135, high=-45)
    flakes = (_motion(flakes, int(radius), sigma, degrees) * 255).round() / 255
    grey = (x * torch.tensor([0.299, 0.587, 0.114]).to(x).reshape(3, 1, 1)).sum(1, keepdim=True)
    return share * x + (1 - share) * torch.maximum(x, grey * 1.5 + 0.5) + flakes + flakes.flip(2, 3)


def _frost(x: Tensor, strength: tuple[float, float], generator: Generator, frost: Any) -> Tensor:
    side, (n, _, h, w) = x.shape[-1], frost.shape
    which, top, left = (torch.randint(0, most, (len(x), 1, 1), generator=generator) for most in (n, h - side, w - side))
    place = torch.arange(side)
    crops: Tensor = frost[which, :, top + place[:, None], left + place].permute(0, 3, 1, 2)
    return x * strength[0] + crops.to(x) / 255 * strength[1]


def _plasma(x: Tensor, decay: float, generator: Generator) -> Tensor:
    """Diamond-square height maps (N, H, H) in 0..1, H a power of two."""
    step, wibble = x.shape[-1], 100.0
    field = torch.zeros(len(x), step, step, dtype=torch.float64)
    while step >= 2:
        half, corners = step // 2, field[:, ::step, ::step]
        noise = wibble**2 * (2 * torch.rand(3, *corners.shape, generator=generator).double() - 1)
        sums = corners + corners.roll(-1, 1)
        middle = field[:, half::step, half::step] = (sums + sums.roll(-1, 2)) / 4 + noise[0]
        across, down = middle + middle.roll(1, 1), middle + middle.roll(1, 2)
        field[:, ::step, half::step] = (across + corners + corners.roll(-1, 2)) / 4 + noise[1]
        field[:, half::step, ::step] = (down + sums) / 4 + noise[2]
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
    saturation = 1 - x.amin(1, keepdim=True) / value.clamp(min=1e-12)
    red = torch.tensor([0.0, 1.0, 1.0]).to(x).reshape(3, 1, 1)  # the hue of grey
    share = torch.where(x.amin(1, keepdim=True) < value, (value - x) / (value * saturation).clamp(min=1e-12), red)
    return value * (1 - (saturation * strength[0] + strength[1]).clamp(0, 1) * share)


def _elastic(x: Tensor, strength: tuple[float, float, float], generator: Generator) -> Tensor:
    """Move three corners of a square at random, take the affine map that does it, then move each pixel smoothly."""
    (N, _, side, _), (alpha, sigma, most) = x.shape, strength
    high, low = side // 2 + side // 3, side // 2 - side // 3
    before = torch.tensor([[high, high], [high, low], [low, low]], dtype=torch.float64, device=x.device).expand(N, 3, 2)
    after = before + _uniform(x, generator, N, 3, 2, low=-most, high=most)
    back = torch.linalg.solve(F.pad(after, (0, 1), value=1.0), before)  # (N, 3, 2): from the result to the image
    place = torch.arange(side, dtype=torch.float64, device=x.device)
    grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), 2)  # (H, W, 2): x, y
    source = (F.pad(grid, (0, 1), value=1.0).reshape(1, -1, 3) @ back).reshape(N, side, side, 2)
    x = F.grid_sample(x, 2 * source / (side - 1) - 1, padding_mode="reflection", align_corners=True)
    moved = _gaussian(_uniform(x, generator, N, 2, side, side, low=-1), sigma, "reflect", 3.0) * alpha
    source = grid + moved.permute(0, 2, 3, 1)
    return F.grid_sample(x, (2 * source + 1) / side - 1, padding_mode="reflection", align_corners=False)


def _pixelate(image: Image.Image, share: float) -> Image.Image:
    small = image.resize((int(image.width * share), int(image.height * share)), Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.BOX)


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    image.save(file := io.BytesIO(), "JPEG", quality=quality)
    return Image.open(file)


BY_PIL: dict[str, Callable[[Image.Image, Any], Image.Image]] = {"pixelate": _pixelate, "jpeg": _jpeg}
FORMULAS: dict[str, Callable[[Tensor, Any, Generator], Tensor]] = {  # of images (N, 3, H, W) in 0..1 and a strength
    "gaussian_noise": lambda x, deviation, generator: x + deviation * _normal(x, generator),
    "speckle_noise": lambda x, deviation, generator: x + x * deviation * _normal(x, generator),
    "shot_noise": lambda x, n, generator: torch.poisson((x * n).cpu(), generator).to(x.device) / n,
    "impulse_noise": lambda x, share, generator: torch.where(
        (u := _uniform(x, generator, *x.shape)) < share, (u >= share / 2).double(), x
    ),
    "motion_blur": lambda x, c, generator: _motion(x, c[0], c[1], _uniform(x, generator, len(x), low=-45, high=45)),
    "zoom_blur": lambda x, n, generator: torch.stack([x, *(_zoom(x, 1 + 0.01 * step) for step in range(n))]).mean(0),
    "gaussian_blur": lambda x, sigma, generator: _gaussian(x, sigma),
    "defocus_blur": _defocus,
    "glass_blur": _glass,
    "contrast": lambda x, factor, generator: torch.lerp(x.mean((2, 3), keepdim=True), x, factor),
}
FORMULAS |= {function.__name__[1:]: function for function in (_snow, _fog, _brightness, _saturate, _elastic)}
