"""Training of ResNet, and its networks as files."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mcbn import batches
from mcbn.engine.capture import WARM_UPS, capture, warm_up
from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random
from mcbn.saving import read_tensors, write_tensors
from mcbn_study.cifar10.profile import CifarProfile
from mcbn_study.data.cifar import CIFAR10_SHAPE, Images, require_images
from mcbn_study.machine import fastest_convolutions
from mcbn_study.networks import CifarResNet, load_weights, standardize

PADDING = 2  # pixels on each side: 36 x 36, of which 32 x 32 are cropped (authors' code)
OFFSETS = 2 * PADDING + 1
SIZE = CIFAR10_SHAPE[-1]
FORMAT = "mcbn-cifar-resnet-1"


class Choices(NamedTuple):
    """Which images, and how each is cropped and flipped; integers of one shape, flips boolean."""

    rows: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor


def epoch_choices(n: int, batch_size: int, seed: int, epoch: int) -> Choices:
    """Choose the full batches of an epoch, (S, M), S = n // M, each image once at most, by (seed, epoch) alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    shape = n // batch_size, batch_size
    rows = generator.permutation(n)[: shape[0] * batch_size].reshape(shape)
    top, left = generator.integers(0, OFFSETS, (2, *shape))
    return Choices(*map(torch.from_numpy, (rows, top, left, generator.integers(0, 2, shape).astype(bool))))


class Augmented(Dataset[Tensor]):
    """Training images to draw batches from, prepared; each time one is asked for, it is cropped and flipped anew.

    The images live on one device, and a batch is made there in one go. Random numbers come from torch's global
    generator, which `MCBN.fit` seeds for each draw and gives back.
    """

    def __init__(
        self, images: Tensor, *, padding: int = PADDING, prepare: Callable[[Tensor], Tensor] = standardize
    ) -> None:
        require_images(images, CIFAR10_SHAPE)
        self.padded, self.offsets, self.prepare = F.pad(images, (padding,) * 4), 2 * padding + 1, prepare

    def __len__(self) -> int:
        return len(self.padded)

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Return images (3, 32, 32) each."""
        top, left = torch.randint(self.offsets, (2, len(rows)))
        return list(self.batch(Choices(torch.tensor(rows), top, left, torch.randint(2, (len(rows),)).bool())))

    def batch(self, chosen: Choices) -> Tensor:
        """Cut images out at (top, left), mirror and prepare them: (B, 3, 32, 32), without waiting for a GPU."""
        rows, top, left, flip = (t[:, None] for t in batches.move(chosen, self.padded.device, None))  # (B, 1) each
        place = torch.arange(SIZE, device=rows.device)
        line = top + place  # (B, 32)
        column = left + torch.where(flip, SIZE - 1 - place, place)
        channel = torch.arange(3, device=rows.device)[:, None, None]
        return self.prepare(self.padded[rows[..., None, None], channel, line[:, None, :, None], column[:, None, None]])


class ResNetTrainer:
    """A network, its optimiser, and a step over fixed memory: images, the epoch's choices, the place in it.

    Stochastic gradient descent with momentum; the loss is cross-entropy + weight_decay / 2 * ||W||^2; W are the weights
    of convolutions and of the linear layer, neither gamma, beta nor bias decays (authors' code).
    """

    def __init__(self, profile: CifarProfile, images: Images, *, seed: int, dropout: float, device: str) -> None:
        self.profile, self.seed, self.done = profile, seed, 0  # done: steps
        self.images, self.y = Augmented(images.x.to(device)), images.y.to(device)
        network = CifarResNet(profile.depth, dropout=dropout, seed=seed).to(device)
        self.network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self.rate = torch.tensor(learning_rate(profile, 0), device=device)  # a tensor: a captured step follows it
        weights, others = ([p for p in network.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False))
        groups = [{"params": weights, "weight_decay": profile.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=self.rate, momentum=profile.momentum, fused=True)
        for parameter in network.parameters():  # momenta exist from the start, so that a capture knows them
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.choose = partial(epoch_choices, len(images.y), profile.batch_size, seed)  # of an epoch
        self.choices: Choices = batches.move(self.choose(0), torch.device(device), None)  # (S, M) each
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next step in the epoch
        self.sums = torch.zeros(2, device=device)  # of loss and accuracy over the steps of an epoch

    def take_epoch(self, step: Callable[[], None]) -> tuple[float, float]:
        """Take the steps of an epoch, or those that are left of the training; return mean loss and accuracy."""
        number = self.done // len(self.choices.rows)
        for tensor, values in zip(self.choices, self.choose(number), strict=True):
            tensor.copy_(values)
        self.place.zero_()
        self.sums.zero_()
        steps = range(self.done, min((number + 1) * len(self.choices.rows), self.profile.steps))
        with isolated_random(self.seed * 1_000_003 + number):
            for each in steps:
                self.rate.fill_(learning_rate(self.profile, each))
                step()
        loss, accuracy = (self.sums / len(steps)).tolist()
        if not loss < float("inf"):
            raise MCBNError(f"training diverged before step {steps.stop}: the mean loss of the epoch is {loss}")
        self.done = steps.stop
        return loss, accuracy

    def step(self) -> None:
        """Take one step; nothing in it waits for the device."""
        chosen = Choices(*(tensor.index_select(0, self.place)[0] for tensor in self.choices))  # (M,) each
        x, y = self.images.batch(chosen).contiguous(memory_format=torch.channels_last), self.y[chosen.rows]
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.network(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            self.sums += torch.stack([loss, (logits.argmax(1) == y).float().mean()])
            self.place.add_(1).remainder_(len(self.choices.rows))  # runs before a capture may exceed an epoch

    def captured_step(self) -> Callable[[], None]:
        """Capture a step as a CUDA graph; what the runs before the capture change is put back."""
        momenta = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.network.parameters()]
        changed = [*self.network.state_dict().values(), *momenta]
        before = [tensor.clone() for tensor in changed]
        with isolated_random(self.seed):
            warm_up(self.step, WARM_UPS)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        self.optimizer.zero_grad(set_to_none=True)
        return capture(self.step, warm_ups=0)


def learning_rate(profile: CifarProfile, step: int) -> float:
    """Return the rate of a step, counted from 0: that of the last boundary reached."""
    return next(rate for start, rate in reversed(profile.rates) if step >= start)


def train(
    profile: CifarProfile, images: Images, *, seed: int, dropout: float = 0.0, device: str = "cpu"
) -> tuple[CifarResNet, dict[str, Any]]:
    """Train a network, all that is random by its seed; return it in eval mode, and the facts to keep."""
    if len(images.x) < profile.batch_size:
        raise MCBNError(f"{len(images.x)} images make no batch of {profile.batch_size}")
    started, loss, accuracy = time.perf_counter(), 0.0, 0.0
    with fastest_convolutions(), torch.enable_grad():
        trainer = ResNetTrainer(profile, images, seed=seed, dropout=dropout, device=device)
        step = trainer.captured_step() if device != "cpu" else trainer.step
        while trainer.done < profile.steps:
            loss, accuracy = trainer.take_epoch(step)
    seconds, steps = round(time.perf_counter() - started, 3), trainer.done
    facts = {"seed": seed, "dropout": dropout, "profile": profile.name, "training": profile.training, "steps": steps}
    facts |= {"loss": loss, "accuracy": accuracy, "seconds": seconds}
    return trainer.network.eval(), facts | {"milliseconds_per_step": round(1000 * seconds / steps, 4)}


def save_network(network: CifarResNet, path: Path, facts: Mapping[str, Any]) -> Path:
    """Write a trained network; `facts` on its training go into the file's metadata as JSON."""
    metadata = {"depth": str(network.depth), "dropout": repr(network.dropout), "facts": json.dumps(dict(facts))}
    write_tensors(path, network.state_dict(), {"format": FORMAT, **metadata})
    return path


def load_network(path: Path) -> tuple[CifarResNet, dict[str, Any]]:
    """Read a trained network, in eval mode on the CPU, and what was noted on its training: profile, seed, seconds."""
    tensors, metadata = read_tensors(path, hint="remove what is there and train it with `mcbn reproduce cifar10`")
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} holds no network of `mcbn reproduce cifar10` (format {metadata.get('format')!r})")
    network = CifarResNet(int(metadata["depth"]), dropout=float(metadata["dropout"]), seed=0)
    return load_weights(network, tensors, path), json.loads(metadata["facts"])
