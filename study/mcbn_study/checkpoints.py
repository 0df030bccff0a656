"""A training on its way as a file to go on from, as if nothing had happened; and trained networks read from files."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError
from mcbn.saving import read_tensors, write_tensors

N = TypeVar("N", bound=nn.Module)
State = Mapping[str, Tensor]


def training_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors that a step changes, themselves; the optimiser's must exist already."""
    state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        state |= {f"{kind}.{name}": tensor for kind, tensor in optimizer.state[parameter].items()}
    return state


def keep(path: Path, state: State, settings: Mapping[str, Any], progress: Any) -> None:
    """Write the state of a training, the settings that made it and how far it is, as JSON has them."""
    write_tensors(path, state, {"settings": json.dumps(settings), "progress": json.dumps(progress)})


def resume(path: Path, state: State, settings: Mapping[str, Any]) -> Any:
    """Fill the state from a file that the same settings gave; return the progress, None where there is no file."""
    if not path.exists():
        return None
    values, metadata = read_tensors(path, hint="remove it to train from the beginning")
    if json.loads(metadata.get("settings", "null")) != settings:
        raise MCBNError(f"{path} is of a training with other settings; remove it, or use another folder with --out")
    if {name: tensor.shape for name, tensor in state.items()} != {name: t.shape for name, t in values.items()}:
        raise MCBNError(f"{path} does not fit the network it names; remove it to train from the beginning")
    put_back(state.values(), (values[name] for name in state))
    return json.loads(metadata["progress"])


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


def load_weights(network: N, tensors: State, path: Path) -> N:
    """Load the weights that a file holds, which must fit; return the network in eval mode."""
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise MCBNError(f"{path} does not fit the network it names: {error}; remove it to train anew") from error
    return network.eval()
