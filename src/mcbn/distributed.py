"""`fit` on all ranks of a torch.distributed job: each draws its share, all end with the same posterior.

Draw t depends on (seed, t) alone. Ranks take whole groups of draws and gather them, over gloo or NCCL, so the posterior
is bit for bit that of one process on the same kind of machine, wherever all training batches have one shape.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import layer_of
from mcbn.batching import shares
from mcbn.errors import MCBNError
from mcbn.gaussian import require_family
from mcbn.model import MCBN
from mcbn.network import is_synchronised
from mcbn.posterior import Posterior
from mcbn.training_data import Source, read_source

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
    group: Any = None,
) -> B:
    """Fit on every rank of a process group; called by all of them with the same arguments and the whole data.

    Args:
        bayes: an MCBN of the same network on every rank; wrapped by DistributedDataParallel or not.
        data: training data that can be indexed, as for `MCBN.fit`; a DistributedSampler is looked through.
        n_samples: T over all ranks.
        batch_size: M; the loader's where it is not given, and for a network with SyncBatchNorm, whose statistics span
            the ranks, the loader's times the number of ranks.
        seed: draw t depends on (seed, t) alone.
        posterior: "sample", "gaussian" or "layerwise".
        inputs: overrides the constructor's.
        group: a process group; the default one where it is not given.
    """
    require_family(posterior)
    if posterior == "diagonal":
        raise MCBNError('posterior="diagonal" is one pass over the data, not T draws; fit it in one process')
    if not (dist.is_available() and dist.is_initialized()):
        raise MCBNError("torch.distributed has no process group; call init_process_group first, or bayes.fit")
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    options = {"n_samples": n_samples, "batch_size": _batch_size(bayes, data, batch_size, W), "seed": seed}
    twin = bayes.with_posterior(None)
    share = _share(twin, data, options | {"inputs": inputs}, rank, W)
    _agree(share, options | {"weights of the network": _weights(twin, share)}, group)
    assert share.posterior is not None
    drawn = gather(share.posterior, share.draws, group)
    fitted = drawn if posterior == "sample" else drawn.as_gaussian(posterior, seed=seed)
    bayes.adopt(twin.engine.network, fitted)
    bayes.inputs = twin.inputs
    return bayes


@dataclass(frozen=True)
class _Share:
    """What one rank has: its draws, or why it has none."""

    draws: range
    posterior: Posterior | None
    error: str | None


def _share(twin: MCBN[Any], data: Any, options: dict[str, Any], rank: int, W: int) -> _Share:
    """Draw this rank's share; a rank without one still draws the first, to know the layers."""
    own = range(0)
    try:
        own = shares(options["n_samples"], W)[rank]
        twin.fit(data, **options, draws=own or range(1))
    except Exception as error:  # the other ranks wait: they must hear of it
        return _Share(own, None, f"{type(error).__name__}: {error}")
    return _Share(own, twin.posterior, None)


def _batch_size(bayes: MCBN[Any], data: Any, asked: int | None, W: int) -> int | None:
    """Resolve M where SyncBatchNorm makes the batches of all ranks one."""
    if asked is not None or not is_synchronised(bayes.model):
        return asked
    source = read_source(data)
    known = source.batch_size if isinstance(source, Source) else None
    return None if known is None else known * W


def _weights(twin: MCBN[Any], share: _Share) -> str | None:
    """Hash what the draws depend on: all tensors but the running statistics of the layers that are drawn.

    Those differ from rank to rank after training under DistributedDataParallel, and no draw reads them.
    """
    if share.posterior is None:
        return None
    drawn = {layer_of(name) for name in share.posterior.layers}
    digest = hashlib.sha256()
    for name, tensor in sorted(twin.engine.network.module.state_dict().items()):
        module, _, last = name.rpartition(".")
        if last not in RUNNING or module not in drawn:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _agree(share: _Share, options: dict[str, Any], group: Any) -> None:
    """Exchange errors and arguments, so that either all ranks go on or all of them raise."""
    p = share.posterior
    layers = None if p is None else [(name, value.shape[1]) for name, value in p.mean.items()]
    mine = {"error": share.error, **options, "layers": layers, "dtype": None if p is None else _flat(p).dtype}
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs["error"] is not None:
            raise MCBNError(f"rank {rank} could not draw its share: {theirs['error']}")
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise MCBNError(f"ranks differ in {name}: {everyone[0][name]!r} on rank 0, {value!r} on rank {rank}")


def gather(posterior: Posterior, draws: range, group: Any = None) -> Posterior:
    """Gather the draws of all ranks, of which `draws` are this one's: the same posterior on each."""
    W = dist.get_world_size(group)
    rows = _flat(posterior)[: len(draws)]  # (t, P)
    device = _exchange_device(rows, group)
    counts = [torch.zeros(2, dtype=torch.long, device=device) for _ in range(W)]
    dist.all_gather(counts, torch.tensor([draws.start, draws.stop], device=device), group=group)
    spans = [range(*span.tolist()) for span in counts]
    most = max(len(span) for span in spans)
    padded = torch.zeros(most, rows.shape[1], dtype=rows.dtype, device=device)
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(W)]
    dist.all_gather(gathered, padded, group=group)
    parts = [
        _unflat(part[: len(span)].to(rows.device), posterior, span)
        for part, span in zip(gathered, spans, strict=True)
        if len(span)
    ]
    return Posterior.merge(parts)


def _exchange_device(rows: Tensor, group: Any) -> torch.device:
    """NCCL moves memory of a GPU, gloo of the CPU."""
    if dist.get_backend(group) == "nccl":
        return rows.device if rows.is_cuda else torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _flat(posterior: Posterior) -> Tensor:
    """Lay all statistics of a draw out in one row, (t, P)."""
    return torch.cat([*posterior.mean.values(), *posterior.var.values()], 1)


def _unflat(rows: Tensor, like: Posterior, span: range) -> Posterior:
    """Take rows (t, P) apart again into layers."""
    own = [*like.mean.values(), *like.var.values()]
    cut = torch.split(rows, [value.shape[1] for value in own], 1)
    pieces = [piece.to(value.dtype).contiguous() for piece, value in zip(cut, own, strict=True)]
    L = len(like.layers)
    mean, var = dict(zip(like.layers, pieces[:L], strict=True)), dict(zip(like.layers, pieces[L:], strict=True))
    return Posterior(mean, var, like.batch_size, seed=like.seed, numbers=tuple(span))
