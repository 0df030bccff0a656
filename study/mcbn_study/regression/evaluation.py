"""What stacked networks predict: T draws in bounded memory, their moments, and the plain networks.

Symbols as in `stack`; T draws, n query rows. Results are in standardised units unless said otherwise.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu_

from mcbn.networks import BN_EPSILON
from mcbn_study.machine import precision
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.stack import Values, matrices
from mcbn_study.regression.streams import batch_draws, purpose_key, uniforms
from mcbn_study.regression.train import Networks

CHUNK_NUMBERS = {"cpu": 2**19, "cuda": 2**26}  # that one activation of a chunk may hold


class Moments(NamedTuple):
    """Mean and variance (with 1/T) of the T draws, each (S, n) float64."""

    mean: Tensor
    variance: Tensor


class Affine(NamedTuple):
    """What batch statistics make of a BN layer: z -> scale z + shift, each (S, T, H)."""

    scale: Tensor
    shift: Tensor


@dataclass(frozen=True)
class Chunk:
    """Outputs (s, t, n) of some networks under some draws."""

    networks: slice
    draws: slice
    output: Tensor


class Evaluator:
    """Predicts the query rows of a problem. Draws belong to the stream: every evaluation uses the same ones.

    The paper draws anew at every evaluation; fixed draws remove noise from the comparison of epochs and of lambda.
    """

    def __init__(
        self, problem: Problem, batch_size: int, n_samples: int, *, tf32: bool = False, compiled: bool = False
    ) -> None:
        self.problem, self.batch_size, self.n_samples, self.tf32 = problem, batch_size, n_samples, tf32
        self._fused = _fused(compiled)
        self._kernels = _kernels(problem.device)
        self._draws: Tensor | None = None
        self._mask_keys = torch.tensor(
            [purpose_key(stream, "dropout draws") for stream in problem.streams], device=problem.device
        )

    @torch.no_grad()
    def moments(self, values: Values, networks: Networks) -> Moments:
        """Return mean and variance over T draws."""
        if self._kernels is not None:
            with precision(self.tf32):
                return Moments(*self._kernel_moments(self._kernels, values, networks))
        S, n = len(networks.stream), self.problem.query.y.shape[1]
        total = torch.zeros(2, S, n, dtype=torch.float64, device=self.problem.device)
        for chunk in self.chunks(values, networks):
            output = chunk.output.double()  # (s, t, n)
            total[0, chunk.networks] += output.sum(1)
            total[1, chunk.networks] += output.square_().sum(1)
        mean, square = total / self.n_samples
        return Moments(mean, (square - mean.square()).clamp_(min=0))

    def _kernel_moments(self, kernels: Any, values: Values, networks: Networks) -> tuple[Tensor, Tensor]:
        """Let one kernel a part go through all draws, the activations of none ever in memory."""
        x, stream = self.problem.query.x, networks.stream
        w = matrices(values["weights"], x.shape[2], networks.hidden)
        if networks.family == "bn":
            layers = kernels.batch_statistics(self.problem.train.x, self._batches(), stream, w, values, BN_EPSILON)
            return kernels.bn_moments(x, stream, w, values["bias3"], *layers)  # type: ignore[no-any-return]
        biases = values["bias1"], values["bias2"], values["bias3"]
        return kernels.dropout_moments(x, stream, self._mask_keys, w, biases, networks.rate, self.n_samples)  # type: ignore[no-any-return]

    @torch.no_grad()
    def samples(self, values: Values, networks: Networks) -> Tensor:
        """Return all draws, (S, T, n)."""
        S, n = len(networks.stream), self.problem.query.y.shape[1]
        result = self.problem.query.y.new_empty(S, self.n_samples, n)
        for chunk in self.chunks(values, networks):
            result[chunk.networks, chunk.draws] = chunk.output
        return result

    def chunks(self, values: Values, networks: Networks) -> Iterator[Chunk]:
        """Yield the outputs of all networks and draws in pieces of bounded size."""
        draw = self._bn_outputs if networks.family == "bn" else self._dropout_outputs
        rows = max(self.problem.query.y.shape[1], self.batch_size if networks.family == "bn" else 1)
        S, T = len(networks.stream), self.n_samples
        at_once = max(1, CHUNK_NUMBERS[self.problem.device.type] // (rows * networks.hidden))
        # Draws of dropout hash one number a unit for all networks of a stream: many networks, few draws at a time.
        t = min(T, at_once if networks.family == "bn" else max(1, at_once // S))
        s = min(S, max(1, at_once // t))
        with precision(self.tf32):
            for i in range(0, S, s):
                some = torch.arange(i, min(i + s, S), device=self.problem.device)
                part = {name: value[some] for name, value in values.items()}
                for j in range(0, T, t):
                    draws = slice(j, min(j + t, T))
                    yield Chunk(slice(i, min(i + s, S)), draws, draw(part, networks[some], draws))

    @torch.no_grad()
    def plain(self, values: Values, networks: Networks) -> Tensor:
        """Return what the deterministic networks say, (S, n).

        BN: statistics of one pass over the whole training part. Dropout: every unit kept.
        """
        rows = max(self.problem.train.y.shape[1], self.problem.query.y.shape[1])
        s = max(1, CHUNK_NUMBERS[self.problem.device.type] // (rows * networks.hidden))
        outputs = []
        with precision(self.tf32):
            for i in range(0, len(networks.stream), s):
                some = torch.arange(i, min(i + s, len(networks.stream)), device=self.problem.device)
                part = {name: value[some] for name, value in values.items()}
                outputs.append(self._plain(part, networks[some]))
        return torch.cat(outputs)

    def _plain(self, values: Values, networks: Networks) -> Tensor:
        x = self.problem.query.x[networks.stream]  # (s, n, Q)
        if networks.family == "bn":
            layers = population(values, networks, self.problem)
            return self._bn_forward(
                values, x, *(Affine(layer.scale[:, None], layer.shift[:, None]) for layer in layers)
            )[:, 0]
        w = matrices(values["weights"], x.shape[2], networks.hidden)
        a = relu_(torch.baddbmm(values["bias1"][:, None], x, w.first))
        a = relu_(torch.baddbmm(values["bias2"][:, None], a, w.second))
        return torch.baddbmm(values["bias3"][:, None], a, w.last).squeeze(2)

    def _bn_outputs(self, values: Values, networks: Networks, draws: slice) -> Tensor:
        """Estimate the statistics of both layers jointly from each draw's batch, then predict with them."""
        first, second = self._batch_statistics(values, networks, draws)
        return self._bn_forward(values, self.problem.query.x[networks.stream], first, second)

    def _batch_statistics(self, values: Values, networks: Networks, draws: slice) -> tuple[Affine, Affine]:
        train, stream = self.problem.train, networks.stream
        R, N, Q = train.x.shape
        s, H, M = len(stream), networks.hidden, self.batch_size
        at = self._batches()[:, draws]  # (R, t, M)
        at = (at + torch.arange(0, R * N, N, device=at.device)[:, None, None])[stream]  # (s, t, M)
        w = matrices(values["weights"], Q, H)
        z = torch.bmm(train.x.view(R * N, Q)[at.flatten(1)], w.first).view(s, -1, M, H)
        first = _affine(z, values["gamma1"], values["beta1"])
        a = self._fused.hidden(z, first.scale.unsqueeze(2), first.shift.unsqueeze(2))  # (s, t, M, H)
        second = _affine(torch.bmm(a.view(s, -1, H), w.second).view_as(a), values["gamma2"], values["beta2"])
        return first, second

    def _batches(self) -> Tensor:
        """Return the T batches of every stream as row indices, (R, T, M), drawn once."""
        if self._draws is None:
            n_rows = self.problem.train.n.tolist()
            drawn = [
                torch.from_numpy(batch_draws(stream, n, self.n_samples, self.batch_size))
                for stream, n in zip(self.problem.streams, n_rows, strict=True)
            ]
            self._draws = torch.stack(drawn).to(self.problem.device)
        return self._draws

    def _dropout_outputs(self, values: Values, networks: Networks, draws: slice) -> Tensor:
        """Drop inputs and hidden units of every query row anew in each draw."""
        x, H = self.problem.query.x[networks.stream], networks.hidden
        s, n, Q = x.shape
        w = matrices(values["weights"], Q, H)
        streams, which = torch.unique(networks.stream, return_inverse=True)
        positions = torch.arange(draws.start, draws.stop, device=x.device)
        u = uniforms(self._mask_keys[streams], positions, n, Q + 2 * H).flatten(1, 2)  # (r, t n, Q + 2H)
        rate = networks.rate[:, None, None]
        kept0, kept1, kept2 = torch.split(u, [Q, H, H], 2)
        scale = 1 / (1 - rate)
        a = x.repeat(1, len(positions), 1) * (kept0[which] >= rate)  # (s, t n, Q)
        a = self._fused.dropped(torch.bmm(a, w.first * scale), values["bias1"], kept1, which, rate)
        a = self._fused.dropped(torch.bmm(a, w.second * scale), values["bias2"], kept2, which, rate)
        return torch.baddbmm(values["bias3"][:, None], a, w.last * scale).view(s, -1, n)

    def _bn_forward(self, values: Values, x: Tensor, first: Affine, second: Affine) -> Tensor:
        """Predict x (s, n, Q) under t pairs of statistics, (s, t, H) each: (s, t, n)."""
        s, n, Q = x.shape
        t, H = first.scale.shape[1:]
        w = matrices(values["weights"], Q, H)
        z = torch.bmm(x, w.first).unsqueeze(1)  # (s, 1, n, H): the same for all draws
        a = self._fused.hidden(z, first.scale.unsqueeze(2), first.shift.unsqueeze(2))  # (s, t, n, H)
        z = torch.bmm(a.view(s, t * n, H), w.second).view(s, t, n, H)
        output: Tensor = self._fused.head(z, second.scale.unsqueeze(2), second.shift.unsqueeze(2), w.last)
        return output.add_(values["bias3"][:, None])


def _kernels(device: torch.device) -> Any:
    """Return the Triton kernels where they run: on a GPU, in an environment that has Triton."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from mcbn_study.regression import kernels

    return kernels


class _Fused(NamedTuple):
    """The elementwise parts of a prediction, each one kernel where compiled."""

    hidden: Callable[..., Tensor]
    head: Callable[..., Tensor]
    dropped: Callable[..., Tensor]


@cache
def _fused(compiled: bool) -> _Fused:
    parts = (_hidden, _head, _dropped)
    return _Fused(*(torch.compile(part, dynamic=True) if compiled else part for part in parts))


def _hidden(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise and rectify."""
    return relu_(torch.addcmul(shift, z, scale))


def _head(z: Tensor, scale: Tensor, shift: Tensor, last: Tensor) -> Tensor:
    """Normalise and rectify z (s, t, n, H), then multiply by the last weights (s, H, 1): (s, t, n)."""
    s, t, n, H = z.shape
    a = relu_(torch.addcmul(shift, z, scale))
    if torch.compiler.is_compiling():
        return (a * last.view(s, 1, 1, H)).sum(3)  # joins the kernel, where a matrix product would not
    return torch.bmm(a.view(s, t * n, H), last).view(s, t, n)


def _dropped(z: Tensor, bias: Tensor, uniform: Tensor, which: Tensor, rate: Tensor) -> Tensor:
    """Rectify z (s, m, H) and drop units by the numbers of each network's stream, uniform[which]."""
    return relu_(z + bias[:, None]) * (uniform[which] >= rate)


def population(values: Values, networks: Networks, problem: Problem) -> tuple[Affine, Affine]:
    """Return the layers under the statistics of one pass over the whole training part, each (S, H)."""
    return tuple(_fold(*s, values, i) for i, s in enumerate(population_statistics(values, networks, problem), 1))  # type: ignore[return-value]


def population_statistics(
    values: Values, networks: Networks, problem: Problem
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return mean and biased variance of both BN layers over the whole training part, each (S, H)."""
    x, mask = problem.train.x[networks.stream], problem.train.mask[networks.stream, :, None]  # (S, N, Q), (S, N, 1)
    w = matrices(values["weights"], x.shape[2], networks.hidden)
    z = torch.bmm(x, w.first)
    first = _masked_moments(z, mask)
    layer = _fold(*first, values, 1)
    a = _hidden(z, layer.scale[:, None], layer.shift[:, None])
    return first, _masked_moments(torch.bmm(a, w.second), mask)


def _masked_moments(z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of z (S, N, H) over the rows of the mask (S, N, 1)."""
    n = mask.sum(1)  # (S, 1)
    mean = (z * mask).sum(1) / n
    return mean, ((z - mean[:, None]) * mask).square_().sum(1) / n


def _fold(mean: Tensor, variance: Tensor, values: Values, layer: int) -> Affine:
    scale = values[f"gamma{layer}"] * torch.rsqrt(variance + BN_EPSILON)
    return Affine(scale, values[f"beta{layer}"] - mean * scale)


def _affine(z: Tensor, gamma: Tensor, beta: Tensor) -> Affine:
    """Return scale and shift of one BN layer from the batches z (s, t, M, H); biased variance."""
    variance, mean = torch.var_mean(z, 2, correction=0)  # (s, t, H)
    scale = gamma[:, None] * torch.rsqrt(variance + BN_EPSILON)
    return Affine(scale, torch.addcmul(beta[:, None], mean, scale, value=-1))


def rmse(prediction: Tensor, problem: Problem, stream: Tensor) -> Tensor:
    """Return each network's root mean squared error over its own query rows, in original units: (S,) float64."""
    mask = problem.query.mask[stream]  # (S, n)
    squares = (prediction.double() - problem.query.y[stream]).square() * mask
    return (squares.sum(1) / mask.sum(1)).sqrt() * problem.y_std[stream]
