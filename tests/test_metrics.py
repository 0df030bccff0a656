"""Scores of regression against their definitions, and the arguments that every score takes."""

import itertools
import math

import numpy as np
import pytest
import scoringrules
import torch
from hypothesis import given, settings, strategies as st
from scipy import integrate, optimize, stats

from kinds import normal
from mcbn import metrics
from mcbn.errors import MCBNError
from scored import assert_close, classified, generator, scalar

finite = st.floats(-100, 100)
positive = st.floats(1e-3, 1e3)
law = settings(deadline=None, derandomize=True, max_examples=50)


def test_rmse_equals_loop():
    mean, y = normal(7, 2), normal(7, 2, seed=1)
    total = sum((mean[i, d] - y[i, d]).item() ** 2 for i in range(7) for d in range(2))
    assert_close(metrics.rmse(mean, y), math.sqrt(total / 14))


def test_pll_equals_loop_with_one_tau_per_output():
    samples, y, tau = normal(5, 4, 3), normal(4, 3, seed=1), torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
    naive = []
    for i in range(4):
        likelihood = 0.0
        for j in range(5):
            factors = [
                math.sqrt(tau[d] / (2 * math.pi)) * math.exp(-tau[d] / 2 * (y[i, d] - samples[j, i, d]) ** 2)
                for d in range(3)
            ]
            likelihood += math.prod(factors) / 5
        naive.append(math.log(likelihood))
    assert_close(metrics.pll(samples, y, tau), naive)


def test_pll_equals_scipy_mixture():
    samples, y, tau = normal(6, 9), normal(9, seed=1), 3.0
    density = stats.norm.pdf(y.numpy(), samples.numpy(), tau**-0.5)  # (T, N)
    assert_close(metrics.pll(samples, y, tau), np.log(density.mean(0)))


def test_pll_of_one_output_equals_pll_without_output_dimension():
    samples, y = normal(6, 9), normal(9, seed=1)
    assert_close(metrics.pll(samples[..., None], y[:, None], 2.0), metrics.pll(samples, y, 2.0))


@law
@given(finite, finite, st.floats(1e-4, 1e4))
def test_pll_of_one_draw_is_the_normal_log_density(f, y, tau):
    expected = stats.norm.logpdf(y, f, tau**-0.5)
    assert_close(metrics.pll(scalar([[f]]), scalar([y]), tau), [expected])


def test_pll_ignores_the_order_of_draws_and_follows_the_order_of_points():
    samples, y = normal(8, 5), normal(5, seed=1)
    draws, points = torch.randperm(8, generator=generator()), torch.randperm(5, generator=generator())
    assert_close(metrics.pll(samples[draws][:, points], y[points], 2.0), metrics.pll(samples, y, 2.0)[points])


@pytest.mark.parametrize("tau", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pll_stays_finite_at_extreme_tau(tau, dtype):
    value = metrics.pll(normal(5, 4).to(dtype), normal(4, seed=1).to(dtype), tau)
    assert value.isfinite().all()
    assert value.dtype == dtype


def test_pll_keeps_every_digit_of_a_float_tau():
    assert_close(metrics.pll(scalar([[0.0]]), scalar([0.0]), 0.1), [stats.norm.logpdf(0, 0, 0.1**-0.5)], 1e-14)


def test_pll_gradients_are_right_and_finite():
    samples, y = normal(3, 4).requires_grad_(), normal(4, seed=1)
    tau = scalar(2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda s, t: metrics.pll(s, y, t), (samples, tau))


@pytest.mark.parametrize(
    ("samples", "y"),
    [
        ((5, 4, 1), (4,)),
        ((5, 4), (4, 1)),
        ((5, 4), (1,)),
        ((4,), (4,)),
        ((5,), ()),
        ((0, 4), (4,)),
        ((5, 0), (0,)),
    ],
)
def test_pll_names_shapes_it_would_have_to_broadcast(samples, y):
    with pytest.raises(MCBNError) as caught:
        metrics.pll(torch.zeros(samples), torch.zeros(y), 1.0)
    assert str(samples) in str(caught.value)
    assert str(y) in str(caught.value)


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan, [1.0, 2.0], "big", None])
def test_pll_refuses_bad_tau(tau):
    with pytest.raises(MCBNError, match="tau"):
        metrics.pll(torch.zeros(2, 3), torch.zeros(3), tau)


@law
@given(finite, positive, finite)
def test_crps_equals_the_integral_of_its_definition(mean, sigma, y):
    def height(t):
        return (stats.norm.cdf(t, mean, sigma) - (t >= y)) ** 2

    cells = sorted([y, *(mean + k * sigma for k in range(-10, 11, 2))])
    naive = sum(integrate.quad(height, a, b)[0] for a, b in itertools.pairwise(cells) if a < b)
    assert_close(metrics.crps_gaussian(scalar(mean), scalar(sigma**2), scalar(y)), naive, 1e-9)


def test_crps_equals_scoringrules():
    mean, variance, y = normal(50), normal(50, seed=1).exp(), normal(50, seed=2)
    expected = scoringrules.crps_normal(y.numpy(), mean.numpy(), variance.sqrt().numpy())
    assert_close(metrics.crps_gaussian(mean, variance, y), expected, 2e-7)


@law
@given(finite, positive, finite, st.floats(-50, 50).filter(lambda a: abs(a) > 1e-3))
def test_crps_scales_with_the_unit(mean, sigma, y, a):
    scaled = metrics.crps_gaussian(scalar(a * mean), scalar((a * sigma) ** 2), scalar(a * y))
    assert_close(scaled, abs(a) * metrics.crps_gaussian(scalar(mean), scalar(sigma**2), scalar(y)))


def test_crps_of_zero_variance_is_the_absolute_error_with_finite_gradients():
    mean, y = scalar([1.0, -2.0, 3.0]).requires_grad_(), scalar([3.0, 1.0, 3.0])
    variance = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    value = metrics.crps_gaussian(mean, variance, y)
    value.sum().backward()
    assert value.tolist() == [2.0, 3.0, 0.0]
    assert mean.grad.tolist() == [-1.0, -1.0, 0.0]
    assert variance.grad.tolist() == [0.0, 0.0, 0.0]


def test_crps_tends_to_the_absolute_error():
    assert_close(metrics.crps_gaussian(scalar(1.0), scalar(1e-24), scalar(3.0)), 2.0)


def test_crps_gradients_are_right():
    inputs = (
        normal(4).requires_grad_(),
        normal(4, seed=1).exp().requires_grad_(),
        normal(4, seed=2).requires_grad_(),
    )
    assert torch.autograd.gradcheck(metrics.crps_gaussian, inputs)


def test_crps_lets_nan_variance_through():
    assert metrics.crps_gaussian(scalar([0.0]), scalar([math.nan]), scalar([1.0])).isnan().all()


def test_crps_refuses_negative_variance():
    with pytest.raises(MCBNError, match=r"-0\.5"):
        metrics.crps_gaussian(torch.zeros(2), torch.tensor([1.0, -0.5]), torch.zeros(2))


@pytest.mark.parametrize("e", [0.01, 1.0, 37.5])
def test_pll_optimum_equals_numerical_optimum(e):
    best = optimize.minimize_scalar(lambda s: -stats.norm.logpdf(e, 0, math.exp(s)), options={"xtol": 1e-12})
    assert_close(metrics.pll_optimum(scalar([2.0]), scalar([2.0 + e])), [-best.fun])


@pytest.mark.parametrize("e", [0.01, 1.0, 37.5])
def test_crps_optimum_equals_numerical_optimum(e):
    def crps(log_sigma):
        return metrics.crps_gaussian(scalar(2.0), scalar(math.exp(2 * log_sigma)), scalar(2.0 + e)).item()

    best = optimize.minimize_scalar(crps, bracket=(math.log(e) - 1, math.log(e) + 1), options={"xtol": 1e-10})
    assert_close(metrics.crps_optimum(scalar(2.0), scalar(2.0 + e)), best.fun)
    assert_close(math.exp(best.x), e / math.sqrt(math.log(2)), 1e-6)


@law
@given(finite, positive, finite)
def test_optima_bound_every_variance(mean, sigma, y):
    mean, y = scalar([mean]), scalar([y])
    assert metrics.crps_optimum(mean, y) <= metrics.crps_gaussian(mean, scalar([sigma**2]), y) + 1e-10
    assert metrics.pll_optimum(mean, y) >= metrics.pll(mean[None], y, sigma**-2) - 1e-10


def test_pll_optimum_sums_over_outputs_and_is_reached():
    mean, y = normal(4, 3), normal(4, 3, seed=1)
    reached = [metrics.pll(mean[None, i : i + 1], y[i : i + 1], (mean - y)[i] ** -2) for i in range(4)]
    assert_close(metrics.pll_optimum(mean, y), torch.cat(reached))


def test_pll_optimum_of_an_exact_prediction_is_infinite():
    assert metrics.pll_optimum(torch.zeros(2), torch.tensor([0.0, 1.0])).isposinf().tolist() == [True, False]


@pytest.mark.parametrize("function", [metrics.rmse, metrics.pll_optimum, metrics.crps_optimum])
def test_point_scores_refuse_to_broadcast(function):
    with pytest.raises(MCBNError, match=r"\(4, 1\).*\(4,\)"):
        function(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(MCBNError, match=r"\(0,\)"):
        function(torch.zeros(0), torch.zeros(0))


def test_pll_optimum_refuses_two_numbers():
    with pytest.raises(MCBNError, match="two numbers"):
        metrics.pll_optimum(torch.tensor(1.0), torch.tensor(2.0))


def test_crps_refuses_to_broadcast_the_variance():
    with pytest.raises(MCBNError, match=r"variance.*\(1,\).*\(4,\)"):
        metrics.crps_gaussian(torch.zeros(4), torch.ones(1), torch.zeros(4))


def test_normalized_equals_its_definition():
    score, constant, optimum = normal(9), normal(9, seed=1) - 1, normal(9, seed=2) + 5
    s, c, o = (sum(v.tolist()) / 9 for v in (score, constant, optimum))
    assert_close(metrics.normalized(score, constant, optimum), (s - c) / (o - c) * 100)
    assert_close(metrics.normalized(s, c, o), (s - c) / (o - c) * 100)
    assert_close(metrics.normalized(score, c, o), (s - c) / (o - c) * 100)


def test_normalized_is_0_at_constant_and_100_at_optimum_whatever_the_direction():
    low, high = normal(5), normal(5) + 2
    for constant, optimum in ((low, high), (high, low)):
        assert_close(metrics.normalized(constant, constant, optimum), 0.0)
        assert_close(metrics.normalized(optimum, constant, optimum), 100.0)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.0, math.inf), (-math.inf, 0.0), (math.nan, 1.0)])
def test_normalized_refuses_bounds_without_a_scale(bounds):
    with pytest.raises(MCBNError, match="finite and differ"):
        metrics.normalized(torch.zeros(3), *bounds)


def test_normalized_refuses_different_points():
    with pytest.raises(MCBNError, match="same points"):
        metrics.normalized(torch.zeros(3), torch.zeros(4), 1.0)


# --- arguments of every score ------------------------------------------------------------------------------


def test_numpy_arguments_equal_tensors():
    samples, y, v = normal(5, 4), normal(4, seed=1), normal(4, seed=2).exp()
    probs, label = classified()
    for function, arguments in [
        (metrics.rmse, (y, v)),
        (metrics.pll, (samples, y, v[0])),
        (metrics.crps_gaussian, (y, v, samples[0])),
        (metrics.pll_optimum, (y, v)),
        (metrics.crps_optimum, (y, v)),
        (metrics.normalized, (y, v, v + 1)),
        (metrics.nll, (probs, label)),
        (metrics.ece, (probs, label)),
        (metrics.auroc, (probs[:, 0], label == 1)),
    ]:
        assert_close(function(*(argument.numpy() for argument in arguments)), function(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_the_inputs_and_float32_agrees(dtype):
    samples, y, v = normal(5, 4), normal(4, seed=1), normal(4, seed=2).exp()
    probs, label = classified()
    for function, tensors, rest in [
        (metrics.rmse, (y, v), ()),
        (metrics.pll, (samples, y), (2.0,)),
        (metrics.crps_gaussian, (y, v, samples[0]), ()),
        (metrics.pll_optimum, (y, v), ()),
        (metrics.crps_optimum, (y, v), ()),
        (metrics.normalized, (y,), (0.5, 2.0)),
        (metrics.nll, (probs,), (label,)),
        (metrics.brier, (probs,), (label,)),
        (metrics.accuracy, (probs,), (label,)),
        (metrics.ece, (probs,), (label,)),
        (metrics.auroc, (probs[:, 0],), (label == 1,)),
    ]:
        value = function(*(tensor.to(dtype) for tensor in tensors), *rest)
        assert value.dtype == dtype
        assert_close(value, function(*tensors, *rest).to(dtype), 1e-5)


def test_integer_targets_are_allowed():
    assert_close(metrics.rmse(scalar([1.5, 2.0]), torch.tensor([1, 2])), math.sqrt(0.125))
    assert metrics.rmse(torch.tensor([1, 2]), torch.tensor([1, 4])).dtype == torch.get_default_dtype()


def test_what_is_not_a_tensor_is_named():
    with pytest.raises(MCBNError, match="mean must be a tensor"):
        metrics.rmse("many", torch.zeros(3))
