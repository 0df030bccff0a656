"""The regression study as Ray tasks: its own cells of work anywhere, one writer here; the records of a local run.

A task works in a folder of its own, given the files of the cells it builds on, and hands back what it made. A task
whose worker is lost is run again; a driver that is started again goes on from what is in the folder.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mcbn.data import Regression, load
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.ray.cluster import connected
from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import one_thread
from mcbn_study.regression import run as regression
from mcbn_study.regression import search
from mcbn_study.regression.context import Context
from mcbn_study.regression.profile import METHODS, Profile
from mcbn_study.regression.stack import Family
from mcbn_study.regression.testing import TESTED
from mcbn_study.sensitivity import run as sensitivity

Step = Callable[[Context, Regression], None]


class Made(NamedTuple):
    """What a task made: files by their path in the folder of the study, and records."""

    files: Mapping[str, bytes]
    records: list[Record]


@dataclass(frozen=True)
class Numerics:
    """Where and how tasks compute."""

    device: str = "cpu"
    compiled: bool = False
    fused: bool = False


def run_regression(
    profile: Profile,
    out: str | Path = "results/regression",
    *,
    datasets: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    address: str | None = None,
    **numerics: Any,
) -> CellJournal:
    """Run the regression study on a cluster, as `mcbn_study.regression.run.run` does in one process."""
    datasets, how = tuple(datasets) or profile.datasets, Numerics(**numerics)
    _check(datasets, methods)
    store = CellJournal(Path(out), profile.settings())
    with connected(address) as ray:
        desk = _Desk(ray, regression.STUDY, profile, store, how)
        for name in datasets:
            desk.add_dataset(name)
            found = {family: _searches(desk, name, family) for family in _families(methods)}
            for method in methods:
                if not regression.is_done(store, profile, name, method):
                    step, family = partial(_test, dataset=name, method=method), _family(method)
                    desk.want(f"{name}-test-{method}", step, name, found[family] if family else [])
        desk.collect()
    return store


def run_sensitivity(
    profile: Profile,
    out: str | Path = "results/sensitivity",
    *,
    regression: str | Path = "results/regression",
    datasets: Sequence[str] = (),
    address: str | None = None,
    **numerics: Any,
) -> CellJournal:
    """Run the sensitivity study on a cluster, as `mcbn_study.sensitivity.run.run` does in one process."""
    datasets, how = tuple(datasets) or profile.datasets, Numerics(**numerics)
    _check(datasets, ("mcbn",))
    decays = {name: sensitivity.chosen_decays(Path(regression), profile, name) for name in datasets}
    store = CellJournal(Path(out), profile.settings())
    with connected(address) as ray:
        desk = _Desk(ray, sensitivity.STUDY, profile, store, how)
        for name in datasets:
            desk.add_dataset(name)
            for M in sensitivity.batch_sizes(profile, name):
                step = partial(_sensitivity, dataset=name, batch_size=M, decays=tuple(decays[name]))
                desk.want(f"{name}-sensitivity-{M}", step, name, [])
        desk.collect()
    return store


def _check(datasets: Sequence[str], methods: Sequence[str]) -> None:
    regression.check_request(datasets, methods, "cpu")  # a GPU is looked for where the tasks run


def _family(method: str) -> Family | None:
    """Name the search a method builds on; MNF has its own."""
    return None if method == "mnf" else TESTED[method][0] if method in TESTED else "bn"


def _families(methods: Sequence[str]) -> list[Family]:
    return list(dict.fromkeys(family for method in methods if (family := _family(method)) is not None))


def _searches(desk: "_Desk", dataset: str, family: Family) -> list[Any]:
    """Have every cell of a family's cross-validation done; return what they will have made."""
    found = search.cells(desk.profile, dataset, family)
    return [desk.want(c.name, partial(_search, dataset=dataset, family=family, cell=c), dataset, []) for c in found]


def _search(context: Context, data: Regression, *, dataset: str, family: Family, cell: search.Cell) -> None:
    problem = search.fold_problem(context, dataset, data)
    search._search_cell(context, dataset, family, cell, problem)


def _test(context: Context, data: Regression, *, dataset: str, method: str) -> None:
    regression.score_method(context, dataset, data, method)


def _sensitivity(
    context: Context, data: Regression, *, dataset: str, batch_size: int, decays: tuple[float, ...]
) -> None:
    sensitivity._measure(context, dataset, data, batch_size, decays)


class _Desk:
    """Gives tasks out and is the only one who writes."""

    def __init__(self, ray: Any, study: str, profile: Profile, store: CellJournal, how: Numerics) -> None:
        self.ray, self.study, self.profile, self.store, self.how = ray, study, profile, store, how
        self.data: dict[str, Any] = {}
        self.pending: list[Any] = []
        self.task = ray.remote(num_cpus=1, num_gpus=1 if how.device == "cuda" else 0)(_work)

    def add_dataset(self, name: str) -> None:
        """Put a data set where all tasks find it."""
        self.data[name] = self.ray.put(load(name))

    def want(self, cell: str, step: Step, dataset: str, needed: Sequence[Any]) -> Any:
        """Have a cell done, unless its file is there; return a reference to what it made."""
        if self.store.load(cell) is not None:
            name = f"cells/{cell}.safetensors"
            return self.ray.put(Made({name: (self.store.folder / name).read_bytes()}, []))
        made = self.task.remote(self.study, self.profile, self.how, step, self.data[dataset], *needed)
        self.pending.append(made)
        return made

    def collect(self) -> None:
        """Write what tasks make, in the order they end; cells before their records."""
        while self.pending:
            ready, self.pending = self.ray.wait(self.pending)
            try:
                made: Made = self.ray.get(ready[0])
            except self.ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise MCBNError(f"a task of the study failed ({cause}); the same command goes on from here") from error
            for name, content in made.files.items():
                with replacing(self.store.folder / name) as temporary:
                    temporary.write_bytes(content)
            self.store.append(made.records)


def _work(study: str, profile: Profile, how: Numerics, step: Step, data: Regression, *needed: Made) -> Made:
    """Run one cell in a folder of its own; return its new files and records."""
    with one_thread(how.device), tempfile.TemporaryDirectory() as name:
        folder, given = Path(name), {path: content for made in needed for path, content in made.files.items()}
        for path, content in given.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        store = CellJournal(folder, profile.settings())
        step(Context(study, profile, store, how.device, how.compiled, how.fused), data)
        new = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
        return Made({path: content for path, content in new.items() if path not in given}, store.records)


def _files(folder: Path) -> Iterator[Path]:
    kept = ("cells", "networks", "predictions")
    return (path for part in kept for path in sorted((folder / part).rglob("*")) if path.is_file())
