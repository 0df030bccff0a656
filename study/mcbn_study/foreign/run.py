"""Families of q(omega) on a network that somebody else trained: ResNet-32 on CIFAR-10."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mcbn.model import MCBN
from mcbn_study.data.cifar import cifar10
from mcbn_study.foreign.inputs import FramedCrops, load_resnet, normalise
from mcbn_study.journal import Journal
from mcbn_study.machine import saved_bytes, timed
from mcbn_study.scores import class_scores

NAMES = {  # what is fitted -> what is measured with it
    "plain": ("plain",),
    "sample": ("sample", "linear"),
    "gaussian": ("gaussian",),
    "layerwise": ("layerwise",),
    "diagonal": ("diagonal",),
}
AT_ONCE = {"cpu": 100, "cuda": 1250}  # images of 32 x 32
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
    train, test = FramedCrops(cifar10("train").x), cifar10("test")
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
        yield _row("plain", predict_and_score(lambda images: bayes.plain(images).softmax(1), x, y))
        return
    seen = Subset(train, range(fit["n_samples"] * fit["batch_size"])) if family == "diagonal" else train
    _, fit_seconds = timed(lambda: bayes.fit(seen, posterior=family, **fit))
    for name in NAMES[family]:
        predict = partial(bayes.predict, method="linear" if name == "linear" else "sample")
        row = _row(name, predict_and_score(lambda images, predict=predict: predict(images).probs, x, y))  # type: ignore[misc]
        yield row | {"fit_seconds": fit_seconds, "bytes": saved_bytes(bayes)}


def _row(family: str, scores: Row) -> Row:
    kept = {name: scores[name] for name in ("pll", "pll_error", "accuracy", "ece")}
    return {"kind": "posterior", "dataset": "cifar10", "family": family, **kept, "predict_seconds": scores["seconds"]}


def predict_and_score(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Row:
    """Score the class probabilities that `predict` gives for images (N, 3, H, W), a few at a time; with its seconds.

    Probabilities are fetched from the device, so that the clock stops when the work is done.
    """
    at_once = max(1, AT_ONCE[x.device.type] * 32**2 // x[0, 0].numel())
    probs, seconds = timed(lambda: torch.cat([predict(images).cpu() for images in torch.split(x, at_once)]))
    return {"n": len(y), **class_scores(probs, y), "seconds": seconds}
