"""Population moments of what each batch norm layer sees, streamed over data."""

from typing import Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.network import Network
from mcbn.posterior import Posterior
from mcbn.recording import Recorded
from mcbn.statistics import BatchNormCall, Replay
from mcbn.theory import StatisticMoments


class Population:
    """Streams moments of what each layer sees, the network normalised by the average of the draws."""

    def __init__(self, posterior: Posterior) -> None:
        self.posterior = posterior
        self.centre = {name: value.double().mean(0) for name, value in posterior.mean.items()}
        # law of total variance: within batches and between their means
        self.var = {
            name: posterior.var[name].double().mean(0) + value.double().var(0, correction=0)
            for name, value in posterior.mean.items()
        }
        self.count: dict[str, int] = {}  # rows seen
        self.sums: dict[str, Tensor] = {}  # (6, C), see `Watch`
        self.rows_each: dict[str, float] = {}  # rows of the layer for each example
        self.running: dict[str, tuple[Tensor, Tensor]] = {}
        self.values: dict[str, int] = {}

    def add(self, network: Network, x: Any) -> None:
        """Run one batch."""
        dtypes = {name: value.dtype for name, value in self.posterior.mean.items()}
        means = {name: value.to(dtypes[name]) for name, value in self.centre.items()}
        variances = {name: value.to(dtypes[name]) for name, value in self.var.items()}
        with Watch(means, variances, self, batches.size_of(x)):
            network(x)

    def moments(self, name: str) -> StatisticMoments:
        """Model the statistics of one layer's batches."""
        M = self.posterior.batch_size * self.rows_each[name]
        return moments_of_sums(self.sums[name][:5] / self.count[name], self.centre[name], M)

    def zeros(self, name: str) -> Tensor:
        """Return the share of values of each unit that are exactly 0, (C,)."""
        return self.sums[name][5] / self.count[name]

    def recorded(self) -> Recorded:
        """Put the draws beside the running statistics, for `mcbn.drift`."""
        return Recorded(self.posterior, self.running, self.values)


class Watch(Replay):
    """Replay the average statistics and add up what each layer sees."""

    def __init__(self, mean: dict[str, Tensor], var: dict[str, Tensor], population: Population, n: int) -> None:
        super().__init__(mean, var)
        self.population, self.n = population, n

    def answer(self, call: BatchNormCall) -> Tensor:
        """Add up this call's input."""
        if call.layer in self.chosen and call.name in self.mean:
            self._add(call)
        return super().answer(call)

    def _add(self, call: BatchNormCall) -> None:
        people, name = self.population, call.name
        rows, channels = call.x.shape[:2]
        x = call.x.double().reshape(rows, channels, -1)  # (rows, C, values)
        centred = x - people.centre[name][:, None]
        s1, s2 = centred.mean(2), centred.square().mean(2)  # (rows, C) each
        zeros = (x == 0).double().mean(2)  # (rows, C)
        new = torch.stack([s1, s2, s1.square(), s2.square(), s1 * s2, zeros]).sum(1)  # (6, C)
        people.sums[name] = people.sums[name] + new if name in people.sums else new
        people.count[name] = people.count.get(name, 0) + rows
        people.rows_each[name] = rows / self.n
        people.values[name] = round(x.shape[2] * people.rows_each[name] * people.posterior.batch_size)
        if call.running_mean is not None and call.running_var is not None:
            people.running[name] = (call.running_mean, call.running_var)


def moments_of_sums(average: Tensor, centre: Tensor, batch_size: float) -> StatisticMoments:
    """Model statistics of batches of M: `mcbn.theory.activation_moments` from averages over examples.

    average (5, C): of s1, s2, s1^2, s2^2 and s1 s2, where s1 and s2 are the means of an example's h - c and (h - c)^2.
    With d = mu - c: sigma^2 = E[s2] - d^2, and b = s2 - 2 d s1 + d^2 is the mean of the example's (h - mu)^2.
    """
    d, square, d2, square2, cross = average
    variance = (square - d.square()).clamp(min=0)
    of_mean = (d2 - d.square()).clamp(min=0)
    of_square = square2 - square.square() - 4 * d * (cross - d * square) + 4 * d.square() * of_mean  # Var(b)
    spread = of_square.clamp(min=0) / (4 * variance * batch_size)
    spread = spread.where(variance > 0, torch.zeros_like(spread))
    return StatisticMoments(centre + d, (of_mean / batch_size).sqrt(), variance.sqrt(), spread.sqrt())
