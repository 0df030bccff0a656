"""Small archives of scenes, laid out like CamVid's and VOC's."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encode(pixels: np.ndarray, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind, **({"quality": 95} if kind == "JPEG" else {}))
    return out.getvalue()


def scene(rng: np.random.Generator, size: tuple[int, int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """An image of rectangles, each class with a brightness of its own, and its labels."""
    H, W = size
    label = np.zeros(size, np.uint8)
    for k in range(1, classes):
        top, left = rng.integers(0, H // 2), rng.integers(0, W // 2)
        label[top : top + H // 3, left : left + W // 3] = k
    shade = (label[..., None] * (200 // classes) + rng.integers(0, 30, (H, W, 3))).astype(np.uint8)
    return shade, label


def write_part(
    path: Path, size: tuple[int, int] = (360, 480), *, count: int = 2, classes: int = 11, **changes: Any
) -> None:
    """Write an archive; `changes` replaces or (with None) leaves out members by name."""
    rng = np.random.default_rng(0)
    members: dict[str, bytes | None] = {"names.txt": "\n".join(f"scene{i}" for i in range(count)).encode()}
    for i in range(count):
        image, label = scene(rng, size, classes)
        members[f"images/scene{i}.jpg"] = encode(image, "JPEG")
        members[f"labels/scene{i}.png"] = encode(label, "PNG")
    members |= changes
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
