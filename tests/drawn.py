"""Draws through the network's own code, one by one: what every fast way must equal."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import mcbn


def loop(bayes: mcbn.MCBN, x: Any) -> Tensor:
    """Run every draw through the network's own code."""
    engine = bayes._fitted()
    with torch.no_grad():
        return torch.stack([engine._replay(x, t) for t in range(engine.posterior.n_samples)])


def fit(net: nn.Module, x: Tensor, **options: Any) -> mcbn.MCBN:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mcbn.MCBN(net.eval(), "regression").fit(x, **{"n_samples": 5, "batch_size": 8, **options})


def check_equal(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
