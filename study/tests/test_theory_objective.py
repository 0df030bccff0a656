"""The objectives of Eq. (1) and (2), the prior that weight decay implies, and the gap between their gradients."""

import math

import pytest
import torch
from torch import Tensor, nn

from kinds import normal
from mcbn import MCBNError
from mcbn.networks import RegressionMLP
from mcbn_study.theory import Prior, implied_prior, kl_regularizer, objective_gap
from untouched import untouched

F64 = torch.float64
PRIOR = Prior(mean=0.3, mean_std=1.5, std=0.8, std_std=0.4)


def mlp(**options: int) -> nn.Module:
    return RegressionMLP(4, (6, 5), seed=0, **options).double()


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


def test_no_decay_implies_a_flat_prior() -> None:
    assert implied_prior(mlp(), 0.0, 100, 1.0) == Prior()


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


@pytest.mark.parametrize(
    ("decay", "n", "tau", "message"),
    [
        (-1.0, 10, 1.0, "weight_decay must not be negative"),
        (0.1, 0, 1.0, "n must be a positive"),
        (0.1, 10, math.inf, "tau must be a positive"),
    ],
)
def test_bad_decay_is_refused(decay: float, n: int, tau: float, message: str) -> None:
    with pytest.raises(MCBNError, match=message):
        implied_prior(mlp(), decay, n, tau)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(MCBNError, match="no batch norm layer"):
        implied_prior(nn.Linear(3, 1), 0.1, 10, 1.0)
    with pytest.raises(MCBNError, match=r"\(8, 1\) for targets \(8,\)"):
        objective_gap(mlp(), normal(8, 4), normal(8), n=8)
    with pytest.raises(MCBNError, match=r"\(8, 1\) for targets \(7, 1\)"):
        objective_gap(mlp(), normal(8, 4), normal(7, 1), n=8)
    with pytest.raises(MCBNError, match="unfreeze"):
        objective_gap(mlp().requires_grad_(False), normal(8, 4), normal(8, 1), n=8)
