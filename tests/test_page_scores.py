"""Curves of a report against plain evaluations of what they say they are."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.random import default_rng

from mcbn import metrics
from mcbn.page import scores

N = 137


@pytest.fixture
def points():
    random = default_rng(0)
    std = random.uniform(0.2, 2.0, N)
    return std, np.abs(random.normal(0, std))


def test_tenths_are_means_of_the_extremes(points):
    std, error = points
    ordered = [e for _, e in sorted(zip(std, error, strict=True))]
    assert scores.tenths(std, error) == pytest.approx((np.mean(ordered[:13]), np.mean(ordered[-13:])))
    assert scores.tenths(np.array([1.0]), np.array([3.0])) == (3.0, 3.0)


def test_risk_coverage_is_the_mean_loss_of_the_most_certain(points):
    std, error = points
    curve = scores.risk_coverage(std, error)
    for k in (1, 10, N):
        kept = sorted(zip(std, error, strict=True))[:k]
        assert curve.x[k - 1] == pytest.approx(k / N)
        assert curve.y[k - 1] == pytest.approx(np.mean([e for _, e in kept]))


def test_risk_coverage_ignores_the_order_of_ties():
    uncertainty, loss = np.array([1.0, 0.0, 1.0, 0.0]), np.array([5.0, 1.0, 7.0, 3.0])
    there = scores.risk_coverage(uncertainty, loss)
    back = scores.risk_coverage(uncertainty[::-1].copy(), loss[::-1].copy())
    assert there.x.tolist() == back.x.tolist() == [0.5, 1.0]
    assert there.y.tolist() == back.y.tolist() == [2.0, 4.0]


def test_interval_coverage_counts_points_inside(points):
    std, error = points
    curve = scores.interval_coverage(error, std)
    for level in (0.1, 0.5, 0.95):
        z = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
        assert curve.y[round(100 * level)] == np.mean(error <= z * std)
    assert curve.y[-1] == 1


def test_interval_coverage_of_a_gaussian_is_the_level():
    random, n = default_rng(1), 20_000
    std = random.uniform(0.5, 2, n)
    curve = scores.interval_coverage(np.abs(random.normal(0, std)), std)
    assert np.abs(curve.y - curve.x).max() < 4 * 0.5 / math.sqrt(n)


def test_no_spread_covers_exact_predictions_only():
    curve = scores.interval_coverage(np.array([0.0, 1.0]), np.zeros(2))
    assert (curve.y[0], curve.y[99], curve.y[100]) == (0.5, 0.5, 1.0)


def test_set_coverage_builds_the_smallest_sets():
    random = default_rng(2)
    probs = random.dirichlet(np.ones(5), N)
    y = random.integers(0, 5, N)
    above = np.array([p[p > p[k]].sum() for p, k in zip(probs, y, strict=True)])
    curve = scores.set_coverage(above)
    for level in (0.3, 0.8):
        inside = []
        for p, k in zip(probs, y, strict=True):
            order = np.argsort(-p)
            size = int(np.argmax(np.cumsum(p[order]) >= level)) + 1
            inside.append(k in order[:size])
        assert curve.y[round(100 * level)] == pytest.approx(np.mean(inside))


def test_reliability_bins_give_the_calibration_error():
    random = default_rng(3)
    probs = random.dirichlet(np.ones(4), N)
    y = random.integers(0, 4, N)
    bins = scores.reliability(probs.max(1), (probs.argmax(1) == y).astype(float))
    error = np.abs(bins.observed - bins.predicted) @ bins.size / N
    assert bins.size.sum() == N
    assert error == pytest.approx(metrics.ece(torch.from_numpy(probs), torch.from_numpy(y)).item())


def test_spread_reliability_averages_tenths(points):
    std, error = points
    bins = scores.spread_reliability(std, error)
    assert bins.size.sum() == N
    assert bins.size.max() - bins.size.min() <= 1
    first = sorted(zip(std, error, strict=True))[: bins.size[0]]
    assert bins.predicted[0] == pytest.approx(math.sqrt(np.mean([s**2 for s, _ in first])))
    assert bins.observed[0] == pytest.approx(math.sqrt(np.mean([e**2 for _, e in first])))


def test_histograms_are_shares_of_each_group(points):
    std, error = points
    edges, (good, bad), medians = scores.histograms(std, error <= np.median(error))
    assert len(edges) == len(good) + 1
    assert good.sum() == pytest.approx(1)
    assert bad.sum() == pytest.approx(1)
    assert float(medians[0]) == pytest.approx(np.median(std[error <= np.median(error)]), rel=1e-2)
    _, shares, medians = scores.histograms(std, np.ones(N, bool))
    assert (shares[1].sum(), medians[1]) == (0, "none")


def test_thinned_points_are_a_random_part_in_the_order_of_uncertainty(monkeypatch):
    uncertainty = default_rng(0).uniform(size=1000)
    assert scores.ranked(uncertainty).tolist() == np.argsort(uncertainty).tolist()
    monkeypatch.setattr(scores, "MOST_POINTS", 10)
    order = scores.ranked(uncertainty)
    assert (np.diff(uncertainty[order]) > 0).all()
    assert len(order) == 10
    assert np.ptp(uncertainty[order]) > 0.3  # not neighbours
    assert order.tolist() == scores.ranked(uncertainty).tolist()


def test_right_answers_lie_low_and_wrong_ones_high():
    heights, words = scores.answers(np.array([0.0, 1.0, 0.0]), 0.5)
    assert words == ["right", "wrong", "right"]
    assert (np.abs(heights - 0.5 * np.array([0.03, 0.95, 0.03])) <= 0.01).all()


@pytest.mark.parametrize(
    ("share", "n", "word"),
    [(0.861, 1000, "short"), (0.95, 1000, ""), (0.94, 100_000, ""), (0.99, 1000, "beyond"), (0.9, 20, "")],
)
def test_a_promise_is_broken_beyond_two_percent_and_beyond_chance(share: float, n: int, word: str) -> None:
    held = (np.arange(n) < round(share * n)).astype(float)
    assert scores.fault(held, np.full(n, 0.95), ("short", "beyond")) == word


def test_coverage_is_counted_by_group_of_uncertainty_and_of_inputs():
    uncertainty, inside = np.arange(10.0), np.array([1.0, 1, 1, 1, 1, 0, 1, 0, 0, 0])
    votes = SimpleNamespace(inside=inside, inputs=np.arange(10))
    rows = scores.coverage_by_group(votes, uncertainty, ["a"] * 4 + ["b"] * 6)
    assert [points for _, points, _ in rows] == [2, 2, 2, 2, 2, 4, 6]
    assert [share for _, _, share in rows] == [1, 1, 0.5, 0.5, 0, 1, pytest.approx(2 / 6)]
    assert [name for name, _, _ in rows][-2:] == ["a", "b"]
    assert len(scores.coverage_by_group(votes, uncertainty, None)) == 5
