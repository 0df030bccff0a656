"""Same numbers? Whether two ways to one result agree up to rounding: the only place where this is decided.

A faster way is used only where it agrees with the network's own code. Bounds are relative to a scale, by default the
largest expected value: rounding adds up over a network, and a small output of large terms is no more exact than they.
A wrong way (another layer's statistics, a value overwritten too early) is off by about the spread of the draws, parts
in ten or in a hundred, so bounds far above rounding still tell it apart.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mcbn.batches import tf32

SMALLEST_SCALE = 1e-6  # outputs that are all zero have no scale of their own


class Precision(NamedTuple):
    """The largest difference, relative to a scale, by what the numbers were computed in."""

    double: float
    single: float
    coarse: float  # half precision, and single precision whose products a GPU rounds to TF32


# Samples of a plan against a replay. 53 layers of random weights differ by 1e-4 in single precision; half precision
# and TF32 have 10 digits, rounding of which reaches parts in a hundred over as many layers
SAMPLES = Precision(1e-9, 1e-3, 0.1)
# Outputs and their gradients, traced against autograd through the network's own code: the same operations
GRADIENTS = Precision(1e-9, 1e-3, 1e-3)
# What an exported graph gives against `predict`: another runtime sums in another order, so a digit less
EXPORTED = Precision(1e-8, 1e-3, 1e-3)
# Statistics of a batch, channel by channel: sums over a batch are exacter than what single values go through
MEANS = Precision(1e-4, 1e-4, 0.02)
VARIANCES = Precision(1e-3, 1e-3, 0.04)  # of a standard deviation and of its square: twice the means' in TF32


def agree(values: Tensor, expected: Tensor, precision: Precision = SAMPLES, *, scale: Tensor | None = None) -> bool:
    """Tell whether values hold the expected numbers: |values - expected| <= bound * scale, everywhere.

    scale: one number or one a value, where the largest of the expected values is not what rounding is relative to.
    Nothing agrees with nothing: without values there is no evidence.
    """
    if values.shape != expected.shape or not expected.numel():
        return False
    scale = expected.abs().max() if scale is None else scale
    difference = (values.to(expected.device) - expected).abs()
    return bool((difference <= _bound(expected, precision) * scale.clamp(min=SMALLEST_SCALE)).all())


def _bound(expected: Tensor, precision: Precision) -> float:
    if expected.dtype == torch.float64:
        return precision.double
    return precision.single if expected.dtype == torch.float32 and not is_tf32(expected) else precision.coarse


def is_tf32(values: Tensor) -> bool:
    """Tell whether products of such values are rounded to TF32: then two ways of one are not as near."""
    return values.is_cuda and tf32()[0] and values.dtype == torch.float32
