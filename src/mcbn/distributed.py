"""`fit` on all ranks of a torch.distributed job: each draws its share, all end with the same posterior.

Draw t depends on (seed, t) alone. Ranks take whole groups of draws and exchange them, over gloo or NCCL, so the
posterior is bit for bit that of one process on the same kind of machine, wherever all training batches have one shape.
"""

import hashlib
from typing import Any, TypeVar

import torch.distributed as dist

from mcbn import batches
from mcbn.batch_norm import layer_of
from mcbn.batching import read_source, shares
from mcbn.engine.record import Recorded
from mcbn.errors import MCBNError, require_choice
from mcbn.field.adapt import centre_on_running, record_running
from mcbn.model import CENTRES, MCBN
from mcbn.network import is_synchronised
from mcbn.posterior import FAMILIES, Posterior
from mcbn.saving import checksums

B = TypeVar("B", bound=MCBN[Any])
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


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
    group: Any = None,
) -> B:
    """Fit on every rank of a process group; called by all of them with the same arguments and the whole data.

    Args:
        bayes: an MCBN of the same network on every rank; wrapped by DistributedDataParallel or not.
        data: training data that can be indexed, as for `MCBN.fit`; a DistributedSampler is looked through.
        n_samples, seed, posterior, inputs, centre: as for `MCBN.fit`, but for posterior="diagonal"; T is over all
            ranks, running statistics are those of the first.
        batch_size: M; the loader's where it is not given, and for a network with SyncBatchNorm, whose statistics span
            the ranks, the loader's times the number of ranks.
        group: a process group; the default one where it is not given.
    """
    require_draws(posterior, centre)
    if not (dist.is_available() and dist.is_initialized()):
        raise MCBNError("torch.distributed has no process group; call init_process_group first, or bayes.fit")
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    if batch_size is None and is_synchronised(bayes.model):  # one batch is that of all ranks
        known = read_source(data).batch_size
        batch_size = None if known is None else known * W
    options, twin = {"n_samples": n_samples, "batch_size": batch_size, "seed": seed}, bayes.with_posterior(None)
    share = options | _share(twin, data, options | {"inputs": inputs}, rank, W)
    if centre == "running" and share["error"] is None:
        share["running"] = record_running(twin, data, seed)._replace(first=None)
    everyone: list[dict[str, Any]] = [{} for _ in range(W)]
    dist.all_gather_object(everyone, share, group=group)
    _require_agreement(everyone)
    network = twin.engine.network
    drawn = Posterior.merge(theirs["draws"] for theirs in everyone if theirs["draws"]).to(network.device)
    return bayes.adopt_fit(network, in_family(drawn, everyone[0].get("running"), posterior, seed), twin.inputs)


def require_draws(posterior: str, centre: str) -> None:
    """Refuse a fit that cannot be shared out."""
    require_choice("posterior", posterior, FAMILIES)
    require_choice("centre", centre, CENTRES)
    if posterior == "diagonal":
        raise MCBNError('posterior="diagonal" is one pass over the data, not T draws; fit it in one process')


def in_family(drawn: Posterior, running: Recorded | None, posterior: str, seed: int) -> Posterior:
    """Move the draws of all to running statistics, where they are given, and model them by the family asked for."""
    if running is not None:
        drawn = centre_on_running(drawn, running._replace(posterior=drawn))
    return drawn if posterior == "sample" else drawn.as_gaussian(posterior, seed=seed)


def _share(twin: MCBN[Any], data: Any, options: dict[str, Any], rank: int, W: int) -> dict[str, Any]:
    """Draw this rank's share and say what must be alike on all; a rank without one draws the first, to know that."""
    try:
        numbers = shares(options["n_samples"], W)[rank]
        drawn = twin.fit(data, **options, draws=numbers or range(1)).posterior.to("cpu")
    except Exception as error:  # the other ranks wait: they must hear of it
        return {"error": f"{type(error).__name__}: {error}"}
    # running statistics of drawn layers differ between ranks after training, draws do not
    running = {f"{layer_of(name)}.{statistic}" for name in drawn.layers for statistic in RUNNING}
    weights = {n: t for n, t in twin.engine.network.module.state_dict().items() if n not in running}
    digest = hashlib.sha256(repr(sorted(checksums(weights, {}).items())).encode())
    return {
        "error": None,
        "weights of the network": digest.hexdigest()[:12],
        "layers": [(name, value.shape[1], value.dtype) for name, value in drawn.mean.items()],
        "draws": drawn if numbers else None,
    }


def _require_agreement(everyone: list[dict[str, Any]]) -> None:
    """Raise on all ranks where one could not draw or had other arguments, so that none waits for another."""
    for rank, theirs in enumerate(everyone):
        if theirs["error"] is not None:
            raise MCBNError(f"rank {rank} could not draw its share: {theirs['error']}")
        for name, first in everyone[0].items():
            if name not in ("draws", "running") and theirs[name] != first:
                raise MCBNError(f"ranks differ in {name}: {first!r} on rank 0, {theirs[name]!r} on rank {rank}")
