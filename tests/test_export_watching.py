"""A watch as ONNX: the numbers of the watch for batches and single inputs, NaN, other sizes, what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mcbn
from deployed import M, faded, fitted, images, reference, table, watched
from mcbn import export
from mcbn.field.watch import Watch

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
KINDS = ("table", "images")


def session(path: Path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def draw(kind: str, n: int, seed: int) -> torch.Tensor:
    return (table if kind == "table" else images)(n, seed)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_the_numbers_of_the_watch(kind: str, tmp_path: Path) -> None:
    watch, path = watched(kind), tmp_path / "watch.onnx"
    watch.export(path, draw(kind, M, 60))
    served = session(path)
    for x in (draw(kind, M, 61), faded(draw(kind, M, 62))):
        distance, p_value = served.run(None, {"x": x.numpy()})
        reading = watch(x)
        assert distance.shape == p_value.shape == (1,)
        assert distance[0] == pytest.approx(reading.distance, rel=1e-4)
        assert p_value[0] == pytest.approx(reading.p_value, rel=1e-5)
    spoiled = draw(kind, M, 63)
    spoiled[2] = torch.nan
    distance, p_value = served.run(None, {"x": spoiled.numpy()})
    assert np.isinf(distance[0])
    assert p_value[0] == pytest.approx(watch(spoiled).p_value)
    with pytest.raises(Exception, match=r"(?i)dimension|shape"):  # every size has a null of its own
        served.run(None, {"x": draw(kind, M + 1, 64).numpy()})


@pytest.mark.parametrize("kind", KINDS)
def test_single_inputs_give_their_novelty_whatever_their_number(kind: str, tmp_path: Path) -> None:
    watch, path = watched(kind), tmp_path / "watch.onnx"
    watch.export(path, draw(kind, 1, 65), each=True)
    served = session(path)
    for n in (1, 5):
        x = draw(kind, n, 66)
        x[0] *= 3
        x[-1:].view(-1)[0] = torch.inf if n > 1 else x[-1:].view(-1)[0]
        distance, p_value = served.run(None, {"x": x.numpy()})
        novelty = watch.novelty(x)
        np.testing.assert_allclose(distance, novelty.distance.numpy(), rtol=1e-4)
        np.testing.assert_allclose(p_value, novelty.p_value.numpy(), rtol=1e-5)


def test_a_loaded_watch_is_exported_before_anything_ran(tmp_path: Path) -> None:
    watched("table").save(tmp_path / "home.watch")
    bayes = fitted("table")
    bayes.save(tmp_path / "net.mcbn")
    again = mcbn.MCBN.load(tmp_path / "net.mcbn", bayes.model)
    watch = Watch.load(tmp_path / "home.watch", again)
    x = draw("table", M, 67)
    watch.export(tmp_path / "watch.onnx", x)
    (distance, _) = session(tmp_path / "watch.onnx").run(None, {"x": x.numpy()})
    assert distance[0] == pytest.approx(watched("table")(x).distance, rel=1e-4)


def test_a_loaded_network_that_never_ran_is_watched_as_one_that_did(tmp_path: Path) -> None:
    bayes = fitted("table")
    bayes.save(tmp_path / "net.mcbn")
    again = mcbn.MCBN.load(tmp_path / "net.mcbn", bayes.model)
    x = draw("table", 5, 68)
    novelty = again.watch(reference("table"), batch_size=M).novelty(x)  # its first run was recorded twice
    torch.testing.assert_close(novelty.distance, watched("table").novelty(x).distance)


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, x = watched("table"), draw("table", M, 69)
    with pytest.raises(mcbn.MCBNError, match="it is a folder"):
        watch.export(tmp_path, x)
    with pytest.raises(mcbn.MCBNError, match="those of the reference"):
        watch.export(tmp_path / "w.onnx", x[:, :3])
    with pytest.raises(mcbn.MCBNError, match="one input has no batch statistics"):
        watch.export(tmp_path / "w.onnx", x[:1])
    monkeypatch.setattr(export, "run_onnx", lambda *_: {"distance": torch.ones(1)})
    with pytest.raises(mcbn.MCBNError, match="another distance than the watch"):
        watch.export(tmp_path / "w.onnx", x)
    assert not (tmp_path / "w.onnx").exists()


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x) if float(x.sum()) > -1e9 else x


@pytest.mark.filterwarnings("ignore:mcbn")
def test_a_network_that_decides_by_values_is_named(tmp_path: Path) -> None:
    bayes = mcbn.MCBN(Deciding().eval(), "regression").fit(torch.randn(60, 3), n_samples=5, batch_size=8)
    watch = bayes.watch(torch.randn(300, 3), batch_size=2)
    with pytest.raises(mcbn.MCBNError, match="Deciding cannot be exported as one graph"):
        watch.export(tmp_path / "w.onnx", torch.randn(2, 3))
