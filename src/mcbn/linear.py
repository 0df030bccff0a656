"""Sampling-free moments: the covariance of the drawn statistics carried through the network's Jacobian.

Let omega hold mean mu_B and standard deviation sigma_B of every stochastic channel, omega_0 their average over the
draws and C their full covariance. With J the gradient of one input's output at omega_0,

    f_omega(x) ~ f_omega_0(x) + J (omega - omega_0),    covariance = J C J^T.

The mean of what this leaves out is, to second order, tr(H C) / 2 with H the matrix of second derivatives. It is taken
from K = 8 draws omega_k whose second moments about omega_0 are nearest to C (`representative`), once for all inputs:

    mean = 1/K sum_k [f_omega_k(x) - J (omega_k - omega_0)].

Both are exact where the output is linear in omega (docs/posteriors.md says what they are elsewhere). Class
probabilities are averaged over the linearised logits of the draws, which have exactly this mean and covariance. A
Gaussian posterior gives its own moments instead: omega_0 is its location and C the modelled covariance, exactly.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, Replay, scale_and_shift
from mcbn.engine.jacobian import Differentiator, PerExample
from mcbn.engine.run import Engine, keep
from mcbn.errors import MCBNError
from mcbn.gaussian import join, split
from mcbn.network import Network, ProcessLock
from mcbn.posterior import Posterior

BLOCK_VALUES = 2**20  # inputs and statistics of the examples that go through together
DRAWS_AT_ONCE = 2**24  # values of linearised outputs made in one piece
REPRESENTATIVES = 8  # K
CANDIDATES = 512  # draws they are chosen from
EXPANSIONS_KEPT = 4  # of numbers of draws


class Linearised(NamedTuple):
    """Moments of every example's output: a mean, and a first-order expansion in the statistics."""

    mean: Tensor  # (N, ...)
    jacobian: Tensor  # (N, D, S), S running over mean, then standard deviation, of every call
    deviations: Tensor  # (T, S), draws less their average
    factors: tuple[Tensor, ...]  # of blocks of successive statistics: C = blockdiag(factor^T factor, ...) + diagonal
    diagonal: Tensor | None  # (S,)

    @property
    def projected(self) -> Tensor:
        """J C^1/2, (N, D, S'): its squares sum to the variance."""
        blocks = torch.split(self.jacobian, [factor.shape[1] for factor in self.factors], 2) if self.factors else ()
        columns = [block @ factor.T for block, factor in zip(blocks, self.factors, strict=True)]
        if self.diagonal is not None:
            columns.append(self.jacobian * self.diagonal.sqrt())
        return columns[0] if len(columns) == 1 else torch.cat(columns, 2)

    def draws(self) -> Iterator[Tensor]:
        """Yield the linearised output of every draw, (t, N, ...) a chunk."""
        N, D, _ = self.jacobian.shape
        for rows in torch.split(self.deviations, max(1, DRAWS_AT_ONCE // max(1, N * D))):
            yield self.mean + torch.einsum("nds,ts->tnd", self.jacobian, rows).reshape(-1, *self.mean.shape)

    def shares(self, channels: Mapping[str, int]) -> dict[str, tuple[float, float]]:
        """Split the predictive variance among layers: each one's share, and what it would be alone; none if it is 0.

        J_l, d_l a layer's block of gradient and deviations, V the variance of sum_l J_l d_l: alone_l = Var(J_l d_l) / V
        and share_l = Cov(J_l d_l, sum_k J_k d_k) / V, which sums to 1.
        """
        sizes = [2 * C for C in channels.values()]
        blocks = zip(torch.split(self.jacobian, sizes, 2), torch.split(self.deviations, sizes, 1), strict=True)
        moves = [torch.einsum("nds,ts->tnd", J, d).double().flatten(1) for J, d in blocks]  # (T, N D) each
        whole = torch.stack(moves).sum(0)  # (T, N D)
        variance = whole.square().sum()
        if not variance > 0:
            return {}
        shares = [(float((move * whole).sum() / variance), float(move.square().sum() / variance)) for move in moves]
        return dict(zip(channels, shares, strict=True))


class Expansion:
    """What does not depend on the inputs: the point to expand about, and the covariance of the first T draws there."""

    def __init__(self, network: Network, posterior: Posterior, inputs: Any, T: int) -> None:
        model, seed = posterior.gaussian, posterior.seed
        self.diagonal: Tensor | None = None  # (S,)
        if model is None:
            candidates = posterior.rows(slice(T))
            rows = join(candidates.mean, candidates.var)  # (T, S)
            centre = rows.mean(0)
            self.deviations = rows - centre  # (T, S)
            self.factors: tuple[Tensor, ...] = (torch.linalg.qr(self.deviations, mode="r").R / math.sqrt(T),)
        else:
            candidates = Posterior(*model.statistics(CANDIDATES, seed), posterior.batch_size)
            rows, centre = join(candidates.mean, candidates.var), model.location
            self.deviations = model.deviations(T, seed).to(centre)  # for class probabilities
            self.factors, self.diagonal = model.factors, model.diagonal  # each factor (S', S_block)
        self.centres = split(centre, posterior.channels)  # call name -> mean and standard deviation, each (C,)
        away = rows[:CANDIDATES] - centre
        nearest = representative(away * self._units(network, inputs), REPRESENTATIVES)
        self.chosen = candidates.rows(nearest)  # the K draws of the mean
        self.offset = away[nearest].mean(0)  # (S,), their average less the centre
        self.engine, self.differentiate = Engine(network, self.chosen), Differentiator(network, self.centres)

    def _units(self, network: Network, inputs: Any) -> Tensor:
        """Return |gamma| / sigma of every statistic, (S,): how much it moves its channel; 0 where it is not used."""
        with torch.no_grad(), PerExample(self.centres, batches.size_of(inputs)) as mode:
            network.run_copy(inputs)
        used = {name: point.scale.abs() for name, point in mode.points.items()}
        scales = (used.get(name, torch.zeros_like(centre)) for name, (centre, _) in self.centres.items())
        return torch.cat([scale for scale in scales for _ in range(2)])


class Linearizer:
    """Linearises one network in the statistics of one posterior; what does not depend on the inputs is kept."""

    def __init__(self, network: Network, posterior: Posterior) -> None:
        self.network, self.posterior = network, posterior
        self._expansions: dict[int, Expansion] = {}  # by number of draws
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.network, self.posterior)  # expansions are made again

    @torch.inference_mode(False)  # gradients are taken, wherever this is called
    def __call__(self, inputs: Any, n_samples: int) -> Linearised:
        """Expand the output of each of N prepared inputs on its own in the statistics of the first T draws."""
        inputs = batches.map_tensors(lambda t: t.clone() if t.is_inference() else t.detach(), inputs)
        expansion = self.expansion(inputs, n_samples)
        cut = _blocks(inputs, expansion.deviations.shape[1])
        cut = cut if len(cut) > 1 and expansion.engine.independent(inputs, *cut) else [inputs]
        blocks = [expansion.differentiate(block)[1] for block in cut]
        jacobian = blocks[0] if len(blocks) == 1 else torch.cat(blocks)  # (N, D, S)
        K, dtype = expansion.chosen.n_samples, jacobian.dtype
        with torch.no_grad():
            sums = [chunk.to(dtype).sum(0) for chunk in expansion.engine.outputs(inputs, K)]  # (N, ...) each
            shift = jacobian.flatten(0, 1) @ expansion.offset.to(dtype)  # (N D,)
            mean = functools.reduce(torch.add, sums) / K - shift.reshape(sums[0].shape)
        deviations, *factors = (value.to(dtype) for value in (expansion.deviations, *expansion.factors))
        diagonal = None if expansion.diagonal is None else expansion.diagonal.to(dtype)
        return Linearised(mean, jacobian, deviations, tuple(factors), diagonal)

    def expansion(self, inputs: Any, T: int) -> Expansion:
        """Return what all inputs share, made on the first of them."""
        if T < 2 and self.posterior.gaussian is None:
            raise MCBNError(f"method='linear' needs a covariance, so at least 2 draws; got {T}: fit more of them")
        with self._lock:
            if T not in self._expansions:
                keep(self._expansions, T, Expansion(self.network, self.posterior, inputs, T), EXPANSIONS_KEPT)
            return self._expansions[T]


def representative(deviations: Tensor, count: int) -> list[int]:
    """Choose draws whose second moments stand for those of all: deviations (T, S) about the centre.

    Greedily, each draw making || 1/k sum d d^T - 1/T sum_t d_t d_t^T || least (Frobenius): with the kernel
    g_ij = (d_i^T d_j)^2 the k-th is the one of least (2 sum_chosen g_jc + g_jj) / k^2 - 2/k mean_t g_jt.
    """
    kernel = (deviations @ deviations.T).double().square()  # (T, T)
    alone, target = kernel.diagonal(), kernel.mean(1)
    chosen: list[int] = []
    for k in range(1, min(count, len(kernel)) + 1):
        loss = (2 * kernel[:, chosen].sum(1) + alone) / k**2 - 2 / k * target  # (T,)
        loss[chosen] = torch.inf
        chosen.append(int(loss.argmin()))
    return chosen


class Gather(Replay):
    """Replay the first draw and note scale and shift of all draws, (T, C) each, of every stochastic call."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__(*posterior.draw(0))
        self.posterior = posterior
        self.drawn: dict[str, tuple[Tensor, Tensor]] = {}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Note this call."""
        if call.layer in self.chosen and call.name in self.posterior.mean:
            mean, var = self.posterior.mean[call.name], self.posterior.var[call.name]
            self.drawn[call.name] = scale_and_shift(mean, var, call.weight, call.bias, call.eps)
        return super().answer(call)


def _blocks(inputs: Any, S: int) -> list[Any]:
    """Cut the inputs so that the activations kept for the backward pass stay bounded."""
    N, tensors = batches.size_of(inputs), batches.tensors_of(inputs)
    count = -(-N * (S + sum(t.numel() for t in tensors) // max(N, 1)) // BLOCK_VALUES)
    whole = count <= 1 or any(t.ndim == 0 or t.shape[0] != N for t in tensors)
    return [inputs] if whole else batches.cut(inputs, min(count, N))
