"""CIFAR-10 in small: a profile of a few steps, random images, a network trained on them."""

import copy
import dataclasses

import torch
from torch import nn

from mcbn_study.cifar10.profile import QUICK
from mcbn_study.cifar10.train import train
from mcbn_study.data.cifar import Images
from mcbn_study.networks import CifarResNet

TINY = dataclasses.replace(
    QUICK,
    batch_size=8,
    steps=14,
    rates=((0, 0.1), (7, 0.01)),
    n_samples=(1, 2, 4),
    n_draws=4,
    batch_sizes=(4, 8),
    sweep_samples=2,
    query_images=6,
    query_samples=2,
    query_pool=None,
)


def images(n: int = 40, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(n) % 10)


_TRAINED: list[CifarResNet] = []


def trained() -> CifarResNet:
    """A network whose running statistics fit `images()`; trained once."""
    if not _TRAINED:
        profile = dataclasses.replace(TINY, steps=40, rates=((0, 0.05), (15, 1e-4)))
        _TRAINED.append(train(profile, images(), seed=0)[0])
    return copy.deepcopy(_TRAINED[0])


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
