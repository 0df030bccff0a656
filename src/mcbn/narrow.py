"""Narrow convolutions of many draws on a GPU: convolution, batch norm, shortcut and rectifier in one CUDA kernel.

cuDNN's float32 convolutions of 16 channels take five times what moving their values takes, and batch norm that differs
from draw to draw is two passes over memory more. Products are TF32, as PyTorch's convolutions are by default. The
kernel, narrow_kernel.cu, is compiled for its sizes by PyTorch when it is first needed.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mcbn.files import cache_folder, replacing

MOST_CHANNELS = 64  # wider ones cuDNN does well
PIXELS = {16: (128, 64), 32: (128, 64), 64: (128, 64)}  # of a block of threads by outputs: the first that fit
WARPS = 4  # of a block
SHARED_BYTES = 48 * 1024


def is_tf32(values: Tensor) -> bool:
    """Tell whether convolutions of such values are rounded to TF32: then two ways of one are not as near."""
    return values.is_cuda and torch.backends.cudnn.allow_tf32 and values.dtype == torch.float32


@cache
def available() -> bool:
    """Tell whether the kernel can be compiled and run here."""
    if not torch.cuda.is_available() or torch.version.hip is not None or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    from torch.utils.cpp_extension import CUDA_HOME  # slow to import

    return CUDA_HOME is not None and torch.cuda.get_device_capability() >= (8, 0)


def suits(weight: Tensor, shape: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: Any) -> bool:
    """Tell whether the kernel takes a convolution by weight (D, C, k, k) that gives images of a shape."""
    outputs, inputs, height, width = weight.shape
    square = height == width and height in (1, 3) and not isinstance(padding, str)
    if not square or groups != 1 or inputs % 16 or inputs > MOST_CHANNELS or outputs not in PIXELS:
        return False
    even = len({*_both(stride)}) == len({*_both(padding)}) == 1 and {*_both(dilation)} == {1}
    return even and _pixels(weight.shape, shape, _both(stride)[0]) is not None


def _both(sizes: Any) -> tuple[int, ...]:
    return (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)


def _pixels(weight: Sequence[int], image: Sequence[int], stride: int) -> int | None:
    """Return how many pixels of an image (..., H', W') a block of threads takes: whole rows, or whole images."""
    outputs, inputs, _, size = weight
    high, wide = image[-2:]
    for pixels in PIXELS[outputs]:
        rows = min(high, max(1, pixels // wide))
        whole, rest = divmod(pixels, rows * wide)  # images
        around = ((rows - 1) * stride + size) * ((wide - 1) * stride + size)
        buffers = min(2, inputs // 16)
        if not rest and high % rows == 0 and buffers * whole * around * 64 <= SHARED_BYTES:
            return pixels
    return None


def packed(weight: Tensor) -> Tensor:
    """Lay a weight (D, C, k, k), rounded to TF32, out as the threads of a warp hold it, (C / 16, k k, D / 8, 32, 4).

    Thread 4 g + t of part j holds channels 4 t to 4 t + 3 of output 4 (g // 2) + g % 2 + 2 (j % 2) of its 16.
    """
    D, C, k, _ = weight.shape
    parts = rounded(weight).reshape(D // 16, 4, 2, 2, C // 16, 4, 4, k * k).permute(4, 7, 0, 2, 1, 3, 5, 6)
    return parts.reshape(C // 16, k * k, D // 8, 32, 4).contiguous()


def rounded(values: Tensor) -> Tensor:
    """Round to TF32, which has 10 digits behind the first, half away from zero."""
    bits = (values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


@torch.library.custom_op("mcbn::narrow", mutates_args=())
def narrow(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    shortcut: Tensor | None,
    slope: float,
    stride: int,
    padding: int,
) -> Tensor:
    """f(scale (x * weight + bias) + shift + shortcut), f(y) = y where y > 0, else slope y: (N, D, H', W').

    x (N, C, H, W), weight `packed`, bias, scale and shift (D,); scale and shift (t, D) are of N / t images each.
    """
    k, D = isqrt(weight.shape[1]), 8 * weight.shape[2]
    N, C, H, W = x.shape
    high, wide = ((size + 2 * padding - k) // stride + 1 for size in (H, W))
    out = torch.empty(N, D, high, wide, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    scale, shift = scale.reshape(-1, D), shift.reshape(-1, D)
    shift = shift if bias is None else torch.addcmul(shift, bias, scale)
    pixels = _pixels((D, C, k, k), (high, wide), stride) or 0
    sizes = {"INPUTS": C, "OUTPUTS": D, "HEIGHT": H, "WIDTH": W, "HIGH": high, "WIDE": wide, "SIZE": k}
    sizes |= {"STRIDE": stride, "PADDING": padding, "PIXELS": pixels, "WARPS": WARPS}
    sizes |= {"SHORTCUT": int(shortcut is not None)}
    images = [_aligned(part, torch.channels_last) for part in (x, out if shortcut is None else shortcut)]
    tensors = [images[0], weight, _aligned(scale), _aligned(shift), images[1], out]
    whole = max(1, pixels // (high * wide))  # images of a block
    launch(sizes, -(-N // whole) * max(1, high * wide // pixels), tensors, N, N // len(scale), slope)
    return out


def _aligned(values: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Lay values out where they begin at a multiple of 16 bytes: the kernel reads four at a time."""
    values = values.contiguous(memory_format=layout)
    return values.clone(memory_format=layout) if values.data_ptr() % 16 else values


@narrow.register_vmap
def _(info: Any, axes: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
    """Run the draws of `torch.vmap` as one batch: image n of draw t is image t N + n."""
    t = info.batch_size
    x, weight, bias, scale, shift, shortcut, *rest = arguments

    def stacked(value: Tensor, axis: int | None) -> Tensor:
        return value.expand(t, *value.shape) if axis is None else value.movedim(axis, 0)

    values = [stacked(part, axis) for part, axis in zip((x, scale, shift), (axes[0], *axes[3:5]), strict=True)]
    added = None if shortcut is None else stacked(shortcut, axes[5]).flatten(0, 1)
    out = narrow(values[0].flatten(0, 1), weight, bias, *values[1:], added, *rest)  # (t N, D, H', W')
    return out.unflatten(0, (t, -1)), 0


def options(sizes: dict[str, int]) -> list[str]:
    """Return the compiler's definitions."""
    return [f"-D{name}={value}" for name, value in sizes.items()]


def launch(sizes: dict[str, int], blocks: int, tensors: Sequence[Tensor], *numbers: float) -> None:  # pragma: no cover
    """Run the kernel on the current stream."""
    kernel = _compiled(tuple(sizes.items()), tensors[0].device.index)
    with torch.cuda.device(tensors[0].device):
        kernel((blocks, 1, 1), (32 * sizes["WARPS"], 1, 1), [*tensors, *numbers])


@cache
def _compiled(sizes: tuple[tuple[str, int], ...], device: int) -> Any:  # pragma: no cover
    """Load the kernel; what PyTorch compiles is kept for other processes, where there is a folder for it."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    code, flags = files("mcbn").joinpath("narrow_kernel.cu").read_text(), ["-std=c++17", *options(dict(sizes))]
    with torch.cuda.device(device):
        known = f"{code}{flags}{torch.version.cuda}{torch.cuda.get_device_capability()}"
        kept = cache_folder() / "kernels" / f"{sha256(known.encode()).hexdigest()}.cubin"
        if kept.exists():
            made = kept.read_bytes()
        else:
            made, _ = _nvrtc_compile(code, "narrow", nvcc_options=flags)
            with suppress(OSError), replacing(kept) as temporary:
                temporary.write_bytes(made)
        return _cuda_load_module(made, ["narrow"])["narrow"]  # type: ignore[index]
