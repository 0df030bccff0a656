"""Same numbers? Whether two ways to one result agree up to rounding: the only place where this is decided.

    |plan - own| <= FRACTION spread + TIMES rounding

Why these numbers stands in `agree.md` beside this file.
"""

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from mcbn.batches import tf32

FRACTION = 0.01  # of the spread
TIMES = 24  # roundings
TYPICAL = 1 / 8  # of what one value may be apart, for many of them
TF32_DIGIT = 2**-11  # convolutions of a GPU may round so, by PyTorch's default, whether or not they do at some size
SMALLEST = 1e-6  # of the largest output: what is smaller has no scale of its own
TINY = 1e-300  # where all outputs are zero


class Precision(NamedTuple):
    """The largest difference, relative to a scale, by what the numbers were computed in."""

    double: float
    single: float
    coarse: float  # half precision, and single precision whose products a GPU rounds to TF32

    def at(self, values: Tensor) -> float:
        """Return the one that holds for such values."""
        if values.dtype == torch.float64:
            return self.double
        return self.single if values.dtype == torch.float32 and not is_tf32(values) else self.coarse


ROUNDING = Precision(1e-12, 1e-5, 1e-2)  # of the output's size, where nothing more exact can be had
MOST_ROUNDING = Precision(1e-12, 1e-2, 1.0)  # taken for rounding: in double precision a network may do something else
GRADIENTS = Precision(1e-9, 1e-3, 1e-3)  # traced against autograd through the network's own code: the same operations
EXPORTED = Precision(1e-8, 1e-3, 1e-3)  # an exported graph against `predict`: another runtime sums in another order
MEANS = Precision(1e-4, 1e-4, 0.02)  # of a batch, channel by channel: sums are exacter than what single values give
VARIANCES = Precision(1e-3, 1e-3, 0.04)  # of a standard deviation and of its square: twice the means' in TF32


def tolerance(own: Tensor, error: Tensor | None = None, *, digit: float = 0.0) -> Tensor:
    """Work out how far samples may be from those of the network's own code, (t, N, ...): broadcasts to (N, ...).

    error: of its pass against double precision, (n, ...) for a few inputs; None: as if it were exact. digit: the last
    one it may compute in, relative, where its outputs have more.
    """
    size, most = own.abs().amax(0), MOST_ROUNDING.at(own)
    variance = _wide(own).var(0) if len(own) > 1 else torch.zeros_like(size)
    by_axis = []
    for axis in {1, max(1, size.ndim - 1)}:  # outputs lie along the second, or the last where channels come last
        others = [other for other in range(size.ndim) if other != axis]
        scale, spread = _largest(size, axis), variance.mean(others, keepdim=True).double().sqrt()
        rounding = max(digit, torch.finfo(own.dtype).eps) * scale
        if error is not None:
            measured = _wide(error).square().mean(others, keepdim=True).double().sqrt()
            unit = torch.maximum(spread, rounding)
            typical = (measured / unit.clamp(min=TINY)).median() * unit
            rounding = torch.maximum(rounding, torch.maximum(measured, typical).minimum(most * scale))
        by_axis.append(FRACTION * spread + TIMES * rounding)
    return reduce(torch.minimum, by_axis)


def within(tolerance: Tensor, values: Tensor, expected: Tensor) -> bool:
    """Tell whether samples are as near to the expected ones as they may be, and typically much nearer."""
    if values.shape != expected.shape or not expected.numel():
        return False
    shares = (_wide(values) - expected).abs_() / tolerance.clamp(min=TINY)
    typical = TYPICAL + (1 - TYPICAL) / math.sqrt(shares.numel())
    return bool((shares <= 1).all() & (shares.square().mean().sqrt() <= typical))


def agree(values: Tensor, expected: Tensor, precision: Precision = GRADIENTS, scale: Tensor | None = None) -> bool:
    """Tell whether values are the expected ones, |values - expected| <= precision times scale; none never are.

    scale: one number or one a value; the largest expected value of each output (axis 1) where it is not given.
    """
    if values.shape != expected.shape or not expected.numel():
        return False
    scale = _largest(expected.abs(), 1) if scale is None else scale
    difference = (values.to(expected.device, scale.dtype) - expected).abs()
    return bool((difference <= precision.at(expected) * scale.clamp(min=SMALLEST)).all())


def half_agree(values: Tensor, expected: Tensor) -> bool:
    """Tell whether results of one operator on made-up values agree in half their digits; NaN is NaN."""
    digits = math.sqrt(torch.finfo(values.dtype).eps) if values.is_floating_point() else 0
    return torch.equal(values, expected) or torch.allclose(values, expected, rtol=digits, atol=digits, equal_nan=True)


def is_tf32(values: Tensor) -> bool:
    """Tell whether products of such values may be rounded to TF32: then two ways of one are not as near."""
    return values.is_cuda and tf32()[0] and values.dtype == torch.float32


def _largest(sizes: Tensor, axis: int) -> Tensor:
    """Return the largest of the sizes of each output along an axis of (N, ...)."""
    others = [other for other in range(sizes.ndim) if other != axis]
    largest = sizes.amax(others, keepdim=True).double()
    return largest.maximum(SMALLEST * largest.amax())


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
