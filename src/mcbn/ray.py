"""mcbn on a Ray cluster: `predict` of many files by actors, and `fit` as tasks that draw shares; extra `mcbn[ray]`.

Ray is imported where it is needed and connected to within a time limit. What runs where stands in docs/scale.md.
"""

import importlib
import json
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcbn import batches
from mcbn.batching import shares
from mcbn.distributed import in_family, require_draws
from mcbn.errors import MCBNError, extra, one_line
from mcbn.field.adapt import record_running
from mcbn.model import MCBN
from mcbn.network import Network, unwrap
from mcbn.posterior import Posterior
from mcbn.scale import OnPart, Outcome, Summary, clear, collect, opened, require_free, work
from mcbn.scale.job import SPOOL, Job, on_device, plan

CONNECT_SECONDS = 10.0
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113, section 3.4
COMPLETE, FAILED = "complete", "failed"
GO_ON = "finished parts are kept: go on with resume=True (--resume) once it is mended"
FILE_ROWS = 2**20  # of a data set, in one file
B = TypeVar("B", bound=MCBN[Any])


def fit(
    bayes: B,
    data: Any,
    *,
    n_samples: int = 100,
    batch_size: int | None = None,
    seed: int = 0,
    posterior: str = "sample",
    inputs: batches.Picker = None,
    centre: str = "drawn",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
) -> B:
    """Fit on a cluster: the posterior of one process, bit for bit on equal machines.

    Args:
        bayes: an MCBN; it ends fitted as by `MCBN.fit`.
        data: training data that can be indexed; it travels to every worker, so let a Dataset hold paths, not images.
        n_samples, batch_size, seed, posterior, inputs, centre: as for `MCBN.fit`, but for posterior="diagonal"; a task
            whose worker is lost is run again with the same result.
        workers: tasks; by default one a GPU, or one for as many CPUs as `threads`.
        threads: CPU threads of a task.
        address: as `mcbn.ray.predict`.
    """
    require_draws(posterior, centre)
    inputs, network = bayes.inputs if inputs is None else inputs, bayes.copy_network()
    network.columns = batches.columns_of(data)
    unfitted = bayes.with_posterior(None, model=Network(unwrap(bayes.model), bayes.output).module.to("cpu"))
    options = {"n_samples": n_samples, "batch_size": batch_size, "seed": seed, "inputs": inputs}
    with connected(address) as ray:
        tasks, gpus = workers_of(ray, threads, workers)
        payload = ray.put(pack(unfitted, data))
        draw = ray.remote(num_cpus=threads, num_gpus=gpus)(_draw)
        pending = [draw.remote(payload, options, list(draws), threads) for draws in shares(n_samples, tasks) if draws]
        try:
            drawn = Posterior.merge(ray.get(pending)).to(network.device)
        except ray.exceptions.RayTaskError as error:
            raise MCBNError(f"a share could not be drawn: {error.cause}") from error
    bayes.adopt_fit(network, drawn, inputs)
    running = record_running(bayes, data, seed) if centre == "running" else None
    return bayes.adopt(network, in_family(drawn, running, posterior, seed))


def _draw(payload: bytes, options: dict[str, Any], draws: list[int], threads: int) -> Posterior:
    """Draw one share, on the GPU that Ray gave this task, else on the CPU."""
    torch.set_num_threads(threads)
    bayes, data = require_ray("ray.cloudpickle").loads(payload)
    if torch.cuda.is_available():
        bayes.model = bayes.model.to("cuda")
    return bayes.fit(data, **options, draws=draws).posterior.to("cpu")  # type: ignore[no-any-return]


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
    on_part: OnPart = None,
    **options: Any,
) -> Summary:
    """Predict tables or images on a cluster, into a folder of parquet files: bit for bit as `mcbn.scale.predict` does.

    Actors are restarted and parts given out again when a process or a machine is lost; a driver that was stopped goes
    on with `resume`. All machines see the inputs and the folder under the same path.

    Args:
        dataset: the inputs of `mcbn.scale.predict`; or a `ray.data.Dataset`, whose rows are first written to the folder
            in their order.
        bayes, out, resume, overwrite, on_part, options: as for `mcbn.scale.predict`.
        workers: actors; by default one a GPU, or one for as many CPUs as `threads` in a cluster without.
        threads: CPU threads of an actor.
        address: of the cluster; by default the one Ray is connected to, else one of this machine alone.
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
        with connected(address) as ray, opened(job, resume=again, overwrite=overwrite) as done:
            items = [part.name for part in job.parts if part.name not in done]
            return collect(job, done, _outcomes(ray, job, items, bayes, workers, threads) if items else (), on_part)


def _outcomes(
    ray: Any, job: Job, items: list[str], bayes: MCBN[Any], asked: int | None, threads: int
) -> Iterator[Outcome]:
    """Have actors, replaced where they are lost, work on parts; yield what becomes of each, in the order they end."""
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
        for outcome in (Outcome(**json.loads(row["answer"])) for row in done.iter_rows()):
            if outcome.status == FAILED:
                raise MCBNError(f"a worker failed: {outcome.reason}; {GO_ON}")
            yield outcome
    except ray.exceptions.RayError as error:
        raise MCBNError(f"a worker was lost: {one_line(error)}; {GO_ON}") from error
    finally:
        logger.setLevel(level)


class Worker:
    """An actor: network and posterior arrive once, parts one by one."""

    def __init__(self, payload: list[Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.bayes, self.job = require_ray("ray.cloudpickle").loads(require_ray().get(payload[0]))
        self.parts = {part.name: part for part in self.job.parts}
        if torch.cuda.is_available():  # the GPU that Ray gave this actor
            self.bayes = on_device(self.bayes, torch.device("cuda"))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Work on the one part that Ray Data names; answer what became of it, as text."""
        name = str(batch["item"][0])
        try:
            outcome = work(self.job, self.bayes, self.parts[name])
        except Exception as error:  # raised, it would be lost in what Ray Data says of it
            outcome = Outcome(name, FAILED, reason=one_line(error))
        return {"answer": [json.dumps(asdict(outcome))]}


@contextmanager
def spooled(
    dataset: Any, out: str | Path, resume: bool, overwrite: bool, options: dict[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """Give inputs as files, and whether the folder may hold something; those of a data set go when the job is done."""
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


def require_ray(module: str = "ray") -> Any:
    """Import Ray, or say how to get it."""
    with extra("ray", "this needs Ray"):
        return importlib.import_module(module)


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Give Ray: connected as it is, or for this while to an address, to $RAY_ADDRESS, or to this machine alone."""
    ray, address = require_ray(), address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield ray
        return
    if address not in (None, "auto", "local"):
        _require_listening(str(address))
    alone = {"include_dashboard": False} if address in (None, "local") else {}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **alone)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        place, cure = address or "this machine", "start one with `ray start --head`, or leave the address out"
        raise MCBNError(f"cannot join a Ray cluster at {place} ({one_line(error)}); {cure}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listening(address: str) -> None:
    """Refuse an address where nothing answers, within seconds: Ray itself would wait for minutes."""
    host, _, port = address.split("://")[-1].rpartition(":")
    if not host or not port.isdigit():
        raise MCBNError(f"a Ray address reads host:port, ray://host:port or auto; got {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
            connection.sendall(HTTP2_START)  # which Ray's servers speak: they answer with a frame of type 4
            if connection.recv(64)[3:4] != b"\x04":
                raise ConnectionError("what listens there is not Ray")
    except (OSError, OverflowError) as error:
        fault = f"no Ray cluster answers at {address} within {CONNECT_SECONDS:.0f} seconds ({error})"
        raise MCBNError(f"{fault}; check it with `ray status`, or leave the address out") from error


def workers_of(ray: Any, threads: int, asked: int | None) -> tuple[int, int]:
    """Return how many workers run at once, and how many GPUs each has: one where the cluster has any."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    return asked or gpus or max(1, int(resources.get("CPU", 1)) // threads), 1 if gpus else 0


def pack(bayes: MCBN[Any], *more: Any) -> bytes:
    """Serialise (bayes, *more); what the user's own files define goes by value: other machines may lack them."""
    cloudpickle = require_ray("ray.cloudpickle")
    objects = [*bayes.model.modules(), bayes.inputs, bayes.output, bayes.layers, *more]
    objects += [getattr(item, name, None) for item in more for name in ("dataset", "collate_fn", "reader")]
    objects += [getattr(item, "transform", None) for item in objects]
    names = {str(getattr(item, "__module__", None) or type(item).__module__) for item in objects}
    files = {name: str(getattr(sys.modules.get(name), "__file__", None) or "") for name in names}
    known = {"__main__", "torch", "mcbn", *sys.stdlib_module_names}  # and installed packages: other machines have them
    foreign = [name for name, file in files.items() if file and name.split(".")[0] not in known]
    registered = [sys.modules[name] for name in foreign if not re.search("(site|dist)-packages", files[name])]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((bayes, *more))  # type: ignore[no-any-return]
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
