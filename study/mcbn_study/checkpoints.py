"""Tensors put back as they were, and trained networks read from files."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError

N = TypeVar("N", bound=nn.Module)


@torch.no_grad()
def put_back(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Fill tensors in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back what is changed of tensors inside."""
    tensors = list(tensors)
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        put_back(tensors, before)


def load_weights(network: N, tensors: Mapping[str, Tensor], path: Path) -> N:
    """Load the weights that a file holds, which must fit; return the network in eval mode."""
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise MCBNError(f"{path} does not fit the network it names: {error}; remove it to train anew") from error
    return network.eval()
