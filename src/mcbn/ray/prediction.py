"""Prediction on Ray: parts of the input, worked on by actors that hold the network and its posterior.

The rows of a `ray.data.Dataset` become files first: batches depend on their order alone, and a job can be resumed.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.model import MCBN
from mcbn.ray.cluster import connected, pack, require_ray, unpack, workers_of
from mcbn.ray.pools import run_actors, run_data
from mcbn.scale.job import Job, on_device, plan
from mcbn.scale.work import Folder, Outcome, Summary, require_free, work
from mcbn.tables.formats import pyarrow

POOLS = {"data": run_data, "actors": run_actors}
SPOOL, COMPLETE = ".input", "complete"
FILE_ROWS = 2**20  # of a data set, in one file


def predict(
    dataset: Any,
    bayes: MCBN[Any],
    *,
    out: str | Path,
    resume: bool = False,
    workers: int | None = None,
    threads: int = 1,
    pool: str = "data",
    address: str | None = None,
    on_part: Callable[[Outcome], object] | None = None,
    **options: Any,
) -> Summary:
    """Predict tables or images on a cluster, into a folder of parquet files: bit for bit as `mcbn.scale.predict` does.

    Actors are restarted and parts given out again when a process or a machine is lost; a driver that was stopped goes
    on with `resume`. All machines see the inputs and the folder under the same path.

    Args:
        dataset: a csv or parquet file, an image, a folder of either kind, a list of such; or a `ray.data.Dataset`,
            whose rows are first written to the folder in their order.
        bayes: a fitted MCBN.
        out: folder of the results; empty, or with `resume`.
        resume: go on with a job that was interrupted; finished parts are kept.
        workers: actors; by default one a GPU, or one for as many CPUs as `threads` in a cluster without.
        threads: CPU threads of an actor.
        pool: "data" makes the parts a data set that Ray Data maps and its dashboard shows; "actors" gives them out
            itself and starts some seconds sooner, for short jobs.
        address: of the cluster; by default the one Ray is connected to, else one of this machine alone.
        on_part: called with the outcome of each part.
        options: those of `mcbn.scale.predict`.
    """
    batches.require_int("threads", threads, 1)
    if workers is not None:
        batches.require_int("workers", workers, 1)
    if pool not in POOLS:
        raise MCBNError(f"pool must be one of {list(POOLS)}, got {pool!r}")
    bayes.engine_for()
    require_ray()
    with spooled(dataset, out, resume, options) as (inputs, again):
        job = plan(inputs, bayes, out=out, **options)
        with connected(address) as ray:
            folder = Folder(job, resume=again)
            items = [part.name for part in folder.missing()]
            outcomes = _outcomes(ray, job, items, bayes, workers, threads, pool) if items else ()
            return folder.collect(outcomes, on_part)


def _outcomes(
    ray: Any, job: Job, items: list[str], bayes: MCBN[Any], asked: int | None, threads: int, pool: str
) -> Iterator[Outcome]:
    """Have actors work on parts, by their names; yield what becomes of each, in the order they end."""
    workers, gpus = workers_of(ray, threads, asked)
    payload = ray.put(pack(on_device(bayes, torch.device("cpu")), job))
    resources = {"num_cpus": threads, "num_gpus": gpus}
    try:
        answers = POOLS[pool](ray, Worker, ([payload], threads), resources, items, min(workers, len(items)))
        yield from map(Outcome.from_json, answers)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines()
        raise MCBNError(
            f"a worker failed ({type(cause).__name__}: {lines[-1] if lines else ''}); finished parts are kept: go on "
            "with resume=True (--resume) once it is mended"
        ) from error


class Worker:
    """An actor: network and posterior arrive once, parts one by one."""

    def __init__(self, payload: list[Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.bayes, self.job = unpack(require_ray().get(payload[0]))
        self.parts = {part.name: part for part in self.job.parts}
        if torch.cuda.is_available():  # the GPU that Ray gave this actor
            self.bayes = on_device(self.bayes, torch.device("cuda"))
        self.ended: float | None = None

    def ready(self) -> None:
        """Answer once network and posterior are there."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Work on items as Ray Data gives them out."""
        return {"answer": [self.work(str(item)) for item in batch["item"]]}

    def work(self, name: str) -> str:
        """Work on the part of this name; return what became of it, as text."""
        waited = 0.0 if self.ended is None else time.perf_counter() - self.ended
        outcome = replace(work(self.job, self.bayes, self.parts[name]), waited=waited)
        self.ended = time.perf_counter()
        return outcome.to_json()


@contextmanager
def spooled(dataset: Any, out: str | Path, resume: bool, options: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Give inputs as files, and whether the folder may hold something: what is no data set goes as it is.

    The files are removed once the job is done, and kept where it is interrupted.
    """
    require_free(Path(out), resume)
    if not hasattr(dataset, "iter_batches"):
        yield dataset, resume
        return
    folder = Path(out) / SPOOL
    if not (folder / COMPLETE).exists():
        _write(dataset, folder, options)
    yield folder, True
    shutil.rmtree(folder)


def _write(dataset: Any, folder: Path, options: dict[str, Any]) -> None:
    """Write the rows in their order; Ray reads ahead meanwhile."""
    _, parquet = pyarrow(folder)
    key = options.get("key") or ()
    wanted = [*([key] if isinstance(key, str) else key), *(options.get("columns") or ())]
    if not key:
        raise MCBNError("name the key column(s) of the data set by key=: nothing else tells its rows apart")
    names = list(dataset.schema().names)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MCBNError(f"the data set has no column {missing[0]!r}; it has {', '.join(names)}")
    shutil.rmtree(folder, ignore_errors=True)
    size = options.get("part_rows") or FILE_ROWS
    execution = dataset.context.execution_options
    before, execution.preserve_order = execution.preserve_order, True  # whoever reads them first
    try:
        for number, table in enumerate(dataset.iter_batches(batch_size=size, batch_format="pyarrow")):
            with replacing(folder / f"rows-{number:06d}.parquet") as temporary:
                parquet.write_table(table, temporary)
    finally:
        execution.preserve_order = before
    (folder / COMPLETE).touch()
