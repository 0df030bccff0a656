"""The habits of PyTorch on a fitted MCBN: save and load, `state_dict`, `to`."""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mcbn import batch_norm as statistics
from mcbn import batches
from mcbn import saving as storage
from mcbn.errors import MCBNError
from mcbn.layers import Layers
from mcbn.network import Network, Output
from mcbn.posterior import Posterior
from mcbn.tuning import Tunable

METADATA = (
    "metadata"  # key of a state dict: its text, JSON as bytes, since torch.save and safetensors both keep tensors
)
TAU = "tau"


class Portable(Tunable):
    """A fitted posterior that can be kept, moved and put back."""

    model: nn.Module
    layers: Layers
    output: Output
    _placement: tuple[torch.device | None, torch.dtype | None] = (None, None)  # where `to` put the private network

    @property
    @abstractmethod
    def posterior(self) -> Posterior:
        """The fitted draws."""

    @property
    @abstractmethod
    def network(self) -> Network | None:
        """The private network; None until fitted."""

    @abstractmethod
    def _set(self, network: Network, drawn: Posterior) -> None: ...

    def _watched(self) -> Network:
        """Copy the network, where `to` asked for it, and let the copy tell which of its modules is running."""
        network = Network(self.model, self.output).to(*self._placement)
        statistics.watch(network.module)
        return network

    def save(self, path: str | Path) -> None:
        """Write posterior, tau and settings as one safetensors file."""
        tensors, metadata = self._packed()
        storage.save(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, inputs: batches.Picker = None, output: Output = None) -> Self:
        """Read a saved posterior for this network, onto its device; functions as inputs= or output= come again."""
        tensors, settings = storage.read(Path(path))
        drawn = storage.unpack(str(path), tensors, settings, model)
        stored = {name: json.loads(settings[name]) if name in settings else None for name in ("inputs", "output")}
        make: Any = cls  # the subclass takes a network and a task
        bayes: Self = make(
            model,
            settings["task"],
            inputs=inputs if inputs is not None else stored["inputs"],
            output=output if output is not None else stored["output"],
        )
        bayes._restore(drawn, torch.tensor(json.loads(settings["tau"]), dtype=torch.float64))
        return bayes

    def state_dict(self) -> dict[str, Tensor]:
        """Return posterior, tau and their metadata as tensors alone: for `torch.save`, safetensors, a checkpoint.

        The network is not in it: keep `model.state_dict()` beside it.
        """
        tensors, metadata = self._packed()
        text = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
        return {**{name: value.clone() for name, value in tensors.items()}, TAU: self._tau.clone(), METADATA: text}

    def load_state_dict(self, state: dict[str, Tensor]) -> Self:
        """Take over posterior and tau of a `state_dict` made with this network; no fit is needed before.

        The draws go to the network's device. Whatever does not fit is an error, and nothing is changed then.
        """
        missing = [key for key in (METADATA, TAU) if not isinstance(state.get(key), Tensor)]
        if missing:
            raise MCBNError(f"not a state_dict of an MCBN: {missing[0]!r} is missing; it has {sorted(state)[:5]}")
        metadata = _text(state[METADATA])
        if metadata["task"] != self.task:
            raise MCBNError(f"the state_dict is of task {metadata['task']!r}, this MCBN of {self.task!r}")
        tensors = {name: value for name, value in state.items() if name not in (METADATA, TAU)}
        self._restore(storage.unpack("the state_dict", tensors, metadata, self.model), state[TAU])
        return self

    def to(
        self, device: torch.device | torch.dtype | Tensor | str | int | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Move the private network and its draws to a device, a floating dtype, both, or those of a tensor.

        In place, and returned, as of a module; your own network stays where it is. Before `fit` it is where the copy
        will be made. Half precision keeps its statistics in float32, as training does.
        """
        place = _place(device, dtype)
        self._placement = tuple(
            new if new is not None else old for new, old in zip(place, self._placement, strict=True)
        )  # type: ignore[assignment]
        if self.network is not None:
            network = self.network.to(*place)
            self._set(network, self.posterior.to(network.device, network.dtype))
        return self

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what is kept: tensors on the CPU, and text."""
        settings = {"task": self.task, "tau": json.dumps(self._tau.tolist())}
        for name, value in (("inputs", self.inputs), ("output", self.output)):
            if value is not None and not callable(value):
                settings[name] = json.dumps(value)
        posterior = self.posterior
        assert self.network is not None  # posterior refuses before that
        return storage.pack(posterior, self.network.module, settings)

    def _restore(self, drawn: Posterior, tau: Tensor) -> None:
        with torch.inference_mode(False):
            network = self._watched()
            layers = list(dict.fromkeys(statistics.layer_of(name) for name in drawn.layers))
            self._set(network, drawn.to(network.device))
        self.layers, self.tau = layers, tau


def _text(encoded: Tensor) -> dict[str, str]:
    try:
        metadata: dict[str, str] = json.loads(bytes(encoded.cpu().tolist()))
    except (ValueError, TypeError) as error:
        raise MCBNError(f"the state_dict is damaged: its metadata cannot be read ({error})") from error
    return metadata


def _place(device: Any, dtype: torch.dtype | None) -> tuple[torch.device | None, torch.dtype | None]:
    """Read the arguments of `to` as a module does."""
    if isinstance(device, Tensor):
        device, dtype = device.device, device.dtype
    elif isinstance(device, torch.dtype):
        device, dtype = None, device
    if dtype is not None and not dtype.is_floating_point:
        raise MCBNError(f"to takes a floating dtype, got {dtype}; a network cannot run in it")
    try:
        return None if device is None else torch.device(device), dtype
    except (RuntimeError, TypeError) as error:
        raise MCBNError(f'to takes a device such as "cpu" or "cuda:0", or a floating dtype; got {device!r}') from error
