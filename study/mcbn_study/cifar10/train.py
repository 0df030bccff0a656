"""Training of one network, or of several at once, to networks in eval mode; goes on where it stopped."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mcbn.errors import MCBNError
from mcbn_study.cifar10.augmentation import require_images
from mcbn_study.cifar10.profile import Profile
from mcbn_study.cifar10.trainer import Epoch, Together, Trainer
from mcbn_study.data.cifar import Images
from mcbn_study.machine import fastest_convolutions
from mcbn_study.networks.resnet import CifarResNet

CHECKPOINT_SECONDS = 60.0


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
    (trained,) = train_together(
        profile,
        images,
        seeds=[seed],
        dropout=dropout,
        device=device,
        checkpoints=[] if checkpoint is None else [checkpoint],
        checkpoint_seconds=checkpoint_seconds,
        watch=lambda seed, epoch: watch(epoch),
    )
    return trained


def train_together(
    profile: Profile,
    images: Images,
    *,
    seeds: Sequence[int],
    dropout: float = 0.0,
    device: str = "cpu",
    parallel: bool = True,
    checkpoints: Sequence[Path] = (),
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    watch: Callable[[int, Epoch], None] = lambda seed, epoch: None,
) -> list[Trained]:
    """Train a network a seed, all at the same step; small ones leave most of a GPU idle when alone.

    Each network is the one of `train`, except for the masks of dropout on a GPU: there one generator makes those of
    all of them, so that they depend on which networks are trained together.

    Args:
        profile, images, dropout, device, checkpoint_seconds: as for `train`.
        seeds: one network each.
        parallel: let the networks overlap on a GPU; else their steps follow each other.
        checkpoints: a file a network, or none.
        watch: is told of every epoch of every seed.
    """
    require_images(*images)
    if len(images.x) < profile.batch_size:
        raise MCBNError(f"{len(images.x)} images make no batch of {profile.batch_size}")
    kept = started = time.perf_counter()
    with fastest_convolutions(), torch.enable_grad():
        trainers = [Trainer(profile, images, seed=seed, dropout=dropout, device=device) for seed in seeds]
        together = Together(trainers, parallel=parallel)
        epochs = _resume(trainers, checkpoints)
        before = epochs[0][-1].seconds if epochs[0] else 0.0
        while trainers[0].steps_done < profile.steps:
            means = together.epoch()
            now = time.perf_counter()
            steps, seconds = trainers[0].steps_done, round(before + now - started, 3)
            for seen, (loss, accuracy) in zip(epochs, means, strict=True):
                seen.append(Epoch(len(seen), steps, loss, accuracy, seconds))
            if checkpoints and steps < profile.steps and now - kept >= checkpoint_seconds:
                for trainer, path, seen in zip(trainers, checkpoints, epochs, strict=True):
                    trainer.keep(path, seen)
                kept = now
            for seed, seen in zip(seeds, epochs, strict=True):
                watch(seed, seen[-1])
    for path in checkpoints:
        path.unlink(missing_ok=True)
    return [Trained(trainer.network.eval(), seen) for trainer, seen in zip(trainers, epochs, strict=True)]


def _resume(trainers: Sequence[Trainer], checkpoints: Sequence[Path]) -> list[list[Epoch]]:
    """Go on from checkpoints where there are any; networks at different steps cannot go on together."""
    epochs = [
        trainer.resume(path) if path.exists() else []
        for trainer, path in zip(trainers, checkpoints, strict=bool(checkpoints))
    ]
    reached = [trainer.steps_done for trainer in trainers]
    if len(set(reached)) > 1:
        raise MCBNError(
            f"the networks stopped at different steps, {reached}, and cannot go on together; train them one by one"
        )
    return epochs or [[] for _ in trainers]
