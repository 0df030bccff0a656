"""Population moments of every batch-norm input in one pass over the data: the paper's factorised q(omega)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches, draws, statistics
from mcbn.errors import MCBNError
from mcbn.gaussian import Gaussian
from mcbn.network import Network
from mcbn.posterior import Posterior
from mcbn.recording import Recorded, stochastic_layers
from mcbn.theory import analytic_moments

CHECKED_BATCHES = 100  # whose statistics the drift check sees


class Population:
    """Sums over examples of one call's inputs, merged batch by batch.

    Example i has the averages p_i of h - c and q_i of (h - c)^2 over its positions, c the mean of the first batch: near
    the population's, so that no digits cancel. In double precision.
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
        self.sums += torch.stack([part.sum(0) for part in (p, q, p * p, p * q, q * q)])

    def gaussian(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return location and variance of mu_B and sigma_B for batches of M, each (2C,) (Teye et al. 2018, app. 1.3).

        With mu the mean, a_i example i's mean of h and b_i its mean of (h - mu)^2: sigma^2 = E[b],
        Var(mu_B) = Var(a) / M and Var(sigma_B) = (E[b^2] - sigma^4) / (4 sigma^2 M).
        Differs: M counts examples. With one value an example b^2 is (h - mu)^4 and this is the paper's formula; of an
        image's positions, which are correlated, only the averages a and b are taken as independent.
        """
        p, q, pp, pq, qq = self.sums / self.count  # each (C,); p is mu - c
        variance = (q - p.square()).clamp(min=0)
        fourth = qq - 4 * p * pq + 4 * p.square() * pp + 2 * p.square() * q - 3 * p.pow(4)  # E[(q_i - 2 p p_i + p^2)^2]
        of_means = (pp - p.square()).clamp(min=0)  # Var(a)
        modelled = analytic_moments(self.pivot.cpu().double() + p, variance, fourth, batch_size)
        location = torch.cat([modelled.mean, modelled.std])
        return location, torch.cat([of_means / batch_size, modelled.std_std.square()])


class Observe(statistics.Record):
    """Normalise by the batch as in training, and add what every chosen call sees to its population."""

    def __init__(self, layers: frozenset[str], populations: dict[str, Population], n_examples: int) -> None:
        super().__init__(layers)
        self.populations, self.n_examples = populations, n_examples

    def answer(self, call: statistics.BatchNormCall) -> Tensor:
        """Note the inputs of this call."""
        output = super().answer(call)
        if call.layer in self.chosen:
            rows, G = call.x.shape[0], self.n_examples
            if rows % G:
                raise MCBNError(
                    f"layer {call.name!r} sees {rows} rows for {G} examples, so its moments cannot be counted by "
                    "example; use posterior='gaussian'"
                )
            population = self.populations.setdefault(call.name, Population(self.mean[call.name]))
            values = call.x.to(statistics.statistics_dtype(call.x))
            population.add(values.reshape(G, rows // G, *values.shape[1:]))
        return output


class Observed(NamedTuple):
    """What one pass gives: the factorised Gaussian, and for the drift check the statistics of some batches."""

    gaussian: Gaussian
    recorded: Recorded


def observe(network: Network, drawn: draws.Draws, layers: statistics.Layers, inputs: batches.Picker) -> Observed:
    """Run every example once through the network, each layer seeing inputs normalised by their batch."""
    keys, chosen = network.accepted_keys(), frozenset[str]()
    populations: dict[str, Population] = {}
    modes: list[Observe] = []
    with torch.no_grad():
        for batch in drawn.batches:
            x = network.prepare(batches.pick_inputs(batch, inputs, keys))
            chosen = chosen or stochastic_layers(network, x, layers)
            mode = _run(network, x, chosen, populations)
            if len(modes) < CHECKED_BATCHES:
                modes.append(mode)
    if not modes:
        raise MCBNError("the training data gives no batch at all")
    posterior = Posterior(_stack(modes, "mean"), _stack(modes, "var"), drawn.batch_size)
    recorded = Recorded(posterior, modes[0].running, modes[0].values)
    return Observed(_factorised(populations, posterior, drawn.batch_size), recorded)


def _run(network: Network, x: Any, chosen: frozenset[str], populations: dict[str, Population]) -> Observe:
    with Observe(chosen, populations, batches.size_of(x)) as mode:
        network(x)
    if set(mode.mean) != set(populations):
        name = sorted(set(mode.mean) ^ set(populations))[0]
        raise MCBNError(
            f"layer {name!r} was not called for every training batch; the network takes another path from batch to "
            "batch: choose the steady layers with layers="
        )
    return mode


def _stack(modes: list[Observe], part: str) -> dict[str, Tensor]:
    """Stack the statistics of the kept batches, (T, C) each."""
    return {name: torch.stack([getattr(mode, part)[name] for mode in modes]) for name in modes[0].mean}


def _factorised(populations: Mapping[str, Population], like: Posterior, batch_size: int) -> Gaussian:
    """Join the moments of all calls."""
    moments = {name: population.gaussian(batch_size) for name, population in populations.items()}
    for name, pair in moments.items():
        if not all(bool(torch.isfinite(part).all()) for part in pair):
            raise MCBNError(f"layer {name!r} has non-finite statistics; the network overflows on its training data")
    location, variance = (torch.cat(part) for part in zip(*moments.values(), strict=True))  # (P,) each
    sample = next(iter(like.mean.values()))
    channels = {name: len(population.pivot) for name, population in populations.items()}
    return Gaussian("diagonal", channels, location.to(sample), (), variance.to(sample))
