"""Population moments of every batch-norm input in one pass over the data: the paper's factorised q(omega)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, Record, statistics_dtype
from mcbn.batching import TrainingBatches
from mcbn.engine.record import Recorded
from mcbn.errors import MCBNError
from mcbn.gaussian import Gaussian
from mcbn.layers import Layers, stochastic_layers
from mcbn.network import Network
from mcbn.population import Population
from mcbn.posterior import Posterior

CHECKED_BATCHES = 100  # whose statistics the drift check sees


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
                raise MCBNError(
                    f"layer {call.name!r} sees {rows} rows for {G} examples, so its moments cannot be counted by "
                    "example; use posterior='gaussian'"
                )
            population = self.populations.setdefault(call.name, Population(self.mean[call.name]))
            values = call.x.to(statistics_dtype(call.x))
            population.add(values.reshape(G, rows // G, *values.shape[1:]))
        return output


class Observed(NamedTuple):
    """What one pass gives: the factorised Gaussian, and for the drift check the statistics of some batches."""

    gaussian: Gaussian
    recorded: Recorded


def observe(network: Network, drawn: TrainingBatches, layers: Layers, inputs: batches.Picker) -> Observed:
    """Run every example once through the network, each layer seeing inputs normalised by their batch."""
    keys, chosen = network.accepted_keys(), frozenset[str]()
    populations: dict[str, Population] = {}
    modes: list[Observe] = []
    first: Any = None
    with torch.no_grad():
        for batch in drawn.batches:
            x = network.prepare(batches.pick_inputs(batch, inputs, keys))
            first = x if first is None else first
            chosen = chosen or stochastic_layers(network, x, layers)
            mode = _run(network, x, chosen, populations)
            if len(modes) < CHECKED_BATCHES:
                modes.append(mode)
    if not modes:
        raise MCBNError("the training data gives no batch at all")
    posterior = Posterior(_stack(modes, "mean"), _stack(modes, "var"), drawn.batch_size)
    recorded = Recorded(posterior, modes[0].running, modes[0].values, first)
    return Observed(_factorised(populations, posterior, drawn.batch_size), recorded)


def _run(network: Network, x: Any, chosen: frozenset[str], populations: dict[str, Population]) -> Observe:
    with Observe(chosen, populations, batches.size_of(x)) as mode:
        network(batches.map_tensors(torch.clone, x))  # it may change its inputs in place
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
    """Join the moments of mu_B and sigma_B of all calls (Teye et al. 2018, appendix 1.3).

    Differs: M counts examples. With one value an example this is the paper's formula; of an image's positions, which
    are correlated, only the averages are taken as independent (`mcbn_study.theory.statistic_moments`).
    """
    locations, variances = [], []  # (2C,) each
    for name, population in populations.items():
        modelled = population.moments(batch_size)
        if not all(bool(torch.isfinite(part).all()) for part in modelled):
            raise MCBNError(f"layer {name!r} has non-finite statistics; the network overflows on its training data")
        locations.append(torch.cat([modelled.mean, modelled.std]))
        variances.append(torch.cat([modelled.mean_std, modelled.std_std]).square())
    sample = next(iter(like.mean.values()))
    channels = {name: len(population.pivot) for name, population in populations.items()}
    return Gaussian("diagonal", channels, torch.cat(locations).to(sample), (), torch.cat(variances).to(sample))
