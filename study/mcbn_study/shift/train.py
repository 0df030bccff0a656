"""The networks that are watched: the paper's, foreign ones, and some that never saw four of the ten classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mcbn.model import MCBN
from mcbn.prediction import ClassificationPrediction
from mcbn_study.alternatives.inputs import load_networks
from mcbn_study.alternatives.methods import look_inside
from mcbn_study.cifar10.train import Augmented, load_network, save_network, train
from mcbn_study.data.cifar import Images
from mcbn_study.foreign.run import framed_crops, load_resnet
from mcbn_study.networks import normalise, standardize
from mcbn_study.shift.profile import Inputs, ShiftProfile

AT_ONCE = 1000  # images of one plain pass


class Features(NamedTuple):
    """What a network makes of images: logits (..., N, K), and what its last layer is given (..., N, F)."""

    logits: Tensor
    hidden: Tensor

    def take(self, rows: Tensor) -> "Features":
        """Return some rows (...,)."""
        return Features(self.logits[rows], self.hidden[rows])


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network, what it takes for bytes, and its training images as it saw them."""

    name: str
    seed: int
    network: nn.Module
    prepare: Callable[[Tensor], Tensor]
    train: Dataset[Tensor]

    def look(self, images: Tensor) -> Features:
        """Run bytes (N, 3, 32, 32) through the network as it is."""
        prepared = (self.prepare(some) for some in torch.split(images, AT_ONCE))
        return Features(*(values.double() for values in look_inside(self.network, prepared)))

    def fit(self, profile: ShiftProfile, images: Any = None, **how: Any) -> MCBN[ClassificationPrediction]:
        """Draw statistics of training batches, or of other images."""
        draws: dict[str, Any] = {"n_samples": profile.n_samples, "batch_size": profile.batch_size, "seed": self.seed}
        return MCBN(self.network, "classification").fit(self.train if images is None else images, **draws, **how)


def load_subjects(networks: Path | None, weights: Path | None, inputs: Inputs, device: str) -> list[Subject]:
    """Load the networks of `mcbn reproduce cifar10`, then those that somebody else trained, where they are at hand."""
    trained = load_networks(networks, device).plain.items() if networks else ()
    images, crops = Augmented(inputs.train.x), framed_crops(inputs.train.x)
    files = sorted(weights.glob("resnet*.npz")) if weights else []
    return [
        *(Subject("resnet32", seed, network, standardize, images) for seed, network in trained),
        *(Subject(f"foreign {path.stem}", 0, load_resnet(path).to(device), normalise, crops) for path in files),
    ]


def is_novel(y: Tensor, seed: int) -> Tensor:
    """Tell which labels (N,) are of the four classes that the network of this seed never sees."""
    return torch.isin((y - seed) % 10, torch.tensor([0, 2, 5, 7], device=y.device))


def known(images: Images, seed: int) -> Images:
    """Leave out the images of the classes that the network of this seed never sees."""
    return Images(*(part[~is_novel(images.y, seed)] for part in images))


def near_subjects(profile: ShiftProfile, inputs: Inputs, folder: Path, seeds: Sequence[int]) -> list[Subject]:
    """Train, or load, a network a seed on the images of six classes; labels keep their numbers."""
    subjects, device = [], str(inputs.train.x.device)
    for seed in seeds:
        path, seen = folder / f"resnet{profile.near.depth}-near{seed}.safetensors", known(inputs.train, seed)
        if not path.exists():
            network, facts = train(profile.near, seen, seed=seed, device=device)
            save_network(network.cpu(), path, facts)
        subjects.append(Subject("six classes", seed, load_network(path)[0].to(device), standardize, Augmented(seen.x)))
    return subjects
