"""`mcbn.compare`: its scores are those of the methods themselves, its advice follows the bootstrap."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from mcbn import comparison, metrics
from mcbn.baselines import ConstantUncertainty, DeepEnsemble, MCDropout, Temperature
from test_conformal import classes, fitted, noisy
from untouched import untouched


def test_rows_of_regression_are_the_scores_of_each_method() -> None:
    bayes, held, (x, y) = fitted("regression"), noisy(100, 2), noisy(80, 3)
    with untouched(bayes.model):
        compared = mcbn.compare(bayes, held, (x, y), level=0.9)
    assert bayes.tau == float("inf")
    tuned = copy.copy(bayes).tune(held)
    predictions = {
        "plain, constant variance": Temperature(bayes.model, "regression").tune(held).predict(x),
        "MCBN mean, constant variance": ConstantUncertainty(tuned).tune(held).predict(x),
        "MCBN, linear": tuned.predict(x, method="linear"),
        "MCBN, sampled": tuned.predict(x),
    }
    for row, (name, pred) in zip(compared.rows, predictions.items(), strict=False):
        low, high = pred.interval(0.9)
        assert row.method == name
        assert row.ece is None
        assert row.loss == pytest.approx(metrics.crps_gaussian(pred.mean, pred.variance, y).mean().item(), rel=1e-9)
        assert row.coverage == pytest.approx(((low <= y) & (y <= high)).double().mean().item())
        aurc = metrics.aurc(pred.std.flatten(), (y - pred.mean).abs().flatten()).item()
        assert row.aurc == pytest.approx(aurc, rel=1e-6)
        assert row.milliseconds > 0
    assert compared.rows[-1].method.startswith("MCBN, tuned M = ")


def test_rows_of_classification_and_others() -> None:
    bayes, held, (x, y) = fitted("classification", 4), classes(200, 2), classes(150, 3)
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 4)).double().eval()
    others = {"dropout": MCDropout(network, "classification"), "ensemble": DeepEnsemble([network], "classification")}
    test = DataLoader(TensorDataset(x, y), batch_size=64)
    compared = mcbn.compare(bayes, held, test, others=others)
    scaled = Temperature(bayes.model, "classification").tune(held).predict(x)
    row = compared.rows[1]
    assert row.method == "temperature"
    assert row.loss == pytest.approx(metrics.nll(scaled.probs, y).item(), rel=1e-6)
    assert row.ece == pytest.approx(metrics.ece(scaled.probs, y).item(), rel=1e-6)
    assert [row.method for row in compared.rows][-2:] == ["dropout", "ensemble"]
    assert others["dropout"].tau == 1.0
    lines = str(compared).splitlines()
    assert len(lines) == len(compared.rows) + 3
    assert lines[0].split() == ["NLL", "ECE", "in", "95", "%", "AURC", "ms", "an", "input"]
    assert lines[-1] == compared.advice


def rows(losses: torch.Tensor) -> list[comparison.Row]:
    return [comparison.Row(f"m{i}", each.mean().item(), None, 0.9, 0.1, 1.0) for i, each in enumerate(losses)]


def test_advice_is_the_simplest_that_nothing_beats_beyond_chance() -> None:
    noise = torch.randn(3, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = 2 + noise * torch.tensor([[1.0], [1.0], [1.0]])
    assert "Take 'm0'" in comparison._advise("NLL", rows(near), near, 0)
    better = near.clone()
    better[1] = near[0] - 0.5 + 0.01 * noise[1]
    better[2] = better[1] - 0.0001 * noise[2]
    text = comparison._advise("NLL", rows(better), better, 0)
    assert text.startswith("Take 'm1'")
    assert "a difference beyond chance (95 % bootstrap interval 0.4" in text


def test_bootstrap_interval_is_that_of_the_mean() -> None:
    gaps = torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = comparison.difference(torch.zeros(500), gaps)
    error = gaps.std().item() / 500**0.5
    assert low == pytest.approx(gaps.mean().item() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(gaps.mean().item() + 1.96 * error, abs=0.15 * error)


def test_labels_that_the_plain_network_rules_out_do_not_hide_what_is_better() -> None:
    bayes, held, test = fitted("classification", 4), classes(200, 2), classes(150, 3)
    sharp = nn.Sequential(*bayes.model[:-1], nn.Linear(8, 4).double())
    sharp[-1].load_state_dict({name: 300 * value for name, value in bayes.model[-1].state_dict().items()})
    compared = mcbn.compare(mcbn.MCBN(sharp.eval(), "classification").fit(held[0], batch_size=16), held, test)
    assert metrics.nll(Temperature(sharp, "classification").predict(test[0]).probs.float(), test[1]) == float("inf")
    assert "nothing here beats it" not in compared.advice


def test_methods_of_another_task_are_refused() -> None:
    other = Temperature(nn.Linear(3, 4).double(), "classification")
    with pytest.raises(mcbn.MCBNError, match="'other' does classification, but the others regression"):
        mcbn.compare(fitted("regression"), noisy(30, 2), noisy(30, 3), others={"other": other})


def test_what_is_advised_beats_the_plain_network_beyond_chance() -> None:
    """m1 is as good as the best, m2, and yet no better than m0 beyond chance."""
    noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = 2 + noise[0]
    losses = torch.stack([plain, plain - 0.04 + 0.5 * noise[1], plain - 0.06 + 0.1 * noise[1]])
    assert comparison.difference(losses[1], losses[0])[0] < 0
    assert comparison.difference(losses[2], losses[1])[0] < 0
    assert comparison._advise("NLL", rows(losses), losses, 0).startswith("Take 'm2'")


def test_nothing_beats_the_plain_network_only_where_nothing_does() -> None:
    """The best on average, m1, may be chance where m2 is not."""
    noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = torch.stack([2 + noise[0], 1.9 + 3 * noise[1], 1.95 + noise[0]])
    assert losses[1].mean() < losses[2].mean()
    assert comparison._advise("NLL", rows(losses), losses, 0).startswith("Take 'm2'")


def test_columns_of_a_table_are_found_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    (x, y), (x_test, y_test) = noisy(100, 2), noisy(80, 3)
    held, test = (pandas.DataFrame(values.numpy(), columns=list("abc")) for values in (x, x_test))
    bayes = fitted("regression")
    bayes.fit(held, n_samples=20, batch_size=16)
    expected = mcbn.compare(bayes, (held, y), (test, y_test))
    got = mcbn.compare(bayes, (held.assign(id=5.0)[["c", "id", "a", "b"]], y), (test[list("bca")], y_test))
    assert torch.equal(got.losses, expected.losses)


def test_what_cannot_be_compared_is_said() -> None:
    bayes, held = fitted("regression"), noisy(100, 2)
    for level in ([0.9], "0.9", 2):
        with pytest.raises(mcbn.MCBNError, match="level must lie between 0 and 1"):
            mcbn.compare(bayes, held, held, level=level)  # type: ignore[arg-type]
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double().eval()
    head = mcbn.MCBN(network, "regression", noise="head").fit(held[0], n_samples=5, batch_size=16, centre="running")
    with pytest.raises(mcbn.MCBNError, match=r"noise must be one of .* to compare, got 'head'"):
        mcbn.compare(head, held, held)
