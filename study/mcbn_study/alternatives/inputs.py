"""What the comparison is made of: trained networks, CIFAR-10, and the sets of images to ask about."""

from pathlib import Path
from typing import NamedTuple

from mcbn.errors import MCBNError
from mcbn_study.alternatives.corruptions import SEVERITIES, mixture
from mcbn_study.alternatives.images import Queries, load_foreign
from mcbn_study.cifar10.augmentation import require_images
from mcbn_study.cifar10.parts import held_out
from mcbn_study.cifar10.saved import load_network, network_facts
from mcbn_study.data.cifar import Images, cifar10
from mcbn_study.networks.resnet import CifarResNet


class Networks(NamedTuple):
    """Trained networks by seed: as the paper has them, and with dropout."""

    plain: dict[int, CifarResNet]
    thinned: dict[int, CifarResNet]


class Data(NamedTuple):
    """Images as they are stored."""

    train: Images
    validation: Images
    test: Images


def questions(test: Images, foreign: str | Path | None, *, n_test: int | None, n_corrupted: int) -> dict[str, Queries]:
    """Collect the sets of images to ask about: test images first, then the same corrupted, then foreign ones."""
    x, y = test.x[:n_test], test.y[:n_test]
    sets = {"test": Queries(x, y)}
    for severity in SEVERITIES:
        sets[f"corrupted {severity}"] = Queries(mixture(x[:n_corrupted], severity), y[:n_corrupted])
    return sets | (load_foreign(foreign) if foreign is not None else {})


def require_data(data: Data) -> Data:
    """Refuse images the networks do not take, and labels outside the classes."""
    for part in data:
        require_images(*part)
    return data


def load_data() -> Data:
    """Load CIFAR-10: the images trained on, the held-out ones, the test images."""
    train, test = cifar10("train"), cifar10("test")
    kept, held = held_out()
    return Data(Images(train.x[kept], train.y[kept]), Images(train.x[held], train.y[held]), test)


def load_networks(folder: str | Path, device: str = "cpu") -> Networks:
    """Load every network of a folder; which seed it has stands in its file."""
    found = Networks({}, {})
    for path in sorted(Path(folder).glob("*.safetensors")):
        network = load_network(path)
        kind = found.thinned if network.dropout > 0 else found.plain
        kind[int(network_facts(path)["seed"])] = network.to(device)
    if not found.plain:
        raise MCBNError(f"{folder} holds no network without dropout; train them with `mcbn reproduce cifar10`")
    return found
