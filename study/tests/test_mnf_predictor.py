"""MNF as a trained method: it learns, covers, stops, saves, and says what is wrong."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import normal
from mcbn.baselines import ConstantUncertainty
from mcbn_study.mnf import stack
from mcbn_study.mnf.predictor import MNF
from untouched import generators


def toy(n: int = 200) -> tuple[Tensor, Tensor]:
    x = normal(n, 4).float()
    return x, 30 + 10 * (x[:, 0] + x[:, 1].sin()) + normal(n, seed=3).float()


@pytest.mark.slow
def test_fit_learns_and_tuned_intervals_cover() -> None:
    x, y = toy(400)
    method = MNF("regression", hidden=(20,)).fit(x[:300], y[:300], epochs=150, batch_size=30)
    pred = method.tune((x[300:], y[300:])).predict(x[300:])
    assert mcbn.metrics.rmse(pred.mean, y[300:]) < 0.3 * y.std()
    low, high = pred.interval(0.95)
    assert 0.85 < ((low < y[300:]) & (y[300:] < high)).float().mean() <= 1


def test_validation_keeps_the_best_epoch_and_stops() -> None:
    x, y = toy()
    pair = (x[:50], y[:50].flip(0))  # nothing to learn: the first epochs are the best
    short = MNF("regression", hidden=(5,)).fit(x[50:], y[50:], epochs=60, validation=pair, patience=3)
    long = MNF("regression", hidden=(5,)).fit(x[50:], y[50:], epochs=5000, validation=pair, patience=3)
    assert torch.equal(short.predict(x).mean, long.predict(x).mean)


def test_fit_takes_tensors_a_pair_a_loader_or_a_dataset_alike() -> None:
    x, y = toy()
    pairs = TensorDataset(x, y)
    data: list[tuple[Any, ...]] = [(x, y), ((x, y),), (DataLoader(pairs, batch_size=64),), (pairs,)]
    means = [MNF("regression", hidden=(5,)).fit(*given, epochs=2).predict(x).mean for given in data]
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_fit_and_predict_leave_the_global_generators() -> None:
    x, y = toy()
    state = generators()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=2)
    method.tune((x, y)).predict(x)
    assert generators() == state


def test_outputs_are_shaped_like_the_targets() -> None:
    x, y = toy()
    for target in (y, y.unsqueeze(1), torch.stack([y, -y], 1)):
        method = MNF("regression", hidden=(5,)).fit(x, target, epochs=1)
        assert method.predict(x).mean.shape == method.plain(x).shape == target.shape


def test_whole_number_targets_are_standardised_like_any_others() -> None:
    x, y = toy()
    y = y.round()
    means = [MNF("regression", hidden=(5,)).fit(x, given, epochs=3).predict(x).mean for given in (y, y.long())]
    assert torch.equal(*means)


def test_default_dtype_changes_nothing() -> None:
    x, y = toy()
    expected = MNF("regression", hidden=(5,)).fit(x, y, epochs=2).predict(x).mean
    torch.set_default_dtype(torch.float64)
    try:
        found = MNF("regression", hidden=(5,)).fit(x, y, epochs=2).predict(x).mean
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_more_draws_begin_with_the_same_draws() -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1)
    assert torch.equal(method.sample(x, n_samples=9)[:4], method.sample(x, n_samples=4))


def test_chunked_prediction_equals_unchunked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1)
    whole = method.predict(x)
    monkeypatch.setitem(stack.CHUNK, "cpu", len(x) * 5 * 3)
    parts = method.predict(x)
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.epistemic, whole.epistemic, rtol=1e-4, atol=1e-4)


def test_failed_fit_leaves_the_fitted_network() -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1, n_samples=4, seed=1)
    before = method.sample(x)
    with pytest.raises(mcbn.MCBNError):
        method.fit(x, y.fill_(math.inf), n_samples=7, seed=2)
    assert torch.equal(method.sample(x), before)


def test_constant_twin_of_mnf_has_its_mean() -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1, n_samples=5)
    assert torch.equal(ConstantUncertainty(method).predict(x).mean, method.predict(x).mean)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_saved_and_loaded_predicts_the_same(task: str, tmp_path: Path) -> None:
    x, y = toy()
    target = y if task == "regression" else (y > 30).long()
    method = MNF(task, hidden=(5,)).fit(x, target, epochs=2, n_samples=6, seed=3).tune((x, target))
    method.save(tmp_path / "net.mnf")
    again = MNF.load(tmp_path / "net.mnf")
    assert torch.equal(again.sample(x), method.sample(x))
    assert again.tau == method.tau
    assert [path.name for path in tmp_path.iterdir()] == ["net.mnf"]
    with pytest.raises(mcbn.MCBNError, match="does not exist"):
        method.save(tmp_path / "gone" / "net.mnf")


def test_loading_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    (tmp_path / "text").write_text("not a network")
    for name in ("other", "text", "missing"):
        with pytest.raises(mcbn.MCBNError, match="saved MNF"):
            MNF.load(tmp_path / name)


def test_mistakes_are_told() -> None:
    x, y = toy()
    with pytest.raises(mcbn.MCBNError, match="not fitted"):
        MNF("regression").predict(x)
    with pytest.raises(mcbn.MCBNError, match="needs targets"):
        MNF("regression").fit(x)
    with pytest.raises(mcbn.MCBNError, match="finite"):
        MNF("regression").fit(x, y.clone().fill_(math.nan))
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        MNF("regression", hidden=(3,)).fit(x, y, epochs=1).predict(x[:, :2])
    with pytest.raises(mcbn.MCBNError, match="labels must be whole numbers"):
        MNF("classification").fit(x, y)
    with pytest.raises(mcbn.MCBNError, match="leave validation= out"):
        MNF("classification").fit(x, (y > 30).long(), validation=(x, y))
    with pytest.raises(mcbn.MCBNError, match="task must be one of"):
        MNF("ranking")


@pytest.mark.parametrize("option", ["epochs", "patience", "batch_size", "n_samples"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(mcbn.MCBNError, match=f"{option} must be a whole number"):
        MNF("regression").fit(*toy(), **{option: 0})
    with pytest.raises(mcbn.MCBNError, match="learning_rate"):
        MNF("regression").fit(*toy(), learning_rate=0.0)
