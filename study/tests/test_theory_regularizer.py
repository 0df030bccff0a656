"""The KL regulariser of a network: the sum over its units, written out, and its gradient (appendix 1.4)."""

import math
import threading

import pytest
import torch
from torch import Tensor, nn

from kinds import KINDS, make, normal
from mcbn import MCBNError
from mcbn.networks import RegressionMLP
from mcbn_study.theory import Prior, activation_moments, kl_derivative, kl_regularizer
from untouched import fingerprint, generators, untouched

F64 = torch.float64
PRIOR = Prior(mean=0.3, mean_std=1.5, std=0.8, std_std=0.4)


def mlp(**options: int) -> nn.Module:
    return RegressionMLP(4, (6, 5), seed=0, **options).double()


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


def test_a_dead_unit_counts_nothing() -> None:
    model, x = mlp(), normal(20, 4)
    with torch.no_grad():
        model[0].weight[0] = 0
    loss = kl_regularizer(model, PRIOR, x)
    loss.backward()
    assert loss.isfinite()
    assert bool(model[0].weight.grad.isfinite().all())
    assert model[0].weight.grad[0].abs().max() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean_std": 0.0}, "mean_std must be positive"),
        ({"std_std": -1.0}, "std_std must be positive"),
        ({"std_std": math.nan}, "std_std must be positive"),
        ({"mean": math.inf}, "mean must be finite"),
    ],
)
def test_bad_priors_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(MCBNError, match=message):
        Prior(**options)


def test_without_gradients_the_penalty_is_the_same_number() -> None:
    model, x = mlp(), normal(8, 4)
    with torch.no_grad():
        found = kl_regularizer(model, PRIOR, x)
    assert not found.requires_grad
    assert found == kl_regularizer(model, PRIOR, x)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(MCBNError, match="no batch norm layer"):
        kl_regularizer(nn.Linear(3, 1), PRIOR, torch.zeros(4, 3))
    with pytest.raises(MCBNError, match="at least 2"):
        kl_regularizer(mlp(), PRIOR, normal(1, 4))
    with pytest.raises(MCBNError, match="batch_size must be a whole number"):
        kl_regularizer(mlp(), PRIOR, normal(8, 4), batch_size=1)
    with pytest.raises(MCBNError, match="non-finite"):
        kl_regularizer(mlp(), PRIOR, normal(8, 4) / 0)
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(MCBNError, match="cannot be copied"):
        kl_regularizer(model, PRIOR, normal(8, 4))
