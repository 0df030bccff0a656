"""Images of no CIFAR-10 class: cut from photographs where nothing is labelled, and digits."""

import builtins
import io
import zipfile

import numpy as np
import pytest
import torch

from mcbn.errors import MCBNError
from mcbn_study.alternatives import inputs


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """Photographs whose left half is labelled an object (white) and whose right half is background (their number)."""
    from PIL import Image

    for name, part, object_label in (("voc", "val", 8), ("camvid", "test", 8)):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / f"{part}.zip", "w") as file:
            for i in range(3):
                pixels, labels = np.full((120, 260, 3), 10 * i, np.uint8), np.zeros((120, 260), np.uint8)
                pixels[:, :130], labels[:, :130] = 255, object_label
                for path, array in ((f"images/{i}.jpg", pixels), (f"labels/{i}.png", labels)):
                    buffer = io.BytesIO()
                    Image.fromarray(array).save(buffer, format="PNG")  # lossless, whatever the name
                    file.writestr(path, buffer.getvalue())
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    return tmp_path


def test_squares_show_no_object_and_come_from_all_photographs(archives):
    found = inputs.photographs("voc/val.zip", inputs.VOC_ALLOWED, n=6, seed=0)
    assert found.shape == (6, 3, 32, 32)
    assert found.max() <= 20  # nothing of the white half
    assert sorted(found[:, 0, 0, 0].tolist()) == [0, 0, 10, 10, 20, 20]


@pytest.mark.slow
def test_the_sets_are_written_and_read(archives, tmp_path):
    path = inputs.build_foreign(tmp_path / "foreign.npz", n=5)
    sets = inputs.load_foreign(path)
    assert {name: tuple(x.shape) for name, x in sets.items()} == dict.fromkeys(
        ("voc", "camvid", "digits"), (5, 3, 32, 32)
    )
    again = inputs.load_foreign(inputs.build_foreign(tmp_path / "again.npz", n=5))
    assert all(torch.equal(sets[name], again[name]) for name in sets)


def test_digits_are_enlarged_and_grey():
    from sklearn.datasets import load_digits

    found = inputs.digits(n=4, seed=0)
    assert (found[:, 0] == found[:, 2]).all()
    small = found[:, 0, ::4, ::4].astype(float) * 16 / 255  # (4, 8, 8)
    originals = load_digits().images
    assert all(np.abs(originals - one).max((1, 2)).min() < 0.05 for one in small)
    blocks = found[:, 0].reshape(4, 8, 4, 8, 4)
    assert (blocks == blocks[:, :, :1, :, :1]).all()


def test_what_is_missing_is_named(archives, tmp_path, monkeypatch):
    with pytest.raises(MCBNError, match="no square of 96 pixels without an object"):
        inputs.photographs("voc/val.zip", (3,), n=1, seed=0)
    with pytest.raises(MCBNError, match=r"no voc/none.zip in .*: run `mcbn data voc`, or set MCBN_DATA_DIR"):
        inputs.photographs("voc/none.zip", (0,), n=1, seed=0)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MCBNError, match=r"pip install 'mcbn\[sklearn\]'"):
        inputs.digits(n=1, seed=0)
