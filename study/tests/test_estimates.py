"""Means over runs: errors, tests and intervals against scipy, and how a table shows them."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from mcbn_study import paper
from mcbn_study.estimates import Estimate, cell, difference, estimate, mean_cell, p_value, stars, welch
from mcbn_study.tables import MISSING

EXCEPTION = ("protein", "mcbn", "crps_normalized")  # printed as "2.77-12"


@pytest.mark.parametrize("n", [2, 3, 5, 25, 400])
@pytest.mark.parametrize("t", [0.1, 0.7, 1.0, 2.064, 5.0, 26.6, 300.0])
def test_p_values_are_two_sided(t, n):
    assert p_value(t, 1.0, n) == p_value(-t, 1.0, n) == pytest.approx(2 * stats.t.sf(t, n - 1), rel=1e-9)
    if n == 2:  # one degree of freedom: Cauchy
        assert p_value(t, 1.0, n) == pytest.approx(1 - 2 * np.arctan(t) / np.pi, rel=1e-9)


@settings(deadline=None)  # the first call of scipy.stats takes a while on a busy machine
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30).filter(lambda v: np.std(v) > 1e-3))
def test_mean_error_and_p_value_equal_scipy(values):
    mean, error, n, *_ = estimate(values)
    assert mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert error == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), rel=1e-9)
    naive = stats.ttest_1samp(values, 0).pvalue
    assert p_value(mean, error, n) == pytest.approx(naive, rel=1e-6, abs=1e-12)


def test_runs_without_spread():
    assert estimate([3.0]) == Estimate(3.0, None, 1)
    assert p_value(3.0, None, 1) is None
    assert p_value(0.0, 0.0, 5) is None
    assert p_value(-2.0, 0.0, 5) == 0.0


def test_welch_interval_equals_scipy():
    rng = np.random.default_rng(0)
    for n, n_2 in ((25, 25), (5, 25), (2, 25)):
        a, b = rng.normal(1, 2, n), rng.normal(0, 0.5, n_2)
        naive = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
        assert welch(estimate(a), estimate(b)) == pytest.approx((naive.low, naive.high), rel=1e-9)


def test_welch_interval_with_errors_printed_as_zero():
    half = stats.t.ppf(0.975, 24) * 0.02
    exact = Estimate(0.4, 0.0, 25)
    assert welch(Estimate(0.5, 0.02, 25), exact) == pytest.approx((0.1 - half, 0.1 + half))
    assert welch(Estimate(0.5, 0.0, 25), exact) == pytest.approx((0.1, 0.1))


def test_the_papers_p_values_are_two_sided_with_25_runs():
    """Its printed mean and standard error, each anywhere within rounding, give its printed p-value."""
    checked = 0
    for place, number in paper.numbers().items():
        if number.p_value is None or place.method == "mnf" or place[1:4] == EXCEPTION:
            continue  # MNF: some p-values are those of fewer runs
        low, high = (
            p_value(abs(number.mean) + side * 0.006, number.standard_error - side * 0.006, 25) for side in (1, -1)
        )
        assert 0.99 * low <= number.p_value <= 1.01 * high, place  # three digits, one of them cut and not rounded
        checked += 1
    assert checked == 31


def test_stars_are_the_papers():
    levels = {
        0.05: "ns",
        0.0499: "*",
        0.01: "*",
        0.0099: "**",
        0.001: "**",
        0.00099: "***",
        0.0001: "***",
        9e-5: "****",
    }
    assert {p: stars(p) for p in levels} == levels
    assert stars(None) == ""


def test_digits_follow_the_error_for_ours_and_the_print_for_theirs():
    assert cell(Estimate(8.4567, 0.864, 25)) == "8.46 ± 0.86"
    assert cell(Estimate(0.071234, 0.00031, 25)) == "0.0712 ± 0.0003"
    assert cell(Estimate(2.7512, 0.0514, 25)) == "2.751 ± 0.051"
    assert cell(Estimate(2.75, 0.05, 25, None, 2)) == "2.75 ± 0.05"
    assert cell(Estimate(-0.001, 14.2, 25)) == "0.00 ± 14.20"
    assert cell(Estimate(1.0, None, 1)) == "1.00"
    assert cell(Estimate(1.0, 0.0, 2)) == "1.00 ± 0.00"
    assert cell(Estimate(1.0, 0.5, 25), "p") == cell(None) == MISSING
    assert difference(Estimate(1.0, None, 1), Estimate(1.5, 0.1, 25, None, 2)) == "-0.50"
    assert mean_cell([1.0, 2.0], scale=100, decimals=1, sign="+") == "+150.0 ± 50.0"
    assert mean_cell([]) == MISSING
