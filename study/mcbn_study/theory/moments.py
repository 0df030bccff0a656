"""The distribution of batch statistics: Gaussian moments from population moments, and tests (appendix 1.3)."""

import torch
from torch import Tensor

from mcbn.check.diagnosis import ks_distance
from mcbn.diagonal import StatisticMoments, statistic_moments
from mcbn.errors import MCBNError


def analytic_moments(mean: Tensor, variance: Tensor, fourth: Tensor, batch_size: int) -> StatisticMoments:
    """Model the statistics of a batch of M examples, one value each, from population moments.

    mu_B ~ N(mu, sigma^2 / M), sigma_B ~ N(sigma, (E[(h - mu)^4] - sigma^4) / (4 sigma^2 M)).
    Teye et al. 2018, appendix 1.3. A unit that never varies (sigma = 0) has no spread.

    mean, variance and fourth central moment of the population, each (C,).
    """
    return statistic_moments(mean, variance, variance, (fourth - variance.square()).clamp(min=0), batch_size)


def activation_moments(h: Tensor, batch_size: float) -> StatisticMoments:
    """Model the statistics of a batch of M examples from what a layer sees of a population, h (N, C, ...).

    The equations of `statistic_moments`. One value an example: a = h, Var(b) = E[(h - mu)^4] - sigma^4, those of
    Teye et al. 2018, appendix 1.3.
    Differs: they treat fully connected layers; pixels of one image are no independent examples, images are.

    Differentiable; a statistic that does not vary has spread 0 and passes no gradient through it.
    """
    if h.ndim < 2 or len(h) < 2:
        raise MCBNError(f"activations must be (N, C, ...) with N at least 2; got {tuple(h.shape)}")
    h = h.reshape(*h.shape[:2], -1)  # (N, C, P): P values an example
    mean = h.mean([0, 2])  # (C,)
    centred = h - mean[:, None]  # (N, C, P)
    each_mean, each_square = centred.mean(2), centred.square().mean(2)  # (N, C): a - mu, b
    average = each_square.mean(0)  # (C,)
    variance = _above_rounding(average, mean.square())
    of_mean = _above_rounding(each_mean.square().mean(0), batch_size * mean.square())  # (C,): Var(a)
    of_square = (each_square - average).square().mean(0)  # (C,): Var(b)
    of_square = _above_rounding(of_square, 4 * batch_size * average.square())
    return statistic_moments(mean, variance, of_mean, of_square, batch_size)


def _above_rounding(square: Tensor, scale: Tensor) -> Tensor:
    """Put 0 for what is rounding against `scale`."""
    return square.masked_fill(square.detach() <= scale.detach() * (4 * torch.finfo(square.dtype).eps) ** 2, 0)


def ks_pvalue(distance: Tensor, n: int) -> Tensor:
    """Return the probability of a larger D for n draws from the reference itself, exactly."""
    from scipy.stats import kstwo  # type: ignore[import-untyped]  # takes a second

    return torch.as_tensor(kstwo.sf(distance.cpu().numpy(), n)).to(distance)


def kolmogorov_smirnov(values: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Test T values against N(mean, std^2) known beforehand: (T, C) -> p-values (C,); 0 where std is 0."""
    std = torch.as_tensor(std, dtype=torch.float64, device=values.device)
    p = ks_pvalue(ks_distance(values, mean, std.where(std > 0, torch.ones_like(std))), len(values))
    return p.where(std > 0, torch.zeros_like(p))
