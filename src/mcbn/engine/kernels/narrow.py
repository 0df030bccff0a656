"""Narrow convolutions of many draws on a GPU: convolution, batch norm, shortcut and rectifier in one CUDA kernel.

cuDNN's float32 convolutions of 16 channels take five times what moving their values takes, and batch norm that differs
from draw to draw is two passes over memory more. Products are TF32, as PyTorch's convolutions are by default. The
kernel is narrow.cu.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn.batches import tf32
from mcbn.engine import kernels

MOST_INPUTS, OUTPUTS = 256, (16, 32, 64)  # wider ones cuDNN does well; other numbers of outputs are filled up
PIXELS = (128, 64)  # of a block of threads: the first whose inputs fit
COLUMNS = {True: 32, False: 16}  # of them beside each other at most, by whether whole rows of the image are
MOST_WORK = 1.25  # pixels computed for one wanted: patches hang over the edges of an image
WARPS = 4  # of a block
BLOCKS = {16: 4, 32: 4, 64: 3}  # that a multiprocessor should hold, by outputs: bounds registers
BLOCKS_OF_16 = 8  # from 16 inputs to 16 outputs
SHARED_BYTES = 48 * 1024
IMAGES, SCALES = (0, 1, 7), (5, 6)  # places of what differs from draw to draw among the arguments of `narrow`


def is_tf32(values: Tensor) -> bool:
    """Tell whether convolutions of such values are rounded to TF32: then two ways of one are not as near."""
    return values.is_cuda and tf32()[0] and values.dtype == torch.float32


def suits(weight: Tensor, shape: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: Any) -> bool:
    """Tell whether the kernel takes a convolution by weight (D, C, k, k) that gives images of a shape."""
    outputs, inputs, height, width = weight.shape
    square = height == width and height in (1, 3) and not isinstance(padding, str)
    if not square or groups != 1 or inputs % 16 or inputs > MOST_INPUTS or outputs > OUTPUTS[-1]:
        return False
    even = len({*_both(stride)}) == len({*_both(padding)}) == 1 and {*_both(dilation)} == {1}
    return even and patch(shape, inputs, height, _both(stride)[0]) is not None


def _both(sizes: Any) -> tuple[int, ...]:
    return (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)


def patch(image: Sequence[int], inputs: int, size: int, stride: int) -> tuple[int, int, int] | None:
    """Return rows, columns and images (..., H', W') that a block of threads takes, powers of two; None if none suit."""
    high, wide = image[-2:]
    for pixels in PIXELS:
        columns = min(COLUMNS[wide <= COLUMNS[True]], _power_of_two(wide))
        rows = min(pixels // columns, _power_of_two(high))
        images = pixels // (rows * columns)
        around = ((rows - 1) * stride + size) * ((columns - 1) * stride + size)
        fits = min(2, inputs // 16) * images * around * 64 <= SHARED_BYTES
        if fits and _covered(high, rows) * _covered(wide, columns) <= MOST_WORK * high * wide:
            return rows, columns, images
    return None


def _power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def _covered(size: int, part: int) -> int:
    return -(-size // part) * part


def packed(weight: Tensor) -> Tensor:
    """Lay a weight (D, C, k, k), rounded to TF32, out as the threads of a warp hold it, (C / 16, k k, D / 8, 32, 4).

    Thread 4 g + t of part j holds channels 4 t to 4 t + 3 of output 4 (g // 2) + g % 2 + 2 (j % 2) of its 16. D is
    filled up to one of OUTPUTS.
    """
    kept, C, k, _ = weight.shape
    D = next(size for size in OUTPUTS if size >= kept)
    filled = F.pad(rounded(weight), (0, 0, 0, 0, 0, 0, 0, D - kept))
    parts = filled.reshape(D // 16, 4, 2, 2, C // 16, 4, 4, k * k).permute(4, 7, 0, 2, 1, 3, 5, 6)
    return parts.reshape(C // 16, k * k, D // 8, 32, 4).contiguous()


def rounded(values: Tensor) -> Tensor:
    """Round to TF32, which has 10 digits behind the first, half away from zero."""
    bits = (values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


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
    k, C, D, kept = isqrt(weight.shape[1]), 16 * weight.shape[0], 8 * weight.shape[2], scale.shape[-1]
    N, first, H, W = x.shape
    H, W = (2 * H, 2 * W) if doubled & 1 else (H, W)
    high, wide = ((size + 2 * padding - k) // stride + 1 for size in (H, W))
    out = torch.empty(N, kept, high, wide, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    scale, shift = scale.reshape(-1, kept), shift.reshape(-1, kept)
    shift = shift if bias is None else torch.addcmul(shift, bias, scale)
    rows, columns, images = patch((high, wide), C, k, stride) or (0, 0, 0)
    sizes = {"INPUTS": C, "OUTPUTS": D, "KEPT": kept, "HEIGHT": H, "WIDTH": W, "HIGH": high, "WIDE": wide, "SIZE": k}
    sizes |= {"STRIDE": stride, "PADDING": padding, "ROWS": rows, "COLUMNS": columns, "IMAGES": images, "WARPS": WARPS}
    sizes |= {"SHORTCUT": int(shortcut is not None), "FIRST": first, "DOUBLED": doubled}
    sizes |= {"BLOCKS": BLOCKS_OF_16 if C == D == 16 else BLOCKS[D]}
    read = [aligned(out if part is None else part, torch.channels_last) for part in (x, beside, shortcut)]
    scale, shift = _in_rows(scale, shift)
    tensors = [*read[:2], weight, scale, shift, read[2], out]
    blocks = -(-N // images) * -(-high // rows) * -(-wide // columns)
    kernels.launch("narrow", sizes, (blocks, 32 * WARPS), tensors, N, N // len(scale), scale.stride(0), slope)
    return out


def _in_rows(scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Lay (t, D) out as the kernel reads them; parts of one table, whose columns both are, stay where they lie."""
    parts = (scale, shift)
    alike = scale.stride() == shift.stride() and scale.stride(1) == 1 and scale.stride(0) % 4 == 0
    if alike and not any(part.data_ptr() % 16 for part in parts):
        return parts
    return aligned(scale), aligned(shift)


def aligned(values: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Lay values out where they begin at a multiple of 16 bytes: kernels read four at a time."""
    values = values.contiguous(memory_format=layout)
    return values.clone(memory_format=layout) if values.data_ptr() % 16 else values


@narrow.register_vmap
def _(info: Any, axes: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
    """Run the draws of `torch.vmap` as one batch: image n of draw t is image t N + n."""
    t = info.batch_size

    def stacked(position: int) -> Tensor:
        axis = axes[position]
        value: Tensor = arguments[position]
        return value.expand(t, *value.shape) if axis is None else value.movedim(axis, 0)

    given = list(arguments)
    for position in SCALES:
        given[position] = stacked(position)  # (t, D)
    for position in IMAGES:
        if given[position] is not None:
            given[position] = stacked(position).flatten(0, 1)  # (t N, C, H, W)
    out = narrow(*given)
    return out.unflatten(0, (t, -1)), 0  # (t, N, D, H', W')
