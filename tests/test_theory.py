"""The equations of appendix 1.2 to 1.4, each evaluated naively."""

import math
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kinds import KINDS, make
from mcbn import MCBNError
from mcbn.networks import RegressionMLP
from mcbn.theory import (
    Prior,
    activation_moments,
    analytic_moments,
    implied_prior,
    kl_derivative,
    kl_gaussian,
    kl_regularizer,
    objective_gap,
)
from untouched import fingerprint, generators, untouched

F64 = torch.float64
PRIOR = Prior(mean=0.3, mean_std=1.5, std=0.8, std_std=0.4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def mlp(**options: int) -> nn.Module:
    return RegressionMLP(4, (6, 5), seed=0, **options).double()


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


def naive_penalty(model: nn.Module, prior: Prior, x: Tensor, M: int) -> Tensor:
    """Unit by unit, the layers of a RegressionMLP written out."""
    total, h = torch.zeros((), dtype=F64), x
    for linear, bn in ((model[0], model[1]), (model[3], model[4])):
        h = h @ linear.weight.T
        normalised = []
        for u, column in enumerate(h.unbind(1)):
            mu = sum(column) / len(column)
            sigma = (sum((column - mu) ** 2) / len(column)) ** 0.5
            fourth = sum((column - mu) ** 4) / len(column)
            q_mean = torch.distributions.Normal(mu, sigma / M**0.5)
            q_std = torch.distributions.Normal(sigma, ((fourth - sigma**4) / (4 * sigma**2 * M)) ** 0.5)
            p_mean, p_std = (
                torch.distributions.Normal(torch.tensor(mean, dtype=F64), torch.tensor(std, dtype=F64))
                for mean, std in ((prior.mean, prior.mean_std), (prior.std, prior.std_std))
            )
            total = total + torch.distributions.kl_divergence(q_mean, p_mean)
            total = total + torch.distributions.kl_divergence(q_std, p_std)
            normalised.append(bn.weight[u] * (column - mu) / (sigma**2 + bn.eps) ** 0.5 + bn.bias[u])
        h = torch.stack(normalised, 1).relu()
    return total


def test_regularizer_is_the_sum_over_units_and_so_is_its_gradient() -> None:
    model, x = mlp(), normal(20, 4)
    for M in (20, 7):
        expected = naive_penalty(model, PRIOR, x, M)
        found = kl_regularizer(model, PRIOR, x, batch_size=M)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        weights = [model[0].weight, model[3].weight, model[1].weight, model[1].bias]
        for a, b in zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(kl_regularizer(model, PRIOR, x), kl_regularizer(model, PRIOR, x, batch_size=20))


@pytest.mark.parametrize("prior", [PRIOR, Prior(std_std=0.5)], ids=["given", "implied"])
def test_gradient_of_the_regularizer_matches_finite_differences(prior: Prior) -> None:
    model, x = mlp(), normal(20, 4)
    kl_regularizer(model, prior, x).backward()
    for weight in (model[0].weight, model[3].weight, model[1].weight):
        for i in range(0, weight.numel(), 5):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    weight.view(-1)[i] += step
                    values.append(kl_regularizer(model, prior, x).item())
                    weight.view(-1)[i] -= step
            assert weight.grad.view(-1)[i].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-6)


def test_gradient_of_one_layer_is_equation_7_with_the_slopes_of_the_appendix() -> None:
    """Case 1 and 2 of appendix 1.4: mu' = mean of x_k, sigma' = sum_i W_i Cov(x_k, x_i) / sigma."""
    x, M = normal(50, 3), 10
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2, affine=False)).double()
    (found,) = torch.autograd.grad(kl_regularizer(model, PRIOR, x, batch_size=M), model[0].weight)
    weight, covariance = model[0].weight.detach(), torch.cov(x.T, correction=0)
    for u in range(2):
        h = x @ weight[u]
        sigma, centred = h.std(correction=0), h - h.mean()
        fourth = centred.pow(4).mean()
        for k in range(3):
            slope = covariance[k] @ weight[u] / sigma  # sigma'
            of_mean = kl_derivative(h.mean(), sigma / M**0.5, 0.3, 1.5, x[:, k].mean(), slope / M**0.5)
            fourth_slope = (4 * centred.pow(3) * (x[:, k] - x[:, k].mean())).mean()
            spread = ((fourth - sigma**4) / (4 * sigma**2 * M)).sqrt()
            # d/dtheta of (m4 - sigma^4) / (4 sigma^2 M) = (m4 / sigma^2 - sigma^2) / (4 M)
            square_slope = (fourth_slope / sigma**2 - 2 * fourth * slope / sigma**3 - 2 * sigma * slope) / (4 * M)
            of_std = kl_derivative(sigma, spread, 0.8, 0.4, slope, square_slope / (2 * spread))
            assert (of_mean + of_std).item() == pytest.approx(found[u, k].item(), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network_has_a_penalty_with_gradients_and_is_not_changed(kind: str) -> None:
    model, x = make(kind, dtype=F64)
    model.train()
    before, state = fingerprint(model), generators()
    loss = kl_regularizer(model, PRIOR, x)
    assert fingerprint(model) == before
    assert generators() == state
    assert loss.isfinite()
    if loss.requires_grad:
        loss.backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    assert loss.requires_grad == (kind != "bare")  # no weight lies before a lone batch norm


def test_a_failing_pass_changes_nothing_either() -> None:
    model = mlp()
    with untouched(model), pytest.raises(MCBNError, match="could not run"):
        kl_regularizer(model, PRIOR, normal(8, 3))


def test_training_with_the_penalty_lowers_it() -> None:
    model, x = mlp().train(), normal(64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = kl_regularizer(model, PRIOR, x).item()
    for _ in range(200):
        optimizer.zero_grad()
        kl_regularizer(model, PRIOR, x).backward()
        optimizer.step()
    assert kl_regularizer(model, PRIOR, x).item() < 0.5 * first
    assert int(model[1].num_batches_tracked) == 0


def test_the_implied_prior_fixes_the_scale_of_a_unit_and_nothing_of_its_mean() -> None:
    """Along W, d KL = (sigma^2 + spread^2) / sigma_p^2 - 2: the scale settles at sigma^2 = 2 sigma_p^2, nearly."""
    x, M = normal(50, 3), 16
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, affine=False)).double()
    (gradient,) = torch.autograd.grad(kl_regularizer(model, Prior(std_std=0.3), x, batch_size=M), model[0].weight)
    q = activation_moments(x @ model[0].weight.detach().T, M)
    expected = (q.std.square() + q.std_std.square()) / 0.3**2 - 2
    torch.testing.assert_close((gradient * model[0].weight.detach()).sum(1), expected, rtol=1e-9, atol=1e-9)
    moved = kl_regularizer(nn.Sequential(model[0], Shift(), model[1]), Prior(std_std=0.3), x, batch_size=M)
    torch.testing.assert_close(moved, kl_regularizer(model, Prior(std_std=0.3), x, batch_size=M))


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 3


def test_prior_may_differ_by_layer_and_unit() -> None:
    model, x = mlp(), normal(20, 4)
    one = kl_regularizer(model, PRIOR, x)
    spread = {"1": torch.full((6,), 0.4), "4": 0.4}
    torch.testing.assert_close(kl_regularizer(model, Prior(0.3, 1.5, 0.8, spread), x), one, rtol=1e-6, atol=0)
    other = kl_regularizer(model, Prior(0.3, 1.5, 0.8, {"1": 0.4, "4": 4.0}), x)
    assert abs(other - one) > 1


def test_a_dead_unit_counts_nothing() -> None:
    model, x = mlp(), normal(20, 4)
    with torch.no_grad():
        model[0].weight[0] = 0
    loss = kl_regularizer(model, PRIOR, x)
    loss.backward()
    assert loss.isfinite()
    assert bool(model[0].weight.grad.isfinite().all())
    assert model[0].weight.grad[0].abs().max() == 0


def whitened(n: int, q: int) -> Tensor:
    """Inputs with mean 0, variance 1 and no correlation at all."""
    return torch.linalg.qr(normal(n, q) - normal(n, q).mean(0)).Q * n**0.5


def test_implied_prior_reconciles_weight_decay_on_independent_inputs() -> None:
    """Eq. (5): d KL / dW = N tau d Omega / dW = N tau weight_decay W, for the prior on standard deviations."""
    decay, n, tau = 0.03, 500, 2.0
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, affine=False)).double()
    prior = implied_prior(model, decay, n, tau)
    assert (prior.mean, prior.mean_std, prior.std) == (0.0, math.inf, 0.0)
    assert prior.std_std**2 == pytest.approx(1 / (2 * n * tau * (decay / 2)))
    h = whitened(800, 4) @ model[0].weight.T  # (800, 3)
    sigma = h.std(0, correction=0)
    pull = sigma.square().sum() / (2 * prior.std_std**2)  # the term of Eq. (4) that weight decay stands for
    (found,) = torch.autograd.grad(pull, model[0].weight)
    torch.testing.assert_close(found, n * tau * decay * model[0].weight.detach(), rtol=1e-10, atol=1e-10)


def test_implied_prior_by_layer() -> None:
    prior = implied_prior(mlp(), {"1": 0.1, "4": 0.0}, 100, 1.0)
    assert prior.std_std == {"1": pytest.approx(10**-0.5), "4": math.inf}


def test_without_decay_the_gap_falls_exactly_as_one_over_n() -> None:
    model, x, y = mlp(), normal(40, 4), normal(40, 1, seed=1)
    gaps = [objective_gap(model, x, y, n=n, tau=2.0, prior=PRIOR).relative for n in (100, 1000, 10_000)]
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=1e-9)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=1e-9)


def test_gap_is_that_of_the_two_objectives_written_out() -> None:
    model, x, y = mlp(), normal(40, 4), normal(40, 1, seed=1)
    n, tau, decay = 300, 2.5, 0.2
    prior = implied_prior(model, decay, n, tau)
    with untouched(model):
        found = objective_gap(model, x, y, n=n, tau=tau, weight_decay=decay)
    model.train()
    weights = list(model.parameters())
    density = torch.distributions.Normal(model(x), tau**-0.5).log_prob(y)  # (M, 1)
    va = -n / 40 * density.sum() + kl_regularizer(model, prior, x)
    rr = -density.sum() / (40 * tau) + decay / 2 * sum((p**2).sum() for p in weights if p.ndim > 1)
    grads = [torch.autograd.grad(v, weights, retain_graph=True, materialize_grads=True) for v in (va, rr)]
    of_va, of_rr = (torch.cat([g.flatten() for g in grad]) for grad in grads)
    assert found.relative == pytest.approx(((of_va / (n * tau) - of_rr).norm() / of_rr.norm()).item(), rel=1e-8)


def all_normalised(x: Tensor) -> nn.Module:
    """BN on the only layer and no scale and shift: what appendix 1.4 assumes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(x.shape[1], 3, bias=False), nn.BatchNorm1d(3, affine=False)).double()


def test_under_the_papers_assumptions_the_regularisers_agree_as_n_and_m_grow() -> None:
    x, y = whitened(2000, 4), normal(2000, 3, seed=1)
    model = all_normalised(x)

    def mismatch(n: int, M: int) -> float:
        gap = objective_gap(model, x, y, n=n, weight_decay=0.1, batch_size=M)
        return gap.difference / gap.decay

    by_n = [mismatch(n, 10**9) for n in (10**3, 10**4, 10**5)]
    assert by_n[0] / by_n[1] == pytest.approx(10, rel=1e-3)
    assert by_n[1] / by_n[2] == pytest.approx(10, rel=1e-3)
    floor = [mismatch(10**12, M) for M in (10, 100, 1000)]
    assert floor[0] / floor[1] == pytest.approx(10, rel=1e-3)  # O(1/M) stays however large N is
    assert floor[0] > 0.01


def test_with_correlated_inputs_they_do_not_agree() -> None:
    x, y = whitened(2000, 4), normal(2000, 3, seed=1)
    x = x @ torch.linalg.cholesky(0.5 * torch.eye(4, dtype=F64) + 0.5).T
    model = all_normalised(x)
    gap = objective_gap(model, x, y, n=10**12, weight_decay=0.1, batch_size=10**9)
    weight, covariance = model[0].weight.detach(), torch.cov(x.T, correction=0)
    expected = (0.1 * weight @ (covariance - torch.eye(4))).norm().item()
    assert gap.difference == pytest.approx(expected, rel=1e-4)
    assert gap.difference > 0.2 * gap.decay


def test_gap_of_a_classifier() -> None:
    model, x = make("residual", dtype=F64)
    labels = torch.arange(24) % 5
    gaps = [objective_gap(model, x, labels, n=n, prior=PRIOR, loss=cross_entropy).relative for n in (24, 240)]
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean_std": 0.0}, "mean_std must be positive"),
        ({"std_std": -1.0}, "std_std must be positive"),
        ({"std_std": {"1": 1.0, "4": 0.0}}, "std_std must be positive"),
        ({"std_std": math.nan}, "std_std must be positive"),
        ({"mean": math.inf}, "mean must be finite"),
        ({"mean": torch.zeros(2, 2)}, "a number or one a unit"),
    ],
)
def test_bad_priors_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(MCBNError, match=message):
        Prior(**options)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (Prior(std_std=torch.ones(5)), r"std_std has shape \(5,\) for layer '1' of 6 units"),
        (Prior(std_std={"1": 1.0}), r"names layers \['1'\], but not '4'"),
    ],
)
def test_priors_that_do_not_fit_the_network_are_refused(prior: Prior, message: str) -> None:
    with pytest.raises(MCBNError, match=message):
        kl_regularizer(mlp(), prior, normal(8, 4))


def test_bad_calls_are_refused() -> None:
    plain = nn.Linear(3, 1)
    with pytest.raises(MCBNError, match="no batch norm layer"):
        kl_regularizer(plain, PRIOR, torch.zeros(4, 3))
    with pytest.raises(MCBNError, match="no batch norm layer"):
        implied_prior(plain, 0.1, 10, 1.0)
    with pytest.raises(MCBNError, match="at least 2"):
        kl_regularizer(mlp(), PRIOR, normal(1, 4))
    with pytest.raises(MCBNError, match="batch_size must be a whole number"):
        kl_regularizer(mlp(), PRIOR, normal(8, 4), batch_size=1)
    with pytest.raises(MCBNError, match="non-finite"):
        kl_regularizer(mlp(), PRIOR, normal(8, 4) / 0)
    with pytest.raises(MCBNError, match="std_q must be positive"):
        kl_gaussian(0.0, 0.0, 0.0, 1.0)
    with pytest.raises(MCBNError, match="must broadcast"):
        kl_gaussian(torch.zeros(2), torch.ones(3), 0.0, 1.0)
    with pytest.raises(MCBNError, match=r"\(8, 1\) for targets \(8,\)"):
        objective_gap(mlp(), normal(8, 4), normal(8), n=8)
    with pytest.raises(MCBNError, match="as many examples"):
        objective_gap(mlp(), normal(8, 4), normal(7, 1), n=8)
    with pytest.raises(MCBNError, match=r"activations must be \(N, C, ...\)"):
        activation_moments(torch.zeros(3), 4)


def test_networks_that_cannot_be_read_are_refused() -> None:
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(MCBNError, match="cannot be copied"):
        kl_regularizer(model, PRIOR, normal(8, 4))
    with pytest.raises(MCBNError, match="unfreeze"):
        objective_gap(mlp().requires_grad_(False), normal(8, 4), normal(8, 1), n=8)


def test_without_gradients_the_penalty_is_the_same_number() -> None:
    model, x = mlp(), normal(8, 4)
    with torch.no_grad():
        found = kl_regularizer(model, PRIOR, x)
    assert not found.requires_grad
    assert found == kl_regularizer(model, PRIOR, x)


@pytest.mark.parametrize(
    ("decay", "n", "tau", "message"),
    [
        (-1.0, 10, 1.0, "weight_decay must not be negative"),
        (0.1, 0, 1.0, "n must be a positive"),
        (0.1, 10, math.inf, "tau must be a positive"),
        ({"2": 0.1}, 10, 1.0, r"the batch norm layers are \['1', '4'\]"),
    ],
)
def test_bad_decay_is_refused(decay: float, n: int, tau: float, message: str) -> None:
    with pytest.raises(MCBNError, match=message):
        implied_prior(mlp(), decay, n, tau)


def test_the_code_of_the_page_on_theory_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "theory.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with torch.random.fork_rng():
        exec(compile("\n".join(blocks), "theory.md", "exec"), {})
    assert "independent batches" in capsys.readouterr().out
