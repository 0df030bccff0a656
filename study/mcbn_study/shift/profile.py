"""What is measured, on how many images; and the images themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mcbn_study.alternatives.inputs import load_foreign
from mcbn_study.cifar10 import profile as cifar10
from mcbn_study.data.cifar import Images
from mcbn_study.profiles import read_profiles
from mcbn_study.shift.corruptions import KINDS, load_frost

NEAR = cifar10.CifarProfile(name="near", batch_size=128, steps=3_000, rates=((0, 0.1), (1_500, 0.01), (2_400, 0.001)))


@dataclass(frozen=True)
class ShiftProfile:
    """Sizes of the study; settings of `mcbn.field` are its own defaults."""

    name: str = "paper"
    n_train: int = 20_000  # training images that statistics are drawn from
    n_samples: int = 32  # T
    batch_size: int = 32  # M of the draws
    kinds: tuple[str, ...] = KINDS
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    n_reference: int = 6_000  # of the test images; the others are corrupted
    n_pool: int = 1_500  # of these, to take unlabelled ones from
    n_scored: int = 1_000  # and to score
    unlabelled: tuple[int, ...] = (256, 32)  # the second at the middle severity alone
    pairs: tuple[tuple[int, int], ...] = ((0, 1), (3, 5))  # classes of unlabelled images of two only, at that severity
    pool_of_pair: int = 256
    n_tent: int = 2_000  # images TENT passes, the scored ones last
    alarm_sizes: tuple[int, ...] = (1, 8, 32, 128)
    references: int = 4  # drawn anew, each with as many clean batches
    clean_batches: int = 500
    power_sizes: tuple[int, ...] = (8, 32)
    power_severities: tuple[int, ...] = (1, 3, 5)
    power_batches: int = 100
    stream: tuple[int, int, int] = (200, 10_000, 8)  # streams, updates, M
    timed: int = 41  # readings, the first to warm up
    near: cifar10.CifarProfile = NEAR  # trains the networks of six classes
    novel: int = 600  # images of every foreign set
    tables: int = 5  # splits of each regression set


PROFILES = read_profiles("shift", ShiftProfile, "name")
QUICK = PROFILES["quick"] = replace(PROFILES["quick"], near=cifar10.QUICK)


class Inputs(NamedTuple):
    """CIFAR-10, foreign images by name (n, 3, 32, 32), and photographs of frost (5, 3, h, w) where they are at hand."""

    train: Images
    validation: Images
    test: Images
    far: Mapping[str, Tensor]
    frost: Tensor | None


def load_inputs(profile: ShiftProfile, foreign: Path | None, frost: Path | None, device: str) -> Inputs:
    """Read CIFAR-10, to a device, an npz of foreign images, and the folder of frost in the package imagecorruptions."""
    train, validation, test = (Images(part.x.to(device), part.y.to(device)) for part in cifar10.PAPER.load())
    some, far = Images(*(part[: profile.n_train] for part in train)), load_foreign(foreign) if foreign else {}
    return Inputs(some, validation, test, far, load_frost(frost) if frost else None)
