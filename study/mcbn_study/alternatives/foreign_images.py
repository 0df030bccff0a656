"""Images of no CIFAR-10 class: background of photographs, street scenes without vehicles, handwritten digits.

Photographs come from the VOC and CamVid archives of $MCBN_DATA_DIR. Their labels, one a pixel, pick squares that show
no object: those of VOC would often be a cat, dog or horse, which the networks know.
"""

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mcbn.errors import MCBNError
from mcbn.files import replacing

SIDE = 32
CROP = 96  # pixels a side before shrinking
TRIES = 20  # squares looked at in one photograph
CAMVID_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7)  # sky, building, pole, road, pavement, tree, sign, fence
VOC_ALLOWED = (0,)  # background
Array = np.ndarray[Any, np.dtype[np.uint8]]


def build(path: str | Path, *, n: int = 500, seed: int = 0) -> Path:
    """Write the sets "voc", "camvid" and "digits", n images (3, 32, 32) each at most, as one npz.

    Needs pillow and scikit-learn, and the archives `voc/val.zip` and `camvid/test.zip` in $MCBN_DATA_DIR.
    """
    sets = {
        "voc": photographs("voc/val.zip", VOC_ALLOWED, n=n, seed=seed),
        "camvid": photographs("camvid/test.zip", CAMVID_ALLOWED, n=n, seed=seed),
        "digits": digits(n=n, seed=seed),
    }
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **sets)  # type: ignore[arg-type]
    return Path(path)


def digits(*, n: int, seed: int) -> Array:
    """Return scikit-learn's 8x8 digits, enlarged to (n, 3, 32, 32), grey."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise MCBNError("handwritten digits come with scikit-learn; pip install 'mcbn[sklearn]'") from error
    found = load_digits().images * (255 / 16)  # (1797, 8, 8)
    chosen = np.random.default_rng(seed).permutation(len(found))[:n]
    large = found[chosen].repeat(SIDE // 8, 1).repeat(SIDE // 8, 2).round().astype(np.uint8)
    return np.repeat(large[:, None], 3, 1)


def photographs(archive: str, allowed: tuple[int, ...], *, n: int, seed: int) -> Array:
    """Cut squares whose every pixel has an allowed label from the photographs in turn; (n, 3, 32, 32)."""
    generator = np.random.default_rng(seed)
    found: list[Array] = []
    with zipfile.ZipFile(_find(archive)) as file:
        names = [name for name in file.namelist() if name.startswith("images/")]
        for _ in range(TRIES):
            for name in generator.permutation(names).tolist():
                found += list(_square(*_pair(file, name), allowed, generator))
                if len(found) == n:
                    return np.stack(found)
    if not found:
        raise MCBNError(f"{archive} holds no square of {CROP} pixels without an object")
    return np.stack(found)


def _square(image: Any, label: Array, allowed: tuple[int, ...], generator: np.random.Generator) -> Iterator[Array]:
    """Yield the first of some random squares that shows nothing but what is allowed, shrunk to (3, 32, 32)."""
    height, width = label.shape
    for _ in range(TRIES if min(height, width) >= CROP else 0):
        top, left = int(generator.integers(height - CROP + 1)), int(generator.integers(width - CROP + 1))
        if np.isin(label[top : top + CROP, left : left + CROP], allowed).all():
            small = image.crop((left, top, left + CROP, top + CROP)).resize((SIDE, SIDE), resample=4)  # 4: area average
            yield np.asarray(small, dtype=np.uint8).transpose(2, 0, 1)
            return


def _pair(file: zipfile.ZipFile, name: str) -> tuple[Any, Array]:
    """Read a photograph and its labels (H, W)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MCBNError("reading photographs needs pillow; pip install 'mcbn[data]'") from error
    label = name.replace("images/", "labels/").replace(".jpg", ".png")
    image = Image.open(io.BytesIO(file.read(name))).convert("RGB")
    return image, np.asarray(Image.open(io.BytesIO(file.read(label))), dtype=np.uint8)


def _find(archive: str) -> Path:
    folder = os.environ.get("MCBN_DATA_DIR")
    path = Path(folder or ".").expanduser() / archive
    if not folder or not path.is_file():
        raise MCBNError(f"no {archive} in MCBN_DATA_DIR ({folder or 'not set'}); set it to the folder that holds it")
    return path
