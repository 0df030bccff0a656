"""The variational objective of batch norm, KL(q || p) of its statistics, and how far training is from it."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcbn import batches, layers
from mcbn.batch_norm import BatchNormCall, BatchNormMode, layer_of, normalize, scale_and_shift, statistics_dtype, watch
from mcbn.diagonal import StatisticMoments
from mcbn.errors import MCBNError
from mcbn.network import Network, Output, unwrap
from mcbn_study.theory.gaussians import Prior, activation_moments, implied_prior, kl_gaussian

Loss = Callable[[Tensor, Tensor], Tensor]


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
            raise MCBNError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); its modules are, so that "
                "yours stay as they are: keep what cannot be copied (open files, locks, generators) out of it"
            ) from error
        for parent in list(self.module.modules()):
            for name, child in list(parent.named_children()):
                setattr(parent, name, unwrap(child))
        for module in self.module.modules():
            module.training = False
        watch(self.module)
        self.output = output
        self._look()


class StatisticsModel(BatchNormMode):
    """Normalise every layer by the batch's own statistics, as training does, and model those of batches of M.

    Everything is made of differentiable operations, so the moments carry gradients to the weights.
    """

    def __init__(self, batch_size: int, n_examples: int) -> None:
        super().__init__()
        self.batch_size, self.n_examples = batch_size, n_examples
        self.moments: dict[str, StatisticMoments] = {}  # call name -> (C,) each

    def answer(self, call: BatchNormCall) -> Tensor:
        """Model this call's statistics and normalise by them."""
        rows = call.x.shape[0]
        if rows < 2:
            return call.unchanged()  # instance norm and weight standardisation: no batch is seen
        dtype = statistics_dtype(call.x)
        x = call.x.to(dtype)
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

    Args:
        model: any network with batch norm.
        prior: `Prior(...)`, or `implied_prior(...)`.
        batch: inputs for the network, at least 2 examples; more give better population moments.
        batch_size: M of the batches whose statistics q describes; the batch's length unless given.
    """
    network = LiveNetwork(model, output=lambda _: torch.empty(0))  # the output is not looked at
    N = batches.size_of(batch)
    M = N if batch_size is None else batches.require_int("batch_size", batch_size, 2)
    if N < 2:
        raise MCBNError(f"the batch holds {N} example(s); the statistics of a batch need at least 2")
    with StatisticsModel(M, N) as mode:
        network(network.prepare(batch))
    return _penalty(mode.moments, prior, model)


def _penalty(moments: dict[str, StatisticMoments], prior: Prior, model: nn.Module) -> Tensor:
    """Sum the divergence over statistics of all calls."""
    if not moments:
        raise MCBNError(
            f"{type(unwrap(model)).__name__} ran without a batch norm call on a batch; there is nothing to regularise"
        )
    pairs = []
    for name, q in moments.items():
        mean, mean_std, std, std_std = prior.of(layer_of(name), q.mean)
        pairs += [(q.mean, q.mean_std, mean, mean_std), (q.std, q.std_std, std, std_std)]
    home = pairs[0][0].device
    columns = [torch.cat([values.to(home) for values in column]) for column in zip(*pairs, strict=True)]
    varies = columns[1] > 0
    return kl_gaussian(*(column[varies] for column in columns)).sum()


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
    loss: Loss | None = None,
    output: Output = None,
) -> ObjectiveGap:
    """Compare the gradients of the variational objective and of batch-norm training on one batch.

    L_VA = -N/M sum_i ln p(y_i | x_i, omega) + KL(q || p)                 Teye et al. 2018, Eq. (1)
    L_RR = -1/(M tau) sum_i ln p(y_i | x_i, omega) + lambda sum_l ||W_l||^2                 Eq. (2)

    are one objective if grad KL = N tau grad Omega (section 3.3). The data terms agree exactly once divided by N tau:
    one batch gives one omega in both. What is left is |grad KL / (N tau) - grad Omega|. For a prior that does not
    depend on N and no weight decay it is exactly proportional to 1 / N. For the implied prior a share of the decay
    remains however large N is, unless inputs of every layer are independent with variance 1 and M is large too.

    Args:
        model: the network, read in training mode's arithmetic and not changed.
        x, y: one batch, or the whole training set as the population.
        n: N, the training examples.
        tau: noise precision in the units of y; 1 for classification.
        weight_decay: as an optimiser takes it (lambda = weight_decay / 2), on all weight matrices.
        prior: on the statistics; the one that `weight_decay` implies unless given.
        batch_size: M; the length of x unless given.
        loss: -ln p(y | x) / tau averaged over the batch, up to a constant: half the squared error summed over
            outputs unless given; `torch.nn.functional.cross_entropy` for classes.
        output: which tensor of the network's result counts: key, index or function.
    """
    prior = prior or implied_prior(model, weight_decay, n, tau)
    network, N = LiveNetwork(model, output), batches.size_of(x)
    if N < 2 or len(y) != N:
        raise MCBNError(f"x and y must hold as many examples, at least 2; got {N} and {len(y)}")
    M = N if batch_size is None else batches.require_int("batch_size", batch_size, 2)
    parameters = [p for p in network.module.parameters() if p.requires_grad]
    if not parameters:
        raise MCBNError(f"{type(network.module).__name__} has no parameter that requires a gradient; unfreeze it first")
    with torch.enable_grad():
        with StatisticsModel(M, N) as mode:
            predicted = network(network.prepare(x))
        data = (loss or _half_squared_error)(predicted, y.to(network.device))
        kl = _penalty(mode.moments, prior, model) / (n * tau)
        squares = [p.square().sum() for p in parameters if p.ndim > 1]
        decay = 0.5 * weight_decay * sum(squares, start=0.0 * data)
        of_data, of_kl, of_decay = (_gradient(value, parameters) for value in (data, kl, decay))
    difference = _norm(of_kl - of_decay)
    whole = _norm(of_data + of_decay)
    relative = difference / whole if whole else math.inf
    return ObjectiveGap(relative, difference, _norm(of_kl), _norm(of_decay), _norm(of_data))


def _half_squared_error(predicted: Tensor, y: Tensor) -> Tensor:
    """1/M sum_i 1/2 ||f(x_i) - y_i||^2: Gaussian noise of precision tau, over tau."""
    if predicted.shape != y.shape:
        raise MCBNError(
            f"the network gives {tuple(predicted.shape)} for targets {tuple(y.shape)}; shape the targets alike, or "
            "pass loss= (cross_entropy for classes)"
        )
    return 0.5 * (predicted - y.to(predicted.dtype)).square().sum() / len(y)


def _gradient(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    slopes = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([slope.double().flatten() for slope in slopes])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
