"""The distribution of batch statistics: Gaussian moments from population moments (appendix 1.3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from mcbn.errors import MCBNError


class StatisticMoments(NamedTuple):
    """Gaussian moments of a batch mean and a batch standard deviation, each (C,)."""

    mean: Tensor  # of the batch mean: mu
    mean_std: Tensor  # sigma / sqrt(M)
    std: Tensor  # of the batch standard deviation: sigma
    std_std: Tensor  # sqrt((E[(h - mu)^4] - sigma^4) / (4 sigma^2 M))


def analytic_moments(mean: Tensor, variance: Tensor, fourth: Tensor, batch_size: int) -> StatisticMoments:
    """Model the statistics of a batch of M independent examples from population moments.

    mu_B ~ N(mu, sigma^2 / M), sigma_B ~ N(sigma, (E[(h - mu)^4] - sigma^4) / (4 sigma^2 M)).
    Teye et al. 2018, appendix 1.3. A unit that never varies (sigma = 0) has no spread.

    mean, variance and fourth central moment of the population, each (C,).
    """
    std = variance.sqrt()
    spread = (fourth - variance.square()).clamp(min=0) / (4 * variance * batch_size)
    return StatisticMoments(
        mean, (variance / batch_size).sqrt(), std, spread.where(variance > 0, spread.new_zeros(())).sqrt()
    )


def activation_moments(h: Tensor, batch_size: float) -> StatisticMoments:
    """Model the statistics of a batch of M examples from what a layer sees of a population, h (N, C, ...).

    With a_i the mean of example i's values and b_i the mean of its (h - mu)^2,
    mu_B ~ N(mu, Var(a) / M), sigma_B ~ N(sigma, Var(b) / (4 sigma^2 M)). One value an example: a = h, Var(b) =
    E[(h - mu)^4] - sigma^4, the equations of Teye et al. 2018, appendix 1.3.
    Differs: they treat fully connected layers; pixels of one image are no independent examples, images are.

    Differentiable; a statistic that does not vary has spread 0 and passes no gradient through it.
    """
    if h.ndim < 2 or len(h) < 2:
        raise MCBNError(f"activations must be (N, C, ...) with N at least 2; got {tuple(h.shape)}")
    own = list(range(2, h.ndim))  # axes inside an example
    mean = h.mean([0, *own])  # (C,)
    centred = h - mean.reshape(-1, *(1,) * len(own))  # (N, C, ...)
    each_mean = centred.mean(own) if own else centred  # (N, C): a - mu
    each_square = centred.square().mean(own) if own else centred.square()  # (N, C): b
    variance = each_square.mean(0)  # (C,)
    std = _safe_sqrt(variance, mean.square())
    of_square = (each_square - variance).square().mean(0)  # (C,): Var(b)
    varies = std > 0
    spread = of_square / (4 * variance.where(varies, torch.ones_like(variance)) * batch_size)
    of_mean = each_mean.square().mean(0)  # (C,): Var(a)
    return StatisticMoments(
        mean,
        _safe_sqrt(of_mean / batch_size, mean.square()),
        std,
        _safe_sqrt(spread.where(varies, torch.zeros_like(spread)), variance),
    )


def _safe_sqrt(square: Tensor, scale: Tensor) -> Tensor:
    """Square root with 0, and gradient 0, for what is rounding against `scale`."""
    real = square.detach() > scale.detach() * (4 * torch.finfo(square.dtype).eps) ** 2
    return square.where(real, torch.ones_like(square)).sqrt() * real
