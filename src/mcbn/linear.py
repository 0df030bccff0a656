"""Sampling-free moments: the covariance of the drawn statistics carried through the network's Jacobian.

Batch norm with statistics (mu_B, sigma_B) is h * scale + shift, so let omega hold scale and shift of every stochastic
channel, omega_0 their average over the draws and C their full covariance. With J the gradient of one example's output,

    f_omega(x) ~ f_omega_0(x) + J (omega - omega_0),    mean = f_omega_0(x),    covariance = J C J^T.

Exact where the output is linear in omega, as in a network whose batch norm is followed by linear layers only;
otherwise the first term of the expansion, good while draws differ little (large M). It takes one forward pass and one
backward pass for each output, whatever T. Class probabilities are averaged over the linearised logits of the draws,
which have exactly this covariance.

A Gaussian posterior (`mcbn.gaussian`) gives its own moments instead: omega then holds mean and standard deviation of
every channel, omega_0 their location and C the modelled covariance, exactly, whatever the number of draws.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.gaussian import Gaussian
from mcbn.network import Network
from mcbn.posterior import Posterior
from mcbn.statistics import BatchNormCall, BatchNormMode, Replay, scale_and_shift, statistics_dtype

MOST_OUTPUTS = 4096  # of one example: each costs a backward pass
BLOCK_VALUES = 2**20  # inputs and statistics of the examples that go through together
DRAWS_AT_ONCE = 2**24  # values of linearised outputs made in one piece


class Linearised(NamedTuple):
    """First-order expansion of every example's output in the statistics."""

    mean: Tensor  # (N, ...), the output at the average statistics
    jacobian: Tensor  # (N, D, S)
    deviations: Tensor  # (T, S), draws less their average
    factors: tuple[Tensor, ...]  # of blocks of successive statistics: C = blockdiag(factor^T factor, ...) + diagonal
    diagonal: Tensor | None  # (S,)

    @property
    def projected(self) -> Tensor:
        """J C^1/2, (N, D, S'): its squares sum to the variance."""
        blocks = torch.split(self.jacobian, [part.shape[1] for part in self.factors], 2) if self.factors else ()
        parts = [block @ factor.T for block, factor in zip(blocks, self.factors, strict=True)]
        if self.diagonal is not None:
            parts.append(self.jacobian * self.diagonal.sqrt())
        return torch.cat(parts, 2)

    def draws(self) -> Iterator[Tensor]:
        """Yield the linearised output of every draw, (t, N, ...) a chunk."""
        N, D, _ = self.jacobian.shape
        for rows in torch.split(self.deviations, max(1, DRAWS_AT_ONCE // max(1, N * D))):
            yield self.mean + torch.einsum("nds,ts->tnd", self.jacobian, rows).reshape(-1, *self.mean.shape)


class Expansion(NamedTuple):
    """The point that outputs are expanded about, and the covariance of the statistics there."""

    centres: Mapping[str, tuple[Tensor, Tensor]]  # call name -> scale and shift, or mean and std, each (C,)
    deviations: Tensor  # (T, S)
    factors: tuple[Tensor, ...]  # each (S', S_block)
    diagonal: Tensor | None = None  # (S,); given: centres are mean and std


class Linearizer:
    """Linearises one network in the statistics of one posterior; what does not depend on the inputs is kept."""

    def __init__(self, network: Network, posterior: Posterior) -> None:
        self.network, self.posterior = network, posterior
        self._expansions: dict[int, Expansion] = {}

    @torch.inference_mode(False)  # gradients are taken, wherever this is called
    def __call__(self, inputs: Any, n_samples: int) -> Linearised:
        """Expand the output of each input on its own in the statistics of the first draws."""
        model = self.posterior.gaussian
        if n_samples < 2 and model is None:
            raise MCBNError(
                f"method='linear' needs a covariance, so at least 2 draws; got {n_samples}: fit more of them"
            )
        if n_samples not in self._expansions:
            expand = self._expand(inputs, n_samples) if model is None else self._modelled(model, n_samples)
            self._expansions[n_samples] = expand
        expansion = self._expansions[n_samples]
        inputs = batches.map_tensors(lambda t: t.clone() if t.is_inference() else t.detach(), inputs)
        parts = [self._linearise(block, expansion) for block in _blocks(inputs, expansion.deviations.shape[1])]
        mean, jacobian = (torch.cat(part) for part in zip(*parts, strict=True))
        return Linearised(mean, jacobian, expansion.deviations, expansion.factors, expansion.diagonal)

    def _expand(self, inputs: Any, T: int) -> Expansion:
        """Average the scales and shifts of T draws, in the order the network makes its calls."""
        with torch.no_grad(), Gather(self.posterior) as mode:
            self.network(inputs)
        drawn = {name: tuple(part[:T] for part in pair) for name, pair in mode.drawn.items()}  # each (T, C)
        centres = {name: (scale.mean(0), shift.mean(0)) for name, (scale, shift) in drawn.items()}
        deviations = torch.cat([part - part.mean(0) for pair in drawn.values() for part in pair], 1)  # (T, S)
        return Expansion(centres, deviations, (torch.linalg.qr(deviations, mode="r").R / math.sqrt(T),))

    def _modelled(self, model: Gaussian, T: int) -> Expansion:
        """Take the moments of a Gaussian as they are; T deviations are drawn from it for class probabilities."""
        deviations = model.deviations(T, self.posterior.seed).to(model.location)  # (T, S)
        return Expansion(model.split(model.location), deviations, model.factors, model.diagonal)

    def _linearise(self, inputs: Any, expansion: Expansion) -> tuple[Tensor, Tensor]:
        """Return output (N, ...) and Jacobian (N, D, S) at the average statistics."""
        N = batches.size_of(inputs)
        with torch.enable_grad():
            with PerExample(expansion.centres, N, of_statistics=expansion.diagonal is not None) as mode:
                output = self.network(inputs)  # (N, ...)
            flat = output.reshape(N, -1)  # (N, D)
            if flat.shape[1] > MOST_OUTPUTS:
                raise MCBNError(
                    "method='linear' takes one backward pass an output and this network has "
                    f"{flat.shape[1]} for each input; use method='sample'"
                )
            leaves = [leaf for name in expansion.centres for leaf in mode.leaf_pair(name, flat.dtype)]
            jacobian = torch.stack([_gradient(column.sum(), leaves) for column in flat.unbind(1)], 1)
        return output.detach().to(jacobian.dtype), jacobian


def _gradient(total: Tensor, leaves: list[Tensor]) -> Tensor:
    """Return the gradient with respect to every example's own statistics, (N, S)."""
    return torch.cat(torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True), 1)


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


class PerExample(BatchNormMode):
    """Give every example statistics of its own, all at the centre, so that gradients come apart."""

    def __init__(
        self, centres: Mapping[str, tuple[Tensor, Tensor]], n_examples: int, *, of_statistics: bool = False
    ) -> None:
        super().__init__()
        self.centres, self.N, self.of_statistics = centres, n_examples, of_statistics
        self.leaves: dict[str, tuple[Tensor, Tensor]] = {}  # call name -> scale and shift, or mean and std, each (N, C)

    def leaf_pair(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the parameters of one call that gradients are taken for, (N, C) each."""
        if name not in self.leaves:
            first, second = (part.to(dtype).repeat(self.N, 1).requires_grad_() for part in self.centres[name])
            self.leaves[name] = first, second
        return self.leaves[name]

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise with per-example parameters that require grad."""
        if call.name not in self.centres:
            return call.unchanged()
        if call.x.shape[0] != self.N:
            raise MCBNError(
                f"layer {call.name!r} sees {call.x.shape[0]} rows for {self.N} inputs, so its statistics have no "
                "gradient per input; use method='sample'"
            )
        dtype = statistics_dtype(call.x)
        first, second = self.leaf_pair(call.name, dtype)
        if self.of_statistics:
            first, second = scale_and_shift(first, second.square(), call.weight, call.bias, call.eps)
        scale, shift = (part.to(dtype).reshape(*part.shape, *(1,) * (call.x.ndim - 2)) for part in (first, second))
        return torch.addcmul(shift, call.x.to(dtype), scale).to(call.x.dtype)


def _blocks(inputs: Any, S: int) -> Iterator[Any]:
    """Cut the inputs so that the activations kept for the backward pass stay bounded."""
    N, tensors = batches.size_of(inputs), batches.tensors_of(inputs)
    each = S + sum(t.numel() for t in tensors) // max(N, 1)
    count = -(-N * each // BLOCK_VALUES)
    if count <= 1 or any(t.ndim == 0 or t.shape[0] != N for t in tensors):
        yield inputs
    else:
        yield from batches.cut(inputs, min(count, N))
