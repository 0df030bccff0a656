"""The exact variational treatment of batch norm: KL(q || p) of its statistics as a training penalty."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mcbn import batch_norm as statistics
from mcbn import batches, layers
from mcbn.batch_norm import BatchNormCall, BatchNormMode, layer_of, scale_and_shift, statistics_dtype
from mcbn.diagonal import StatisticMoments
from mcbn.errors import MCBNError
from mcbn.network import Network, Output, unwrap
from mcbn_study.theory.divergence import Prior, kl_gaussian
from mcbn_study.theory.moments import activation_moments


class LiveNetwork(Network):
    """The user's own tensors in a private frame of modules: gradients reach them, hooks and modes do not."""

    def __init__(self, model: nn.Module, output: Output = None) -> None:
        model = unwrap(model)
        layers.candidates(model)
        layers.refuse_scripted(model)
        tensors = [*model.parameters(), *model.buffers()]
        shared = {id(tensor): tensor for tensor in tensors}
        shared |= {id(v): v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor)}
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
        statistics.watch(self.module)
        self.output = output
        self.device = tensors[0].device if tensors else None
        floating = {t.dtype for t in model.parameters() if t.is_floating_point()}
        self.dtype = floating.pop() if len(floating) == 1 else None


class Moments(BatchNormMode):
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
        return statistics.normalize(call.x, *scale_and_shift(mean, variance, call.weight, call.bias, call.eps))


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
    network = LiveNetwork(model, output=_nothing)
    N = batches.size_of(batch)
    M = N if batch_size is None else batches.require_int("batch_size", batch_size, 2)
    if N < 2:
        raise MCBNError(f"the batch holds {N} example(s); the statistics of a batch need at least 2")
    with Moments(M, N) as mode:
        network(network.prepare(batch))
    return penalty(mode.moments, prior, model)


def penalty(moments: dict[str, StatisticMoments], prior: Prior, model: nn.Module) -> Tensor:
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
    columns = [torch.cat([part.to(home) for part in column]) for column in zip(*pairs, strict=True)]
    varies = columns[1] > 0
    return kl_gaussian(*(column[varies] for column in columns)).sum()


def _nothing(result: Any) -> Tensor:
    """Stand in for the output, which the penalty does not look at."""
    return torch.empty(0)
