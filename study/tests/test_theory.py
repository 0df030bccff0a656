"""Moments and tests of batch statistics and the KL divergence (appendix 1.3, 1.4), each evaluated naively."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kinds import normal
from mcbn import MCBNError
from mcbn_study.theory import (
    activation_moments,
    analytic_moments,
    kl_derivative,
    kl_gaussian,
    kolmogorov_smirnov,
    ks_pvalue,
)
from snippets import blocks

F64 = torch.float64


def test_analytic_moments_are_the_equations_of_the_appendix() -> None:
    h = normal(10_000, 3).abs()
    mu, var, fourth = h.mean(0), h.var(0, correction=0), (h - h.mean(0)).pow(4).mean(0)
    found = analytic_moments(mu, var, fourth, 32)
    for c in range(3):
        sigma = var[c].item() ** 0.5
        assert abs(found.mean_std[c].item() - sigma / 32**0.5) < 1e-12
        assert abs(found.std_std[c].item() - ((fourth[c].item() - sigma**4) / (4 * sigma**2 * 32)) ** 0.5) < 1e-12


def test_analytic_moments_match_the_spread_of_drawn_batches() -> None:
    h = normal(20_000, 256, seed=1).exp()  # (draws, M): far from Gaussian
    pool = h.flatten()
    fourth = (pool - pool.mean()).pow(4).mean()
    found = analytic_moments(pool.mean()[None], pool.var(correction=0)[None], fourth[None], 256)
    torch.testing.assert_close(h.mean(1).std(), found.mean_std[0], rtol=0.02, atol=0)


def test_a_constant_unit_has_no_spread() -> None:
    zero = torch.zeros(1)
    assert analytic_moments(torch.ones(1), zero, zero, 8).std_std.item() == 0
    h = torch.full((9, 2), 0.1, requires_grad=True)
    found = activation_moments(h, 8)
    assert [part.tolist() for part in found[1:]] == [[0, 0]] * 3
    sum(part.sum() for part in found).backward()
    assert bool(h.grad.isfinite().all())


def test_activation_moments_of_one_value_an_example_are_the_analytic_ones() -> None:
    h = normal(200, 3).exp()
    fourth = (h - h.mean(0)).pow(4).mean(0)
    expected = analytic_moments(h.mean(0), h.var(0, correction=0), fourth, 16)
    for got, wanted in zip(activation_moments(h, 16), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)


def test_activation_moments_of_images_match_the_spread_of_drawn_batches() -> None:
    """Pixels that share their image's brightness: counting them as independent would be off by a factor of 6."""
    level, pixels = normal(20_000, 1, 1), 0.4 * normal(20_000, 1, 36, seed=1)
    h = (level + pixels).reshape(20_000, 1, 6, 6)
    found = activation_moments(h, 20)
    batches = h.reshape(1000, 20, -1).flatten(1)  # (draws, values of a batch)
    torch.testing.assert_close(batches.mean(1).std(), found.mean_std[0], rtol=0.07, atol=0)  # error 1 / sqrt(2000)
    torch.testing.assert_close(batches.std(1, correction=0).std(), found.std_std[0], rtol=0.1, atol=0)
    assert found.mean_std[0] > 5 * activation_moments(h.reshape(-1, 1), 20 * 36).mean_std[0]


def test_kl_is_that_of_torch_and_of_the_integral() -> None:
    mean_q, std_q, mean_p, std_p = normal(7), normal(7, seed=1).exp(), normal(7, seed=2), normal(7, seed=3).exp()
    q, p = torch.distributions.Normal(mean_q, std_q), torch.distributions.Normal(mean_p, std_p)
    found = kl_gaussian(mean_q, std_q, mean_p, std_p)
    torch.testing.assert_close(found, torch.distributions.kl_divergence(q, p), rtol=1e-10, atol=1e-12)
    for i in range(7):
        by_hand = math.log(std_p[i] / std_q[i]) - 0.5
        by_hand += (std_q[i] ** 2 + (mean_q[i] - mean_p[i]) ** 2).item() / (2 * std_p[i].item() ** 2)
        assert abs(found[i].item() - by_hand) < 1e-10
    omega = mean_q + std_q * torch.linspace(-12, 12, 20_001, dtype=F64)[:, None]  # (grid, 7)
    integrand = q.log_prob(omega).exp() * (q.log_prob(omega) - p.log_prob(omega))
    torch.testing.assert_close(found, torch.trapezoid(integrand, omega, dim=0), rtol=1e-8, atol=1e-8)


def test_kl_of_a_distribution_from_itself_is_zero_and_numbers_do() -> None:
    assert kl_gaussian(1.0, 2.0, 1.0, 2.0).item() == pytest.approx(0, abs=1e-15)
    assert kl_gaussian(0.0, 1.0, 1.0, 1.0).item() == 0.5


def test_a_flat_prior_is_the_limit_of_wide_ones_less_their_constant() -> None:
    mean, std = normal(5), normal(5, seed=1).exp()
    wide = kl_gaussian(mean, std, 0.0, 1e7) - math.log(1e7)
    torch.testing.assert_close(kl_gaussian(mean, std, 0.0, math.inf), wide, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kl_gaussian(mean, std, 0.0, math.inf), -std.log() - 0.5, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("std_p", [0.7, math.inf])
def test_kl_derivative_is_equation_7_and_autograd_and_a_finite_difference(std_p: float) -> None:
    def moments(theta: Tensor) -> tuple[Tensor, Tensor]:
        return theta.sin() + 2, (theta / 3).exp()

    theta = normal(6).requires_grad_()
    mean_q, std_q = moments(theta)
    mean_slope, std_slope = theta.cos(), (theta / 3).exp() / 3
    found = kl_derivative(mean_q, std_q, 0.4, std_p, mean_slope, std_slope)
    (by_autograd,) = torch.autograd.grad(kl_gaussian(mean_q, std_q, 0.4, std_p).sum(), theta)
    torch.testing.assert_close(found, by_autograd, rtol=1e-10, atol=1e-12)
    step = 1e-6
    high, low = (kl_gaussian(*moments(theta + s), 0.4, std_p) for s in (step, -step))
    torch.testing.assert_close(found, (high - low) / (2 * step), rtol=1e-6, atol=1e-8)
    for i in range(6):
        m, s, dm, ds = (v[i].item() for v in (mean_q, std_q, mean_slope, std_slope))
        assert abs(found[i].item() - ((s * ds + m * dm - 0.4 * dm) / std_p**2 - ds / s)) < 1e-12


def test_bad_calls_are_refused() -> None:
    with pytest.raises(MCBNError, match="std_q must be positive"):
        kl_gaussian(0.0, 0.0, 0.0, 1.0)
    with pytest.raises(MCBNError, match="must broadcast"):
        kl_gaussian(torch.zeros(2), torch.ones(3), 0.0, 1.0)
    with pytest.raises(MCBNError, match=r"activations must be \(N, C, ...\)"):
        activation_moments(torch.zeros(3), 4)


def test_the_code_of_the_page_on_theory_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        for block in blocks("theory.md"):
            exec(block, names)
    assert "independent batches" in capsys.readouterr().out


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
