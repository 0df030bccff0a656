"""How the network is trained and what is measured: the paper's protocol, and a small likeness of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn_study.data.cifar import Images, cifar10
from mcbn_study.profiles import read_profiles

N_IMAGES, N_VALIDATION, SPLIT_SEED = 50_000, 2_000, 2018


class Split(NamedTuple):
    """Images to train on, to choose by, and to test on."""

    train: Images
    validation: Images
    test: Images


@dataclass(frozen=True)
class CifarProfile:
    """Teye et al. 2018, section 4.3 and the authors' code, unless a line says otherwise."""

    name: str = "paper"
    depth: int = 32
    batch_size: int = 32  # M; section 4.3 (the code has 128)
    steps: int = 82_500  # the last rate begins at 80,000 (code); 55 epochs of 48,000 images
    rates: tuple[tuple[int, float], ...] = ((0, 0.1), (40_000, 0.01), (60_000, 0.001), (80_000, 0.0001))  # from step
    momentum: float = 0.9
    weight_decay: float = 2e-4
    n_train: int | None = None  # all that are not held out; 50,000: none is
    n_validation: int | None = None
    n_test: int | None = None
    n_samples: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)  # T; Table 2
    n_draws: int = 256  # drawn for these: 2 disjoint sets of the largest T, 256 of the smallest. Ours
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)  # of the sweep over M. Ours
    sweep_samples: int = 32  # T of the sweep. Ours
    query_images: int | None = None  # test images for the estimator with fresh batches for each; all
    query_samples: int = 128  # its T
    query_pool: int | None = 4_096  # batches that every image has T different ones of; None: T an image. Ours

    @property
    def training(self) -> dict[str, Any]:
        """What decides on the weights, as JSON has it."""
        names = ("depth", "batch_size", "steps", "rates", "momentum", "weight_decay", "n_train")
        return {name: getattr(self, name) for name in names} | {"rates": [list(pair) for pair in self.rates]}

    def load(self) -> Split:
        """Read the images; those to train on and to validate on are disjoint, the first so many of each."""
        images, test, (train, validation) = cifar10("train"), cifar10("test"), held_out(self.n_train)
        rows = train[: self.n_train], validation[: self.n_validation]
        training, held = (Images(images.x[row], images.y[row]) for row in rows)
        return Split(training, held, Images(test.x[: self.n_test], test.y[: self.n_test]))


PROFILES = read_profiles("cifar10", CifarProfile, "name")
PAPER, QUICK = PROFILES["paper"], PROFILES["quick"]


def held_out(n_train: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the indices of the 48,000 images to train on and of the 2,000 to validate on, each sorted, for all seeds.

    The paper trains on all 50,000, as here if that many are asked for, and keeps none to choose by.
    """
    order = np.random.Generator(np.random.Philox(key=SPLIT_SEED)).permutation(N_IMAGES)
    parts = np.split(order, [0 if n_train == N_IMAGES else N_VALIDATION])
    validation, train = (torch.from_numpy(np.sort(part)) for part in parts)
    return train, validation
