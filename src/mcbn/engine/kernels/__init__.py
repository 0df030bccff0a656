"""CUDA kernels, imported on a GPU alone: compiled by PyTorch for their sizes when they are first needed, and kept.

What they do and why they pay stands in each of the .cu files; benchmarks/README.md has times.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import isqrt, prod
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn import private_torch
from mcbn.engine import constants
from mcbn.files import cache_folder, replacing

COMPILERS = ThreadPoolExecutor(os.cpu_count(), "mcbn-kernels")  # at work without Python's lock
IMAGES, SCALES = (0, 1, 7), (5, 6)  # places of what differs from draw to draw among the arguments of `narrow`
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of values that `scaled` takes


@cache
def available() -> bool:
    """Tell whether kernels can be compiled and run here."""
    if not torch.cuda.is_available() or torch.version.hip is not None or not private_torch.compiles_kernels():
        return False
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or which("nvcc")  # as PyTorch looks for one
    return bool(toolkit or Path("/usr/local/cuda").exists()) and torch.cuda.get_device_capability() >= (8, 0)


def source(name: str, package: str = __name__) -> str:
    """Read `<name>.cu`."""
    return files(package).joinpath(f"{name}.cu").read_text()


def options(definitions: Mapping[str, int | str]) -> tuple[str, ...]:
    """Return the compiler's definitions."""
    return tuple(f"-D{name}={value}" for name, value in definitions.items())


def launch(
    name: str,
    definitions: Mapping[str, int | str],
    grid: tuple[int, int],
    tensors: Sequence[Tensor],
    *numbers: float,
    package: str = __name__,
    shared: int = 0,
) -> None:  # pragma: no cover
    """Run `<name>.cu` of a package on the current stream: grid (blocks, threads), shared: bytes of a block, dynamic."""
    device = tensors[0].device
    kernel = _compiled(name, options(definitions), device.index, package, shared)
    with torch.cuda.device(device):
        kernel((grid[0], 1, 1), (grid[1], 1, 1), [*tensors, *numbers], shared)


@cache  # pragma: no cover
def _compiled(name: str, flags: tuple[str, ...], device: int, package: str = __name__, shared: int = 0) -> Any:
    """Load a kernel onto a GPU."""
    with torch.cuda.device(device):
        return private_torch.load_kernel(_binary(name, flags, device, package).result(), name, shared)


@cache
def _binary(name: str, flags: tuple[str, ...], device: int, package: str) -> Future[bytes]:
    """Begin to compile a kernel, beside others; it is kept for other processes, where there is a folder for it."""

    def compiled() -> bytes:
        code, every_flag = source(name, package), ["-std=c++17", *flags]
        with torch.cuda.device(device):
            known = f"{code}{every_flag}{torch.version.cuda}{torch.cuda.get_device_capability()}"
            kept = cache_folder() / "kernels" / f"{sha256(known.encode()).hexdigest()}.cubin"
            if kept.exists():
                return kept.read_bytes()
            binary = private_torch.compile_kernel(code, name, every_flag)
            with suppress(OSError), replacing(kept) as temporary:
                temporary.write_bytes(binary)
            return binary

    return COMPILERS.submit(compiled)


def prefetch(name: str, definitions: Mapping[str, int | str], device: torch.device) -> bool:
    """Begin to compile a kernel that will be launched later; tell whether it is there already."""
    return device.type != "cuda" or _binary(name, options(definitions), device.index, __name__).done()


def suits_narrow(weight: Tensor, shape: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: Any) -> bool:
    """Tell whether `narrow` takes a convolution by weight (D, C, k, k) that gives images of a shape."""
    outputs, inputs, height, width = weight.shape
    square = height == width and height in (1, 3) and not isinstance(padding, str)
    few = inputs <= constants.NARROW_MOST_INPUTS and outputs <= constants.NARROW_OUTPUTS[-1]
    if not square or not few or groups != 1 or inputs % 16:
        return False
    even = len({*_both(stride)}) == len({*_both(padding)}) == 1 and {*_both(dilation)} == {1}
    return even and patch(shape, inputs, height, _both(stride)[0]) is not None


def _both(sizes: Any) -> tuple[int, ...]:
    return (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)


def patch(image: Sequence[int], inputs: int, size: int, stride: int) -> tuple[int, int, int] | None:
    """Return rows, columns and images (..., H', W') that a block of threads takes, powers of two; None if none suit."""
    high, wide = image[-2:]
    for pixels in constants.NARROW_PIXELS:
        whole_rows = wide <= constants.NARROW_COLUMNS[1]
        columns = min(constants.NARROW_COLUMNS[whole_rows], _power_of_two(wide))
        rows = min(pixels // columns, _power_of_two(high))
        images = pixels // (rows * columns)
        around = ((rows - 1) * stride + size) * ((columns - 1) * stride + size)
        fits = min(2, inputs // 16) * images * around * 64 <= 48 * 1024  # bytes of shared memory
        covered = -(-high // rows) * rows * -(-wide // columns) * columns
        if fits and covered <= constants.NARROW_MOST_WORK * high * wide:
            return rows, columns, images
    return None


def _power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def packed(weight: Tensor) -> Tensor:
    """Lay a weight (D, C, k, k), rounded to TF32, out as the threads of a warp hold it, (C / 16, k k, D / 8, 32, 4).

    Thread 4 g + t of part j holds channels 4 t to 4 t + 3 of output 4 (g // 2) + g % 2 + 2 (j % 2) of its 16. D is
    filled up to one of NARROW_OUTPUTS.
    """
    kept, C, k, _ = weight.shape
    D = next(size for size in constants.NARROW_OUTPUTS if size >= kept)
    filled = F.pad(rounded(weight), (0, 0, 0, 0, 0, 0, 0, D - kept))
    threads = filled.reshape(D // 16, 4, 2, 2, C // 16, 4, 4, k * k).permute(4, 7, 0, 2, 1, 3, 5, 6)
    return threads.reshape(C // 16, k * k, D // 8, 32, 4).contiguous()


def rounded(values: Tensor) -> Tensor:
    """Round to TF32, which has 10 digits behind the first, half away from zero."""
    bits = (values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


def narrow_sizes(
    x: Sequence[int], weight: Sequence[int], kept: int, doubled: int, shortcut: bool, stride: int, padding: int
) -> dict[str, int | str]:
    """Return what `narrow` is compiled for, by the shapes of x and of a packed weight: N is not among it."""
    k, C, D = isqrt(weight[1]), 16 * weight[0], 8 * weight[2]
    _, first, H, W = x
    H, W = (2 * H, 2 * W) if doubled & 1 else (H, W)
    high, wide = ((size + 2 * padding - k) // stride + 1 for size in (H, W))
    rows, columns, images = patch((high, wide), C, k, stride) or (0, 0, 0)
    sizes = {"INPUTS": C, "OUTPUTS": D, "KEPT": kept, "HEIGHT": H, "WIDTH": W, "HIGH": high, "WIDE": wide, "SIZE": k}
    sizes |= {"STRIDE": stride, "PADDING": padding, "ROWS": rows, "COLUMNS": columns, "IMAGES": images}
    sizes |= {"SHORTCUT": int(shortcut), "FIRST": first, "DOUBLED": doubled}
    of_16, usual = constants.NARROW_BLOCKS_OF_16, constants.NARROW_BLOCKS[constants.NARROW_OUTPUTS.index(D)]
    return {**sizes, "WARPS": constants.NARROW_WARPS, "BLOCKS": of_16 if C == D == 16 else usual}


@torch.library.custom_op("mcbn::narrow", mutates_args=())
def narrow(
    x: Tensor,
    beside: Tensor | None,
    doubled: int,
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

    x (N, C, H, W), with the channels of beside behind its own; if doubled is 1, each pixel of x stands for 2 x 2, if it
    is 2, of beside, if it is 3, of both. weight `packed`, bias, scale and shift (D,); (t, D) are of N / t images each.
    """
    N, kept = len(x), scale.shape[-1]
    sizes = narrow_sizes(x.shape, weight.shape, kept, doubled, shortcut is not None, stride, padding)
    high, wide, rows, columns, images = (int(sizes[name]) for name in ("HIGH", "WIDE", "ROWS", "COLUMNS", "IMAGES"))
    out = torch.empty(N, kept, high, wide, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    shift = shift if bias is None else torch.addcmul(shift, bias, scale)
    read = [aligned(out if image is None else image, torch.channels_last) for image in (x, beside, shortcut)]
    scale, shift = _tables(scale, shift, kept)
    tensors = [*read[:2], weight, scale, shift, read[2], out]
    blocks = -(-N // images) * -(-high // rows) * -(-wide // columns)
    launch("narrow", sizes, (blocks, 32 * constants.NARROW_WARPS), tensors, N, N // len(scale), scale.stride(0), slope)
    return out


def _tables(scale: Tensor, shift: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Lay scales and shifts out as tables (t, C) of one pitch; columns of one table stay in it where they can."""
    scale, shift = scale.reshape(-1, channels), shift.reshape(-1, channels)
    alike = scale.stride() == shift.stride() and scale.stride(1) == 1 and scale.stride(0) % 4 == 0
    if not alike or any(table.data_ptr() % 16 for table in (scale, shift)):
        scale, shift = aligned(scale), aligned(shift)
    return scale, shift


def aligned(values: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Lay values out where they begin at a multiple of 16 bytes: kernels read four at a time."""
    values = values.contiguous(memory_format=layout)
    return values.clone(memory_format=layout) if values.data_ptr() % 16 else values


@narrow.register_vmap
def _(info: Any, axes: Sequence[int | None], *operands: Any) -> tuple[Tensor, int]:
    """Run the draws of `torch.vmap` as one batch: image n of draw t is image t N + n."""
    t, together = info.batch_size, list(operands)
    for position in (*IMAGES, *SCALES):
        value, axis = operands[position], axes[position]
        if value is not None:
            stacked = value.expand(t, *value.shape) if axis is None else value.movedim(axis, 0)
            together[position] = stacked.flatten(0, 1) if position in IMAGES else stacked  # (t N, C, H, W); (t, D)
    return narrow(*together).unflatten(0, (t, -1)), 0  # (t, N, D, H', W')


def suits_scaled(shape: Sequence[int], dtype: torch.dtype | None) -> bool:
    """Tell whether `scaled` takes images of a shape, in pieces of 16 bytes."""
    whole = dtype in KINDS and len(shape) == 4 and shape[1] % (4 if dtype == torch.float32 else 8) == 0
    return whole and 0 < prod(shape) < 2**31


@torch.library.custom_op("mcbn::scaled", mutates_args=())
def scaled(x: Tensor, scale: Tensor, shift: Tensor, shortcut: Tensor | None, slope: float, images: int) -> Tensor:
    """f(scale x + shift + shortcut) as `narrow` has f, rounded as operations of their own round: (t images, C, H, W).

    scale and shift (t, C) or (C,); x and shortcut have the images of all t draws, or those that every draw reads.
    """
    C, values = x.shape[1], 16 // x.element_size()
    scale, shift = _tables(scale.float(), shift.float(), C)
    shape = (len(scale) * images, *x.shape[1:])
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    x, other = (aligned(x if image is None else image, torch.channels_last) for image in (x, shortcut))
    count, inputs, shortcuts = (image.numel() // values for image in (out, x, other))
    numbers = (count, count // len(scale), C // values, scale.stride(0), inputs, 0 if shortcut is None else shortcuts)
    grid = (-(-count // constants.THREADS), constants.THREADS)
    launch("scaled", {"KIND": KINDS[x.dtype]}, grid, [x, scale, shift, other, out], *numbers, slope)
    return out


@scaled.register_vmap
def _(info: Any, axes: Sequence[int | None], *operands: Any) -> tuple[Tensor, int]:
    """Run the draws of `torch.vmap` as one batch; what they share is not repeated."""
    t, pairs = info.batch_size, zip(operands[:4], axes, strict=False)
    x, scale, shift, shortcut = (v if axis is None else v.movedim(axis, 0) for v, axis in pairs)
    x, shortcut = (v if axis is None else v.flatten(0, 1) for v, axis in ((x, axes[0]), (shortcut, axes[3])))
    scale, shift = (v.expand(t, v.shape[-1]) for v in (scale, shift))  # fails for draws of draws
    return scaled(x, scale, shift, shortcut, *operands[4:]).unflatten(0, (t, -1)), 0


def suits_halved(shape: Sequence[int], size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> bool:
    """Tell whether `halved` takes a pooling of images of a shape."""
    plain = size in (2, (2, 2)) and stride in (None, 2, (2, 2)) and padding in (0, (0, 0)) and dilation in (1, (1, 1))
    return plain and not ceil_mode and len(shape) == 4 and not any(side % 2 for side in shape[2:]) and shape[1] % 4 == 0


@torch.library.custom_op("mcbn::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """Return the largest of every 2 x 2 pixels of images (N, C, H, W): (N, C, H / 2, W / 2)."""
    N, C, H, W = x.shape
    out = torch.empty(N, C, H // 2, W // 2, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    count = out.numel() // 4
    grid = (-(-count // constants.THREADS), constants.THREADS)
    launch("halved", {"CHANNELS": C, "WIDTH": W}, grid, [aligned(x, torch.channels_last), out], count)
    return out


@halved.register_vmap
def _(info: Any, axes: Sequence[int | None], x: Tensor) -> tuple[Tensor, int]:
    """Run the draws of `torch.vmap` as one batch."""
    together = x.movedim(axes[0] or 0, 0).flatten(0, 1)  # (t N, C, H, W)
    return halved(together).unflatten(0, (info.batch_size, -1)), 0


class Sums(NamedTuple):
    """Over draws: the first one's probabilities, sums of differences from them, of their squares, of divergences."""

    pivot: Tensor  # (N, K, ...)
    sum: Tensor
    squares: Tensor
    divergences: Tensor  # (N, ...)


def suits_probabilities(logits: Tensor, tau: Tensor) -> bool:
    """Tell whether the kernel takes logits (t, N, K, ...) and their inverse temperature."""
    if not available() or not logits.is_cuda or logits.dtype != torch.float32 or logits.requires_grad:
        return False
    K = logits.shape[2]
    many = logits[0].numel() >= K * constants.PROBABILITIES_LEAST_PLACES and logits.numel() < 2**31
    if K > constants.PROBABILITIES_MOST_CLASSES or not many or tau.ndim or tau.is_cuda:
        return False
    with suppress(Exception):  # PyTorch's compiler is not a public part of it, and may refuse
        _compiled("probabilities", options({"CLASSES": K}), logits.device.index)
        return True
    return False


def add_probabilities(logits: Tensor, tau: Tensor, sums: Sums | None, least: float) -> Sums:
    """Add the draws of logits (t, N, K, ...) in place; None: begin with them. least: of a divergence's pivot."""
    t, N, K, *size = logits.shape
    flat = logits.reshape(t, N, K, -1)  # a copy only where the pixels do not lie in steps of one length
    begin, pixels = sums is None, flat.shape[3]
    if sums is None:
        pivot, total, squares = (logits.new_empty(N, K, *size) for _ in range(3))
        sums = Sums(pivot, total, squares, logits.new_empty(N, *size))
    blocks = -(-N * pixels // constants.PROBABILITIES_THREADS)
    numbers = (t, N * pixels, pixels, *flat.stride(), int(begin), float(tau), least)
    launch("probabilities", {"CLASSES": K}, (blocks, constants.PROBABILITIES_THREADS), [flat, *sums], *numbers)
    return sums
