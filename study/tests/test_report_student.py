import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mcbn_study import paper, student

EXCEPTION = ("protein", "mcbn", "crps_normalized")  # printed as "2.77-12"


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 14, 24, 24.7, 48, 400, 5000])
@pytest.mark.parametrize("t", [0.0, 0.1, 0.7, 1.0, 2.064, 5.0, 26.6, 300.0])
def test_tail_equals_scipy(t, df):
    assert student.two_sided(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-9, abs=1e-300)
    assert student.two_sided(-t, df) == student.two_sided(t, df)


def test_tail_has_its_closed_forms_and_ends():
    for t in (1e-8, 0.3, 1.0, 4.0):
        assert student.two_sided(t, 1) == pytest.approx(1 - 2 * np.arctan(t) / np.pi, rel=1e-12)
        assert student.two_sided(t, 2) == pytest.approx(1 - t / np.sqrt(2 + t * t), rel=1e-12)
    assert student.two_sided(0.0, 24) == 1
    assert student.two_sided(np.inf, 24) == 0
    assert student.two_sided(1e200, 24) == 0


@pytest.mark.parametrize("df", [1, 1.3, 4, 24, 31.4, 48, 1000])
def test_critical_value_equals_scipy(df):
    assert student.critical(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30).filter(lambda v: np.std(v) > 1e-3))
def test_mean_error_and_p_value_equal_scipy(values):
    mean, error = student.mean_error(values)
    assert mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert error == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), rel=1e-9)
    naive = stats.ttest_1samp(values, 0).pvalue
    assert student.p_value(len(values), mean, error) == pytest.approx(naive, rel=1e-6, abs=1e-12)


def test_runs_without_spread():
    assert student.mean_error([3.0]) == (3.0, None)
    assert student.p_value(1, 3.0, None) is None
    assert student.p_value(5, 0.0, 0.0) is None
    assert student.p_value(5, -2.0, 0.0) == 0.0


def test_welch_interval_equals_scipy():
    rng = np.random.default_rng(0)
    for n, n_2 in ((25, 25), (5, 25), (2, 25)):
        a, b = rng.normal(1, 2, n), rng.normal(0, 0.5, n_2)
        naive = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
        parts = [part for values in (a, b) for part in (*student.mean_error(list(values)), len(values))]
        difference, low, high = student.welch(*parts)
        assert difference == pytest.approx(a.mean() - b.mean())
        assert (low, high) == pytest.approx((naive.low, naive.high), rel=1e-9)


def test_welch_interval_with_errors_printed_as_zero():
    difference, low, high = student.welch(0.5, 0.02, 25, 0.4, 0.0, 25)
    half = stats.t.ppf(0.975, 24) * 0.02
    assert (difference, low, high) == pytest.approx((0.1, 0.1 - half, 0.1 + half))
    assert student.welch(0.5, 0.0, 25, 0.4, 0.0, 25) == pytest.approx((0.1, 0.1, 0.1))


def test_the_papers_p_values_are_two_sided_with_25_runs():
    """Its printed mean and standard error, each anywhere within rounding, give its printed p-value."""
    checked = 0
    for number in paper.numbers():
        key = (number.dataset, number.method, number.metric)
        if number.p_value is None or number.method == "mnf" or key == EXCEPTION:
            continue  # MNF: some p-values are those of fewer runs
        low, high = (
            student.two_sided((abs(number.mean) + side * 0.006) / (number.standard_error - side * 0.006), 24)
            for side in (1, -1)
        )
        assert 0.99 * low <= number.p_value <= 1.01 * high, number  # three digits, one of them cut and not rounded
        checked += 1
    assert checked == 31
