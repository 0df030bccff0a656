"""The approximate posterior q(omega): T joint draws of all batch-norm statistics."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import draws, statistics
from mcbn.batches import Picker, pick_inputs
from mcbn.errors import MCBNError
from mcbn.network import Network


@dataclass(frozen=True, eq=False)
class Posterior:
    """T joint draws of the batch-norm statistics omega = {mu_B, sigma^2_B} (Teye et al. 2018, section 3.4).

    `mean[name]` and `var[name]` are (T, C), `var` biased; row t of every layer comes from one training batch of
    `batch_size` examples. A layer called twice in a forward pass has two entries, "name" and "name#2".
    """

    mean: Mapping[str, Tensor]
    var: Mapping[str, Tensor]
    batch_size: int

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the stochastic batch-norm calls, in the order the network makes them."""
        return tuple(self.mean)

    @property
    def n_samples(self) -> int:
        """T, the number of draws."""
        return len(next(iter(self.mean.values())))

    def draw(self, t: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the statistics of draw t: means and variances, each name -> (C,)."""
        return _each(self.mean, t), _each(self.var, t)

    def to(self, device: torch.device | str | None) -> "Posterior":
        """Move all statistics to a device."""
        moved = [{name: value.to(device) for name, value in part.items()} for part in (self.mean, self.var)]
        return Posterior(moved[0], moved[1], self.batch_size)

    def __repr__(self) -> str:
        channels = sum(value.shape[1] for value in self.mean.values())
        return (
            f"Posterior(n_samples={self.n_samples}, batch_size={self.batch_size}, "
            f"{len(self.layers)} layers, {channels} channels)"
        )


def _each(part: Mapping[str, Tensor], index: Any) -> dict[str, Tensor]:
    return {name: value[index] for name, value in part.items()}


class Recorded(NamedTuple):
    """What one pass over the drawn batches gives: the posterior, and what the drift check compares it with."""

    posterior: Posterior
    running: Mapping[str, tuple[Tensor, Tensor]]  # name -> running mean and variance, each (C,)
    values: Mapping[str, int]  # name -> values per channel in a batch


def record(network: Network, batches: draws.Draws, layers: statistics.Layers, inputs: Picker) -> Recorded:
    """Run every drawn batch through the network with batch norm as in training; keep the statistics.

    A draw is joint: one batch sets all layers, each seeing inputs already normalised by that batch (Algorithm 1).
    """
    keys = network.accepted_keys()
    chosen: frozenset[str] | None = None
    means: dict[str, list[Tensor]] = {}
    variances: dict[str, list[Tensor]] = {}
    for batch in batches.batches:
        x = network.prepare(pick_inputs(batch, inputs, keys))
        if chosen is None:
            chosen = stochastic_layers(network, x, layers)
        with torch.no_grad(), statistics.Record(chosen) as mode:
            network(x)
        for name in mode.mean:
            means.setdefault(name, []).append(mode.mean[name])
            variances.setdefault(name, []).append(mode.var[name])
    posterior = Posterior(_stack(means), _stack(variances), batches.batch_size)
    return Recorded(posterior, mode.running, mode.values)


def stochastic_layers(network: Network, x: Any, layers: statistics.Layers) -> frozenset[str]:
    """Run the network once as it is to see which layers call batch norm, and choose among them."""
    with torch.no_grad(), statistics.Survey() as survey:
        network(x)
    found = [*survey.layers, *statistics.deaf(network.module, survey)]
    if not found:
        raise MCBNError(
            f"{type(network.module).__name__} ran without a single batch norm call; its layers "
            f"{statistics.candidates(network.module)} are not used in eval mode"
        )
    chosen = statistics.choose(layers, found, network.module)
    for name in chosen:
        if name not in survey.layers:
            raise MCBNError(
                f"layer {name!r} ({type(network.module.get_submodule(name)).__name__}) does its own arithmetic instead "
                "of calling torch.nn.functional.batch_norm, so its statistics cannot be set; leave it out with layers="
            )
    for name, has_running in survey.layers.items():
        if name not in chosen and not has_running:
            warnings.warn(
                f"mcbn: layer {name!r} is not among layers= and has no running statistics, so it goes on using those "
                "of whatever batch it is given",
                stacklevel=4,
            )
    return frozenset(chosen)


def _stack(parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Stack T rows (C,) of each layer into (T, C), refusing what is not one row a draw or not finite."""
    T = max(len(rows) for rows in parts.values())
    stacked = {}
    for name, rows in parts.items():
        if len(rows) != T:
            raise MCBNError(
                f"layer {name!r} was called for {len(rows)} of {T} training batches; the network takes another path "
                "from batch to batch, and a joint draw needs every layer: choose the steady ones with layers="
            )
        stacked[name] = torch.stack(rows)  # (T, C)
        if not bool(torch.isfinite(stacked[name]).all()):
            raise MCBNError(f"layer {name!r} has non-finite statistics; the network overflows on its training data")
    return stacked
