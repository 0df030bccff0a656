"""Training images as the network sees them: cropped from a black frame, flipped, standardised; on any device."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mcbn.errors import MCBNError
from mcbn_study.data.cifar import CIFAR10_SHAPE, require_images
from mcbn_study.networks.resnet import standardize

PADDING = 2  # pixels on each side: 36 x 36, of which 32 x 32 are cropped (authors' code)
OFFSETS = 2 * PADDING + 1
SIZE = CIFAR10_SHAPE[-1]


class Choices(NamedTuple):
    """Which images, and how each is cropped and flipped; integers of one shape, flips boolean."""

    rows: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor

    def to(self, device: torch.device | str) -> "Choices":
        """Move to a device."""
        return Choices(*(tensor.to(device) for tensor in self))


def pad(images: Tensor) -> Tensor:
    """Put a black frame round the images: (N, 3, 32, 32) to (N, 3, 36, 36)."""
    return F.pad(images, (PADDING,) * 4)


def crop(padded: Tensor, chosen: Choices) -> Tensor:
    """Cut out image `rows` at (top, left) and mirror it where `flip`: (B, 3, 32, 32), without waiting for a GPU."""
    place = torch.arange(SIZE, device=padded.device)
    line = chosen.top[:, None] + place  # (B, 32)
    column = chosen.left[:, None] + torch.where(chosen.flip[:, None], SIZE - 1 - place, place)
    channel = torch.arange(padded.shape[1], device=padded.device)
    return padded[
        chosen.rows[:, None, None, None], channel[:, None, None], line[:, None, :, None], column[:, None, None]
    ]


def epoch_choices(n: int, batch_size: int, seed: int, epoch: int) -> Choices:
    """Choose all batches of an epoch, (S, M) with S = n // M, by a generator of (seed, epoch) alone.

    Every image once at most; the last partial batch is left out.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    shape = n // batch_size, batch_size
    rows = generator.permutation(n)[: shape[0] * batch_size].reshape(shape)
    return _with_crops(rows, generator)


def fresh_choices(n: int, batch_size: int, count: int, generator: np.random.Generator) -> Choices:
    """Choose `count` independent batches of M distinct images, (count, M)."""
    if batch_size > n:
        raise MCBNError(f"a batch of {batch_size} distinct images cannot be drawn from {n}")
    rows = [generator.choice(n, batch_size, replace=False, shuffle=False) for _ in range(count)]
    return _with_crops(np.stack(rows), generator)


def _with_crops(rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], generator: np.random.Generator) -> Choices:
    top, left = generator.integers(0, OFFSETS, (2, *rows.shape))
    flip = generator.integers(0, 2, rows.shape).astype(bool)
    return Choices(*map(torch.from_numpy, (rows, top, left, flip)))


class Augmented(Dataset[Tensor]):
    """Training images to draw batches from; each time one is asked for, it is cropped and flipped anew.

    The images live on one device, and a batch is made there in one go. Random numbers come from torch's global
    generator, which `MCBN.fit` seeds for each draw and gives back.
    """

    def __init__(self, images: Tensor) -> None:
        require_images(images, CIFAR10_SHAPE)
        self.padded = pad(images)

    def __len__(self) -> int:
        return len(self.padded)

    def __getitem__(self, index: int) -> Tensor:
        """Return an image (3, 32, 32)."""
        return self.__getitems__([index])[0]

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Return images (3, 32, 32) each."""
        top, left = torch.randint(OFFSETS, (2, len(rows)))
        chosen = Choices(torch.tensor(rows), top, left, torch.randint(2, (len(rows),)).bool())
        return list(self.batch(chosen))

    def batch(self, chosen: Choices) -> Tensor:
        """Return the chosen images, cropped, flipped and standardised, (B, 3, 32, 32)."""
        return standardize(crop(self.padded, chosen.to(self.padded.device)))
