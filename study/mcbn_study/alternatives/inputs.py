"""What the comparison is made of: trained networks, and the sets of images to ask about.

Corruptions are in the spirit of Hendrycks and Dietterich 2019, with formulas and strengths of our own: their numbers do
not compare with published ones. Foreign images are of no CIFAR-10 class: handwritten digits, and squares of photographs
in the VOC and CamVid archives of $MCBN_DATA_DIR whose labels, one a pixel, show no object that the networks know.
"""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.ndimage import gaussian_filter  # type: ignore[import-untyped]
from torch import Tensor

from mcbn.errors import MCBNError, extra
from mcbn.files import replacing
from mcbn_study.cifar10.train import load_network
from mcbn_study.data.cifar import CIFAR10_SHAPE, Images, require_images
from mcbn_study.data.files import require
from mcbn_study.data.scenes import Bytes, list_pairs, open_pair
from mcbn_study.networks import CifarResNet

SEVERITIES = (1, 2, 3, 4, 5)
SIDE = CIFAR10_SHAPE[-1]
CROP = 96  # pixels a side before shrinking
TRIES = 20  # squares looked at in one photograph
CAMVID_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7)  # sky, building, pole, road, pavement, tree, sign, fence
VOC_ALLOWED = (0,)  # background


class CifarNetworks(NamedTuple):
    """Trained networks by seed: as the paper has them, and with dropout."""

    plain: dict[int, CifarResNet]
    thinned: dict[int, CifarResNet]


Queries = tuple[Tensor, Tensor | None]  # images (N, 3, H, W), bytes, and their classes (N,); None where they have none


def load_networks(folder: str | Path, device: str = "cpu") -> CifarNetworks:
    """Load every network of a folder; which seed it has stands in its file."""
    networks = CifarNetworks({}, {})
    for network, facts in map(load_network, sorted(Path(folder).glob("*.safetensors"))):
        (networks.thinned if network.dropout > 0 else networks.plain)[int(facts["seed"])] = network.to(device)
    if not networks.plain:
        raise MCBNError(f"{folder} holds no network without dropout; train them with `mcbn reproduce cifar10`")
    return networks


def questions(test: Images, foreign: str | Path | None, *, n_test: int | None, n_corrupted: int) -> dict[str, Queries]:
    """Collect the sets of images to ask about: test images first, then the same corrupted, then foreign ones."""
    x, y = test.x[:n_test], test.y[:n_test]
    sets: dict[str, Queries] = {"test": (x, y)}
    for severity in SEVERITIES:
        sets[f"corrupted {severity}"] = mixture(x[:n_corrupted], severity), y[:n_corrupted]
    return sets | {name: (images, None) for name, images in (load_foreign(foreign) if foreign else {}).items()}


def load_foreign(path: str | Path) -> dict[str, Tensor]:
    """Read the sets of foreign images (N, 3, 32, 32) that `build_foreign` wrote."""
    if not Path(path).is_file():
        raise MCBNError(f"there is no {path}; make it with mcbn_study.alternatives.inputs.build_foreign")
    with np.load(path) as arrays:
        return {name: require_images(torch.from_numpy(arrays[name]), CIFAR10_SHAPE) for name in arrays.files}


def build_foreign(path: str | Path, *, n: int = 500, seed: int = 0) -> Path:
    """Write n images (3, 32, 32) at most of "voc" and "camvid", in $MCBN_DATA_DIR, and scikit-learn's "digits"."""
    sets = {
        "voc": photographs("voc/val.zip", VOC_ALLOWED, n=n, seed=seed),
        "camvid": photographs("camvid/test.zip", CAMVID_ALLOWED, n=n, seed=seed),
        "digits": digits(n=n, seed=seed),
    }
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **sets)  # type: ignore[arg-type]
    return Path(path)


def digits(*, n: int, seed: int) -> Bytes:
    """Return scikit-learn's 8x8 digits, enlarged to (n, 3, 32, 32), grey."""
    with extra("sklearn", "handwritten digits come with scikit-learn"):
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    small = np.random.default_rng(seed).permutation(load_digits().images * (255 / 16))[:n]  # (n, 8, 8)
    return small.repeat(SIDE // 8, 1).repeat(SIDE // 8, 2).round().astype(np.uint8)[:, None].repeat(3, 1)


def photographs(archive: str, allowed: tuple[int, ...], *, n: int, seed: int) -> Bytes:
    """Cut squares whose every pixel has an allowed label from the photographs in turn; (n, 3, 32, 32)."""
    generator, squares = np.random.default_rng(seed), list[Bytes]()
    with zipfile.ZipFile(require(Path(archive).parent.name, (archive,)) / archive) as file:
        names = list_pairs(file)
        for name in (name for _ in range(TRIES) for name in generator.permutation(names).tolist()):
            square = _square(*open_pair(file, name), allowed, generator)
            squares += [] if square is None else [square]
            if len(squares) == n:
                break
    if not squares:
        raise MCBNError(f"{archive} holds no square of {CROP} pixels without an object")
    return np.stack(squares)


def _square(image: Image.Image, label: Bytes, allowed: tuple[int, ...], generator: np.random.Generator) -> Bytes | None:
    """Return the first of some random squares that shows nothing but what is allowed, shrunk to (3, 32, 32)."""
    height, width = label.shape
    for _ in range(TRIES if min(height, width) >= CROP else 0):
        top, left = int(generator.integers(height - CROP + 1)), int(generator.integers(width - CROP + 1))
        if np.isin(label[top : top + CROP, left : left + CROP], allowed).all():
            square = image.convert("RGB").crop((left, top, left + CROP, top + CROP))
            shrunk = square.resize((SIDE, SIDE), resample=Image.Resampling.BOX)  # averages the area
            return np.asarray(shrunk, dtype=np.uint8).transpose(2, 0, 1)
    return None


def noise(x: Tensor, sigma: float) -> Tensor:
    """x + sigma e, e standard normal of the row; x (N, 3, H, W) in 0..1."""
    rows = [np.random.default_rng([0, row]).standard_normal(x.shape[1:], np.float32) for row in range(len(x))]
    return x + sigma * torch.from_numpy(np.stack(rows))


def blur(x: Tensor, sigma: float) -> Tensor:
    """Convolve rows and columns with exp(-d^2 / 2 sigma^2), d up to 4, normalised, edges mirrored."""
    return torch.from_numpy(gaussian_filter(x.numpy(), sigma, mode="mirror", radius=4, axes=(2, 3)))


def pixelate(x: Tensor, share: float) -> Tensor:
    """Average to fewer pixels, and give each old pixel the mean of those that cover it."""
    height, width = x.shape[2:]
    coarse = max(1, round(share * height)), max(1, round(share * width))
    return F.adaptive_avg_pool2d(F.adaptive_avg_pool2d(x, coarse), (height, width))


def contrast(x: Tensor, factor: float) -> Tensor:
    """Bring every value nearer to the image's mean."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + factor * (x - mean)


KINDS: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {  # strength by severity, from 0
    "noise": (noise, (0.0, 0.03, 0.06, 0.09, 0.13, 0.18)),  # standard deviation, of 1 = white
    "blur": (blur, (0.0, 0.5, 0.7, 0.9, 1.2, 1.6)),  # standard deviation in pixels
    "contrast": (contrast, (1.0, 0.7, 0.5, 0.35, 0.22, 0.12)),
    "brightness": (torch.add, (0.0, 0.08, 0.16, 0.24, 0.32, 0.42)),  # of 1 = white
    "pixelate": (pixelate, (1.0, 0.875, 0.75, 0.5, 0.375, 0.25)),  # pixels a side that are left, as a share
}


def corrupt(images: Tensor, kind: str, severity: int) -> Tensor:
    """Corrupt bytes (N, 3, H, W) in one of the `KINDS`; severity 0 to 5. A row's noise depends on its number alone."""
    change, strengths = KINDS[kind]
    changed = change(require_images(images).float() / 255, strengths[severity])
    return (changed * 255).round().clamp(0, 255).to(torch.uint8)


def mixture(images: Tensor, severity: int) -> Tensor:
    """Corrupt image i by kind i modulo 5, so that every kind has its share of the images."""
    result = images.clone()
    for position, kind in enumerate(KINDS):
        result[position :: len(KINDS)] = corrupt(images[position :: len(KINDS)], kind, severity)
    return result
