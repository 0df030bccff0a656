"""The kernel of narrow convolutions beside PyTorch's: time of both, and their distance from double precision.

PyTorch's time is of its convolution alone, the kernel's also with batch norm of every draw, shortcut and rectifier.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn.engine.kernels.narrow import narrow, packed
from mcbn_benchmarks.speed.timing import time_interleaved

SIZES = (  # C, D, height, stride, images of each draw: of ResNet-32, and of a UNet
    *((16, 16, 32, 1, 128), (32, 32, 16, 1, 128), (64, 64, 8, 1, 128), (16, 32, 32, 2, 128), (32, 64, 16, 2, 128)),
    *((16, 16, 256, 1, 1), (48, 16, 256, 1, 1), (96, 32, 128, 1, 1), (192, 64, 64, 1, 1)),
)
DRAWS, CALLS = 32, 50
CHECKED = 8  # images at most of the first draw, compared with double precision


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a size."""
    argparse.ArgumentParser(prog="python -m mcbn_benchmarks.narrow", description=__doc__).parse_args(arguments)
    for line in compare("cuda"):
        print(line, flush=True)


@torch.no_grad()
def compare(device: str) -> Iterator[str]:
    """Yield one line a size: 3 x 3 convolutions."""
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device)
    for C, D, size, stride, images in SIZES:
        x = normal(DRAWS * images, C, size, size).relu_().contiguous(memory_format=torch.channels_last)
        weight = (normal(D, C, 3, 3) / (3 * C**0.5)).contiguous(memory_format=torch.channels_last)
        scale, shift = normal(2, DRAWS, D)
        shortcut = normal(F.conv2d(x, weight, None, stride, 1).shape).contiguous(memory_format=torch.channels_last)
        laid_out = packed(weight)
        runs = {
            "convolution": partial(F.conv2d, x, weight, None, stride, 1),
            "kernel": partial(narrow, x, None, 0, laid_out, None, scale, shift, shortcut, 0.0, stride, 1),
            "without shortcut": partial(narrow, x, None, 0, laid_out, None, scale, shift, None, 0.0, stride, 1),
        }
        taken = time_interleaved({name: partial(_repeat, run) for name, run in runs.items()}, CALLS, device)
        checked = min(images, CHECKED)
        first = [part[:checked].double() for part in (x, shortcut)]
        exact = _finish(F.conv2d(first[0], weight.double(), None, stride, 1), scale[0], shift[0], first[1])
        plain = _finish(runs["convolution"]()[:checked], scale[0], shift[0], shortcut[:checked])
        times = ", ".join(f"{name} {1000 * timing.milliseconds / CALLS:.0f} us" for name, timing in taken.items())
        errors = [_distance(part, exact) for part in (plain, runs["kernel"]()[:checked])]
        title = f"{C} -> {D} channels, {size} x {size}, stride {stride}"
        yield f"{title}: {times}; from float64 {errors[0]:.1e}, {errors[1]:.1e}"


def _repeat(run: Callable[[], Tensor], times: int) -> None:
    for _ in range(times):
        run()


def _finish(y: Tensor, scale: Tensor, shift: Tensor, shortcut: Tensor) -> Tensor:
    scale, shift = (part.to(y.dtype)[:, None, None] for part in (scale, shift))
    return torch.relu(y * scale + shift + shortcut)


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max())


if __name__ == "__main__":
    main()
