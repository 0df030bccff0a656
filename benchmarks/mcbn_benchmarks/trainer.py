"""Time the batched trainer against training one network at a time: `python -m mcbn_benchmarks.trainer --help`.

Rows are random numbers of each data set's size, so no data is needed. Seconds per network and step, in one run.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mcbn.data import Regression, describe
from mcbn.networks import RegressionMLP, train_regression
from mcbn_study.journal import append
from mcbn_study.machine import environment, synchronize
from mcbn_study.regression.evaluation import Evaluator
from mcbn_study.regression.problem import Part, Problem, make_problem
from mcbn_study.regression.stack import Family
from mcbn_study.regression.train import Networks, Trainer

LAMBDAS, STREAMS, RATES = 15, 25, 6  # of the paper's grid: 5 splits x 5 folds
TARGET = 50  # times faster per network on a GPU than one network at a time


@dataclass(frozen=True)
class Case:
    """A cell of the study: a data set's size, a family of networks and its batch size."""

    dataset: str
    family: Family
    batch_size: int

    @property
    def n_networks(self) -> int:
        """Networks of the paper's grid that share the batch size."""
        return STREAMS * LAMBDAS * (RATES if self.family == "dropout" else 1)


CASES = (
    Case("boston", "bn", 32),
    Case("kin8nm", "bn", 32),
    Case("kin8nm", "bn", 256),
    Case("protein", "bn", 32),
    Case("protein", "bn", 1024),
    Case("boston", "dropout", 32),
    Case("protein", "dropout", 32),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print one line a case and append the records."""
    chosen = _parser().parse_args(arguments)
    torch.set_num_threads(1 if chosen.device == "cpu" else torch.get_num_threads())
    where = asdict(environment(chosen.device))
    options = {"tf32": chosen.tf32, "compiled": chosen.compile, "fused": chosen.fused}
    cases = [case for case in CASES if chosen.only in f"{case.dataset}-{case.family}-{case.batch_size}"]
    for record in measure(cases, chosen.device, chosen.seconds, chosen.share, options):
        print(json.dumps(record), flush=True)
        if chosen.out is not None:
            append(chosen.out, record | where)


def measure(
    cases: Sequence[Case], device: str, seconds: float, share: float, options: dict[str, bool]
) -> Iterator[dict[str, object]]:
    """Yield one record a case; `share` of the paper's networks train at once."""
    for case in cases:
        single = one_at_a_time(case, device, seconds)
        trainer = _trainer(case, device, share, options)
        step = batched(case, trainer, seconds)
        per_network = step / len(trainer.networks.stream)
        yield {
            "case": f"{case.dataset}-{case.family}-{case.batch_size}",
            "networks": len(trainer.networks.stream),
            "milliseconds_a_step": 1e3 * step,
            "microseconds_a_network_step": 1e6 * per_network,
            "microseconds_one_at_a_time": 1e6 * single,
            "speed_up": single / per_network,
            "target": TARGET,
            "seconds_an_evaluation_500": evaluation(case, trainer, options),
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            **options,
        }


def batched(case: Case, trainer: Trainer, seconds: float) -> float:
    """Return the seconds of one step of all networks, past the capture of graphs."""
    steps = int(trainer.problem.train.n[0]) // case.batch_size
    trainer.advance(2)
    return _repeat(lambda: trainer.advance(1), seconds, trainer.problem.device.type) / steps


def one_at_a_time(case: Case, device: str, seconds: float) -> float:
    """Return the seconds of one step of `train_regression`; BN networks, as dropout ones cost as much."""
    facts = describe(case.dataset)
    data = _random(100 * case.batch_size, facts.q)
    x, y = data.x.float().to(device), data.y.float().to(device)
    network = RegressionMLP(facts.q, (facts.hidden_units,) * 2, seed=0).to(device)
    train_regression(network, x[: 2 * case.batch_size], y[: 2 * case.batch_size], batch_size=case.batch_size, epochs=5)

    def epoch() -> None:
        train_regression(network, x, y, batch_size=case.batch_size, epochs=1)

    return _repeat(epoch, min(seconds, 2.0), device) / 100


def evaluation(case: Case, trainer: Trainer, options: dict[str, bool]) -> float:
    """Return the seconds of one evaluation of all networks with T = 500."""
    evaluator = Evaluator(trainer.problem, case.batch_size, 500, tf32=options["tf32"], compiled=options["compiled"])
    for few in (1, 2):  # compile, and draw the batches
        small = trainer.networks[torch.arange(few, device=trainer.problem.device)]
        evaluator.moments({name: value[:few] for name, value in trainer.values.items()}, small)
    synchronize(trainer.problem.device.type)
    started = time.perf_counter()
    evaluator.moments(trainer.values, trainer.networks)
    synchronize(trainer.problem.device.type)
    return time.perf_counter() - started


def _repeat(work: Callable[[], None], seconds: float, device: str) -> float:
    """Return the mean seconds of one call over about so many seconds, at least 2 calls."""
    synchronize(device)
    started, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - started < seconds:
        work()
        synchronize(device)
        calls += 1
    return (time.perf_counter() - started) / calls


def _trainer(case: Case, device: str, share: float, options: dict[str, bool]) -> Trainer:
    facts = describe(case.dataset)
    problem = _problem(facts.n, facts.q, device)
    S = max(1, round(case.n_networks * share))
    stream = torch.arange(S) % STREAMS
    networks = Networks(
        case.family, stream, torch.full((S,), 1e-4), torch.full((S,), 0.05), case.batch_size, facts.hidden_units
    )
    return Trainer(problem, networks, **options)


def _problem(n: int, q: int, device: str) -> Problem:
    n_train = round(0.64 * n)  # of a fold
    rows = torch.arange(round(0.8 * n))
    parts = [Part(rows[:n_train], rows[n_train:], stream) for stream in range(STREAMS)]
    return make_problem(_random(n, q), parts, device)


def _random(n: int, q: int) -> Regression:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, q, generator=generator, dtype=torch.float64)
    return Regression(x, x.sum(1) + torch.randn(n, generator=generator, dtype=torch.float64))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.trainer", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="JSON-lines file to append to")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to spend on each measurement")
    parser.add_argument("--share", type=float, default=1.0, help="share of the paper's networks to train at once")
    parser.add_argument("--only", default="", help='cases whose name holds this, such as "protein-bn"')
    parser.add_argument("--tf32", action="store_true", help="multiply matrices as TF32")
    parser.add_argument("--compile", action="store_true", help="compile the gradients with torch.compile")
    parser.add_argument("--fused", action="store_true", help="take many steps in one CUDA kernel")
    return parser


if __name__ == "__main__":
    main()
