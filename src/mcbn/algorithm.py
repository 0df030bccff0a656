"""Algorithm 1 of Teye, Azizpour and Smith (2018) as it is printed: one loop to record, one to replay, two moments.

    for t = 1 to T:
        B_t ~ D                                a batch of training data
        omega_t = {mu_B, sigma^2_B}            record: its mean and variance in every layer
        y_t = f_omega_t(x)                     replay: the network with these statistics
    mean, variance = E[y], Var[y] + 1 / tau    moments

This is the whole method, without the engine that makes it fast; `mcbn.MCBN` is tested against it. Wrap a network that
takes more than one argument.
"""

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Draw = list[tuple[Tensor, Tensor] | None]  # mean and variance (C,) of every batch norm call; None: left as it is


class _BatchNorm(TorchFunctionMode):
    """Answer every batch norm call by the batch's own statistics, or by those of a draw; keep what was used."""

    def __init__(self, draw: Draw | None, calls: Collection[int] | None = None) -> None:
        self.draw, self.calls, self.used = draw, calls, Draw()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (F.batch_norm, torch.batch_norm):
            return function(*args, **kwargs or {})
        h, weight, bias, training, eps = (_functional if function is F.batch_norm else _native)(*args, **kwargs or {})
        number = len(self.used)
        is_batch = len(h) > 1 or not training  # one row with its own statistics: weights that are standardised
        chosen = is_batch and (self.calls is None or number in self.calls)
        self.used.append((_statistics(h) if chosen else None) if self.draw is None else self.draw[number])
        if self.used[-1] is None:
            return function(*args, **kwargs or {})
        return F.batch_norm(h, *self.used[-1], weight, bias, training=False, eps=eps)


def _functional(h, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):  # type: ignore[no-untyped-def]
    return h, weight, bias, training, eps


def _native(h, weight, bias, mean, var, training, momentum, eps, cudnn_enabled):  # type: ignore[no-untyped-def]
    return h, weight, bias, training, eps


def _statistics(h: Tensor) -> tuple[Tensor, Tensor]:
    """mu_B and sigma^2_B over all axes but the channels'; biased: what training-mode batch norm divides by."""
    var, mean = torch.var_mean(h.to(torch.promote_types(h.dtype, torch.float32)), [0, *range(2, h.ndim)], correction=0)
    return mean, var


def record(network: nn.Module, batch: Any, calls: Collection[int] | None = None) -> Draw:
    """Run a training batch (M, ...) normalised by its own statistics; return them. calls: which are stochastic."""
    with torch.no_grad(), (batch_norm := _BatchNorm(None, calls)):
        network(batch)
    return batch_norm.used


def replay(network: nn.Module, draw: Draw, x: Any) -> Tensor:
    """Run inputs (N, ...) with the statistics of a draw; return the outputs (N, ...)."""
    with _BatchNorm(draw):
        return network(x)  # type: ignore[no-any-return]


def sample(model: nn.Module, batches: Iterable[Any], x: Any, calls: Collection[int] | None = None) -> Tensor:
    """Return the outputs under the draw of every batch, (T, N, ...); a copy runs, yours stays as it is."""
    network = copy.deepcopy(model).eval().requires_grad_(False)
    return torch.stack([replay(network, record(network, batch, calls), x) for batch in batches])


def moments(samples: Tensor, tau: float = float("inf")) -> tuple[Tensor, Tensor]:
    """Return mean 1/T sum_t y_t and variance 1/T sum_t (y_t - mean)^2 + 1/tau of samples (T, N, ...), each (N, ...)."""
    return samples.mean(0), samples.var(0, correction=0) + 1 / tau
