"""The largest of 2 x 2 pixels on a GPU: PyTorch's pooling also writes where each was, which takes longer than the rest.

The kernel is halved.cu.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcbn.engine import kernels
from mcbn.engine.kernels.narrow import aligned

THREADS = 256


def suits(shape: Sequence[int], size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> bool:
    """Tell whether the kernel takes a pooling of images of a shape."""
    plain = size in (2, (2, 2)) and stride in (None, 2, (2, 2)) and padding in (0, (0, 0)) and dilation in (1, (1, 1))
    return plain and not ceil_mode and len(shape) == 4 and not any(side % 2 for side in shape[2:]) and shape[1] % 4 == 0


@torch.library.custom_op("mcbn::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """Return the largest of every 2 x 2 pixels of images (N, C, H, W): (N, C, H / 2, W / 2)."""
    N, C, H, W = x.shape
    out = torch.empty(N, C, H // 2, W // 2, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    count = out.numel() // 4
    grid = (-(-count // THREADS), THREADS)
    kernels.launch("halved", {"CHANNELS": C, "WIDTH": W}, grid, [aligned(x, torch.channels_last), out], count)
    return out


@halved.register_vmap
def _(info: Any, axes: Sequence[int | None], x: Tensor) -> tuple[Tensor, int]:
    """Run the draws of `torch.vmap` as one batch."""
    together = x.movedim(axes[0] or 0, 0)  # (t, N, C, H, W)
    out = halved(together.flatten(0, 1))
    return out.unflatten(0, (info.batch_size, -1)), 0
