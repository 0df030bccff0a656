"""Time of the study's batched trainer against training one network at a time.

Rows are random numbers of each data set's size, so no data is needed. Seconds per network and step, in one run.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Annotated, cast

import torch
import typer

from mcbn.data import Dataset, Regression, describe
from mcbn.networks import RegressionMLP, train_regression
from mcbn_benchmarks.commands import Device, Only
from mcbn_study.journal import Record
from mcbn_study.machine import one_thread, timed
from mcbn_study.regression.measure import Evaluator
from mcbn_study.regression.problem import Part, make_problem
from mcbn_study.regression.stack import Family, Networks, take
from mcbn_study.regression.train import Trainer

LAMBDAS, STREAMS, RATES = 15, 25, 6  # of the paper's grid: 5 splits x 5 folds
TARGET = 50  # times faster per network on a GPU than one network at a time
# Cells of the study: the size of a data set, a family of networks, a batch size
CELLS = "boston-bn-32 kin8nm-bn-32 kin8nm-bn-256 protein-bn-32 protein-bn-1024 boston-dropout-32 protein-dropout-32"


def trainer(
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(help="time to spend on each measurement")] = 3.0,
    share: Annotated[float, typer.Option(help="share of the paper's networks to train at once")] = 1.0,
    only: Only = "",
    fused: Annotated[bool, typer.Option("--fused", help="take many steps in one CUDA kernel")] = False,
) -> Iterator[Record]:
    """Time the study's batched trainer against training one network at a time."""
    with one_thread(device):
        for cell in (cell for cell in CELLS.split() if only in cell):
            yield {"case": cell, **measure(cell, device, seconds, share, fused=fused), "target": TARGET, "fused": fused}


def measure(cell: str, device: str, seconds: float, share: float, *, fused: bool) -> Record:
    """Time a cell with this share of the paper's networks trained at once."""
    dataset, family, M = cell.split("-")
    single = one_at_a_time(describe(dataset), int(M), device, seconds)
    trainer = _trainer(describe(dataset), cast(Family, family), int(M), device, share, fused)
    trainer.advance(2)  # past the capture of graphs
    steps, networks = int(trainer.problem.train.n[0]) // trainer.networks.batch_size, len(trainer.networks.stream)
    step = _repeat(partial(trainer.advance, 1), seconds) / steps  # of all networks
    return {
        "networks": networks,
        "milliseconds_a_step": 1e3 * step,
        "microseconds_a_network_step": 1e6 * step / networks,
        "microseconds_one_at_a_time": 1e6 * single,
        "speed_up": single / (step / networks),
        "seconds_an_evaluation_500": evaluation(trainer),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def one_at_a_time(facts: Dataset, batch_size: int, device: str, seconds: float) -> float:
    """Return the seconds of one step of `train_regression`; BN networks, as dropout ones cost as much."""
    data = _random(100 * batch_size, facts.q)
    x, y = data.x.float().to(device), data.y.float().to(device)
    network = RegressionMLP(facts.q, (facts.hidden_units,) * 2, seed=0).to(device)
    train_regression(network, x[: 2 * batch_size], y[: 2 * batch_size], batch_size=batch_size, epochs=5)
    return _repeat(partial(train_regression, network, x, y, batch_size=batch_size, epochs=1), min(seconds, 2.0)) / 100


def evaluation(trainer: Trainer) -> float:
    """Return the seconds of one evaluation of all networks with T = 500."""
    evaluator = Evaluator(trainer.problem, trainer.networks.batch_size, 500)
    one = torch.arange(1, device=trainer.problem.device)
    evaluator.moments(take(trainer.values, one), trainer.networks[one])  # draws the batches
    return timed(evaluator.moments, trainer.values, trainer.networks)[1]


def _repeat(work: Callable[[], None], seconds: float) -> float:
    """Return the mean seconds of one call over about so many seconds, at least 2 calls."""
    taken: list[float] = []
    while len(taken) < 2 or sum(taken) < seconds:
        taken.append(timed(work)[1])
    return fmean(taken)


def _trainer(facts: Dataset, family: Family, batch_size: int, device: str, share: float, fused: bool) -> Trainer:
    rows, n_train = torch.arange(round(0.8 * facts.n)), round(0.64 * facts.n)  # of a fold
    parts = [Part(rows[:n_train], rows[n_train:], stream) for stream in range(STREAMS)]
    S = max(1, round(STREAMS * LAMBDAS * (RATES if family == "dropout" else 1) * share))  # of the paper's grid
    weight_decays, rates, stream = torch.full((S,), 1e-4), torch.full((S,), 0.05), torch.arange(S) % STREAMS
    networks = Networks(family, stream, weight_decays, rates, batch_size, facts.hidden_units)
    return Trainer(make_problem(_random(facts.n, facts.q), parts, device), networks, fused=fused)


def _random(n: int, q: int) -> Regression:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, q, generator=generator, dtype=torch.float64)
    return Regression(x, x.sum(1) + torch.randn(n, generator=generator, dtype=torch.float64))
