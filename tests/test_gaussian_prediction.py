"""Gaussian families through the network: close to sampled MCBN, exact where the network is linearised."""

import copy
import math

import pytest
import torch
from torch import Tensor

import mcbn
from kinds import KINDS, make
from mcbn.gaussian import join
from mcbn.metrics import crps_gaussian
from mcbn.networks import RegressionMLP, Standardized, train_regression
from modelled import MODELLED, dense, fitted, modelled


@pytest.mark.parametrize("family", MODELLED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network_predicts(kind: str, family: str) -> None:
    model, x = make(kind, n=48, batch_size=12)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=6, batch_size=12, posterior=family)
    assert bayes.posterior.layers == KINDS[kind].calls
    assert bayes.posterior.family == family
    assert (bayes.posterior.n_samples, bayes.posterior.batch_size) == (6, 12)
    for pred in (bayes.predict(x), bayes.predict(x, method="linear")):
        assert pred.mean.isfinite().all()
        assert (pred.epistemic > 0).any()


@pytest.mark.parametrize("family", MODELLED)
def test_linear_variance_is_j_c_j_transposed_of_the_modelled_covariance(family: str) -> None:
    bayes, x = fitted(posterior=family, n_samples=15)
    net, model = bayes.model, modelled(bayes)

    def forward(row: Tensor, example: Tensor) -> Tensor:
        m1, s1, m2, s2 = row.split(6)
        h = (net[0](example) - m1) / (s1**2 + 1e-5).sqrt() * net[1].weight + net[1].bias
        h = (net[3](h.relu()) - m2) / (s2**2 + 1e-5).sqrt() * net[4].weight + net[4].bias
        return net[6](h.relu())

    pred = bayes.predict(x[:5], method="linear", covariance=True)
    chosen = bayes.linearizer.expansion(x[:5], 15).chosen
    rows = join(chosen.mean, chosen.var)  # (K, P)
    for i in range(5):
        J = torch.autograd.functional.jacobian(lambda row, i=i: forward(row, x[i]), model.location)  # (D, P)
        mean = torch.stack([forward(row, x[i]) - J @ (row - model.location) for row in rows]).mean(0).detach()
        torch.testing.assert_close(pred.mean[i], mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(pred.covariance[i], J @ dense(model) @ J.T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", MODELLED)
def test_linear_classification_averages_draws_of_the_gaussian(family: str) -> None:
    bayes, x = fitted("residual", posterior=family, task="classification")
    expansion = bayes.linearizer(x, 2000)
    pred = bayes.predict(x, method="linear", n_samples=2000, return_samples=True)
    torch.testing.assert_close(pred.probs, torch.softmax(pred.samples, 2).mean(0))
    expected = expansion.projected.square().sum(2)  # (N, K)
    found = pred.samples.var(0)
    assert (expected > 0).any()
    assert ((found - expected).abs() <= 5 * math.sqrt(2 / 2000) * expected).all()


def test_linear_does_not_depend_on_the_number_of_draws() -> None:
    bayes, x = fitted(posterior="gaussian", n_samples=30)
    few, many = (bayes.predict(x, method="linear", n_samples=n) for n in (1, 500))
    assert torch.equal(few.mean, many.mean)
    assert torch.equal(few.epistemic, many.epistemic)


def test_close_to_sampled_monte_carlo_where_the_diagonal_is_not() -> None:
    sampled, x = fitted(posterior="sample", n=400, n_samples=1000, batch_size=50)
    reference = sampled.predict(x).epistemic.sqrt()
    error = {}
    for family in MODELLED:
        bayes = mcbn.MCBN(sampled.model, "regression").fit(x, n_samples=1000, batch_size=50, posterior=family)
        error[family] = (bayes.predict(x).epistemic.sqrt() / reference).log().abs().median().item()
    assert error["gaussian"] < 0.05
    assert error["diagonal"] > 0.2


def test_more_draws_than_fitted_begin_with_the_same_draws_and_leave_the_posterior() -> None:
    bayes, x = fitted(posterior="gaussian", n_samples=10)
    before, drawn = bayes.sample(x), bayes.posterior
    more = bayes.sample(x, n_samples=25)
    assert more.shape[0] == 25
    torch.testing.assert_close(more[:10], before)
    assert bayes.predict(x, n_samples=25).n_samples == 25
    assert bayes.posterior is drawn
    assert bayes.predict(x).n_samples == 10
    bayes.posterior = bayes.posterior.at_batch_size(4)
    assert not torch.allclose(bayes.sample(x, n_samples=25), more)


@pytest.mark.parametrize("family", ["gaussian", "layerwise"])
def test_converting_a_sampled_posterior_equals_fitting_it(family: str) -> None:
    bayes, x = fitted(posterior="sample", n_samples=30)
    direct, _ = fitted(posterior=family, n_samples=30)
    bayes.posterior = bayes.posterior.as_gaussian(family)
    assert bayes.posterior.family == family
    assert torch.equal(bayes.predict(x).epistemic, direct.predict(x).epistemic)
    assert torch.equal(copy.deepcopy(bayes).predict(x).epistemic, direct.predict(x).epistemic)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", MODELLED)
def test_moments_and_draws_live_where_the_network_does(family: str) -> None:
    model, x = make("residual")
    here = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=12, posterior=family)
    there = mcbn.MCBN(copy.deepcopy(model).cuda(), "regression").fit(x, n_samples=5, batch_size=12, posterior=family)
    for posterior in (there.posterior, there.posterior.at_batch_size(6), there.posterior.sample(9)):
        assert all(value.is_cuda for value in (*posterior.mean.values(), *posterior.var.values()))
    torch.testing.assert_close(modelled(there).variance.cpu(), modelled(here).variance, rtol=1e-2, atol=1e-4)
    for method in ("sample", "linear"):
        a, b = there.predict(x, method=method), here.predict(x, method=method)
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weight_decay"), [("boston", 1e-1), ("concrete", 1e-5)])
def test_full_covariance_scores_within_one_percent_of_sampling(name: str, weight_decay: float) -> None:
    x, y = (part.float() for part in mcbn.data.load(name))
    split = mcbn.data.split(len(x), 1)
    fold = mcbn.data.folds(split.train)[0]
    network = Standardized(RegressionMLP(x.shape[1], (50, 50), seed=1), x[fold.train], y[fold.train])
    train_regression(
        network, x[fold.train], y[fold.train], batch_size=32, epochs=200, weight_decay=weight_decay, seed=1
    )
    crps = {}
    for family in ("sample", *MODELLED):
        bayes = mcbn.MCBN(network, "regression").fit(x[fold.train], n_samples=500, batch_size=32, posterior=family)
        pred = bayes.tune((x[fold.validation], y[fold.validation])).predict(x[split.test])
        crps[family] = crps_gaussian(pred.mean, pred.variance, y[split.test]).mean().item()
    assert crps["gaussian"] <= 1.01 * crps["sample"]
    if name == "concrete":  # where statistics cancel
        assert crps["diagonal"] > 1.01 * crps["gaussian"]
