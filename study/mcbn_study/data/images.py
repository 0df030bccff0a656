"""CIFAR-10 as tensors, read from its published binary records."""

import hashlib
import os
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn.data.folders import cache_folder as cache_folder
from mcbn.data.folders import find, places
from mcbn.errors import MCBNError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_FOLDER = "cifar-10-batches-bin"  # as the official archive unpacks
CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
Part = Literal["train", "test"]


class Images(NamedTuple):
    """Images x (N, 3, H, W), bytes, and their classes y (N,)."""

    x: Tensor
    y: Tensor


def cifar10(part: Part, *, folder: str | os.PathLike[str] | None = None) -> Images:
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
        looked = " nor ".join(str(place) for place in places(folder))
        raise MCBNError(f"no {CIFAR10_FOLDER} in {looked}: run `mcbn data cifar10`, or set MCBN_DATA_DIR to its parent")
    return place / CIFAR10_FOLDER


def _read_checked(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    raw = path.read_bytes()
    found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if found != CIFAR10_MD5[path.name]:
        raise MCBNError(
            f"{path} is not the published file: expected md5 {CIFAR10_MD5[path.name]}, found {found}; "
            "remove it and run `mcbn data cifar10`"
        )
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3073)
