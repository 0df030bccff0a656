"""The page about inputs in the field: what it says, draws and shows, with and without inputs, labels and adaptation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mcbn
from deployed import M, faded, fitted, images, reference, table, watched
from mcbn.field.watch import Watch
from mcbn.page.field import write_watch_page
from pages import EVIL, Reader, assert_offline


@pytest.fixture
def watch() -> Watch:
    """A watch whose stream nothing else has touched."""
    home: Watch = watched("table")
    home.reset()
    return home


def words(path: Path) -> str:
    return " ".join(" ".join(Reader(path.read_text()).words).split())


def shifted_half(n: int) -> torch.Tensor:
    x = table(n, 50)[0]
    return torch.cat([x[: n // 2], faded(x[n // 2 :])])


def test_an_alarm_is_told_and_drawn_where_it_is(watch: Watch, tmp_path: Path) -> None:
    x = shifted_half(24 * M)
    path = write_watch_page(tmp_path / "page.html", watch, x)
    assert_offline(path.read_text())
    told, charts = words(path), Reader(path.read_text()).blocks
    assert "The stream has shifted: its evidence reached 100." in told
    assert "24 batches of M = 8" in told
    p_values: Any = charts["p_values"]
    heights = p_values["series"][0]["y"]
    expected = [-np.log10(watch(batch).p_value) for batch in x.split(M)]
    np.testing.assert_allclose(heights, expected, atol=1e-3)
    assert p_values["series"][1]["y"] == [2, 2]
    evidence: Any = charts["evidence"]
    assert max(evidence["series"][0]["y"][:12]) < 2 < max(evidence["series"][0]["y"])


def test_a_stream_like_home_is_no_alarm(watch: Watch, tmp_path: Path) -> None:
    told = words(write_watch_page(tmp_path / "page.html", watch, table(20 * M, 51)[0]))
    assert "No alarm" in told
    assert "Before and after" not in told


def test_rows_alone_make_a_page_without_inputs(watch: Watch, tmp_path: Path) -> None:
    rows = list(watch.read([shifted_half(4 * M)], "today.csv"))
    told = words(write_watch_page(tmp_path / "page.html", watch, rows=rows, title=EVIL))
    assert "strangest" not in told
    assert "at row" in told
    assert "of today.csv" in told
    assert EVIL in told  # as text


def test_fewer_inputs_than_a_batch_are_refused(watch: Watch, tmp_path: Path) -> None:
    for x in (None, table(M - 1, 56)[0]):
        with pytest.raises(mcbn.MCBNError, match="needs a whole batch, 8 inputs"):
            write_watch_page(tmp_path / "page.html", watch, x)


def test_the_strangest_inputs_come_first_as_rows_and_as_pictures(watch: Watch, tmp_path: Path) -> None:
    x = table(6 * M, 52)[0]
    x[7] += 20
    path = write_watch_page(tmp_path / "page.html", watch, x, names=list("abcde"))
    assert words(path).split("distance a b c d e")[1].split()[0] == "7"
    pictures = images(M, 53)[0]
    path = write_watch_page(tmp_path / "images.html", watched("images"), pictures)
    shown = [a for tag, a in Reader(path.read_text()).tags if tag == "img" and (a.get("alt") or "").startswith("input")]
    farthest = int(watched("images").novelty(pictures).distance.argmax())
    assert len(shown) == 6
    assert shown[0]["alt"] == f"input {farthest}"


def test_before_and_after_adaptation_are_scored_by_labels(tmp_path: Path) -> None:
    bayes, home = fitted("images"), watched("images")
    x, y = images(200, 54)
    adapted = bayes.adapt(faded(x), reference=home)
    path = write_watch_page(tmp_path / "page.html", home, faded(x), y.double(), bayes=bayes, adapted=adapted)
    told = words(path)
    assert adapted.adaptation.explain() in told
    for posterior in (bayes, adapted):
        accuracy = float((posterior.predict(faded(x)).label == y).double().mean())
        assert f"{accuracy:.4g}".lstrip("0") in told
    assert "Kept of the means" in told
    plain = words(write_watch_page(tmp_path / "page.html", home, faded(x), bayes=bayes, adapted=adapted))
    assert "mean entropy" in plain
    assert "accuracy" not in plain


def test_more_batches_than_cells_keep_the_farthest(tmp_path: Path) -> None:
    bayes = fitted("table")
    home = bayes.watch(reference("table"), batch_size=2)
    x = table(2 * 400, 55)[0]
    x[401] += 50
    rows = list(home.read([x]))
    from mcbn.page.field import WIDEST, _layers

    drawn = _layers(rows)
    assert drawn["top"] == pytest.approx(max(row[name] for row in rows for name in row if name.startswith("layer_")))
    assert len(drawn["rows"]) == 2
    assert WIDEST < 400
