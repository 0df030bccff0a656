"""Training on the device: one step, from raw bytes to new weights, is one CUDA graph; on the CPU it runs as it is."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn.data import Images
from mcbn.errors import MCBNError
from mcbn.networks import CifarResNet, standardize
from mcbn.randomness import isolated_random
from mcbn.reproduce.backend import fastest_convolutions
from mcbn.reproduce.cifar10 import saved
from mcbn.reproduce.cifar10.augmentation import Choices, crop, epoch_choices, pad, require_images
from mcbn.reproduce.cifar10.profiles import Profile

CHECKPOINT_SECONDS = 60.0
WARM_UPS = 3  # passes before a capture: kernels are chosen and loaded


class Epoch(NamedTuple):
    """How training stands after an epoch: means over its steps, seconds since the beginning."""

    number: int
    steps: int  # in all
    loss: float
    accuracy: float
    seconds: float


class Trained(NamedTuple):
    """A trained network, in eval mode, and its epochs."""

    network: CifarResNet
    epochs: list[Epoch]


def train(
    profile: Profile,
    images: Images,
    *,
    seed: int,
    dropout: float = 0.0,
    device: str = "cpu",
    checkpoint: Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    watch: Callable[[Epoch], None] = lambda epoch: None,
) -> Trained:
    """Train ResNet by SGD with momentum; the loss is cross-entropy + weight_decay / 2 * ||W||^2.

    W are the weights of convolutions and of the linear layer; neither gamma, beta nor bias decays (authors' code).
    Everything random depends on (seed, epoch), so that an interrupted training goes on as if nothing had happened.

    Args:
        profile: the schedule.
        images: what to train on, bytes.
        seed: of initial weights, order, crops, flips and dropout.
        dropout: rate in each unit.
        device: cpu or cuda.
        checkpoint: file to keep the state in on the way and to go on from; it is removed in the end.
        checkpoint_seconds: how often, at the end of an epoch.
        watch: is told of every epoch.
    """
    require_images(*images)
    if len(images.x) < profile.batch_size:
        raise MCBNError(f"{len(images.x)} images make no batch of {profile.batch_size}")
    kept = started = time.perf_counter()
    with fastest_convolutions(), torch.enable_grad():
        trainer = Trainer(profile, images, seed=seed, dropout=dropout, device=device)
        epochs = trainer.resume(checkpoint) if checkpoint is not None and checkpoint.exists() else []
        before = epochs[-1].seconds if epochs else 0.0
        while trainer.steps_done < profile.steps:
            loss, accuracy = trainer.epoch()
            now = time.perf_counter()
            seconds = round(before + now - started, 3)
            epochs.append(Epoch(len(epochs), trainer.steps_done, loss, accuracy, seconds))
            unfinished = trainer.steps_done < profile.steps
            if checkpoint is not None and unfinished and now - kept >= checkpoint_seconds:
                trainer.keep(checkpoint, epochs)
                kept = now
            watch(epochs[-1])
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return Trained(trainer.network.eval(), epochs)


def learning_rate(profile: Profile, step: int) -> float:
    """Return the rate of a step, counted from 0: that of the last boundary reached."""
    return next(rate for start, rate in reversed(profile.rates) if step >= start)


class Trainer:
    """A network, its optimiser, and a step over fixed memory: images, the epoch's choices, the place in it."""

    def __init__(self, profile: Profile, images: Images, *, seed: int, dropout: float, device: str) -> None:
        self.profile, self.seed, self.steps_done = profile, seed, 0
        self.settings: dict[str, Any] = profile.training | {"seed": seed, "dropout": dropout, "images": len(images.x)}
        self.padded, self.y = pad(images.x).to(device), images.y.to(device)
        network = CifarResNet(profile.depth, dropout=dropout, seed=seed).to(device)
        self.network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self.rate = torch.tensor(learning_rate(profile, 0), device=device)
        self.optimizer = _optimizer(self.network, self.rate, profile)
        self.choices = Choices(*(part.to(device) for part in self._choose(0)))  # (S, M) each
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next step in the epoch
        self.sums = torch.zeros(2, device=device)  # of loss and accuracy over the steps of an epoch
        self.graph = self._capture() if self.padded.is_cuda else None

    def epoch(self) -> tuple[float, float]:
        """Take the steps of an epoch, or those that are left of the training; return mean loss and accuracy."""
        per_epoch = len(self.choices.rows)
        number = self.steps_done // per_epoch
        for own, new in zip(self.choices, self._choose(number), strict=True):
            own.copy_(new)
        self.place.zero_()
        self.sums.zero_()
        last = min((number + 1) * per_epoch, self.profile.steps)
        with isolated_random(self.seed * 1_000_003 + number):  # of dropout
            for step in range(self.steps_done, last):
                self._set_rate(step)
                self.step() if self.graph is None else self.graph.replay()
        loss, accuracy = (self.sums / (last - self.steps_done)).tolist()
        if not loss < float("inf"):
            raise MCBNError(f"training diverged before step {last}: the mean loss of the epoch is {loss}")
        self.steps_done = last
        return loss, accuracy

    def step(self) -> None:
        """Take one step; nothing in it waits for the device."""
        chosen = Choices(*(part.index_select(0, self.place)[0] for part in self.choices))  # (M,) each
        x = standardize(crop(self.padded, chosen)).contiguous(memory_format=torch.channels_last)
        y = self.y[chosen.rows]
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.network(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            self.sums += torch.stack([loss, (logits.argmax(1) == y).float().mean()])
            self.place += 1

    def keep(self, path: Path, epochs: list[Epoch]) -> None:
        """Write the state after an epoch."""
        metadata = {"settings": json.dumps(self.settings), "epochs": json.dumps(epochs)}
        saved.write(self._state(), path, metadata)

    def resume(self, path: Path) -> list[Epoch]:
        """Go on from a state that the same settings gave; return the epochs behind it."""
        tensors, metadata = saved.read(path)
        if json.loads(metadata.get("settings", "{}")) != self.settings:
            raise MCBNError(f"{path} is of a training with other settings; remove it, or use another folder with --out")
        own = self._state()
        if own.keys() != tensors.keys() or any(own[n].shape != t.shape for n, t in tensors.items()):
            raise MCBNError(f"{path} does not fit the network it names; remove it to train from the beginning")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        epochs = [Epoch(*values) for values in json.loads(metadata["epochs"])]
        self.steps_done = epochs[-1].steps
        return epochs

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors that a step changes, themselves."""
        momenta = {n: self.optimizer.state[p]["momentum_buffer"] for n, p in self.network.named_parameters()}
        state = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        return state | {f"momentum.{name}": tensor for name, tensor in momenta.items()}

    def _choose(self, epoch: int) -> Choices:
        return epoch_choices(len(self.y), self.profile.batch_size, self.seed, epoch)

    def _set_rate(self, step: int) -> None:
        rate = learning_rate(self.profile, step)
        if step == self.steps_done or rate != learning_rate(self.profile, step - 1):
            self.rate.fill_(rate)

    def _capture(self) -> "torch.cuda.CUDAGraph":
        """Capture a step as a graph; what the steps before it changed is put back."""
        before = {name: tensor.clone() for name, tensor in self._state().items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), isolated_random(self.seed):
            for _ in range(WARM_UPS):
                self.place.zero_()
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for name, tensor in self._state().items():
                tensor.copy_(before[name])
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self.step()
        return graph


def _optimizer(network: CifarResNet, rate: Tensor, profile: Profile) -> torch.optim.SGD:
    """Make SGD whose rate is a tensor, so that a captured step follows it, and whose momenta exist from the start."""
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": profile.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=profile.momentum, fused=True)
    for parameter in network.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
