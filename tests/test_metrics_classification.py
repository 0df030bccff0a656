"""Scores of classification against loops, scikit-learn and their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from kinds import normal
from mcbn import metrics
from mcbn.errors import MCBNError
from scored import assert_close, classified, generator, scalar

law = settings(deadline=None, derandomize=True, max_examples=50)


def test_nll_equals_scikit_learn_and_loop():
    probs, y = classified()
    assert_close(metrics.nll(probs, y), log_loss(y.numpy(), probs.numpy(), labels=range(4)))
    assert_close(metrics.nll(probs, y), -sum(math.log(probs[i, y[i]]) for i in range(40)) / 40)


def test_nll_of_zero_probability_is_infinite():
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf


def test_brier_equals_scikit_learn_and_loop():
    probs, y = classified()
    naive = sum((probs[i, k].item() - (k == y[i].item())) ** 2 for i in range(40) for k in range(4)) / 40
    assert_close(metrics.brier(probs, y), naive)
    probs, y = classified(k=2)
    assert_close(metrics.brier(probs, y), 2 * brier_score_loss(y.numpy(), probs[:, 1].numpy()))


def test_brier_ranges_from_0_to_2():
    sure = torch.eye(3, dtype=torch.float64)
    assert metrics.brier(sure, torch.tensor([0, 1, 2])) == 0
    assert metrics.brier(sure, torch.tensor([1, 2, 0])) == 2


def test_accuracy_equals_loop():
    probs, y = classified()
    hits = sum(max(range(4), key=lambda k, i=i: probs[i, k].item()) == y[i].item() for i in range(40))
    assert_close(metrics.accuracy(probs, y), hits / 40)


@pytest.mark.parametrize("n_bins", [1, 2, 7, 15])
def test_ece_equals_loop(n_bins):
    probs, y = classified(200)
    confidence, label = probs.max(1)
    naive = 0.0
    for b in range(n_bins):
        inside = (confidence > b / n_bins) & (confidence <= (b + 1) / n_bins)
        if inside.any():
            accuracy = (label == y)[inside].double().mean()
            naive += inside.sum().item() / 200 * (accuracy - confidence[inside].mean()).abs()
    assert_close(metrics.ece(probs, y, n_bins), naive)


def test_ece_bins_include_their_upper_edge():
    probs = scalar([[0.5, 0.5], [0.9, 0.1]])  # 0.5 is in (0, 0.5], 0.9 in (0.5, 1]
    assert_close(metrics.ece(probs, torch.tensor([0, 1]), n_bins=2), (0.5 + 0.9) / 2)


def test_ece_of_a_sure_network_is_its_error_rate():
    sure = torch.eye(4, dtype=torch.float64)
    assert_close(metrics.ece(sure, torch.tensor([0, 1, 2, 0])), 0.25)
    assert_close(metrics.ece(sure, torch.tensor([0, 1, 2, 3])), 0.0)


@pytest.mark.parametrize("function", [metrics.nll, metrics.brier, metrics.accuracy, metrics.ece])
def test_pixels_score_as_points(function):
    probs, y = classified(24, 3)
    pixels = probs.reshape(2, 3, 4, 3).permute(0, 3, 1, 2)  # (N, K, H, W)
    assert_close(function(pixels, y.reshape(2, 3, 4)), function(probs, y))
    order = torch.randperm(24, generator=generator())
    assert_close(function(probs[order], y[order]), function(probs, y))


@pytest.mark.parametrize("function", [metrics.nll, metrics.brier, metrics.ece])
def test_classification_gradients_are_right(function):
    probs, y = classified(6, 3)
    logits = probs.log().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: function(z.softmax(1), y), (logits,))


@pytest.mark.parametrize("function", [metrics.nll, metrics.brier, metrics.accuracy, metrics.ece])
@pytest.mark.parametrize(
    ("probs", "y", "message"),
    [
        (torch.full((3, 2), 0.5), torch.tensor([0, 1, 2]), "0 to 1; got 0 to 2"),
        (torch.full((3, 2), 0.5), torch.tensor([0, 1, -1]), "got -1"),
        (torch.full((3, 2), 0.5), torch.tensor([0.0, 1.0, 0.0]), "integer"),
        (torch.full((3, 2), 0.5), torch.tensor([True, False, True]), "integer"),
        (torch.full((3, 2), 0.5), torch.tensor([[0], [1], [0]]), r"\(3, 2\).*\(3, 1\)"),
        (torch.full((3,), 0.5), torch.tensor([0, 1, 0]), r"\(N, K"),
        (torch.full((0, 2), 0.5), torch.zeros(0, dtype=torch.long), "empty"),
        (torch.full((3, 2), 2.0), torch.tensor([0, 1, 0]), "logits"),
        (torch.tensor([[1.5, -0.5]]), torch.tensor([0]), "logits"),
        (torch.tensor([[math.nan, 1.0]]), torch.tensor([0]), "logits"),
    ],
)
def test_classification_refuses_bad_arguments(function, probs, y, message):
    with pytest.raises(MCBNError, match=message):
        function(probs, y)


def test_ece_refuses_no_bins():
    with pytest.raises(MCBNError, match="n_bins"):
        metrics.ece(*classified(), n_bins=0)


@law
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_auroc_equals_all_pairs_with_ties(points):
    score, label = zip(*points, strict=True)
    pairs = [(s, t) for s, p in points if p for t, q in points if not q]
    if not pairs:
        with pytest.raises(MCBNError, match="both classes"):
            metrics.auroc(scalar(score), list(label))
        return
    assert_close(
        metrics.auroc(scalar(score), list(label)),
        sum((s > t) + 0.5 * (s == t) for s, t in pairs) / len(pairs),
    )


def test_auroc_equals_scikit_learn():
    score = (3 * normal(500)).round()
    label = normal(500, seed=1) + 0.2 * score > 0
    assert_close(metrics.auroc(score, label), roc_auc_score(label.numpy(), score.numpy()))
    assert_close(metrics.auroc(-score, label.double()), 1 - metrics.auroc(score, label))


def test_auroc_is_exact_for_many_points():
    score = torch.arange(200_000, dtype=torch.float32)
    assert metrics.auroc(score, score >= 100_000) == 1
    assert_close(metrics.auroc(score, score % 2 == 1), 0.5 + 0.5 / 100_000, 1e-6)


@pytest.mark.parametrize(
    ("score", "label", "message"),
    [
        ([0.1, 0.2], [0, 2], "0/1"),
        ([math.nan, 0.2], [0, 1], "NaN"),
        ([0.1, 0.2], [[0, 1]], r"\(2,\).*\(1, 2\)"),
    ],
)
def test_auroc_refuses_bad_arguments(score, label, message):
    with pytest.raises(MCBNError, match=message):
        metrics.auroc(score, label)
