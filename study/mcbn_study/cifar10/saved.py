"""Trained networks and half-trained ones as files: safetensors, whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn_study.networks.resnet import CifarResNet

FORMAT = "mcbn-cifar-resnet-1"


def save_network(network: CifarResNet, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> Path:
    """Write a trained network; `facts` on its training go into the file's metadata as JSON."""
    metadata = {"depth": str(network.depth), "dropout": repr(network.dropout), "facts": json.dumps(dict(facts))}
    return write(network.state_dict(), Path(path), metadata)


def load_network(path: str | os.PathLike[str]) -> CifarResNet:
    """Read a trained network, in eval mode on the CPU; depth and dropout rate stand in the file."""
    tensors, metadata = read(Path(path))
    network = CifarResNet(int(metadata["depth"]), dropout=float(metadata["dropout"]), seed=0)
    fill(network, tensors, Path(path))
    return network.eval()


def network_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what was noted on a network's training: profile, seed, seconds, device."""
    facts: dict[str, Any] = json.loads(read(Path(path))[1]["facts"])
    return facts


def write(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> Path:
    """Write tensors and text."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, {"format": FORMAT, **metadata})
    return path


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and text; a file that is cut off, damaged or of another kind raises MCBNError."""
    if not path.is_file():
        raise MCBNError(f"there is no network {path}; train it with `mcbn reproduce cifar10`")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise MCBNError(f"{path} is damaged ({error}); remove it and train again") from error
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} holds no network of `mcbn reproduce cifar10` (format {metadata.get('format')!r})")
    return tensors, metadata


def fill(network: torch.nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load a state dict that must fit."""
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise MCBNError(f"{path} does not fit the network it names: {error}") from error
