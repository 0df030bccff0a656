"""What the paper derives about batch statistics (Teye et al. 2018, appendix 1.2 to 1.4)."""

from typing import NamedTuple

from torch import Tensor


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
