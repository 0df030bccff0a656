"""Kolmogorov-Smirnov tests against a Gaussian known beforehand, column by column."""

import torch
from torch import Tensor

from mcbn.check.diagnosis import ks_distance


def ks_pvalue(distance: Tensor, n: int) -> Tensor:
    """Return the probability of a larger D for n draws from the reference itself, exactly."""
    from scipy.stats import kstwo  # type: ignore[import-untyped]

    return torch.as_tensor(kstwo.sf(distance.cpu().numpy(), n)).to(distance)


def kolmogorov_smirnov(values: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Test T values against N(mean, std^2) known beforehand: (T, C) -> p-values (C,); 0 where std is 0."""
    std = torch.as_tensor(std, dtype=torch.float64, device=values.device)
    p = ks_pvalue(ks_distance(values, mean, std.where(std > 0, torch.ones_like(std))), len(values))
    return p.where(std > 0, torch.zeros_like(p))
