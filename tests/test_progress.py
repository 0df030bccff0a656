"""Bars where somebody looks, silence elsewhere."""

import io
import sys

import pytest
from torch.utils.data import DataLoader

import mcbn
from kinds import make
from mcbn import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_only_a_terminal_sees_a_bar(stream: io.StringIO, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SHOW_AFTER", 0)
    with progress.bar("spelling", 3, "letter") as tick:
        for _ in "abc":
            tick(1)
    assert ("spelling" in stream.getvalue()) is shown
    assert ("/3" in stream.getvalue()) is shown


def test_what_takes_less_than_a_second_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.bar("quick", 2, "step") as tick:
        tick(1)
    assert "quick" not in sys.stderr.getvalue()


def test_bytes_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "SHOW_AFTER", 0)
    with progress.bar("file", 170_000_000, "B") as tick:
        tick(85_000_000)
    assert "/170M" in sys.stderr.getvalue()


def test_without_tqdm_work_goes_on_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress.bar("x", 2, "y") as tick:
        tick(1)


def test_counted_batches_leave_the_model_as_it_was() -> None:
    network, x = make("1d")
    bayes, counts = mcbn.MCBN(network, "regression", inputs="here"), []
    with progress.counting(bayes, counts.append):
        bayes.fit(DataLoader([{"here": row} for row in x], batch_size=4), n_samples=3)  # type: ignore[arg-type]
    assert counts == [1, 1, 1]
    with pytest.raises(mcbn.MCBNError), progress.counting(bayes, counts.append):
        bayes.fit(x, n_samples=3, batch_size=4)
    assert bayes.inputs == "here"
