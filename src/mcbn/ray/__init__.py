"""mcbn on a Ray cluster: prediction of many files, and `fit` as tasks that draw shares; extra `mcbn[ray]`."""

from typing import Any, TypeVar

import torch

from mcbn import batches
from mcbn.batching import shares
from mcbn.errors import MCBNError, require_choice
from mcbn.field.adapt import centre_on_running, record_running
from mcbn.model import CENTRES, MCBN
from mcbn.network import Network, unwrap
from mcbn.posterior import Posterior, require_family
from mcbn.ray.cluster import connected, pack, unpack, workers_of
from mcbn.ray.prediction import predict

__all__ = ["fit", "predict"]

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
        n_samples: T.
        batch_size: M; the loader's where it is not given.
        seed: draw t depends on (seed, t) alone; a task whose worker is lost is run again with the same result.
        posterior: "sample", "gaussian" or "layerwise".
        inputs: overrides the constructor's.
        centre: "drawn", or "running" as `MCBN.fit` has it.
        workers: tasks; by default one a GPU, or one for as many CPUs as `threads`.
        threads: CPU threads of a task.
        address: as `mcbn.ray.predict`.
    """
    require_family(posterior)
    require_choice("centre", centre, CENTRES)
    if posterior == "diagonal":
        raise MCBNError('posterior="diagonal" is one pass over the data, not T draws; fit it in one process')
    inputs = bayes.inputs if inputs is None else inputs
    network = bayes.copy_network()
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
    bayes.inputs = inputs
    if centre == "running":
        recorded = record_running(bayes.adopt(network, drawn), data, seed)
        drawn = centre_on_running(drawn, recorded._replace(posterior=drawn))
    bayes.adopt(network, drawn if posterior == "sample" else drawn.as_gaussian(posterior, seed=seed))
    return bayes


def _draw(payload: bytes, options: dict[str, Any], draws: list[int], threads: int) -> Posterior:
    """Draw one share, on the GPU that Ray gave this task, else on the CPU."""
    torch.set_num_threads(threads)
    bayes, data = unpack(payload)
    if torch.cuda.is_available():
        bayes.model = bayes.model.to("cuda")
    return bayes.fit(data, **options, draws=draws).posterior.to("cpu")  # type: ignore[no-any-return]
