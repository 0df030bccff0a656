"""The regression study as Ray tasks: its own cells of work anywhere, one writer here; the records of a local run.

A task works in a folder of its own, given the files of the cells it builds on, and hands back what it made. A task
whose worker is lost is run again; a driver that is started again goes on from what is in the folder.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mcbn_study.regression.profile import METHODS, Profile
from mcbn_study.sensitivity import run as sensitivity
from mcbn_study.study import Study

Step = Callable[..., object]


class Made(NamedTuple):
    """What a task made: files by their path in the folder of the study, and records."""

    files: Mapping[str, bytes]
    records: list[Record]


def run_regression(
    profile: Profile,
    out: str | Path = "results/regression",
    *,
    datasets: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    address: str | None = None,
    device: str = "cpu",
    **numerics: bool,
) -> CellJournal:
    """Run the regression study on a cluster, as `mcbn_study.regression.run.run` does in one process."""
    datasets = tuple(datasets) or profile.datasets
    _check(datasets, methods)
    study = Study(regression.STUDY, profile, out, "cpu", **numerics)
    families = dict.fromkeys(regression.TESTED[method][0] for method in methods if method in regression.TESTED)
    with connected(address) as ray:
        desk = _Desk(ray, study, device)
        for name in datasets:
            desk.add_dataset(name)
            searches = {
                family: [
                    desk.want(cell.name, search.search_cell, name, [], family=family, cell=cell)
                    for cell in search.cells(profile, name, family)
                ]
                for family in families
            }
            for method in methods:
                if not regression.is_done(study.journal, profile, name, method):
                    needed = searches[regression.TESTED[method][0]] if method in regression.TESTED else []
                    desk.want(f"{name}-test-{method}", regression.score_method, name, needed, method=method)
        desk.collect()
    return study.journal


def run_sensitivity(
    profile: Profile,
    out: str | Path = "results/sensitivity",
    *,
    regression: str | Path = "results/regression",
    datasets: Sequence[str] = (),
    address: str | None = None,
    device: str = "cpu",
    **numerics: bool,
) -> CellJournal:
    """Run the sensitivity study on a cluster, as `mcbn_study.sensitivity.run.run` does in one process."""
    datasets = tuple(datasets) or profile.datasets
    _check(datasets, ("mcbn",))
    decays = {name: sensitivity.chosen_decays(Path(regression), profile, name) for name in datasets}
    study = Study(sensitivity.STUDY, profile, out, "cpu", **numerics)
    with connected(address) as ray:
        desk = _Desk(ray, study, device)
        for name in datasets:
            desk.add_dataset(name)
            for M in sensitivity.batch_sizes(profile, name):
                options = {"M": M, "decays": decays[name]}
                desk.want(f"{name}-sensitivity-{M}", sensitivity.measure, name, [], **options)
        desk.collect()
    return study.journal


def _check(datasets: Sequence[str], methods: Sequence[str]) -> None:
    regression.check_request(datasets, methods, "cpu")  # a GPU is looked for where the tasks run


class _Desk:
    """Gives tasks out and is the only one who writes."""

    def __init__(self, ray: Any, study: Study, device: str) -> None:
        self.ray, self.journal = ray, study.journal
        self.about = (study.name, study.profile, device, study.numerics.compiled, study.numerics.fused)
        self.data: dict[str, Any] = {}
        self.pending: list[Any] = []
        self.task = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(_work)

    def add_dataset(self, name: str) -> None:
        """Put a data set where all tasks find it."""
        self.data[name] = self.ray.put(load(name))

    def want(self, name: str, step: Step, dataset: str, needed: Sequence[Any], **options: Any) -> Any:
        """Have a cell done by `step(study, dataset, data, **options)`, unless its file is there.

        needed: references to the cells it builds on. Returns one to what it made.
        """
        if self.journal.load(name) is not None:
            file = f"cells/{name}.safetensors"
            return self.ray.put(Made({file: (self.journal.folder / file).read_bytes()}, []))
        self.pending.append(self.task.remote(self.about, step, dataset, self.data[dataset], options, *needed))
        return self.pending[-1]

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
                with replacing(self.journal.folder / name) as temporary:
                    temporary.write_bytes(content)
            self.journal.append(made.records)


def _work(
    about: tuple[str, Profile, str, bool, bool],
    step: Step,
    dataset: str,
    data: Regression,
    options: Mapping[str, Any],
    *needed: Made,
) -> Made:
    """Run one cell in a folder of its own; return its new files and records."""
    name, profile, device, compiled, fused = about
    with one_thread(device), tempfile.TemporaryDirectory() as temporary:
        folder, before = Path(temporary), {path: content for made in needed for path, content in made.files.items()}
        for path, content in before.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        study = Study(name, profile, folder, device, compiled=compiled, fused=fused)
        step(study, dataset, data, **options)
        after = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
        return Made({path: content for path, content in after.items() if path not in before}, study.journal.records)


def _files(folder: Path) -> Iterator[Path]:
    kept = ("cells", "networks", "predictions")
    return (path for name in kept for path in sorted((folder / name).rglob("*")) if path.is_file())
