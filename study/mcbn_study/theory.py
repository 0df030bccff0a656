"""What the paper derives about batch statistics, as code (Teye et al. 2018, section 3.3, appendix 1.2 to 1.4).

Batch statistics as Gaussians: their moments, tests, priors and the divergence from them; the variational objective of
batch norm, KL(q || p) of its statistics, and how far training is from it.
"""

import copy
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcbn import batches, layers
from mcbn.batch_norm import BatchNormCall, BatchNormMode, normalize, scale_and_shift, statistics_dtype, watch
from mcbn.check.diagnosis import ks_distance, lilliefors as lilliefors
from mcbn.diagonal import StatisticMoments, statistic_moments
from mcbn.errors import MCBNError, one_line
from mcbn.network import Network, Output, unwrap

Numbers = Tensor | float


def analytic_moments(mean: Tensor, variance: Tensor, fourth: Tensor, batch_size: int) -> StatisticMoments:
    """Model the statistics of a batch of M examples, one value each, from population moments.

    mu_B ~ N(mu, sigma^2 / M), sigma_B ~ N(sigma, (E[(h - mu)^4] - sigma^4) / (4 sigma^2 M)).
    Teye et al. 2018, appendix 1.3. A unit that never varies (sigma = 0) has no spread.
    mean, variance and fourth central moment of the population are (C,) each.
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


@dataclass(frozen=True)
class Prior:
    """Factorised Gaussian prior on the statistics of every batch norm unit; an infinite std is a flat prior.

    mu_B ~ N(mean, mean_std^2), sigma_B ~ N(std, std_std^2). Teye et al. 2018, section 3.3.
    """

    mean: float = 0.0
    mean_std: float = math.inf
    std: float = 0.0
    std_std: float = math.inf

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name.endswith("_std") and not value > 0:
                raise MCBNError(f"prior: {name} must be positive (infinite for a flat prior); got {value!r}")
            if not name.endswith("_std") and not math.isfinite(value):
                raise MCBNError(f"prior: {name} must be finite; got {value!r}")


def kl_gaussian(mean_q: Numbers, std_q: Numbers, mean_p: Numbers, std_p: Numbers) -> Tensor:
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
    mean_q: Numbers, std_q: Numbers, mean_p: Numbers, std_p: Numbers, mean_slope: Numbers, std_slope: Numbers
) -> Tensor:
    """Derivative of KL(q || p) by a weight theta_k, from the slopes mu_q' and sigma_q' of q's moments.

    KL' = (sigma_q sigma_q' + mu_q mu_q' - mu_p mu_q') / sigma_p^2 - sigma_q' / sigma_q.
    Teye et al. 2018, appendix 1.4, Eq. (7).
    """
    mean_q, std_q, mean_p, std_p = _tensors(mean_q, std_q, mean_p, std_p)
    return (std_q * std_slope + mean_q * mean_slope - mean_p * mean_slope) / std_p.square() - std_slope / std_q


def _tensors(*values: Numbers) -> list[Tensor]:
    """Take numbers as float64 beside tensors of their own dtype; refuse a std that is not positive."""
    like = next((v for v in values if isinstance(v, Tensor)), torch.zeros((), dtype=torch.float64))
    tensors = [v if isinstance(v, Tensor) else like.new_tensor(v) for v in values]
    for name, std in (("std_q", tensors[1]), ("std_p", tensors[3])):
        if not bool((std > 0).all()):
            raise MCBNError(f"{name} must be positive; smallest is {float(std.min()):.3g}")
    try:
        return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise MCBNError(f"mean_q, std_q, mean_p, std_p must broadcast; got shapes {shapes}") from error


def implied_prior(model: nn.Module, weight_decay: float, n: int, tau: float) -> Prior:
    """Return the prior that weight decay implies: wide on batch means, narrow on batch standard deviations.

    p(mu_B) = N(0, infinity), p(sigma_B) = N(0, 1 / (2 N tau lambda)), the second number a variance: only so is
    d KL / dW = W / sigma_p^2 the 2 N tau lambda W of Eq. (5). Teye et al. 2018, section 3.3 and appendix 1.4; it holds
    for fully connected layers without scale and shift, with independent inputs of variance 1, as N and M grow.
    Differs: section 3.3 prints that variance as a standard deviation.

    weight_decay: as an optimiser takes it, gradient weight_decay * W, so lambda = weight_decay / 2; 0: a flat prior.
    n: N, the training examples; tau: noise precision, 1 for classification.
    """
    layers.candidates(unwrap(model))  # refuses a network without any
    for name, value in (("n", n), ("tau", tau)):
        if not (value > 0 and math.isfinite(value)):
            raise MCBNError(f"{name} must be a positive number; got {value!r}")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise MCBNError(f"weight_decay must not be negative; got {weight_decay!r}")
    return Prior(std_std=1 / math.sqrt(n * tau * weight_decay) if weight_decay else math.inf)


class LiveNetwork(Network):
    """The user's own tensors in a private frame of modules: gradients reach them, hooks and modes do not."""

    def __init__(self, model: nn.Module, output: Output = None) -> None:
        model = unwrap(model)
        layers.candidates(model)
        layers.refuse_scripted(model)
        loose = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor)]
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *loose)}
        try:
            self.module: nn.Module = copy.deepcopy(model, shared)
        except Exception as error:
            cure = "keep what cannot be copied (open files, locks, generators) out of its modules"
            raise MCBNError(f"{type(model).__name__} cannot be copied ({one_line(error)}); {cure}") from error
        for parent in list(self.module.modules()):
            for name, child in list(parent.named_children()):
                setattr(parent, name, unwrap(child))
        for module in self.module.modules():
            module.training = False
        watch(self.module)
        self.output, self.reading = output, None
        self._look()


class StatisticsModel(BatchNormMode):
    """Normalise every layer by the batch's own statistics, as training does, and model those of batches of M."""

    def __init__(self, batch_size: int, n_examples: int) -> None:
        super().__init__()
        self.batch_size, self.n_examples = batch_size, n_examples
        self.moments: dict[str, StatisticMoments] = {}  # call name -> (C,) each

    def answer(self, call: BatchNormCall) -> Tensor:
        """Model this call's statistics and normalise by them."""
        rows = call.x.shape[0]
        if rows < 2:
            return call.unchanged()  # instance norm and weight standardisation: no batch is seen
        x = call.x.to(statistics_dtype(call.x))
        # rows beyond one an example (frames, crops) count as independent examples
        self.moments[call.name] = activation_moments(x, self.batch_size * rows / self.n_examples)
        mean, variance = self.moments[call.name].mean, x.var([a for a in range(x.ndim) if a != 1], correction=0)
        return normalize(call.x, *scale_and_shift(mean, variance, call.weight, call.bias, call.eps))


def kl_regularizer(model: nn.Module, prior: Prior, batch: Any, *, batch_size: int | None = None) -> Tensor:
    """Return KL(q || p) summed over all batch norm units, differentiable in the network's weights.

    sum_u KL(N(mu, sigma^2 / M) || p(mu_B)) + KL(N(sigma, (E[(h - mu)^4] - sigma^4) / (4 sigma^2 M)) || p(sigma_B)),
    the moments over the batch inside the network. Teye et al. 2018, appendix 1.4: Eq. (6) in Eq. (4), the "exact VI
    treatment of BN" named after Eq. (7). The objective of Eq. (1), over N tau, is then

        loss = 0.5 * mse(network(x), y) + mcbn_study.theory.kl_regularizer(network, prior, x) / (N * tau).

    The network is read, not run: running statistics, modes and hooks stay; dropout is off in this pass. A statistic
    that does not vary in the batch (a dead unit) has no density and counts nothing.

    batch: inputs for the network, at least 2 examples; more give better population moments. batch_size: M of the
    batches whose statistics q describes; the batch's length unless given.
    """
    return _run_and_penalize(LiveNetwork(model, output=lambda _: torch.empty(0)), prior, batch, batch_size)[1]


def _run_and_penalize(network: LiveNetwork, prior: Prior, batch: Any, batch_size: int | None) -> tuple[Tensor, Tensor]:
    """Return the output for a batch, and the divergence summed over statistics of all calls."""
    N = batches.size_of(batch)
    M = N if batch_size is None else batches.require_int("batch_size", batch_size, 2)
    if N < 2:
        raise MCBNError(f"the batch holds {N} example(s); the statistics of a batch need at least 2")
    with StatisticsModel(M, N) as mode:
        output = network(network.prepare(batch))
    if not mode.moments:
        name = type(network.module).__name__
        raise MCBNError(f"{name} ran without a batch norm call on a batch; there is nothing to regularise")
    divergences = []
    for q in mode.moments.values():
        of_mean, of_std = (q.mean, q.mean_std, prior.mean, prior.mean_std), (q.std, q.std_std, prior.std, prior.std_std)
        for mean, std, prior_mean, prior_std in (of_mean, of_std):
            divergences.append(kl_gaussian(mean[std > 0], std[std > 0], prior_mean, prior_std))
    return output, torch.cat([units.to(divergences[0].device) for units in divergences]).sum()


class ObjectiveGap(NamedTuple):
    """Norms of gradients by all trainable parameters, each objective in the units of the loss."""

    relative: float  # |grad L_VA / (N tau) - grad L_RR| / |grad L_RR|: 0 means one objective
    difference: float  # |grad KL / (N tau) - grad Omega|, what the objectives differ by
    divergence: float  # |grad KL / (N tau)|
    decay: float  # |grad Omega|
    loss: float  # |grad of the data term|, the same in both


def objective_gap(
    model: nn.Module,
    x: Any,
    y: Tensor,
    *,
    n: int,
    tau: float = 1.0,
    weight_decay: float = 0.0,
    prior: Prior | None = None,
    batch_size: int | None = None,
) -> ObjectiveGap:
    """Compare the gradients of the variational objective and of batch-norm training on one batch.

    L_VA = -N/M sum_i ln p(y_i | x_i, omega) + KL(q || p)                 Teye et al. 2018, Eq. (1)
    L_RR = -1/(M tau) sum_i ln p(y_i | x_i, omega) + lambda sum_l ||W_l||^2                 Eq. (2)

    are one objective if grad KL = N tau grad Omega (section 3.3): the data terms agree exactly once divided by N tau.
    docs/theory.md says what remains.

    x, y: one batch, or the whole training set as the population, y shaped as the network's output; n: N, the training
    examples; tau: noise precision in the units of y; prior: the one that weight_decay, as in `implied_prior`, implies
    unless given; batch_size: M, the length of x unless given. The network is read, not changed.
    """
    prior = prior or implied_prior(model, weight_decay, n, tau)
    network = LiveNetwork(model)
    if not (parameters := [p for p in network.module.parameters() if p.requires_grad]):
        raise MCBNError(f"{type(network.module).__name__} has no parameter that requires a gradient; unfreeze it first")
    with torch.enable_grad():
        predicted, divergence = _run_and_penalize(network, prior, x, batch_size)
        if predicted.shape != y.shape:
            shapes = f"{tuple(predicted.shape)} for targets {tuple(y.shape)}"
            raise MCBNError(f"the network gives {shapes}; shape these alike")
        data = 0.5 * (predicted - y.to(predicted)).square().sum() / len(y)  # Gaussian noise of precision tau, over tau
        kl = divergence / (n * tau)
        decay = 0.5 * weight_decay * sum((p.square().sum() for p in parameters if p.ndim > 1), start=0.0 * data)
        gradient = partial(torch.autograd.grad, inputs=parameters, retain_graph=True, materialize_grads=True)
        slopes = [[slope.double().flatten() for slope in gradient(value)] for value in (data, kl, decay)]
    of_data, of_kl, of_decay = map(torch.cat, slopes)
    gradients = (of_kl - of_decay, of_kl, of_decay, of_data, of_data + of_decay)
    difference, *norms, whole = (float(torch.linalg.vector_norm(gradient)) for gradient in gradients)
    return ObjectiveGap(difference / whole if whole else math.inf, difference, *norms)
