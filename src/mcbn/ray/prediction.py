"""Prediction on Ray: parts of the input, worked on by actors that hold the network and its posterior.

The rows of a `ray.data.Dataset` become files first: batches depend on their order alone, and a job can be resumed.
"""

import json
import logging
import shutil
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.model import MCBN
from mcbn.ray.cluster import connected, pack, require_ray, unpack, workers_of
from mcbn.scale.job import Job, on_device, plan
from mcbn.scale.work import Folder, Outcome, Summary, require_free, work
from mcbn.tables.formats import pyarrow

SPOOL, COMPLETE = ".input", "complete"
FILE_ROWS = 2**20  # of a data set, in one file
TRIES = 4  # of one item, or of starting one actor, before its loss is an error
PATIENCE = 60.0  # seconds without any actor before a warning
LOST = ("RayActorError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError", "ObjectLostError")  # not the item's


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
        yield from (Outcome(**json.loads(answer)) for answer in answers)
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
        return json.dumps(asdict(outcome))


class _Seat(NamedTuple):
    """An actor, and the item it is at work on; None while it starts."""

    number: int
    actor: Any
    item: str | None = None


def run_actors(
    ray: Any, kind: type, arguments: Sequence[Any], resources: dict[str, Any], items: Sequence[str], size: int
) -> Iterator[str]:
    """Yield what `kind(*arguments).work(item)` returns for every item once, in the order they end.

    An actor that has not started holds no item, so that one without room in the cluster holds nothing up. Which actor
    is lost, and how often, changes nothing as long as the same item ends the same.
    """
    pool = _Pool(ray, ray.remote(scheduling_strategy="SPREAD", max_restarts=0, **resources)(kind), arguments)
    try:
        yield from pool.run(items, size)
    finally:  # none outlives the job
        for seat in (*pool.seats.values(), *pool.idle):
            ray.kill(seat.actor)


class _Pool:
    def __init__(self, ray: Any, kind: Any, arguments: Sequence[Any]) -> None:
        self.ray, self.kind, self.arguments = ray, kind, arguments
        self.seats: dict[Any, _Seat] = {}  # by the reference to what is awaited
        self.idle: list[_Seat] = []
        self.lost: Counter[str | int] = Counter()
        self.patient = True

    def run(self, items: Sequence[str], size: int) -> Iterator[str]:
        todo = deque(items)
        for number in range(size):
            self._start(number)
        while todo or any(seat.item is not None for seat in self.seats.values()):
            reference, seat = self._next()
            try:
                answer = self.ray.get(reference)
            except tuple(getattr(self.ray.exceptions, name) for name in LOST) as error:
                self._replace(seat, error)
                todo.extendleft([seat.item] if seat.item is not None else [])
                answer = None
            else:
                self.idle.append(seat)
            while todo and self.idle:
                free, item = self.idle.pop(), todo.popleft()
                self.seats[free.actor.work.remote(item)] = free._replace(item=item)
            if answer is not None:  # an actor that has started answers None
                yield answer

    def _start(self, number: int) -> None:
        actor = self.kind.remote(*self.arguments)
        self.seats[actor.ready.remote()] = _Seat(number, actor)

    def _next(self) -> tuple[Any, _Seat]:
        """Wait for an actor to start, to end an item, or to be lost."""
        while True:
            ended, _ = self.ray.wait(list(self.seats), timeout=PATIENCE)
            if ended:
                self.patient = False
                return ended[0], self.seats.pop(ended[0])
            if self.patient:
                self.patient = False
                warnings.warn(
                    f"mcbn: no actor has started in {PATIENCE:.0f} seconds; the cluster has "
                    f"{self.ray.available_resources()} free: ask for fewer threads=, or wait for others to end",
                    stacklevel=2,
                )

    def _replace(self, seat: _Seat, error: Exception) -> None:
        """Start another actor where one was lost, unless the same item or place has lost too many."""
        lost = seat.number if seat.item is None else seat.item
        self.lost[lost] += 1
        if self.lost[lost] >= TRIES:
            raise error
        self.ray.kill(seat.actor)
        self._start(seat.number)


def run_data(
    ray: Any, kind: type, arguments: Sequence[Any], resources: dict[str, Any], items: Sequence[str], size: int
) -> Iterator[str]:
    """Yield what `kind(*arguments)` answers for every item once, in the order they end; as `run_actors`."""
    data = require_ray("ray.data")
    listed = data.from_items([{"item": item} for item in items], override_num_blocks=len(items))
    listed.context.enable_progress_bars = False  # the context of this data set alone
    listed.context.execution_options.preserve_order = False
    each = {"num_cpus": resources["num_cpus"], "num_gpus": resources["num_gpus"] or None, "batch_size": 1}
    done = listed.map_batches(
        kind, compute=data.ActorPoolStrategy(size=size), fn_constructor_args=tuple(arguments), **each
    )
    logger = logging.getLogger("ray.data")  # it reports every plan it runs: leave the terminal to the caller
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield from (row["answer"] for row in done.iter_rows())
    finally:
        logger.setLevel(before)


POOLS = {"data": run_data, "actors": run_actors}


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
    before, execution.preserve_order = execution.preserve_order, True
    try:
        for number, table in enumerate(dataset.iter_batches(batch_size=size, batch_format="pyarrow")):
            with replacing(folder / f"rows-{number:06d}.parquet") as temporary:
                parquet.write_table(table, temporary)
    finally:
        execution.preserve_order = before
    (folder / COMPLETE).touch()
