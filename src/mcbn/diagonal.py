"""Population moments of every batch-norm input in one pass over the data: the paper's factorised q(omega).

A batch of M independent examples has statistics whose Gaussian moments follow from those of the population
(`statistic_moments`; Teye et al. 2018, appendix 1.3). `observe` makes a posterior of them; `Averaged` takes them for
`mcbn.check`, every layer normalised by the average of the draws.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, Record, Replay, statistics_dtype
from mcbn.batching import TrainingBatches
from mcbn.engine.record import Recorded
from mcbn.errors import MCBNError
from mcbn.gaussian import Gaussian
from mcbn.layers import Layers, stochastic_layers
from mcbn.network import Network
from mcbn.posterior import Posterior

CHECKED_BATCHES = 100  # whose statistics the drift check sees


class StatisticMoments(NamedTuple):
    """Gaussian moments of a batch mean and a batch standard deviation, each (C,)."""

    mean: Tensor  # of the batch mean: mu
    mean_std: Tensor  # sigma / sqrt(M)
    std: Tensor  # of the batch standard deviation: sigma
    std_std: Tensor  # sqrt((E[(h - mu)^4] - sigma^4) / (4 sigma^2 M))


def statistic_moments(
    mean: Tensor, variance: Tensor, of_mean: Tensor, of_square: Tensor, batch_size: float
) -> StatisticMoments:
    """Model the statistics of a batch of M independent examples, given mu, sigma^2, Var(a) and Var(b), (C,) each.

    With a_i the mean of example i's values and b_i the mean of its (h - mu)^2,
    mu_B ~ N(mu, Var(a) / M), sigma_B ~ N(sigma, Var(b) / (4 sigma^2 M)).
    A unit that never varies (sigma = 0) has no spread; what is 0 passes no gradient.
    """
    varies = variance != 0
    spread = of_square / (4 * variance.where(varies, torch.ones_like(variance)) * batch_size)
    spread = spread.where(varies, torch.zeros_like(spread))
    return StatisticMoments(mean, _sqrt(of_mean / batch_size), _sqrt(variance), _sqrt(spread))


def _sqrt(square: Tensor) -> Tensor:
    """Square root with gradient 0 at 0."""
    zero = square.detach() == 0
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


class Population:
    """Sums over examples of one call's inputs, in double precision, merged batch by batch.

    Example i has averages p_i of h - c and q_i of (h - c)^2 over its positions; a pivot c near the mean saves digits.
    """

    def __init__(self, pivot: Tensor) -> None:
        self.pivot = pivot  # c, (C,)
        self.count = 0
        self.sums = torch.zeros(5, len(pivot), dtype=torch.float64)  # of p, q, p^2, p q, q^2

    def add(self, h: Tensor) -> None:
        """Take in the values (G, K, C, ...) of G examples with K rows each."""
        axes = [axis for axis in range(1, h.ndim) if axis != 2]
        shifted = h - self.pivot.to(h).reshape(-1, *(1,) * (h.ndim - 3))
        p = shifted.mean(axes).cpu().double()  # (G, C)
        q = shifted.square().mean(axes).cpu().double()  # (G, C)
        self.count += len(h)
        self.sums += torch.stack([product.sum(0) for product in (p, q, p * p, p * q, q * q)])

    def moments(self, batch_size: float) -> StatisticMoments:
        """Model the statistics of batches of M examples: `statistic_moments` of all that was added.

        With d = mu - c: sigma^2 = E[q] - d^2, and b_i = q_i - 2 d p_i + d^2 is the mean of the example's (h - mu)^2.
        """
        d, q, pp, pq, qq = self.sums / self.count  # each (C,)
        variance = (q - d.square()).clamp(min=0)
        of_mean = (pp - d.square()).clamp(min=0)  # Var(p)
        of_square = qq - q.square() - 4 * d * (pq - d * q) + 4 * d.square() * of_mean  # Var(b)
        return statistic_moments(self.pivot.cpu().double() + d, variance, of_mean, of_square.clamp(min=0), batch_size)


def observe(
    network: Network, drawn: TrainingBatches, layers: Layers, inputs: batches.Picker
) -> tuple[Gaussian, Recorded]:
    """Run every example once, normalised by its batch: the factorised Gaussian, and batches for the drift check."""
    keys, chosen = network.accepted_keys, frozenset[str]()
    populations: dict[str, Population] = {}
    kept: list[Observe] = []
    first: Any = None
    with torch.no_grad():
        for number, batch in enumerate(drawn.batches):
            x = network.prepare(batches.pick_inputs(batch, inputs, keys))
            first = x if first is None else first
            chosen = chosen or stochastic_layers(network, x, layers)
            mode = Observe(chosen, populations, batches.size_of(x))
            with network.undisturbed(drawn.seed + number), mode:
                network.run_copy(x)
            if strange := mode.mean.keys() ^ populations.keys():
                what = f"layer {min(strange)!r} was not called for every training batch"
                raise MCBNError(f"{what}: some take another path; choose the steady layers with layers=")
            if len(kept) < CHECKED_BATCHES:
                kept.append(mode)
    mean, var = ({n: torch.stack([getattr(m, kind)[n] for m in kept]) for n in populations} for kind in ("mean", "var"))
    recorded = Recorded(Posterior(mean, var, drawn.batch_size), kept[0].running, kept[0].values, first)
    return _factorised(populations, next(iter(mean.values())), drawn.batch_size), recorded


class Observe(Record):
    """Normalise by the batch as in training, and add what every chosen call sees to its population."""

    def __init__(self, layers: frozenset[str], populations: dict[str, Population], n_examples: int) -> None:
        super().__init__(layers)
        self.populations, self.n_examples = populations, n_examples

    def answer(self, call: BatchNormCall) -> Tensor:
        """Note the inputs of this call."""
        output = super().answer(call)
        if call.layer in self.chosen:
            rows, G = call.x.shape[0], self.n_examples
            if rows % G:
                how = "so its moments cannot be counted by example; use posterior='gaussian'"
                raise MCBNError(f"layer {call.name!r} sees {rows} rows for {G} examples, {how}")
            population = self.populations.setdefault(call.name, Population(self.mean[call.name]))
            values = call.x.to(statistics_dtype(call.x))
            population.add(values.reshape(G, rows // G, *values.shape[1:]))
        return output


def _factorised(populations: Mapping[str, Population], like: Tensor, batch_size: int) -> Gaussian:
    """Join the moments of mu_B and sigma_B of all calls, in the dtype of a tensor (Teye et al. 2018, appendix 1.3).

    Differs: M counts examples, since the positions of an image are correlated; with one value each it is the paper's.
    """
    moments = {name: population.moments(batch_size) for name, population in populations.items()}
    for name, modelled in moments.items():
        if not all(bool(torch.isfinite(value).all()) for value in modelled):
            raise MCBNError(f"layer {name!r} has non-finite statistics; the network overflows on its training data")
    location = torch.cat([value for m in moments.values() for value in (m.mean, m.std)]).to(like)  # (P,)
    variance = torch.cat([value.square() for m in moments.values() for value in (m.mean_std, m.std_std)]).to(like)
    return Gaussian("diagonal", {name: len(m.mean) for name, m in moments.items()}, location, (), variance)


class Averaged(Replay):
    """Populations of all calls, the network normalised by the average of the draws: a replay of that average."""

    def __init__(self, posterior: Posterior) -> None:
        mean = {name: value.mean(0) for name, value in posterior.mean.items()}
        # law of total variance: within batches and between their means
        var = {name: posterior.var[name].mean(0) + value.var(0, correction=0) for name, value in posterior.mean.items()}
        super().__init__(mean, var)
        self.posterior, self.n_examples = posterior, 0
        self.populations = {name: Population(pivot) for name, pivot in mean.items()}
        self.rows_each: dict[str, float] = {}  # rows of the layer for each example
        self.running: dict[str, tuple[Tensor, Tensor]] = {}
        self.values: dict[str, int] = {}

    def add(self, network: Network, x: Any) -> None:
        """Run one batch."""
        self.n_examples = batches.size_of(x)
        with self:
            network.run_copy(x)

    def answer(self, call: BatchNormCall) -> Tensor:
        """Add what a layer sees, row by row, to its population."""
        if call.layer in self.chosen and call.name in self.mean:
            self.populations[call.name].add(call.x.to(statistics_dtype(call.x)).unsqueeze(1))
            self.rows_each[call.name] = call.x.shape[0] / self.n_examples
            values = call.x[0, 0].numel() * self.rows_each[call.name]  # of a channel, for each example
            self.values[call.name] = round(values * self.posterior.batch_size)
            if call.running_mean is not None and call.running_var is not None:
                self.running[call.name] = (call.running_mean, call.running_var)
        return super().answer(call)

    def moments(self, name: str) -> StatisticMoments:
        """Model the statistics of one layer's batches."""
        return self.populations[name].moments(self.posterior.batch_size * self.rows_each[name])
