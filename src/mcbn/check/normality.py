"""Are drawn statistics Gaussian? Kolmogorov-Smirnov tests, column by column."""

from functools import lru_cache

import torch
from torch import Tensor

from mcbn.errors import MCBNError

REPLICATES = 5000  # of the calibration; p-values are steps of 1 / 5001
CALIBRATION_VALUES = 2**22  # simulated at most, so that many draws get fewer replicates


def ks_distance(values: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Return D = max_z |F_T(z) - Phi(z)| of T values standardised by mean and std: (T, C) -> (C,)."""
    if values.ndim != 2 or len(values) < 1:
        raise MCBNError(f"values must be (T, C), one column a unit; got {tuple(values.shape)}")
    z = ((values.double() - mean) / std).sort(0).values  # (T, C)
    T = len(z)
    expected = torch.special.ndtr(z)
    step = torch.arange(T + 1, dtype=z.dtype, device=z.device)[:, None] / T
    return torch.maximum(step[1:] - expected, expected - step[:-1]).amax(0)


def ks_pvalue(distance: Tensor, n: int) -> Tensor:
    """Return the probability of a larger D for n draws from the reference itself, to 0.003 at n = 10, 0.001 from 30.

    P(D > d) = 2 sum_k (-1)^(k-1) exp(-2 k^2 t^2), t = s + 1 / (6 sqrt(n)) + (s - 1) / (4 n), s = sqrt(n) d:
    Kolmogorov's limit with the small-sample correction of Vrbik (2018).
    """
    s = n**0.5 * distance[..., None]
    t = s + 1 / (6 * n**0.5) + (s - 1) / (4 * n)
    k = torch.arange(1, 101, dtype=distance.dtype, device=distance.device)
    terms = 2 * (-1) ** (k - 1) * torch.exp(-2 * k.square() * t.square())
    return terms.sum(-1).clamp(0, 1).where(t[..., 0] > 0.2, torch.ones_like(distance))  # below, P is 1 to 12 digits


def kolmogorov_smirnov(values: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Test T values against N(mean, std^2) known beforehand: (T, C) -> p-values (C,); 0 where std is 0."""
    std = torch.as_tensor(std, dtype=torch.float64, device=values.device)
    p = ks_pvalue(ks_distance(values, mean, std.where(std > 0, torch.ones_like(std))), len(values))
    return p.where(std > 0, torch.zeros_like(p))


def lilliefors(values: Tensor) -> Tensor:
    """Test T values for a Gaussian of any mean and std: (T, C) -> p-values (C,); NaN for a constant column.

    Mean and std come from the same values, which pulls D down: p-values of Kolmogorov's distribution would be far too
    large. So D is compared with that of simulated Gaussian columns treated alike (Lilliefors 1967), p = (1 + #{D_r >=
    D}) / (1 + R). The simulation has a generator of its own.
    """
    if values.ndim != 2 or len(values) < 4:
        raise MCBNError(f"values must be (T, C) with T at least 4 to judge their shape; got {tuple(values.shape)}")
    values = values.double()
    mean, std = values.mean(0), values.std(0)
    constant = std <= 1e-7 * values.abs().amax(0)
    distance = ks_distance(values, mean, std.where(~constant, torch.ones_like(std)))  # (C,)
    null = _null_distances(len(values)).to(values.device)  # (R,), ascending
    larger = len(null) - torch.searchsorted(null, distance)
    p = (1 + larger.double()) / (1 + len(null))
    return p.where(~constant, torch.full_like(p, torch.nan))


@lru_cache(maxsize=8)
def _null_distances(T: int) -> Tensor:
    """Simulate D of Gaussian columns of T values standardised by their own mean and std, sorted."""
    R = max(500, min(REPLICATES, CALIBRATION_VALUES // T))
    values = torch.randn(T, R, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ks_distance(values, values.mean(0), values.std(0)).sort().values
