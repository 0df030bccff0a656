"""SyncBatchNorm: statistics of one batch over all ranks, so that M is the batch of all ranks together."""

import warnings

import torch.distributed as dist
from torch import nn

from mcbn.network import unwrap


def is_synchronised(model: nn.Module) -> bool:
    """Tell whether a network has SyncBatchNorm layers."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in unwrap(model).modules())


def warn_if_synchronised(model: nn.Module) -> None:
    """Warn that a loader's batch is one rank's, while such a network was trained on the batch of all ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and is_synchronised(model):
        warnings.warn(
            "mcbn: the network has SyncBatchNorm, which takes the statistics of the batches of all "
            f"{dist.get_world_size()} ranks together, so M is as many times the loader's: pass batch_size=, or call "
            "mcbn.distributed.fit",
            UserWarning,
            stacklevel=3,
        )
