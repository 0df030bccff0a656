"""Kolmogorov-Smirnov tests: scipy's, column by column, and Kolmogorov's series."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from kinds import normal
from mcbn_study.theory import kolmogorov_smirnov, ks_pvalue


@pytest.mark.parametrize("n", [10, 30, 200, 2000])
def test_p_values_are_those_of_scipy_column_by_column(n: int) -> None:
    values = 0.9 * normal(n, 40) + torch.linspace(-0.3, 0.3, 40)  # fits well and badly
    expected = [stats.kstest(column.numpy(), "norm").pvalue for column in values.unbind(1)]
    np.testing.assert_allclose(kolmogorov_smirnov(values, 0.0, 1.0), expected, rtol=1e-6)
    assert (kolmogorov_smirnov(values, 0.0, 0.0) == 0).all()


def test_p_values_are_near_the_series_and_span_zero_to_one() -> None:
    """2 sum_k (-1)^(k-1) exp(-2 k^2 t^2), Kolmogorov's limit with the small-sample correction of Vrbik (2018)."""
    distance, n = torch.tensor([1e-9, 0.05, 0.1, 0.9], dtype=torch.float64), 100
    p = ks_pvalue(distance, n)
    for d, found in zip(distance[1:].tolist(), p[1:].tolist(), strict=True):
        t = 10 * d + 1 / 60 + (10 * d - 1) / 400
        series = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 60))
        assert found == pytest.approx(series, abs=1e-3)
    assert p[0] == 1
    assert p[-1] < 1e-30
