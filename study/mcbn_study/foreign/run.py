"""Families of q(omega) on a network that somebody else trained: ResNet-32 on CIFAR-10.

Weights: `resnet32.npz` of github.com/akamaster/pytorch_resnet_cifar10, trained at batch size 128 with flips and 4-pixel
crops; its trainer looked at the test set, so that its accuracy is no result.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mcbn import metrics
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.prediction import ClassificationPrediction
from mcbn_study.data.cifar import cifar10
from mcbn_study.journal import Journal
from mcbn_study.machine import saved_bytes, timed
from mcbn_study.networks.others import cifar_resnet

NAMES = {  # what is fitted -> what is measured with it
    "plain": ("plain",),
    "sample": ("sample", "linear"),
    "gaussian": ("gaussian",),
    "layerwise": ("layerwise",),
    "diagonal": ("diagonal",),
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the weights' trainer
PADDING = 4
AT_ONCE = {"cpu": 100, "cuda": 1250}  # images
Row = dict[str, Any]


def cifar(
    weights: str | Path,
    out: str | Path = "results/posteriors",
    *,
    batch_size: int = 32,
    n_samples: int = 128,
    n_test: int = 1000,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Compare plain, sampled, Gaussian and linear predictions of the first test images; append to `out`/cifar.jsonl.

    Args:
        weights: resnet32.npz.
        out: folder of records; families recorded there with the same settings are not measured again.
        batch_size: M of the draws; the network was trained at 128, smaller ones widen its uncertainty.
        n_samples: T.
        n_test: how many of the test images.
        seed: of the draws.
        device: "cpu" or "cuda".
    """
    config = {"batch_size": batch_size, "n_samples": n_samples, "n_test": n_test, "seed": seed}
    journal = Journal(out, config, device, name="cifar.jsonl")
    network = load_resnet(Path(weights)).to(device)
    train, test = Augmented(cifar10("train").x), cifar10("test")
    x, y = normalise(test.x[:n_test]).to(device), test.y[:n_test]
    fit = {"n_samples": n_samples, "batch_size": batch_size, "seed": seed}
    for family, names in NAMES.items():
        if not all(journal.has(family=name) for name in names):
            rows = _measure(network, family, train, x, y, fit)
            journal.add(row for row in rows if not journal.has(family=row["family"]))
    return journal.path


def _measure(
    network: nn.Module, family: str, train: Dataset[Tensor], x: Tensor, y: Tensor, fit: Mapping[str, Any]
) -> Iterator[Row]:
    """Fit one family, predict, score; the one pass of "diagonal" covers as many images as the T batches hold."""
    bayes = MCBN(network, "classification")
    if family == "plain":
        yield _row("plain", y, *timed(lambda: _in_parts(lambda part: bayes.plain(part).softmax(1), x)))
        return
    seen = Subset(train, range(fit["n_samples"] * fit["batch_size"])) if family == "diagonal" else train
    _, fit_seconds = timed(lambda: bayes.fit(seen, posterior=family, **fit))
    for name in NAMES[family]:
        method = "linear" if name == "linear" else "sample"
        predict = partial(_in_parts, partial(_probabilities, bayes, method), x)
        yield _row(name, y, *timed(predict)) | {"fit_seconds": fit_seconds, "bytes": saved_bytes(bayes)}


def _probabilities(bayes: MCBN[ClassificationPrediction], method: str, x: Tensor) -> Tensor:
    return bayes.predict(x, method=method).probs


def _in_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Predict a few images at a time; fetched from the device, so that a clock stops when the work is done."""
    return torch.cat([function(part).cpu() for part in torch.split(x, AT_ONCE[x.device.type])])


def _row(family: str, y: Tensor, probs: Tensor, seconds: float) -> Row:
    """Score class probabilities (N, K); pll_error is the standard error of pll over the images."""
    log_p = probs.double().gather(1, y[:, None]).log()  # (N, 1)
    scores = {"pll": float(log_p.mean()), "pll_error": float(log_p.std() / len(y) ** 0.5)}
    scores |= {"accuracy": float(metrics.accuracy(probs, y)), "ece": float(metrics.ece(probs, y))}
    return {"kind": "posterior", "dataset": "cifar10", "family": family} | scores | {"predict_seconds": seconds}


class Augmented(Dataset[Tensor]):
    """Training images as the network saw them: flipped at random, cropped from a black frame, then normalised."""

    def __init__(self, images: Tensor) -> None:
        self.images = images  # (N, 3, 32, 32), bytes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        """Return an image (3, 32, 32), another crop each time."""
        image = F.pad(self.images[index], (PADDING,) * 4)
        top, left, flip = (int(torch.randint(high, ())) for high in (2 * PADDING + 1, 2 * PADDING + 1, 2))
        height, width = self.images.shape[2:]
        crop = image[:, top : top + height, left : left + width]
        return normalise(crop.flip(2) if flip else crop)


def normalise(images: Tensor) -> Tensor:
    """Bring bytes (..., 3, H, W) to what the network takes."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def load_resnet(path: Path) -> nn.Module:
    """Read published weights into a ResNet of their depth, 20 or 32 or another, in eval mode."""
    if not path.is_file():
        raise MCBNError(
            f"there is no {path}; save the weights of github.com/akamaster/pytorch_resnet_cifar10, ResNet-32, there as "
            "an npz of its state dict"
        )
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    units = len({name.split(".")[1] for name in found if name.startswith("layer1.")})
    network = cifar_resnet(max(1, units))
    state = {_place(name, units): value for name, value in found.items()}
    missing, unexpected = network.load_state_dict(state, strict=False)
    lost = [name for name in missing if not name.endswith("num_batches_tracked")]
    if lost or unexpected:
        raise MCBNError(f"{path} holds no ResNet for CIFAR-10: missing {lost[:3]}, unexpected {unexpected[:3]}")
    return network.eval()


def _place(name: str, units: int) -> str:
    """Translate a name of the published state dict to ours: layer2.1.conv1 is block units + 1, after two others."""
    for old, new in (("conv1", "first.0"), ("bn1", "first.1"), ("conv2", "second.0"), ("bn2", "second.1")):
        name = name.replace(f".{old}.", f".{new}.")
    parts = name.split(".")
    if parts[0].startswith("layer"):
        parts[:2] = [str(2 + units * (int(parts[0][5:]) - 1) + int(parts[1]))]
    else:
        parts[:1] = [{"conv1": "0.0", "bn1": "0.1", "linear": str(3 * units + 3)}.get(parts[0], parts[0])]
    return ".".join(parts)
