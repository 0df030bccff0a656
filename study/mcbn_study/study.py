"""A study of the paper's regression networks at work: its cells, and what each of them needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from tqdm import tqdm

from mcbn.data import Regression, load
from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import Numerics, environment
from mcbn_study.regression.profile import Profile


class Task(NamedTuple):
    """A cell of work on one data set: what `step(study, **options)` does once the cells it needs are done."""

    cell: str
    dataset: str
    step: Callable[..., object]
    options: Mapping[str, Any]
    needed: Sequence[str] = ()
    weight: float = 0.0  # of the work, for progress


LAYOUT = "{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}"  # of progress
ListTasks = Callable[["Study"], Sequence[Task]]


@dataclass(frozen=True)
class Setup:
    """Where a study runs and how it computes."""

    device: str = "cpu"
    engine: str = "local"  # or "ray": cells as tasks of the cluster at `address`
    address: str | None = None
    compiled: bool = False  # on a GPU: fuse elementwise work by torch.compile
    fused: bool = False  # on a GPU: many training steps in one CUDA kernel


def run_study(
    name: str, profile: Profile, out: str | Path, list_tasks: ListTasks, datasets: Sequence[str], setup: Setup
) -> CellJournal:
    """Do the cells of a study in this process, or as tasks of a Ray cluster."""
    if setup.engine == "ray":
        from mcbn_study import ray

        study = Study(name, profile, out, replace(setup, device="cpu"))
        return ray.run(study, list_tasks(study), setup)
    sets = {dataset: load(dataset) for dataset in datasets}
    study = Study(name, profile, out, setup)
    return study.run(list_tasks(study), sets)


class Progress:
    """A bar over cells of work of known weight, on a terminal; none for no work, or elsewhere."""

    def __init__(self, total: float = 0.0, title: str = "") -> None:
        self._bar = tqdm(total=total, desc=title, bar_format=LAYOUT, disable=None if total else True)
        self._done, self._weight = 0.0, 0.0

    @contextmanager
    def cell(self, name: str, weight: float) -> Iterator[None]:
        """Count a cell as done on leaving, also one that ended early."""
        self._weight = weight
        self._bar.set_postfix_str(name)
        yield
        self.fraction(1.0)
        self._done, self._weight = self._done + weight, 0.0

    def fraction(self, part: float) -> None:
        """Say how much of the present cell is done, 0 to 1."""
        self._bar.n = self._done + part * self._weight
        self._bar.refresh()

    def close(self) -> None:
        """Leave the terminal as it is."""
        self._bar.close()


class Study:
    """One study in one folder on one device; `on` a data set it has `dataset` and `data`."""

    dataset: str
    data: Regression

    def __init__(self, name: str, profile: Profile, out: str | Path, setup: Setup = Setup()) -> None:  # noqa: B008
        self.name, self.profile, self.device = name, profile, setup.device
        self.journal = CellJournal(out, profile.settings())
        self.numerics = Numerics(profile.tf32, setup.compiled, setup.fused)
        self.progress = Progress()
        self._where = environment(setup.device)

    def on(self, dataset: str, data: Regression) -> Self:
        """Return this study, at work on one data set."""
        study = copy(self)
        study.dataset, study.data = dataset, data
        return study

    def run(self, tasks: Sequence[Task], sets: Mapping[str, Regression]) -> CellJournal:
        """Do the cells that have no file yet one after the other, and show how much is done."""
        self.progress = Progress(sum(task.weight for task in tasks), self.name)
        try:
            for task in tasks:
                with self.progress.cell(task.cell, task.weight):
                    if self.journal.load(task.cell) is None:
                        task.step(self.on(task.dataset, sets[task.dataset]), **task.options)
        finally:
            self.progress.close()
        return self.journal

    def record(self, kind: str, seconds: float, **fields: Any) -> Record:
        """Make a record with what all have in common: where and by what configuration it was made."""
        start: Record = {"kind": kind, "study": self.name, "profile": self.profile.name}
        where = {"device": self._where.hardware, "commit": self._where.commit, "config_hash": self.profile.hash}
        return start | fields | {"seconds": round(seconds, 3)} | where
