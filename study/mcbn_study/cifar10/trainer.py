"""One training step, from raw bytes to new weights, of one network or several; on a GPU it is one CUDA graph."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random
from mcbn_study.cifar10 import saved
from mcbn_study.cifar10.augmentation import Choices, crop, epoch_choices, pad
from mcbn_study.cifar10.profile import Profile
from mcbn_study.data.cifar import Images
from mcbn_study.networks.resnet import CifarResNet, standardize

WARM_UPS = 3  # passes before a capture: kernels are chosen and loaded


class Epoch(NamedTuple):
    """How training stands after an epoch: means over its steps, seconds since the beginning."""

    number: int
    steps: int  # in all
    loss: float
    accuracy: float
    seconds: float


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

    def epoch(self) -> tuple[float, float]:
        """Take the steps of an epoch, or those that are left of the training; return mean loss and accuracy."""
        steps = self.begin()
        with isolated_random(self.epoch_seed):
            for step in steps:
                self.set_rate(step)
                self.step()
        return self.finish(steps)

    @property
    def epoch_seed(self) -> int:
        """Of dropout in the epoch that comes."""
        return self.seed * 1_000_003 + self.steps_done // len(self.choices.rows)

    def begin(self) -> range:
        """Get ready for an epoch; return its steps."""
        per_epoch = len(self.choices.rows)
        number = self.steps_done // per_epoch
        for own, new in zip(self.choices, self._choose(number), strict=True):
            own.copy_(new)
        self.place.zero_()
        self.sums.zero_()
        return range(self.steps_done, min((number + 1) * per_epoch, self.profile.steps))

    def finish(self, steps: range) -> tuple[float, float]:
        """Note that the steps are taken; return mean loss and accuracy over them."""
        loss, accuracy = (self.sums / len(steps)).tolist()
        if not loss < float("inf"):
            raise MCBNError(f"training diverged before step {steps.stop}: the mean loss of the epoch is {loss}")
        self.steps_done = steps.stop
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
        saved.write(self.state(), path, metadata)

    def resume(self, path: Path) -> list[Epoch]:
        """Go on from a state that the same settings gave; return the epochs behind it."""
        tensors, metadata = saved.read(path)
        if json.loads(metadata.get("settings", "{}")) != self.settings:
            raise MCBNError(f"{path} is of a training with other settings; remove it, or use another folder with --out")
        own = self.state()
        if own.keys() != tensors.keys() or any(own[n].shape != t.shape for n, t in tensors.items()):
            raise MCBNError(f"{path} does not fit the network it names; remove it to train from the beginning")
        self.put_back(tensors)
        epochs = [Epoch(*values) for values in json.loads(metadata["epochs"])]
        self.steps_done = epochs[-1].steps
        return epochs

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a step changes, themselves."""
        momenta = {n: self.optimizer.state[p]["momentum_buffer"] for n, p in self.network.named_parameters()}
        state = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        return state | {f"momentum.{name}": tensor for name, tensor in momenta.items()}

    def _choose(self, epoch: int) -> Choices:
        return epoch_choices(len(self.y), self.profile.batch_size, self.seed, epoch)

    def set_rate(self, step: int) -> None:
        """Set the learning rate of a step, where it is not set already."""
        rate = learning_rate(self.profile, step)
        if step == self.steps_done or rate != learning_rate(self.profile, step - 1):
            self.rate.fill_(rate)

    @torch.no_grad()
    def put_back(self, state: Mapping[str, Tensor]) -> None:
        """Fill the tensors that a step changes."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _optimizer(network: CifarResNet, rate: Tensor, profile: Profile) -> torch.optim.SGD:
    """Make SGD whose rate is a tensor, so that a captured step follows it, and whose momenta exist from the start."""
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": profile.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=profile.momentum, fused=True)
    for parameter in network.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Together:
    """Several networks at the same step; on a GPU one step of all of them is one CUDA graph.

    Args:
        trainers: of one profile; each keeps its own state.
        parallel: give each network a branch of the graph, so that they overlap; else the branches follow each other.
    """

    def __init__(self, trainers: Sequence[Trainer], *, parallel: bool = True) -> None:
        self.trainers = trainers
        on_gpu, branches = trainers[0].padded.is_cuda, len(trainers) if parallel and len(trainers) > 1 else 0
        self.streams = [torch.cuda.Stream() for _ in range(branches)] if on_gpu else []  # type: ignore[no-untyped-call]
        self.graph = self._capture() if on_gpu else None

    def epoch(self) -> list[tuple[float, float]]:
        """Take the steps of an epoch; return mean loss and accuracy of each network."""
        if self.graph is None:
            return [trainer.epoch() for trainer in self.trainers]
        seed = self.trainers[0].epoch_seed
        steps = [trainer.begin() for trainer in self.trainers]
        with isolated_random(seed):
            for step in steps[0]:
                for trainer in self.trainers:
                    trainer.set_rate(step)
                self.graph.replay()
        return [trainer.finish(own) for trainer, own in zip(self.trainers, steps, strict=True)]

    def _step(self) -> None:
        """Take one step of every network, each on its own stream where there are any."""
        main = torch.cuda.current_stream()
        for trainer, stream in zip(self.trainers, self.streams or [main] * len(self.trainers), strict=True):
            if stream is not main:
                stream.wait_stream(main)
            with torch.cuda.stream(stream):
                trainer.step()
        for stream in self.streams:
            main.wait_stream(stream)

    def _capture(self) -> "torch.cuda.CUDAGraph":
        """Capture a step as a graph; what the steps before it changed is put back."""
        before = [{name: tensor.clone() for name, tensor in t.state().items()} for t in self.trainers]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), isolated_random(self.trainers[0].seed):
            for _ in range(WARM_UPS):
                for trainer in self.trainers:
                    trainer.place.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        for trainer, old in zip(self.trainers, before, strict=True):
            trainer.put_back(old)
            trainer.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph
