"""SegNet by night and in fog, in small: changes by their formulas, records of the watch and of repairs, the table."""

from pathlib import Path

import pytest
import torch

from mcbn_study import journal
from mcbn_study.segmentation import shift
from mcbn_study.segmentation.train import save_network, train
from scene_files import write_part
from segmented import TINY, UNSETTLED


def test_changes_are_their_formulas() -> None:
    x = torch.randint(0, 256, (2, 3, 10, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shift.change(x, "none", 1.0), x)
    foggy = shift.change(x, "fog", 0.3)
    for row in range(10):
        t = 0.3 ** min(1.0, max(0.2, 1.4 * (1 - row / 9)))
        expected = 255 * (t * x[0, 1, row, 2] / 255 + 0.8 * (1 - t))
        assert float(foggy[0, 1, row, 2]) == pytest.approx(float(expected), abs=0.51)
    grey = torch.full((1, 3, 100, 100), 128, dtype=torch.uint8)
    dark = shift.change(grey, "night", 0.5).double()
    assert float(dark.mean()) == pytest.approx(64, abs=0.5)
    assert float(dark.std()) == pytest.approx(0.03 * 255, rel=0.05)


@UNSETTLED
def test_a_tiny_network_is_watched_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, count in (("train", 6), ("val", 20), ("test", 40)):
        write_part(tmp_path / "camvid" / f"{part}.zip", count=count)
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    save_network(train(TINY, TINY.load("train"), None)[0], TINY, tmp_path / "camvid.safetensors")
    few = {"size": [36, 48], "n_samples": 3, "n_reference": 30, "batch_size": 1, "n_watched": 10, "n_scored": 8}
    changes = [["none", 1.0, True], ["fog", 0.6, False], ["fog", 0.1, True]]
    path = shift.run(TINY, tmp_path, tmp_path / "out", **few, unlabelled=[6], changes=changes)
    rows = journal.read(tmp_path / "out" / "records.jsonl")
    methods = ["plain", "batch", "mcbn", "adapt 6"]
    assert [row["method"] for row in rows] == ["watch", *methods, "watch", "watch", *methods]
    assert [row["found"] for row in rows if row["method"] == "watch"][-1] == 10  # of ten foggy images
    assert [row["moved"] for row in rows if "moved" in row] == [False, True]
    clean = {row["method"]: row for row in rows if row["change"] == "none"}
    assert clean["adapt 6"]["nll"] == clean["mcbn"]["nll"]  # nothing moved, nothing lost
    assert all(row["hardware"] and row["commit"] for row in rows)
    text = path.read_text()
    assert "| fog | 0.1 | 10 | 10 |" in text
    assert "| fog | adapt 6 unlabelled |" in text
