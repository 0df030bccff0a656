"""MNF as a trained method: it learns, covers, and says what is wrong."""

import math

import pytest
import torch
from torch import Tensor

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


def test_mistakes_are_told() -> None:
    x, y = toy()
    with pytest.raises(mcbn.MCBNError, match="not fitted"):
        MNF("regression").predict(x)
    with pytest.raises(mcbn.MCBNError, match="finite"):
        MNF("regression").fit(x, y.clone().fill_(math.nan))
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        MNF("regression", hidden=(3,)).fit(x, y, epochs=1).predict(x[:, :2])
    with pytest.raises(mcbn.MCBNError, match="task must be one of"):
        MNF("classification")


@pytest.mark.parametrize("option", ["epochs", "batch_size", "n_samples"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(mcbn.MCBNError, match=f"{option} must be a whole number"):
        MNF("regression").fit(*toy(), **{option: 0})
