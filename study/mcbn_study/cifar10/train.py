"""Training of ResNet, one network or several at once; goes on where it stopped. Networks as files.

The network sees images cropped from a black frame, flipped and standardised. One step goes from raw bytes to new
weights; on a GPU one step of all networks is one CUDA graph.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mcbn import batches
from mcbn.engine.capture import capture
from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random
from mcbn.saving import read_tensors, write_tensors
from mcbn_study import checkpoints
from mcbn_study.cifar10.profile import CifarProfile
from mcbn_study.data.cifar import CIFAR10_SHAPE, Images, require_images, require_labelled
from mcbn_study.machine import fastest_convolutions
from mcbn_study.networks import CifarResNet, standardize

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


def crop(padded: Tensor, chosen: Choices) -> Tensor:
    """Cut out image `rows` at (top, left) and mirror it where `flip`: (B, 3, 32, 32), without waiting for a GPU."""
    place = torch.arange(SIZE, device=padded.device)
    line = chosen.top[:, None] + place  # (B, 32)
    column = chosen.left[:, None] + torch.where(chosen.flip[:, None], SIZE - 1 - place, place)
    channel = torch.arange(padded.shape[1], device=padded.device)
    return padded[
        chosen.rows[:, None, None, None], channel[:, None, None], line[:, None, :, None], column[:, None, None]
    ]


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
        """Return an image (3, 32, 32)."""
        return self.__getitems__([index])[0]

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Return images (3, 32, 32) each."""
        top, left = torch.randint(self.offsets, (2, len(rows)))
        chosen = Choices(torch.tensor(rows), top, left, torch.randint(2, (len(rows),)).bool())
        return list(self.batch(chosen))

    def batch(self, chosen: Choices) -> Tensor:
        """Return the chosen images, cropped, flipped and standardised, (B, 3, 32, 32)."""
        return self.prepare(crop(self.padded, batches.move(chosen, self.padded.device, None)))


class Epoch(NamedTuple):
    """How training stands after an epoch: means over its steps, seconds since the beginning."""

    number: int
    steps: int  # in all
    loss: float
    accuracy: float
    seconds: float


def train(
    profile: CifarProfile,
    images: Images,
    *,
    seeds: Sequence[int],
    dropout: float = 0.0,
    device: str = "cpu",
    files: Sequence[Path] = (),
    watch: Callable[[int, Epoch], None] = lambda seed, epoch: None,
) -> list["ResNetTrainer"]:
    """Train a network a seed by SGD with momentum, all at the same step: small ones leave most of a GPU idle alone.

    Return the trainers, with their networks in eval mode and their epochs.
    The loss is cross-entropy + weight_decay / 2 * ||W||^2; W are the weights of convolutions and of the linear layer,
    neither gamma, beta nor bias decays (authors' code). Everything random depends on (seed, epoch), so that an
    interrupted training goes on as if nothing had happened, and each network is the one it is when trained alone;
    except for the masks of dropout on a GPU: there one generator makes those of all networks.

    seeds: of initial weights, order, crops, flips and dropout; files: one a network to keep its state in after every
    epoch and to go on from, removed in the end; watch: is told of every epoch of every seed.
    """
    require_labelled(images)
    if len(images.x) < profile.batch_size:
        raise MCBNError(f"{len(images.x)} images make no batch of {profile.batch_size}")
    started = time.perf_counter()
    with fastest_convolutions(), torch.enable_grad():
        trainers = [ResNetTrainer(profile, images, seed=seed, dropout=dropout, device=device) for seed in seeds]
        replay = captured_step(trainers) if device != "cpu" else None
        _resume(trainers, files)
        before = trainers[0].epochs[-1].seconds if trainers[0].epochs else 0.0
        while trainers[0].steps_done < profile.steps:
            take_epoch(trainers, replay)
            seconds = round(before + time.perf_counter() - started, 3)
            for trainer in trainers:
                trainer.finish_epoch(seconds)
            for trainer, path in zip(trainers, files, strict=bool(files)):
                checkpoints.keep(path, trainer.state, trainer.settings, trainer.epochs)
            for trainer in trainers:
                watch(trainer.seed, trainer.epochs[-1])
    for path in files:
        path.unlink(missing_ok=True)
    for trainer in trainers:
        trainer.network.eval()
    return trainers


def learning_rate(profile: CifarProfile, step: int) -> float:
    """Return the rate of a step, counted from 0: that of the last boundary reached."""
    return next(rate for start, rate in reversed(profile.rates) if step >= start)


class ResNetTrainer:
    """A network, its optimiser, and a step over fixed memory: images, the epoch's choices, the place in it."""

    def __init__(self, profile: CifarProfile, images: Images, *, seed: int, dropout: float, device: str) -> None:
        self.profile, self.seed = profile, seed
        self.epochs: list[Epoch] = []
        self.steps = range(0)  # of the epoch under way
        self.settings: dict[str, Any] = profile.training | {"seed": seed, "dropout": dropout, "images": len(images.x)}
        self.images, self.y = Augmented(images.x.to(device)), images.y.to(device)
        network = CifarResNet(profile.depth, dropout=dropout, seed=seed).to(device)
        self.network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self.rate = torch.tensor(learning_rate(profile, 0), device=device)  # a tensor: a captured step follows it
        weights, others = ([p for p in network.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False))
        groups = [{"params": weights, "weight_decay": profile.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=self.rate, momentum=profile.momentum, fused=True)
        for parameter in network.parameters():  # momenta exist from the start, so that a capture knows them
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.state = checkpoints.training_state(self.network, self.optimizer)
        self.choose = partial(epoch_choices, len(images.y), profile.batch_size, seed)  # of an epoch
        self.choices: Choices = batches.move(self.choose(0), torch.device(device), None)  # (S, M) each
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next step in the epoch
        self.sums = torch.zeros(2, device=device)  # of loss and accuracy over the steps of an epoch

    @property
    def steps_done(self) -> int:
        """Steps behind it."""
        return self.epochs[-1].steps if self.epochs else 0

    def begin_epoch(self) -> None:
        """Get ready for an epoch: `steps` are its steps, or those that are left of the training."""
        number, per_epoch = len(self.epochs), len(self.choices.rows)
        for tensor, values in zip(self.choices, self.choose(number), strict=True):
            tensor.copy_(values)
        self.place.zero_()
        self.sums.zero_()
        self.steps = range(self.steps_done, min((number + 1) * per_epoch, self.profile.steps))

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

    def finish_epoch(self, seconds: float) -> None:
        """Note mean loss and accuracy of the steps taken since the epoch began."""
        loss, accuracy = (self.sums / len(self.steps)).tolist()
        if not loss < float("inf"):
            raise MCBNError(f"training diverged before step {self.steps.stop}: the mean loss of the epoch is {loss}")
        self.epochs.append(Epoch(len(self.epochs), self.steps.stop, loss, accuracy, seconds))


def _resume(trainers: Sequence[ResNetTrainer], files: Sequence[Path]) -> None:
    """Go on from checkpoints where the same settings gave any; networks at different steps cannot go on together."""
    for trainer, path in zip(trainers, files, strict=bool(files)):
        epochs = checkpoints.resume(path, trainer.state, trainer.settings)
        trainer.epochs = [Epoch(*values) for values in epochs or ()]
    reached = [trainer.steps_done for trainer in trainers]
    if len(set(reached)) > 1:
        raise MCBNError(f"networks that stopped at different steps, {reached}, cannot go on together; go one by one")


def take_epoch(trainers: Sequence[ResNetTrainer], replay: Callable[[], None] | None) -> None:
    """Take the steps of an epoch, by one network after the other, or by all at once where `replay` does a step."""
    for group in [trainers] if replay else [[trainer] for trainer in trainers]:
        for trainer in group:
            trainer.begin_epoch()
        with isolated_random(group[0].seed * 1_000_003 + len(group[0].epochs)):
            for step in group[0].steps:
                for trainer in group:
                    trainer.rate.fill_(learning_rate(trainer.profile, step))
                (replay or group[0].step)()


def captured_step(trainers: Sequence[ResNetTrainer]) -> Callable[[], None]:
    """Capture one step of every network as a CUDA graph, each on a branch of its own, so that they overlap."""
    streams = [torch.cuda.Stream() for _ in trainers]  # type: ignore[no-untyped-call]

    def step() -> None:
        main = torch.cuda.current_stream()
        for trainer, stream in zip(trainers, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                trainer.step()
        for stream in streams:
            main.wait_stream(stream)

    return capture(step, around=_putting_back(trainers))


@contextmanager
def _putting_back(trainers: Sequence[ResNetTrainer]) -> Iterator[None]:
    """Put back what the steps inside change."""
    changed = [tensor for trainer in trainers for tensor in trainer.state.values()]
    with isolated_random(trainers[0].seed), checkpoints.unchanged(changed):
        yield
    for trainer in trainers:
        trainer.optimizer.zero_grad(set_to_none=True)


def save_network(network: CifarResNet, path: Path, facts: Mapping[str, Any]) -> Path:
    """Write a trained network; `facts` on its training go into the file's metadata as JSON."""
    metadata = {"depth": str(network.depth), "dropout": repr(network.dropout), "facts": json.dumps(dict(facts))}
    write_tensors(path, network.state_dict(), {"format": FORMAT, **metadata})
    return path


def load_network(path: Path) -> CifarResNet:
    """Read a trained network, in eval mode on the CPU; depth and dropout rate stand in the file."""
    tensors, metadata = _read(path)
    network = CifarResNet(int(metadata["depth"]), dropout=float(metadata["dropout"]), seed=0)
    return checkpoints.load_weights(network, tensors, path)


def network_facts(path: Path) -> dict[str, Any]:
    """Read what was noted on a network's training: profile, seed, seconds, device."""
    facts: dict[str, Any] = json.loads(_read(path)[1]["facts"])
    return facts


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and text; a file that is cut off, damaged or of another kind raises MCBNError."""
    tensors, metadata = read_tensors(path, hint="remove what is there and train it with `mcbn reproduce cifar10`")
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} holds no network of `mcbn reproduce cifar10` (format {metadata.get('format')!r})")
    return tensors, metadata
