"""Draws through the network's own code, one by one: what every fast way must equal."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import mcbn
from mcbn import algorithm, batches
from mcbn.batching import Generators, Indices
from mcbn.engine.plan import Program, build
from mcbn.engine.trace import ReplayTracer


def loop(bayes: mcbn.MCBN, x: Any) -> Tensor:
    """Run every draw by Algorithm 1 as printed, for a posterior of all layers."""
    draws = bayes.posterior
    with torch.no_grad():
        return torch.stack([_replay(bayes, *draws.draw(t), x) for t in range(draws.n_samples)])


def _replay(bayes: mcbn.MCBN, mean: dict[str, Tensor], var: dict[str, Tensor], x: Any) -> Tensor:
    draw = [(mean[name], var[name]) for name in mean]
    home = batches.tensors_of(x)[0].device  # a network may have gone to a GPU by itself, as DataParallel's do
    return algorithm.replay(bayes.network, draw, batches.copied(bayes.network.prepare(x))).to(home)


def fit(net: nn.Module, x: Tensor, **options: Any) -> mcbn.MCBN:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mcbn.MCBN(net.eval(), "regression").fit(x, **{"n_samples": 5, "batch_size": 8, **options})


def check_equal(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def program_of(bayes: mcbn.MCBN, x: Tensor, *, fold: bool) -> Program:
    """Trace the first draw and make a program of it."""
    tracer = ReplayTracer(*bayes.posterior.draw(0))
    with torch.no_grad():
        tracer.trace(bayes.engine.network, x)
        return build(tracer, fold=lambda width, convolutional: fold)


def rows_of_draw(n: int, batch_size: int, seed: int, t: int) -> Indices:
    """Choose the M of N rows of draw t, by a generator of its own."""
    return Generators(seed).rows(n, batch_size, t)
