"""Images to be asked about: those of the data set, corrupted ones, and foreign ones that belong to no class."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn.errors import MCBNError

SHAPE = (3, 32, 32)  # what the CIFAR networks take


class Queries(NamedTuple):
    """Images x (N, 3, H, W), bytes, and their classes y (N,), None where they belong to no class."""

    x: Tensor
    y: Tensor | None


def require_images(images: Tensor, shape: tuple[int, int, int] | None = None) -> Tensor:
    """Refuse what is not RGB bytes (N, 3, H, W), of a size where one is given."""
    found = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
    wanted = f"(N, {', '.join(map(str, shape))})" if shape else "(N, 3, H, W)"
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise MCBNError(
            f"images must be RGB bytes, uint8 of shape {wanted}; got {found}: convert mode and layout first"
        )
    if shape is not None and tuple(images.shape[1:]) != shape:
        raise MCBNError(f"the network takes images {wanted}; got {found}: resize or crop them first")
    return images


def load_foreign(path: str | Path) -> dict[str, Queries]:
    """Read the sets of foreign images that `mcbn_study.alternatives.foreign_images.build` wrote."""
    path = Path(path)
    if not path.is_file():
        raise MCBNError(f"there is no {path}; make it with mcbn_study.alternatives.foreign_images.build")
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return {name: Queries(require_images(x, SHAPE), None) for name, x in found.items()}
