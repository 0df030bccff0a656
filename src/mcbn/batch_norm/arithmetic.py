"""What batch norm computes: a batch's own mean and biased variance, and h * scale + shift by given ones."""

import torch
from torch import Tensor


def train_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x (N, C, ...) by its own statistics; return it with their mean and biased variance, (C,) each.

    Training's own kernel where it keeps statistics in x's dtype; it hands back 1 / sqrt(sigma^2 + eps).
    """
    if x.dtype == statistics_dtype(x) and (weight is None or weight.dtype == x.dtype):
        output, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        return output, mean, (inverse.square().reciprocal() - eps).clamp(min=0)  # not in place: vmap has no rule for it
    axes = [axis for axis in range(x.ndim) if axis != 1]
    var, mean = torch.var_mean(x.to(statistics_dtype(x)), axes, correction=0)
    return normalize(x, *scale_and_shift(mean, var, weight, bias, eps)), mean, var


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Half precision keeps its statistics in float32, as training does; the rest in its own."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def scale_and_shift(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Turn statistics (..., C) into gamma / sqrt(sigma^2 + eps) and beta - mu * that, so BN is h * scale + shift."""
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def normalize(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply scale and shift (C,) along axis 1 of x (N, C, ...), in the dtype of the statistics; x's dtype returns."""
    dtype = statistics_dtype(x)
    if x.ndim > 2:
        shape = (-1,) + (1,) * (x.ndim - 2)
        scale, shift = scale.view(shape), shift.view(shape)
    if scale.dtype == dtype == x.dtype:
        return torch.addcmul(shift, x, scale)
    return torch.addcmul(shift.to(dtype), x.to(dtype), scale.to(dtype)).to(x.dtype)
