"""Prediction on Ray: parts of the input, worked on by actors that hold the network and its posterior.

The rows of a `ray.data.Dataset` become files first: batches depend on their order alone, and a job can be resumed.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.ray.cluster import connected, pack, require_ray, unpack, workers_of
from mcbn.scale.job import SPOOL, Job, on_device, plan
from mcbn.scale.work import Folder, Outcome, Summary, clear, require_free, work

COMPLETE = "complete"
FILE_ROWS = 2**20  # of a data set, in one file


def predict(
    dataset: Any,
    bayes: MCBN[Any],
    *,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    threads: int = 1,
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
        resume, overwrite: as for `mcbn.scale.predict`.
        workers: actors; by default one a GPU, or one for as many CPUs as `threads` in a cluster without.
        threads: CPU threads of an actor.
        address: of the cluster; by default the one Ray is connected to, else one of this machine alone.
        on_part: called with the outcome of each part.
        options: those of `mcbn.scale.predict`.
    """
    batches.require_int("threads", threads, 1)
    if workers is not None:
        batches.require_int("workers", workers, 1)
    bayes.engine_for()
    require_ray()
    with spooled(dataset, out, resume, overwrite, options) as (inputs, again):
        try:
            job = plan(inputs, bayes, out=out, **options)
        except MCBNError:
            if again and not resume:  # written just now, for a job that cannot be
                shutil.rmtree(inputs)
            raise
        with connected(address) as ray, Folder.opened(job, resume=again, overwrite=overwrite) as folder:
            items = [part.name for part in folder.missing()]
            outcomes = _outcomes(ray, job, items, bayes, workers, threads) if items else ()
            return folder.collect(outcomes, on_part)


def _outcomes(
    ray: Any, job: Job, items: list[str], bayes: MCBN[Any], asked: int | None, threads: int
) -> Iterator[Outcome]:
    """Have actors work on parts, by their names; yield what becomes of each, in the order they end.

    Ray Data replaces actors that are lost, and answers for every part once.
    """
    workers, gpus = workers_of(ray, threads, asked)
    payload = ray.put(pack(on_device(bayes, torch.device("cpu")), job))
    data = require_ray("ray.data")
    actors = data.ActorPoolStrategy(size=min(workers, len(items)))
    resources = {"num_cpus": threads, "num_gpus": gpus or None, "compute": actors}
    listed = data.from_items([{"item": item} for item in items], override_num_blocks=len(items))
    listed.context.enable_progress_bars = False  # the context of this data set alone
    listed.context.execution_options.preserve_order = False
    done = listed.map_batches(Worker, fn_constructor_args=([payload], threads), batch_size=1, **resources)
    logger = logging.getLogger("ray.data")  # it reports every plan it runs: leave the terminal to the caller
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield from (Outcome(**json.loads(row["answer"])) for row in done.iter_rows())
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines()
        raise MCBNError(
            f"a worker failed ({type(cause).__name__}: {lines[-1] if lines else ''}); finished parts are kept: go on "
            "with resume=True (--resume) once it is mended"
        ) from error
    finally:
        logger.setLevel(level)


class Worker:
    """An actor: network and posterior arrive once, parts one by one."""

    def __init__(self, payload: list[Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.bayes, self.job = unpack(require_ray().get(payload[0]))
        self.parts = {part.name: part for part in self.job.parts}
        if torch.cuda.is_available():  # the GPU that Ray gave this actor
            self.bayes = on_device(self.bayes, torch.device("cuda"))
        self.ended: float | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Work on the one part that Ray Data names; answer what became of it, as text."""
        waited = 0.0 if self.ended is None else time.perf_counter() - self.ended
        outcome = replace(work(self.job, self.bayes, self.parts[str(batch["item"][0])]), waited=waited)
        self.ended = time.perf_counter()
        return {"answer": [json.dumps(asdict(outcome))]}


@contextmanager
def spooled(
    dataset: Any, out: str | Path, resume: bool, overwrite: bool, options: dict[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """Give inputs as files, and whether the folder may hold something: what is no data set goes as it is.

    The files are removed once the job is done, and kept where it is interrupted.
    """
    require_free(Path(out), resume, overwrite)
    if not hasattr(dataset, "iter_batches"):
        yield dataset, resume
        return
    folder = Path(out) / SPOOL
    if not options.get("key"):
        raise MCBNError("name the key column(s) of the data set by key=: nothing else tells its rows apart")
    if overwrite and not resume:
        clear(Path(out))
    if not (folder / COMPLETE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        execution = dataset.context.execution_options
        before, execution.preserve_order = execution.preserve_order, True
        try:
            dataset.write_parquet(str(folder), min_rows_per_file=options.get("part_rows") or FILE_ROWS)
        finally:
            execution.preserve_order = before
        (folder / COMPLETE).touch()
    yield folder, True
    shutil.rmtree(folder)
