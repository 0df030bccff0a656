"""Training images made on the device: random zoom, crop, flip and brightness, reflected beyond the image's edge."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn_study.data.scenes import Scenes

ZOOM = (0.75, 1.75)
BRIGHTNESS = 0.35  # of the logarithm, of a whole image
TINT = 0.1  # of the logarithm, of each channel
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of natural images, as usual


class Views(NamedTuple):
    """Which images and how each is seen, drawn on the CPU."""

    rows: Tensor  # (M,)
    window: Tensor  # (M, 2, 3), affine map from the view to the image, both spanning -1 to 1
    gain: Tensor  # (M, 3), of the channels

    def to(self, device: torch.device | str) -> "Views":
        """Move to a device."""
        return Views(*(tensor.to(device, non_blocking=True) for tensor in self))


def draw_views(rows: Tensor, generator: torch.Generator) -> Views:
    """Draw one view of each of the images: zoom in log ZOOM, place uniform, flip with probability 1/2."""
    M = len(rows)
    low, high = map(math.log, ZOOM)
    extent = torch.exp(-(low + (high - low) * torch.rand(M, generator=generator)))  # (M,) of the image's side
    shift = (2 * torch.rand(M, 2, generator=generator) - 1) * (1 - extent).abs().unsqueeze(1)  # (M, 2)
    flip = 1 - 2 * torch.randint(2, (M,), generator=generator)
    window = torch.zeros(M, 2, 3)
    window[:, 0, 0], window[:, 1, 1], window[:, :, 2] = extent * flip, extent, shift
    brightness = BRIGHTNESS * (2 * torch.rand(M, 1, generator=generator) - 1)
    tint = TINT * (2 * torch.rand(M, 3, generator=generator) - 1)
    return Views(rows, window, torch.exp(brightness + tint))


def show(scenes: Scenes, views: Views) -> tuple[Tensor, Tensor]:
    """Return the views as inputs of the network (M, 3, H, W) and their labels (M, H, W); labels stay whole."""
    x, y = scenes.x[views.rows], scenes.y[views.rows]
    grid = F.affine_grid(views.window, list(x.shape), align_corners=False)
    seen = F.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False)
    label = F.grid_sample(y.unsqueeze(1).float(), grid, mode="nearest", padding_mode="reflection", align_corners=False)
    return normalize(seen * views.gain[:, :, None, None]), label.squeeze(1).long()


def normalize(x: Tensor) -> Tensor:
    """Scale byte images (N, 3, H, W) to what the network takes: (x / 255 - mean) / std of each channel."""
    scale, shift = _scale_and_shift(x.device)
    return torch.addcmul(shift, x.float(), scale).contiguous(memory_format=torch.channels_last)


@lru_cache
def _scale_and_shift(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 1 / (255 std) and -mean / std, (3, 1, 1) each; kept, as a copy to the GPU would wait for it."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (1 / (255 * std)).to(device), (-mean / std).to(device)


def epoch_views(n: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[Views]:
    """Yield the full batches of one epoch; they depend on (seed, epoch) alone, so training resumes where it was."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator)
    M = min(batch_size, n)
    for rows in torch.split(order[: n // M * M], M):
        yield draw_views(rows, generator)


def training_batches(scenes: Scenes, batch_size: int, n_samples: int, *, seed: int) -> Iterator[Tensor]:
    """Yield T batches of inputs as training sees them, each of M different images."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_samples):
        rows = torch.randperm(len(scenes), generator=generator)[:batch_size]
        yield show(scenes, draw_views(rows, generator).to(scenes.x.device))[0]
