"""Networks trained for a chosen number of epochs, several configurations at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcbn_study.regression.problem import Problem
from mcbn_study.regression.selection import Configuration
from mcbn_study.regression.stack import Family, Values
from mcbn_study.regression.train import Networks, Trainer


@dataclass(frozen=True)
class Job:
    """One network to train: its stream in the problem, its configuration, its epochs."""

    stream: int
    configuration: Configuration
    epochs: int


@dataclass(frozen=True)
class Trained:
    """Networks of one batch size, in the order of `jobs`, which are places in the list that was asked for."""

    jobs: list[int]
    networks: Networks
    values: Values


def train_jobs(
    problem: Problem,
    jobs: Sequence[Job],
    family: Family,
    hidden: int,
    *,
    tf32: bool = False,
    compiled: bool = False,
    fused: bool = False,
) -> list[Trained]:
    """Train every job; those of one batch size as one stack, which shrinks as networks reach their epochs."""
    sizes = sorted({job.configuration.batch_size for job in jobs})
    numerics = {"tf32": tf32, "compiled": compiled, "fused": fused}
    done = []
    for size in sizes:
        places = [place for place, job in enumerate(jobs) if job.configuration.batch_size == size]
        done.append(_train_stack(problem, jobs, places, family, hidden, numerics))
    return done


def _train_stack(
    problem: Problem, jobs: Sequence[Job], places: list[int], family: Family, hidden: int, numerics: dict[str, bool]
) -> Trained:
    n = problem.train.n.cpu()
    size = min(jobs[places[0]].configuration.batch_size, int(n.min()))
    places = sorted(places, key=lambda place: int(n[jobs[place].stream]) // size)
    chosen = [jobs[place] for place in places]
    networks = Networks(
        family,
        torch.tensor([job.stream for job in chosen]),
        torch.tensor([job.configuration.weight_decay for job in chosen]),
        torch.tensor([job.configuration.rate or 0.0 for job in chosen]),
        size,
        hidden,
    )
    trainer = Trainer(problem, networks, **numerics)
    whole = trainer.networks
    values = {name: value.clone() for name, value in trainer.values.items()}
    epochs = torch.tensor([job.epochs for job in chosen], device=problem.device)
    present = torch.arange(len(chosen), device=problem.device)
    for end in sorted({job.epochs for job in chosen}):
        trainer.advance(end - trainer.epoch)
        ready = epochs[present] == end
        for name, value in trainer.values.items():
            values[name][present[ready]] = value[ready]
        if not bool(ready.all()):
            trainer.keep(torch.nonzero(~ready).flatten())
            present = present[~ready]
    return Trained(places, whole, values)
