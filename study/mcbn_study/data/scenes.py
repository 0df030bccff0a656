"""Segmentation sets as tensors: CamVid and a subset of PASCAL-VOC 2012, read from zip files of JPEG and PNG.

Each part is one zip: `names.txt` (the order), `images/NAME.jpg` (RGB) and `labels/NAME.png` (8 bits, a class a pixel).
"""

import io
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn_study.data.images import cache_folder

Colour = tuple[int, int, int]
Bytes = NDArray[np.uint8]
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class SceneSet:
    """What is known of a set: its classes with a colour each, the label to ignore, and the size of its images."""

    name: str
    parts: tuple[str, ...]
    classes: tuple[str, ...]
    colours: tuple[Colour, ...]
    void: int
    size: Size
    resize: bool = False  # images come in many sizes and are brought to `size`
    weights: tuple[float, ...] | None = None  # published class weights


@dataclass(frozen=True, eq=False)
class Scenes:
    """Images x (N, 3, H, W) and the class of every pixel y (N, H, W), both bytes; `void` pixels count nowhere."""

    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    classes: tuple[str, ...]
    colours: tuple[Colour, ...]
    void: int

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> "Scenes":
        """Move the tensors to a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def take(self, rows: Sequence[int]) -> "Scenes":
        """Keep these images, in this order."""
        chosen = torch.tensor(rows, device=self.x.device)
        return replace(self, x=self.x[chosen], y=self.y[chosen], names=tuple(self.names[row] for row in rows))

    def shrink(self, size: Size) -> "Scenes":
        """Bring all images to a size (H, W): images averaged, labels those of the nearest pixel."""
        x = F.interpolate(self.x.float(), size, mode="bilinear", antialias=True).round_().clamp_(0, 255)
        y = F.interpolate(self.y.unsqueeze(1).float(), size, mode="nearest-exact").squeeze(1)
        return replace(self, x=x.byte(), y=y.byte())


def _voc_colours(count: int) -> tuple[Colour, ...]:
    """Spread the bits of a class number over red, green and blue, as the VOC development kit does."""

    def channel(label: int, bit: int) -> int:
        return sum(((label >> (3 * place + bit)) & 1) << (7 - place) for place in range(3))

    return tuple((channel(label, 0), channel(label, 1), channel(label, 2)) for label in range(count))


CAMVID = SceneSet(
    name="camvid",
    parts=("train", "val", "test"),
    classes=(
        *("Sky", "Building", "Pole", "Road", "Pavement", "Tree"),
        *("SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist"),
    ),
    colours=(
        *((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0)),
        *((192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
    ),
    void=11,
    size=(360, 480),
    # Badrinarayanan et al. 2017 (SegNet), as published with its code
    weights=(0.2595, 0.1826, 4.5640, 0.1417, 0.9051, 0.3826, 9.6446, 1.8418, 0.6823, 6.2478, 7.3614),
)
_VOC_CLASSES = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor"
)
VOC = SceneSet(
    name="voc",
    parts=("train", "val"),
    classes=tuple(_VOC_CLASSES.split()),
    colours=_voc_colours(21),
    void=255,
    size=(224, 224),
    resize=True,
)
SCENE_SETS = {each.name: each for each in (CAMVID, VOC)}


def camvid(part: str, *, folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> Scenes:
    """Load CamVid: 367 train, 101 val, 233 test street scenes of 360 x 480, 11 classes, void 11.

    Args:
        part: "train", "val" or "test".
        folder: holds `camvid/PART.zip`; by default $MCBN_DATA_DIR, then the cache that `mcbn data camvid` fills.
        limit: read only the first images.
    """
    return load_scenes(CAMVID, part, folder=folder, limit=limit)


def voc(part: str, *, folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> Scenes:
    """Load a subset of VOC 2012, 300 train and 200 val images brought to 224 x 224, 21 classes, void 255.

    Every image shows a cat, dog, horse, cow or sheep, so it is no sample of VOC. Arguments as for `camvid`.
    """
    return load_scenes(VOC, part, folder=folder, limit=limit)


def load_scenes(
    kind: SceneSet, part: str, *, folder: str | os.PathLike[str] | None = None, limit: int | None = None
) -> Scenes:
    """Read one part of a set; a damaged archive, image or label is refused with its name."""
    if part not in kind.parts:
        raise MCBNError(f"{kind.name} has the parts {', '.join(kind.parts)}, not {part!r}")
    path = find_scenes(kind, part, folder)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.read("names.txt").decode().split()[:limit]
            if not names:
                raise MCBNError(f"{path}: names.txt names no image; remove the file and run `mcbn data {kind.name}`")
            pairs = [_read_pair(archive, kind, name, f"{path}: {name}") for name in names]
    except (zipfile.BadZipFile, KeyError, EOFError, UnicodeDecodeError) as error:
        raise MCBNError(
            f"{path} is damaged or no archive of scenes ({error}); remove it and run `mcbn data {kind.name}`"
        ) from error
    x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
    return Scenes(x, y, tuple(names), kind.classes, kind.colours, kind.void)


def find_scenes(kind: SceneSet, part: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the zip file of one part."""
    data = os.environ.get("MCBN_DATA_DIR")
    places = [Path(folder)] if folder is not None else [*([Path(data)] if data else []), cache_folder()]
    found = [path for place in places if (path := place / kind.name / f"{part}.zip").is_file()]
    if not found:
        looked = " nor ".join(str(place) for place in places)
        raise MCBNError(
            f"no {kind.name}/{part}.zip in {looked}: run `mcbn data {kind.name}`, or set MCBN_DATA_DIR to the folder "
            f"that holds {kind.name}/"
        )
    return found[0]


def _read_pair(archive: zipfile.ZipFile, kind: SceneSet, name: str, where: str) -> tuple[Tensor, Tensor]:
    """Read one image (1, 3, H, W) and its labels (1, H, W)."""
    image = _decode(archive.read(f"images/{name}.jpg"), "RGB", f"{where}, image")  # (H, W, 3)
    label = _decode(archive.read(f"labels/{name}.png"), "L", f"{where}, label")  # (H, W)
    size = label.shape
    if image.shape[:2] != size:
        raise MCBNError(f"{where}: the image is {image.shape[:2]} (height, width), its label {size}")
    if size != kind.size and not kind.resize:
        raise MCBNError(f"{where}: the image is {size} (height, width); {kind.name} has {kind.size}")
    shown = np.flatnonzero(np.bincount(label.ravel()))  # 0.8 ms an image; sorting takes 2.0
    wrong = shown[(shown >= len(kind.classes)) & (shown != kind.void)]
    if wrong.size:
        raise MCBNError(
            f"{where}: label {wrong[0]} is outside the class list, 0..{len(kind.classes) - 1} and {kind.void} for void"
        )
    x, y = torch.from_numpy(image.copy()).permute(2, 0, 1), torch.from_numpy(label.copy())
    scene = Scenes(x.unsqueeze(0), y.unsqueeze(0), (name,), kind.classes, kind.colours, kind.void)
    if size != kind.size:
        scene = scene.shrink(kind.size)
    return scene.x.contiguous(), scene.y


def _decode(raw: bytes, mode: str, where: str) -> Bytes:
    """Decode a JPEG or PNG of the mode "RGB" to (H, W, 3) or "L", 8-bit grey, to (H, W)."""
    try:
        from PIL import Image
    except ImportError:
        return _decode_by_torchvision(raw, mode, where)
    try:
        with Image.open(io.BytesIO(raw)) as image:
            if image.mode != mode:
                raise MCBNError(f"{where}: expected mode {mode}, found {image.mode}; convert it")
            return np.asarray(image, dtype=np.uint8)
    except (
        OSError,
        SyntaxError,
        ValueError,
    ) as error:  # PIL tells damaged PNGs by SyntaxError; MCBNError is a ValueError
        if isinstance(error, MCBNError):
            raise
        raise MCBNError(f"{where}: cannot be decoded ({error}); download the set again") from error


def _decode_by_torchvision(raw: bytes, mode: str, where: str) -> Bytes:
    try:
        from torchvision.io import decode_image  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MCBNError("reading images needs Pillow: pip install 'mcbn[data]'") from error
    try:
        image: Tensor = decode_image(torch.frombuffer(bytearray(raw), dtype=torch.uint8))  # (channels, H, W)
    except RuntimeError as error:
        raise MCBNError(f"{where}: cannot be decoded ({error}); download the set again") from error
    if len(image) != len(mode):  # RGB has three, L one
        raise MCBNError(f"{where}: expected mode {mode}, found {len(image)} channels; convert it")
    return image.permute(1, 2, 0).numpy() if mode == "RGB" else image[0].numpy()
