"""Draws through the network: f_omega(x) for the statistics omega of every draw."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mcbn.network import Network
from mcbn.posterior import Posterior
from mcbn.statistics import Replay


def sample_outputs(network: Network, posterior: Posterior, inputs: Any) -> Iterator[Tensor]:
    """Yield outputs for successive draws, each chunk (t, N, ...), all T in the posterior's order.

    Every input meets the same draws, so an input alone and in a batch give the same numbers.
    """
    for t in range(posterior.n_samples):
        with Replay(*posterior.draw(t)):
            output = network(inputs)  # (N, ...)
        yield output.unsqueeze(0)
