"""Batch statistics as Gaussians: moments, tests, priors and the divergence from them (appendix 1.2 to 1.4)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from mcbn import layers
from mcbn.check.diagnosis import ks_distance
from mcbn.diagonal import StatisticMoments, statistic_moments
from mcbn.errors import MCBNError
from mcbn.network import unwrap

TensorLike = Tensor | float
Value = float | Tensor | Mapping[str, float | Tensor]  # one for all units, one a unit (C,), or by layer


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


@dataclass(frozen=True, eq=False)
class Prior:
    """Factorised Gaussian prior on the statistics of each batch norm unit.

    mu_B ~ N(mean, mean_std^2), sigma_B ~ N(std, std_std^2). Teye et al. 2018, section 3.3.
    Each is a number, a tensor (C,), or a dict from layer name to those; an infinite std is a flat prior.
    """

    mean: Value = 0.0
    mean_std: Value = math.inf
    std: Value = 0.0
    std_std: Value = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for one in value.values() if isinstance(value, Mapping) else [value]:
                _require_value(field.name, torch.as_tensor(one), positive=field.name.endswith("_std"))

    def of(self, layer: str, like: Tensor) -> list[Tensor]:
        """Return mean, mean_std, std, std_std for one layer, each (C,) as `like`."""
        return [_of_layer(field.name, getattr(self, field.name), layer, like) for field in fields(self)]


def _require_value(name: str, value: Tensor, *, positive: bool) -> None:
    wrong = ~(value > 0) if positive else ~value.isfinite()
    if value.ndim > 1 or bool(wrong.any()):
        kind = "positive (infinite for a flat prior)" if positive else "finite"
        raise MCBNError(f"prior: {name} must be {kind}, a number or one a unit (C,), in every layer; got {value}")


def _of_layer(name: str, value: Value, layer: str, like: Tensor) -> Tensor:
    if isinstance(value, Mapping):
        if layer not in value:
            raise MCBNError(f"prior: {name} names layers {list(value)}, but not {layer!r}; give it a value too")
        value = value[layer]
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if tensor.ndim and tensor.shape != like.shape:
        raise MCBNError(
            f"prior: {name} has shape {tuple(tensor.shape)} for layer {layer!r} of {len(like)} units; "
            f"give a number, or shape ({len(like)},)"
        )
    return tensor.expand_as(like)


def kl_gaussian(mean_q: TensorLike, std_q: TensorLike, mean_p: TensorLike, std_p: TensorLike) -> Tensor:
    """KL divergence of Gaussians, elementwise; of factorised ones it is the sum.

    KL(q || p) = ln(sigma_p / sigma_q) + (sigma_q^2 + (mu_q - mu_p)^2) / (2 sigma_p^2) - 1/2.
    Teye et al. 2018, appendix 1.2, Eq. (3) and (4).
    A flat prior (sigma_p infinite) is infinitely far from every q; what is left without the constant ln sigma_p,
    -ln sigma_q - 1/2, is returned: it ranks and differentiates as the limit does, so mu_q is free and sigma_q is not.
    """
    mean_q, std_q, mean_p, std_p = _tensors(mean_q, std_q, mean_p, std_p)
    flat = std_p.isinf()
    scale = std_p.where(~flat, torch.ones_like(std_p))
    pull = (std_q.square() + (mean_q - mean_p).square()) / (2 * scale.square())
    return (scale / std_q).log() + pull.where(~flat, torch.zeros_like(pull)) - 0.5


def kl_derivative(
    mean_q: TensorLike,
    std_q: TensorLike,
    mean_p: TensorLike,
    std_p: TensorLike,
    mean_slope: TensorLike,
    std_slope: TensorLike,
) -> Tensor:
    """Derivative of KL(q || p) by a weight theta_k, from the slopes mu_q' and sigma_q' of q's moments.

    KL' = (sigma_q sigma_q' + mu_q mu_q' - mu_p mu_q') / sigma_p^2 - sigma_q' / sigma_q.
    Teye et al. 2018, appendix 1.4, Eq. (7).
    """
    mean_q, std_q, mean_p, std_p = _tensors(mean_q, std_q, mean_p, std_p)
    pull = (std_q * std_slope + mean_q * mean_slope - mean_p * mean_slope) / std_p.square()
    return pull - std_slope / std_q


def _tensors(*values: TensorLike) -> list[Tensor]:
    """Take numbers as float64 beside tensors of their own dtype; refuse a std that is not positive."""
    dtype = next((v.dtype for v in values if isinstance(v, Tensor)), torch.float64)
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    tensors = [torch.as_tensor(v, dtype=None if isinstance(v, Tensor) else dtype, device=device) for v in values]
    for name, std in (("std_q", tensors[1]), ("std_p", tensors[3])):
        if not bool((std > 0).all()):
            raise MCBNError(f"{name} must be positive; smallest is {float(std.min()):.3g}")
    try:
        return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise MCBNError(f"mean_q, std_q, mean_p, std_p must broadcast; got shapes {shapes}") from error


def implied_prior(model: nn.Module, weight_decay: float | Mapping[str, float], n: int, tau: float) -> Prior:
    """Return the prior that weight decay implies: wide on batch means, narrow on batch standard deviations.

    p(mu_B) = N(0, infinity), p(sigma_B) = N(0, 1 / (2 N tau lambda)), the second number a variance: only so is
    d KL / dW = W / sigma_p^2 the 2 N tau lambda W of Eq. (5). Teye et al. 2018, section 3.3 and appendix 1.4; it holds
    for fully connected layers without scale and shift, with independent inputs of variance 1, as N and M grow.
    Differs: section 3.3 prints that variance as a standard deviation.

    Args:
        model: the network whose batch norm layers get the prior.
        weight_decay: as an optimiser takes it, gradient weight_decay * W, so lambda = weight_decay / 2; a number, or
            by name of batch norm layer. 0 gives a flat prior.
        n: N, the training examples.
        tau: noise precision; 1 for classification.
    """
    names = layers.candidates(unwrap(model))
    for name, value in (("n", n), ("tau", tau)):
        if not (value > 0 and math.isfinite(value)):
            raise MCBNError(f"{name} must be a positive number; got {value!r}")

    def spread(decay: float) -> float:
        if not (decay >= 0 and math.isfinite(decay)):
            raise MCBNError(f"weight_decay must not be negative; got {decay!r}")
        return 1 / math.sqrt(n * tau * decay) if decay else math.inf

    if not isinstance(weight_decay, Mapping):
        return Prior(std_std=spread(weight_decay))
    if set(weight_decay) != set(names):
        raise MCBNError(f"weight_decay names {list(weight_decay)}; the batch norm layers are {names}: name each once")
    return Prior(std_std={layer: spread(decay) for layer, decay in weight_decay.items()})
