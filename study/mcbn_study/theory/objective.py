"""How far variational inference and regularised training of a batch-normalised network are apart (section 3.3)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.network import Output
from mcbn_study.theory.divergence import Prior, implied_prior
from mcbn_study.theory.regularizer import LiveNetwork, Moments, penalty

Loss = Callable[[Tensor, Tensor], Tensor]


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
        with Moments(M, N) as mode:
            predicted = network(network.prepare(x))
        data = (loss or _half_squared_error)(predicted, y.to(network.device))
        kl = penalty(mode.moments, prior, model) / (n * tau)
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
    parts = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([part.double().flatten() for part in parts])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
