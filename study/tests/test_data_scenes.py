"""Segmentation sets: what is read is what the archive holds, and nothing else is accepted."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mcbn import MCBNError
from mcbn_study.data.scenes import CAMVID, SCENE_SETS, VOC, SceneSet, load_scenes
from scene_files import encode, scene, write_part


def shared(name: str) -> None:
    folder = os.environ.get("MCBN_DATA_DIR")
    if not folder or not (Path(folder) / name / "train.zip").is_file():
        pytest.skip(f"no {name} in MCBN_DATA_DIR")


def test_scenes_hold_the_pixels_of_the_archive_in_its_order(tmp_path: Path) -> None:
    write_part(tmp_path / "camvid" / "val.zip", count=3)
    found = load_scenes(CAMVID, "val", folder=tmp_path)
    assert (found.x.shape, found.x.dtype) == ((3, 3, 360, 480), torch.uint8)
    assert (found.y.shape, found.y.dtype) == ((3, 360, 480), torch.uint8)
    assert found.names == ("scene0", "scene1", "scene2")
    with zipfile.ZipFile(tmp_path / "camvid" / "val.zip") as archive:
        for i, name in enumerate(found.names):
            image = np.asarray(Image.open(io.BytesIO(archive.read(f"images/{name}.jpg"))))
            label = np.asarray(Image.open(io.BytesIO(archive.read(f"labels/{name}.png"))))
            assert np.array_equal(found.x[i].permute(1, 2, 0).numpy(), image)
            assert np.array_equal(found.y[i].numpy(), label)


def test_limit_reads_the_first_images_only(tmp_path: Path) -> None:
    write_part(tmp_path / "camvid" / "val.zip", count=3, **{"images/scene2.jpg": None})
    assert load_scenes(CAMVID, "val", folder=tmp_path, limit=2).names == ("scene0", "scene1")


def test_voc_is_brought_to_224_and_labels_stay_labels(tmp_path: Path) -> None:
    write_part(tmp_path / "voc" / "train.zip", (150, 201), classes=4)
    found = load_scenes(VOC, "train", folder=tmp_path)
    assert found.x.shape == (2, 3, 224, 224)
    assert set(found.y.unique().tolist()) <= {0, 1, 2, 3}


def test_shrinking_to_the_same_size_changes_nothing(tmp_path: Path) -> None:
    write_part(tmp_path / "camvid" / "val.zip")
    found = load_scenes(CAMVID, "val", folder=tmp_path)
    same = found.shrink((360, 480))
    assert torch.equal(same.x, found.x)
    assert torch.equal(same.y, found.y)


def test_colours_of_voc_are_those_of_its_development_kit() -> None:
    assert VOC.colours[:4] == ((0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0))
    assert VOC.colours[12] == (64, 0, 128)  # dog
    assert VOC.colours[20] == (0, 64, 128)  # tvmonitor
    for kind in SCENE_SETS.values():
        assert len(set(kind.colours)) == len(kind.colours) == len(kind.classes)


def bad(member: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    image, label = scene(rng, (360, 480), 11)
    outside = label.copy()
    outside[0, 0] = 12
    changes: dict[str, tuple[str, bytes | None]] = {
        "no label": ("labels/scene1.png", None),
        "no image": ("images/scene1.jpg", None),
        "label outside": ("labels/scene1.png", encode(outside, "PNG")),
        "label in colour": ("labels/scene1.png", encode(np.stack([label] * 3, 2), "PNG")),
        "grey image": ("images/scene1.jpg", encode(image[..., 0], "JPEG")),
        "other size": ("images/scene1.jpg", encode(image[:-8], "JPEG")),
        "cut-off label": ("labels/scene1.png", encode(label, "PNG")[:60]),
        "no JPEG": ("images/scene1.jpg", b"not a picture"),
        "no names": ("names.txt", b""),
        "no names.txt": ("names.txt", None),
    }
    name, content = changes[member]
    return {name: content}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no label", "damaged.*scene1.png.*mcbn data camvid"),
        ("no image", "damaged.*scene1.jpg.*mcbn data camvid"),
        ("label outside", r"scene1: label 12 is outside the class list, 0\.\.10 and 11 for void"),
        ("label in colour", "scene1, label: expected mode L, found RGB"),
        ("grey image", "scene1, image: expected mode RGB, found L"),
        ("other size", r"scene1: the image is \(352, 480\).*its label \(360, 480\)"),
        ("cut-off label", "scene1, label: cannot be decoded"),
        ("no JPEG", "scene1, image: cannot be decoded"),
        ("no names", "names no image"),
        ("no names.txt", "damaged.*names.txt"),
    ],
)
def test_bad_members_are_refused_by_name(tmp_path: Path, what: str, says: str) -> None:
    write_part(tmp_path / "camvid" / "train.zip", **bad(what))
    with pytest.raises(MCBNError, match=says):
        load_scenes(CAMVID, "train", folder=tmp_path)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path / "camvid" / "train.zip", (120, 160))
    with pytest.raises(MCBNError, match=r"\(120, 160\) \(height, width\); camvid has \(360, 480\)"):
        load_scenes(CAMVID, "train", folder=tmp_path)


def test_corrupt_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "camvid" / "train.zip"
    write_part(path)
    raw = bytearray(path.read_bytes())
    for damaged in (raw[: len(raw) // 2], raw[:2000] + bytes(50) + raw[2050:], b""):  # cut off, overwritten, empty
        path.write_bytes(damaged)
        with pytest.raises(MCBNError, match=r"damaged|cannot be decoded"):
            load_scenes(CAMVID, "train", folder=tmp_path)


def test_missing_files_and_parts_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("MCBN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(MCBNError, match=r"no voc/val.zip in .*data nor .*cache: run `mcbn data voc`"):
        load_scenes(VOC, "val")
    with pytest.raises(MCBNError, match=r"part must be one of \['train', 'val'\] of voc, got 'test'"):
        load_scenes(VOC, "test")
    write_part(tmp_path / "cache" / "voc" / "val.zip", (40, 50), classes=3)
    assert len(load_scenes(VOC, "val")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part", "count"), [(CAMVID, "test", 233), (VOC, "val", 200)], ids=["camvid", "voc"])
def test_the_published_sets_are_whole(kind: SceneSet, part: str, count: int) -> None:
    shared(kind.name)
    found = load_scenes(kind, part)
    assert found.x.shape == (count, 3, *kind.size)
    assert set(found.y.unique().tolist()) <= {*range(len(kind.classes)), kind.void}
