"""Labels asked for round by round: the same start for all ways, no image twice, records gone on with, the page."""

from pathlib import Path

import pytest
import torch

from mcbn_study import labels
from mcbn_study.cifar10.profile import Split
from mcbn_study.data.cifar import Images
from mcbn_study.journal import RECORDS, read

SMALL = {"first": 20, "asked": 4, "rounds": 2, "pool": 30, "n_test": 20, "steps": 2, "batch_size": 8, "n_samples": 4}


def pictures() -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (80, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Split(*(Images(x[:n], torch.arange(n) % 10) for n in (80, 10, 20)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mcbn")  # two steps of training leave no running statistics to agree with
def test_every_way_starts_alike_and_asks_for_images_it_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    monkeypatch.setattr(
        labels, "learn", lambda images, *how, learn=labels.learn: learned.append(images) or learn(images, *how)
    )
    labels.run(tmp_path, images=pictures(), seeds=[1], **SMALL)
    records = read(tmp_path / RECORDS)
    assert [(r["way"], r["labels"]) for r in records] == [(way, n) for way in labels.CHOICES for n in (20, 24, 28)]
    assert len({r["accuracy"] for r in records if r["labels"] == 20}) == 1
    for images in learned:
        assert len({image.numpy().tobytes() for image in images.x}) == len(images.x)
    before = len(learned)
    labels.run(tmp_path, images=pictures(), seeds=[1], **SMALL)
    assert len(learned) == before
    assert "| 28 |" in (tmp_path / "table.md").read_text().replace("     ", " ").replace("  ", " ")


def test_ways_choose_what_they_are_named_for() -> None:
    """Draws disagree most on inputs 0 and 1, which are copies, and less on 2."""
    samples = torch.zeros(4, 3, 2)
    samples[:2, :2, 0], samples[2:, :2, 1] = 9.0, 9.0
    samples[::2, 2, 0], samples[1::2, 2, 1] = 3.0, 3.0
    assert set(labels.CHOICES["BALD"](samples, 2, 0).tolist()) == {0, 1}
    assert set(labels.CHOICES["BatchBALD"](samples, 2, 0).tolist()) in ({0, 2}, {1, 2})
    first, again, other = (labels.CHOICES["random"](torch.zeros(1, 50, 2), 9, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other
