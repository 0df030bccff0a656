"""What constants and kernels of the engine rest on: chunks of draws by their bound, and narrow convolutions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn.engine import constants, kernels
from mcbn_benchmarks.commands import Device, Only
from mcbn_benchmarks.speed.cases import MLP, RESNET32, RESNET50, UNET, fitted, peak_bytes, prepare, time_interleaved

EXPONENTS = (20, 22, 23, 24, 25, 27)  # of bounds to try; the engine's should be the least that costs no time
TRIED = {MLP: (100, 2000, 20_000), RESNET32: (1, 32, 256), UNET: (1, 8), RESNET50: (1, 32)}  # N of each
CASES = [replace(case, n=n, recorded=4) for case, sizes in TRIED.items() for n in sizes]
SIZES = (  # C, D, height, stride, images of each draw: of ResNet-32, and of a UNet
    *((16, 16, 32, 1, 128), (32, 32, 16, 1, 128), (64, 64, 8, 1, 128), (16, 32, 32, 2, 128), (32, 64, 16, 2, 128)),
    *((16, 16, 256, 1, 1), (48, 16, 256, 1, 1), (96, 32, 128, 1, 1), (192, 64, 64, 1, 1)),
)
DRAWS, CALLS = 32, 50
CHECKED = 8  # images at most of the first draw, compared with double precision


def chunks(device: Device = "cuda", only: Only = "") -> Iterator[str]:
    """Time `predict`, and its memory, by the bound on a chunk of draws: how many values keep a GPU busy."""
    names = ("GPU_CHUNK", "GPU_CHUNK_FLAT") if device == "cuda" else ("CPU_CHUNK",)
    for case in (case for case in CASES if only in case.title):
        ready = prepare(case, device)
        drawn = fitted(case, ready)
        for exponent in EXPONENTS:
            with mock.patch.multiple(constants, **dict.fromkeys(names, 2**exponent)):
                bayes = drawn.with_posterior(drawn.posterior)  # plans are made anew for each bound
                peak = peak_bytes(case, ready, bayes, "mcbn", device)
                method = {"mcbn": lambda T, bayes=bayes, ready=ready: bayes.predict(ready.query, n_samples=T)}
                taken = time_interleaved(method, case.n_samples, device)["mcbn"].milliseconds
            yield f"{case.title} T={case.n_samples} 2^{exponent}: {taken:.3f} ms, {peak / 2**20:.1f} MiB"


@torch.no_grad()
def narrow(device: Device = "cuda") -> Iterator[str]:
    """Time the kernel of narrow convolutions beside PyTorch's, and their distance from double precision.

    PyTorch's time is of its convolution alone, the kernel's also with batch norm of every draw, shortcut and rectifier.
    """
    normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    for C, D, size, stride, images in SIZES:
        x = normal(DRAWS * images, C, size, size).relu_().contiguous(memory_format=torch.channels_last)
        weight = (normal(D, C, 3, 3) / (3 * C**0.5)).contiguous(memory_format=torch.channels_last)
        scale, shift = normal(2, DRAWS, D)
        shortcut = normal(F.conv2d(x, weight, None, stride, 1).shape).contiguous(memory_format=torch.channels_last)
        laid_out = kernels.packed(weight)
        runs = {
            "convolution": partial(F.conv2d, x, weight, None, stride, 1),
            "kernel": partial(kernels.narrow, x, None, 0, laid_out, None, scale, shift, shortcut, 0.0, stride, 1),
            "without shortcut": partial(kernels.narrow, x, None, 0, laid_out, None, scale, shift, None, 0.0, stride, 1),
        }
        taken = time_interleaved({name: partial(_repeat, run) for name, run in runs.items()}, CALLS, device)
        n = min(images, CHECKED)
        exact = F.conv2d(x[:n].double(), weight.double(), None, stride, 1)
        plain, exact = (_finish(y, scale[0], shift[0], shortcut[:n]) for y in (runs["convolution"]()[:n], exact))
        times = ", ".join(f"{name} {1000 * timing.milliseconds / CALLS:.0f} us" for name, timing in taken.items())
        errors = [float((values - exact).abs().max() / exact.abs().max()) for values in (plain, runs["kernel"]()[:n])]
        title = f"{C} -> {D} channels, {size} x {size}, stride {stride}"
        yield f"{title}: {times}; from float64 {errors[0]:.1e}, {errors[1]:.1e}"


def _repeat(run: Callable[[], Tensor], times: int) -> None:
    for _ in range(times):
        run()


def _finish(y: Tensor, scale: Tensor, shift: Tensor, shortcut: Tensor) -> Tensor:
    scale, shift = (values.to(y.dtype)[:, None, None] for values in (scale, shift))
    return torch.relu(y * scale + shift + shortcut.to(y.dtype))
