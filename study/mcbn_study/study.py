"""A study of the paper's regression networks at work: its cells, and what each of them needs."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from mcbn.data import Regression, load
from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import environment, tracked
from mcbn_study.regression.profile import Profile

Names = Sequence[str]


class Task(NamedTuple):
    """A cell of work on one data set: what `step(study, **options)` does."""

    cell: str
    dataset: str
    step: Callable[..., object]
    options: Mapping[str, Any]


class Study:
    """One study in one folder on one device; at work on a cell it has `dataset` and `data`.

    fused: on a GPU, many training steps in one CUDA kernel.
    """

    dataset: str
    data: Regression

    def __init__(self, name: str, profile: Profile, out: Path, *, device: str = "cpu", fused: bool = False) -> None:
        self.name, self.profile, self.device, self.fused = name, profile, device, fused
        self.journal = CellJournal(out, profile.settings())
        self._where = environment(device)

    def has_runs(self, seeds: Sequence[int] = (), **fields: object) -> bool:
        """Tell whether a run with these fields is on record for every split and seed."""
        runs = product(self.profile.splits, seeds or self.profile.seeds)
        return all(self.journal.has(**fields, split=s, seed=seed) for s, seed in runs)

    def record(self, kind: str, seconds: float, **fields: Any) -> Record:
        """Make a record with what all have in common: where and by what configuration it was made."""
        start: Record = {"kind": kind, "study": self.name, "profile": self.profile.name}
        where = {"device": self._where.hardware, "commit": self._where.commit, "config_hash": self.profile.hash}
        return start | fields | {"seconds": round(seconds, 3)} | where


TaskList = Callable[[Study], Sequence[Task]]  # the cells of a study that are still to do


def run_study(name: str, profile: Profile, out: Path, list_tasks: TaskList, datasets: Names, **how: Any) -> CellJournal:
    """Do the cells of a study that have no file yet, one after the other; how: device and fused, of `Study`."""
    sets = {dataset: load(dataset) for dataset in datasets}
    study = Study(name, profile, out, **how)
    for task in tracked(list_tasks(study), name, "cell"):
        if study.journal.load(task.cell) is None:
            at_work = copy(study)
            at_work.dataset, at_work.data = task.dataset, sets[task.dataset]
            task.step(at_work, **task.options)
    return study.journal
