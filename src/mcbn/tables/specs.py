"""What a command line names: an object by `package.module:name`, weights in a file, a device."""

import difflib
import importlib
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError, one_line
from mcbn.network import unwrap
from mcbn.private_torch import COMPILED
from mcbn.randomness import isolated_random
from mcbn.saving import read_tensors

WRAPPERS = ("state_dict", "model_state_dict", "model")  # where training scripts keep the weights of a checkpoint
PREFIXES = ("module.", f"{COMPILED}.")  # what DataParallel and torch.compile put before every name


def make(spec: str, option: str) -> Any:
    """Import `package.module:factory` and call that without arguments; what is not callable is taken as it is."""
    with isolated_random(0):  # what a factory leaves to chance is the same in every command
        factory = find(spec, option, "factory")
        if isinstance(factory, nn.Module) or not callable(factory):
            return factory
        try:
            with _working_directory_importable():
                return factory()
        except Exception as error:
            raise MCBNError(f"{option} {spec}: calling it without arguments failed: {one_line(error)}") from error


def find(spec: str, option: str, kind: str = "name") -> Any:
    """Import what `package.module:name` names, without calling it."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise MCBNError(f"{option} must read package.module:{kind}; got {spec!r}")
    try:
        with _working_directory_importable():
            named: Any = importlib.import_module(module_name)
    except Exception as error:
        why = f"({one_line(error)}); it must be installed or lie in {os.getcwd()}"
        raise MCBNError(f"{option}: cannot import {module_name!r} {why}") from error
    for attribute in name.split("."):
        if not hasattr(named, attribute):
            near = difflib.get_close_matches(attribute, [n for n in dir(named) if not n.startswith("_")])
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MCBNError(f"{option}: {module_name} has no {name!r}{hint}")
        named = getattr(named, attribute)
    return named


def model(spec: str, weights: Path | None, device: torch.device, *, own_weights: bool = False) -> nn.Module:
    """Make the network, give it its weights, and move it; `own_weights` are those that its factory gave it."""
    if weights is None and not own_weights:
        cure = "give --weights, or --own-weights to take the network as the factory makes it"
        raise MCBNError(f"--model {spec} without --weights has random ones, unless the factory loads them; {cure}")
    network = make(spec, "--model")
    if not isinstance(network, nn.Module):
        raise MCBNError(f"--model {spec} gives a {type(network).__name__}, not a torch.nn.Module")
    if weights is not None:
        _load(unwrap(network), weights)
    return network.to(device)


def device(name: str) -> torch.device:
    """Read a device: auto takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MCBNError(f"--device {name} cannot be used here ({one_line(error)}); take auto or cpu") from error


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _load(network: nn.Module, path: Path) -> None:
    state = _state(path)
    for prefix in PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        details = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise MCBNError(f"the weights of {path} are not those of {type(network).__name__}: {details}") from error


def _state(path: Path) -> dict[str, Tensor]:
    """Read tensors by name, from safetensors or from what torch.save wrote; nothing in the file is executed."""
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    try:
        content = torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise MCBNError(f"there is no file {path}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        cure = "write it with torch.save(net.state_dict(), ...) or safetensors"
        raise MCBNError(f"{path} is not a file of weights ({one_line(error)}); {cure}") from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise MCBNError(f"{path} holds a {type(content).__name__}, not tensors by name; save net.state_dict()")
    return dict(content)
