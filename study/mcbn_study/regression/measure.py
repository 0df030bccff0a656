"""What stacked networks predict, T draws in bounded memory and the plain networks, and how predictions are scored.

Symbols as in `stack`; T draws, n query rows. Predictions are in standardised units unless said otherwise.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import relu_

from mcbn import metrics
from mcbn.engine import kernels
from mcbn.noise import minimize_bounded
from mcbn.stacked import Values
from mcbn_study.regression import fused
from mcbn_study.regression.problem import Problem, batch_draws, row_orders, uniforms
from mcbn_study.regression.stack import Affine, Networks, fold, matrices, population_statistics, take

CHUNK_NUMBERS = {"cpu": 2**19, "cuda": 2**26}  # that one activation of a chunk may hold
Scores = dict[str, float | None]  # by name; None where a score is not finite
Moments = tuple[Tensor, Tensor]  # mean and variance (with 1/T) of the T draws, each (S, n) float64
GRID = 60  # points of log tau looked at before the fine search


class Evaluator:
    """Predicts the query rows of a problem. Draws belong to the stream: every evaluation uses the same ones.

    The paper draws anew at every evaluation; fixed draws remove noise from the comparison of epochs and of lambda.
    `draw_anew` does as the paper does.
    """

    def __init__(self, problem: Problem, batch_size: int, n_samples: int) -> None:
        self.problem, self.batch_size, self.n_samples = problem, batch_size, n_samples
        self._mask_keys, self._first, x = problem.keys("dropout draws"), 0, problem.query.x
        self._fused = x.is_cuda and x.dtype == torch.float32 and kernels.available()  # draws of dropout in one kernel

    def draw_anew(self, evaluation: int) -> None:
        """Take the draws that belong to this evaluation alone, named by a number above 0."""
        self._first = evaluation * self.n_samples
        positions = self._first + torch.arange(self.n_samples, device=self.problem.device)
        orders = row_orders(self.problem.keys("batch draws"), self.problem.train.n, positions)  # (R, T, N)
        self._batches = orders[..., : self.batch_size]

    @torch.no_grad()
    def moments(self, values: Values, networks: Networks) -> Moments:
        """Return mean and variance over T draws."""
        if self._fused and networks.family == "dropout":
            return fused.dropped_moments(
                values, networks, self.problem, range(self._first, self._first + self.n_samples)
            )
        S, n = len(networks.stream), self.problem.query.y.shape[1]
        total = torch.zeros(2, S, n, dtype=torch.float64, device=self.problem.device)
        for some, _, output in self.chunks(values, networks):
            exact = output.double()  # (s, t, n)
            total[0, some] += exact.sum(1)
            total[1, some] += exact.square_().sum(1)
        mean, square = total / self.n_samples
        return mean, (square - mean.square()).clamp_(min=0)

    @torch.no_grad()
    def samples(self, values: Values, networks: Networks) -> Tensor:
        """Return all draws, (S, T, n)."""
        S, n = len(networks.stream), self.problem.query.y.shape[1]
        result = self.problem.query.y.new_empty(S, self.n_samples, n)
        for some, draws, output in self.chunks(values, networks):
            result[some, draws] = output
        return result

    def chunks(self, values: Values, networks: Networks) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the outputs (s, t, n) of some networks under some draws, in pieces of bounded size, until all are."""
        bn, S, T = networks.family == "bn", len(networks.stream), self.n_samples
        at_once = self._at_once(max(self.problem.query.y.shape[1], self.batch_size if bn else 1), networks)
        # Draws of dropout hash one number a unit for all networks of a stream: many networks, few draws at a time.
        t = min(T, at_once if bn else max(1, at_once // S))
        draw = self._bn_outputs if bn else self._dropout_outputs
        for place, some, their in self._pieces(values, networks, min(S, max(1, at_once // t))):
            for start in range(0, T, t):
                draws = slice(start, min(start + t, T))
                yield place, draws, draw(some, their, draws)

    @torch.no_grad()
    def plain(self, values: Values, networks: Networks) -> Tensor:
        """Return what plain networks say, (S, n): BN with statistics of the whole training part, every unit kept."""
        at_once = self._at_once(max(self.problem.train.y.shape[1], self.problem.query.y.shape[1]), networks)
        return torch.cat([self._plain(some, their) for _, some, their in self._pieces(values, networks, at_once)])

    def _at_once(self, rows: int, networks: Networks) -> int:
        return max(1, CHUNK_NUMBERS[self.problem.device.type] // (rows * networks.hidden))

    def _pieces(self, values: Values, networks: Networks, size: int) -> Iterator[tuple[slice, Values, Networks]]:
        S = len(networks.stream)
        for start in range(0, S, size):
            place = slice(start, min(start + size, S))
            index = torch.arange(place.start, place.stop, device=self.problem.device)
            yield place, take(values, index), networks[index]

    def _plain(self, values: Values, networks: Networks) -> Tensor:
        x = self.problem.query.x[networks.stream]  # (s, n, Q)
        if networks.family == "bn":
            layers = enumerate(population_statistics(values, networks, self.problem), 1)
            folded = [fold(mean[:, None], variance[:, None], values, i) for i, (mean, variance) in layers]
            return _bn_forward(values, x, *folded)[:, 0]
        first, second, last = matrices(values, x.shape[2])
        a = relu_(torch.baddbmm(values["bias1"][:, None], x, first))
        a = relu_(torch.baddbmm(values["bias2"][:, None], a, second))
        return torch.baddbmm(values["bias3"][:, None], a, last).squeeze(2)

    def _bn_outputs(self, values: Values, networks: Networks, draws: slice) -> Tensor:
        """Estimate the statistics of both layers jointly from each draw's batch, then predict with them."""
        train, stream = self.problem.train, networks.stream
        R, N, Q = train.x.shape
        at = self._batches[:, draws]  # (R, t, M)
        at = (at + torch.arange(0, R * N, N, device=at.device)[:, None, None])[stream]  # (s, t, M)
        weights = matrices(values, Q)
        z = torch.bmm(train.x.view(R * N, Q)[at.flatten(1)], weights[0]).view(*at.shape, -1)  # (s, t, M, H)
        variance, mean = torch.var_mean(z, 2, correction=0)  # (s, t, H)
        first = fold(mean, variance, values, 1)
        a = _normalized_relu(z, first)
        z = torch.bmm(a.view(len(stream), -1, networks.hidden), weights[1]).view_as(a)
        variance, mean = torch.var_mean(z, 2, correction=0)
        return _bn_forward(values, self.problem.query.x[stream], first, fold(mean, variance, values, 2))

    @cached_property
    def _batches(self) -> Tensor:
        """The T batches of every stream as row indices, (R, T, M)."""
        streams = zip(self.problem.streams, self.problem.train.n.tolist(), strict=True)
        drawn = [torch.from_numpy(batch_draws(stream, n, self.n_samples, self.batch_size)) for stream, n in streams]
        return torch.stack(drawn).to(self.problem.device)

    def _dropout_outputs(self, values: Values, networks: Networks, draws: slice) -> Tensor:
        """Drop inputs and hidden units of every query row anew in each draw."""
        x, H = self.problem.query.x[networks.stream], networks.hidden
        s, n, Q = x.shape
        streams, which = torch.unique(networks.stream, return_inverse=True)
        positions = self._first + torch.arange(draws.start, draws.stop, device=x.device)
        u = uniforms(self._mask_keys[streams], positions, n, Q + 2 * H).flatten(1, 2)  # (r, t n, Q + 2H)
        rate = networks.rate[:, None, None]
        kept0, kept1, kept2 = torch.split(u, [Q, H, H], 2)
        first, second, last = (weight * (1 / (1 - rate)) for weight in matrices(values, Q))
        a = x.repeat(1, len(positions), 1) * (kept0[which] >= rate)  # (s, t n, Q)
        a = relu_(torch.bmm(a, first) + values["bias1"][:, None]) * (kept1[which] >= rate)
        a = relu_(torch.bmm(a, second) + values["bias2"][:, None]) * (kept2[which] >= rate)
        return torch.baddbmm(values["bias3"][:, None], a, last).view(s, -1, n)


def _bn_forward(values: Values, x: Tensor, first: Affine, second: Affine) -> Tensor:
    """Predict x (s, n, Q) under t pairs of statistics, (s, t, H) each: (s, t, n)."""
    s, n, Q = x.shape
    t, H = first[0].shape[1:]
    weights = matrices(values, Q)
    z = torch.bmm(x, weights[0]).unsqueeze(1)  # (s, 1, n, H): the same for all draws
    a = _normalized_relu(z, first)  # (s, t, n, H)
    z = torch.bmm(a.view(s, t * n, H), weights[1]).view(s, t, n, H)
    a = _normalized_relu(z, second)
    return torch.bmm(a.view(s, t * n, H), weights[2]).view(s, t, n).add_(values["bias3"][:, None])


def _normalized_relu(z: Tensor, affine: Affine) -> Tensor:
    scale, shift = (each.unsqueeze(2) for each in affine)
    return relu_(torch.addcmul(shift, z, scale))


def rmse(prediction: Tensor, problem: Problem, stream: Tensor) -> Tensor:
    """Return each network's root mean squared error over its own query rows, in original units: (S,) float64."""
    mask = problem.query.mask[stream]  # (S, n)
    squares = (prediction.double() - problem.query.y[stream]).square() * mask
    return (squares.sum(1) / mask.sum(1)).sqrt() * problem.y_std[stream]


def original_units(moments: Moments, problem: Problem, stream: Tensor) -> Moments:
    """Undo the scaling of the target, (S, n); rows that are padding become NaN."""
    (mean, variance), std, padding = moments, problem.y_std[stream, None], ~problem.query.mask[stream]
    mean = mean * std + problem.y_mean[stream, None]
    return mean.masked_fill(padding, torch.nan), (variance * std.square()).masked_fill(padding, torch.nan)


def tune_tau(mean: Tensor, variance: Tensor, y: Tensor, bounds: tuple[float, float]) -> float:
    """Find the tau within bounds that minimises CRPS of N(mean, variance + 1/tau), averaged within, then over folds.

    mean, variance, y (F, n), NaN beyond a fold's own rows. Teye et al. 2018, Section 4.2; bounds: published code.
    The minimum of a grid of log tau, refined by golden sections between its neighbours.
    """
    score = validation_crps(mean, variance, y)
    grid = torch.linspace(math.log(bounds[0]), math.log(bounds[1]), GRID, dtype=torch.float64)
    best = int(torch.stack([score(point) for point in grid]).argmin())
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    return float(minimize_bounded(score, low, high, steps=30).exp())


def validation_crps(mean: Tensor, variance: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the CRPS that `tune_tau` minimises, as a function of log tau."""
    inside = ~y.isnan()
    weight = inside / (inside.sum(1, keepdim=True) * len(y))  # (F, n): mean over rows, then over folds
    mean, variance, y, weight = (rows[inside].double() for rows in (mean, variance, y, weight))
    return lambda log_tau: (weight * metrics.crps_gaussian(mean, variance + torch.exp(-log_tau), y)).sum()


def score_run(samples: Tensor, y: Tensor, tau: float, tau_constant: float) -> Scores:
    """Score T draws (T, n) of one network at y (n,), original units, as the paper does.

    crps of N(mean, variance + 1/tau); pll of the T-component mixture; *_constant of the same mean with variance
    1/tau_constant; *_optimum bounds; *_normalized in percent between them. Means over the points.
    """
    samples, y = samples.double(), y.double()
    mean, variance = samples.mean(0), samples.var(0, correction=0)
    return _scores(mean, variance + 1 / tau, metrics.pll(samples, y, tau), y, tau_constant)


def score_gaussian(mean: Tensor, variance: Tensor, y: Tensor, tau: float, tau_constant: float) -> Scores:
    """Score N(mean, variance), (n,), as `score_run` does infinitely many of its draws: that mixture is Gaussian."""
    mean, total, y = mean.double(), variance.double() + 1 / tau, y.double()
    log_density = -0.5 * ((y - mean).square() / total + torch.log(2 * math.pi * total))  # (n,)
    return _scores(mean, total, log_density, y, tau_constant)


def _scores(mean: Tensor, variance: Tensor, pll: Tensor, y: Tensor, tau_constant: float) -> Scores:
    """Average the scores of a prediction with this total variance and log density, each (n,)."""
    constant = torch.full_like(mean, 1 / tau_constant)
    scores = {"crps": metrics.crps_gaussian(mean, variance, y), "pll": pll}
    scores |= {"crps_constant": metrics.crps_gaussian(mean, constant, y)}
    scores |= {"pll_constant": metrics.pll(mean[None], y, tau_constant)}
    scores |= {"crps_optimum": metrics.crps_optimum(mean, y), "pll_optimum": metrics.pll_optimum(mean, y)}
    numbers = {"rmse": float(metrics.rmse(mean, y))} | {name: float(each.mean()) for name, each in scores.items()}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}  # JSON has no infinity
    return with_bounds(finite, finite)


def with_bounds(scores: Scores, bounds: Scores) -> Scores:
    """Normalise scores between the constant and the optimum of a prediction, their own or another's."""
    names = [f"{name}_{bound}" for bound in ("constant", "optimum") for name in ("crps", "pll")]
    bounded = {**scores, **{name: bounds[name] for name in names}}
    for name in ("crps", "pll"):
        ends = [end for key in (f"{name}_constant", f"{name}_optimum") if (end := bounded[key]) is not None]
        score, possible = bounded[name], len(set(ends)) == 2  # bounds that coincide leave nothing between
        normalized = float(metrics.normalized(score, *ends)) if score is not None and possible else None
        bounded[f"{name}_normalized"] = normalized
    return bounded
