"""Gaussian families of q(omega): moments kept, draws that follow them, and predictions close to sampled MCBN."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mcbn
from kinds import KINDS, make
from mcbn import draws, gaussian, noise
from mcbn.gaussian import Gaussian, join
from mcbn.metrics import crps_gaussian
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn.population import Population
from mcbn.theory import analytic_moments
from untouched import untouched

MODELLED = ["gaussian", "layerwise", "diagonal"]


def fitted(
    kind: str = "1d", posterior: str = "gaussian", task: str = "regression", n: int = 64, **options: int
) -> tuple[mcbn.MCBN, Tensor]:
    model, x = make(kind, n=n, dtype=torch.float64, batch_size=16)
    options = {"n_samples": 200, "batch_size": 16, **options}
    return mcbn.MCBN(model, task).fit(x, posterior=posterior, **options), x


def modelled(bayes: mcbn.MCBN) -> Gaussian:
    assert bayes.posterior.gaussian is not None
    return bayes.posterior.gaussian


def dense(model: Gaussian) -> Tensor:
    """Build the covariance that is never built, (P, P)."""
    covariance = torch.diag(model.diagonal)
    if model.factors:
        covariance = covariance + torch.block_diag(*(factor.T @ factor for factor in model.factors))
    return covariance


def vector(posterior: mcbn.Posterior) -> Tensor:
    """Lay out draws as the moments are: means, then standard deviations of each call, (T, P)."""
    return torch.cat([p for n in posterior.layers for p in (posterior.mean[n], posterior.var[n].sqrt())], 1)


def is_std(model: Gaussian) -> Tensor:
    return torch.cat([torch.arange(2 * C) >= C for C in model.channels.values()])


# ---------------------------------------------------------------- moments of draws


@pytest.mark.parametrize("family", ["gaussian", "layerwise"])
@pytest.mark.parametrize("T", [2, 3, 7, 40])
def test_mean_and_variance_of_every_statistic_are_those_of_the_draws(family: str, T: int) -> None:
    bayes, _ = fitted(posterior="sample", n_samples=T)
    model = gaussian.from_draws(bayes.posterior.mean, bayes.posterior.var, family)
    drawn = vector(bayes.posterior)
    torch.testing.assert_close(model.location, drawn.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.variance, drawn.var(0), rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("T", [10, 60])  # below and above P = 24
def test_covariance_is_that_of_the_draws_shrunk_towards_its_diagonal(T: int) -> None:
    bayes, _ = fitted(posterior="sample", n_samples=T)
    drawn = vector(bayes.posterior)
    S = torch.cov(drawn.T)
    intensity = gaussian.shrinkage(drawn - drawn.mean(0))
    model = modelled_from(bayes.posterior, "gaussian")
    assert len(model.factors[0]) == min(T, 24)
    expected = (1 - intensity) * S + intensity * torch.diag(S.diagonal())
    torch.testing.assert_close(dense(model), expected, rtol=1e-9, atol=1e-15)


def modelled_from(posterior: mcbn.Posterior, family: str) -> Gaussian:
    return gaussian.from_draws(posterior.mean, posterior.var, family)


@pytest.mark.parametrize("shape", [(6, 11), (20, 5)])
def test_shrinkage_maximises_the_naive_likelihood_of_each_draw_given_the_others(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    T, P = shape
    mix = torch.randn(P, P, generator=generator, dtype=torch.float64)
    drawn = torch.randn(T, P, generator=generator, dtype=torch.float64) @ mix
    deviations = drawn - drawn.mean(0)
    unit = drawn / deviations.square().sum(0).div(T - 1).sqrt()

    def likelihood(intensity: float) -> float:
        total = 0.0
        for t in range(T):
            others = torch.cat([unit[:t], unit[t + 1 :]])
            S = torch.cov(others.T)
            C = (1 - intensity) * S + intensity * torch.eye(P, dtype=torch.float64)
            normal = torch.distributions.MultivariateNormal(others.mean(0), C)
            total += normal.log_prob(unit[t]).item()
        return total

    best = max(gaussian.INTENSITIES.tolist(), key=likelihood)
    assert gaussian.likeliest_intensity(deviations) == best
    assert gaussian.shrinkage(deviations) == min(best, 2 / (T + 2))
    assert 1e-4 < best < 0.85  # not at an end, where anything would do


def test_shrinkage_vanishes_as_draws_grow_and_stays_defined_for_few() -> None:
    bayes, _ = fitted(posterior="sample", n_samples=400)
    deviations = vector(bayes.posterior) - vector(bayes.posterior).mean(0)
    intensities = [gaussian.shrinkage(part - part.mean(0)) for part in (deviations[:12], deviations)]
    assert intensities[0] > 10 * intensities[1]
    assert intensities[1] < 0.01
    assert gaussian.shrinkage(deviations[:2] - deviations[:2].mean(0)) == 0.5
    assert gaussian.shrinkage(torch.zeros(5, 3, dtype=torch.float64)) == 2 / 7


@pytest.mark.parametrize("family", ["gaussian", "layerwise"])
@pytest.mark.parametrize("T", [2, 5])
def test_few_draws_leave_no_direction_without_variance(family: str, T: int) -> None:
    bayes, x = fitted(posterior=family, n_samples=T)
    model = modelled(bayes)
    assert (model.diagonal > 0).all()
    assert torch.linalg.eigvalsh(dense(model)).min() >= 0.5 * model.diagonal.min()
    assert bayes.predict(x, n_samples=50).epistemic.isfinite().all()


def test_layers_are_independent_in_layerwise_and_alone_there() -> None:
    full, layers = fitted(posterior="gaussian", n_samples=500)[0], fitted(posterior="layerwise", n_samples=500)[0]
    covariance = dense(modelled(layers))
    assert (covariance[:12, 12:] == 0).all()
    assert len(modelled(layers).factors) == 2
    torch.testing.assert_close(covariance[:12, :12], dense(modelled(full))[:12, :12], rtol=0.02, atol=1e-3)
    n = 4000
    correlation = torch.corrcoef(vector(layers.posterior.sample(n)).T)[:12, 12:]
    assert correlation.abs().max() < 5 / math.sqrt(n)
    assert torch.corrcoef(vector(full.posterior.sample(n)).T)[:12, 12:].abs().max() > 10 / math.sqrt(n)


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize("family", MODELLED)
def test_draws_converge_to_the_modelled_moments(family: str) -> None:
    bayes, _ = fitted(posterior=family)
    model, n = modelled(bayes), 20000
    drawn, C = vector(bayes.posterior.sample(n, seed=3)), dense(model)
    std = C.diagonal().sqrt()
    assert ((drawn.mean(0) - model.location).abs() <= 5 * std / math.sqrt(n)).all()
    centred = (drawn - drawn.mean(0)) / std
    fourth = centred.pow(4).mean(0)
    assert ((drawn.var(0) / std**2 - 1).abs() <= 5 * ((fourth - 1) / n).sqrt()).all()
    correlation, found = C / std.outer(std), centred.T @ centred / n
    spread = torch.where(is_std(model), std / model.location, 0.0)  # of each sigma_B, relative
    bent = 0.5 * (spread[:, None] + spread[None]).square()  # what bending may take from a correlation
    assert ((found - correlation).abs() <= 5 * math.sqrt(3 / n) + bent * correlation.abs()).all()


def test_deviations_have_the_covariance_exactly_and_standard_deviations_are_bent() -> None:
    model = Gaussian("diagonal", {"a": 1}, torch.tensor([3.0, 2.0]).double(), (), torch.tensor([0.25, 1.0]).double())
    rows = model.deviations(9, 0)
    mean, var = model.statistics(9, 0)
    w = math.log(1 + 1.0 / 2.0**2)
    torch.testing.assert_close(mean["a"][:, 0], 3 + rows[:, 0])
    torch.testing.assert_close(var["a"][:, 0].sqrt(), 2 * torch.exp(math.sqrt(w) * rows[:, 1] - w / 2))


@pytest.mark.parametrize("family", MODELLED)
def test_draw_depends_on_seed_and_number_alone(family: str) -> None:
    bayes, _ = fitted(posterior=family, n_samples=20)
    few, many = bayes.posterior.sample(5, seed=4), bayes.posterior.sample(37, seed=4)
    assert torch.equal(vector(few), vector(many)[:5])
    assert not torch.equal(vector(few), vector(bayes.posterior.sample(5, seed=5)))
    assert torch.equal(vector(bayes.posterior), vector(bayes.posterior.sample(20)))
    assert len(vector(many).unique(dim=0)) == 37


@pytest.mark.parametrize("family", MODELLED)
def test_same_seed_same_result_and_nothing_of_the_users_changes(family: str) -> None:
    model, x = make("residual")
    loader = DataLoader(TensorDataset(x, x), batch_size=8, shuffle=True)
    with untouched(model):
        first = mcbn.MCBN(model, "classification").fit(loader, n_samples=9, posterior=family)
        again = mcbn.MCBN(model, "classification").fit(loader, n_samples=9, posterior=family)
        other = mcbn.MCBN(model, "classification").fit(loader, n_samples=9, posterior=family, seed=1)
        labels = first.predict(x).label
        first.tune((x, labels), batch_sizes=[4, 32])
        first.posterior.sample(3)
    first.posterior = first.posterior.at_batch_size(8)
    first.tau = 1.0
    torch.testing.assert_close(first.predict(x).probs, again.predict(x).probs)
    assert not torch.allclose(again.predict(x).probs, other.predict(x).probs)


def test_standard_deviations_are_positive_however_wide_the_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = {"a": torch.randn(50, 3, generator=generator)}
    rare = torch.where(torch.rand(50, 3, generator=generator) < 0.05, 4.0, 0.0)  # dead for most batches
    rare[:, 2] = 0  # and for all
    for posterior in (mcbn.Posterior(mean, {"a": rare}, 64), mcbn.Posterior(mean, {"a": rare}, 64).as_gaussian()):
        for M in (64, 2, 4096):
            var = posterior.at_batch_size(M).var["a"]
            assert var.isfinite().all()
            assert (var >= 0).all()
            assert (var[:, 2] == 0).all()
    modelled = mcbn.Posterior(mean, {"a": rare}, 64).as_gaussian().sample(1000).at_batch_size(2).var["a"]
    assert (modelled[:, :2] > 0).all()


def test_batch_of_the_whole_set_has_zero_variance() -> None:
    model, x = make("1d", dtype=torch.float64)
    with pytest.warns(UserWarning, match="takes in all 24 examples"):
        bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=6, batch_size=24, posterior="gaussian")
    assert (bayes.predict(x).epistemic == 0).all()


# ---------------------------------------------------------------- the factorised family, from one pass


def naive(h: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Appendix 1.3 for inputs (N, C): mean and variance of mu_B, mean and variance of sigma_B."""
    mu, sigma2 = h.mean(0), h.var(0, correction=0)
    fourth = (h - mu).pow(4).mean(0)
    return mu, sigma2 / M, sigma2.sqrt(), (fourth - sigma2**2) / (4 * sigma2 * M)


def parts(model: Gaussian, name: str) -> tuple[Tensor, ...]:
    return *model.split(model.location)[name], *model.split(model.variance)[name]


@pytest.mark.parametrize("M", [5, 16, 64])
def test_first_layer_has_the_moments_of_the_whole_set(M: int) -> None:
    bayes, x = fitted(posterior="diagonal", batch_size=M)
    with torch.no_grad():
        mu, mu_var, sigma, sigma_var = naive(bayes.model[0](x), M)
    found = parts(modelled(bayes), "1")
    for a, b in zip(found, (mu, sigma, mu_var, sigma_var), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    assert bayes.posterior.batch_size == M


def test_later_layers_see_inputs_normalised_by_their_batch() -> None:
    bayes, x = fitted(posterior="diagonal", batch_size=16)
    net, rows = bayes.model, draws._Partition(None, range(64), 4, 16, 0)
    seen = []
    with torch.no_grad():
        for t in range(4):
            h = net[0](x[rows.chosen(t)])
            h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() * net[1].weight + net[1].bias
            seen.append(net[3](h.relu()))
    mu, mu_var, sigma, sigma_var = naive(torch.cat(seen), 16)
    found = parts(modelled(bayes), "4")
    for a, b in zip(found, (mu, sigma, mu_var, sigma_var), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_images_count_once_however_many_positions_they_have() -> None:
    model, x = make("2d", n=64, dtype=torch.float64, batch_size=16)
    x = x + 2 * torch.randn(64, 1, 1, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the running statistics are of other images
        bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=16, posterior="diagonal")
        sampled = mcbn.MCBN(model, "regression").fit(x, n_samples=3000, batch_size=16).posterior
    with torch.no_grad():
        h = model[0](x)  # (N, C, H, W)
    mu = h.mean((0, 2, 3))
    a, b = h.mean((2, 3)), (h - mu[:, None, None]).square().mean((2, 3))  # (N, C)
    sigma2 = b.mean(0)
    mean, std, mean_var, std_var = parts(modelled(bayes), "1")
    torch.testing.assert_close(mean, mu)
    torch.testing.assert_close(std, sigma2.sqrt())
    torch.testing.assert_close(mean_var, a.var(0, correction=0) / 16)
    torch.testing.assert_close(std_var, b.var(0, correction=0) / (4 * sigma2 * 16))
    assert (mean_var > 1.5 * sigma2 / (16 * 16)).all()  # positions as independent examples would give the right side
    less = 1 - 15 / 63  # batches drawn without replacement
    torch.testing.assert_close(sampled.mean["1"].var(0), mean_var * less, rtol=0.15, atol=0)
    torch.testing.assert_close(sampled.var["1"].sqrt().var(0), std_var * less, rtol=0.35, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_merged_moments_equal_those_of_all_values_at_once(offset: float) -> None:
    h = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp() + offset
    population = Population(h[:7].mean(0))
    for batch in h.split([7, 20, 33]):
        population.add(batch[:, None])
    found = population.moments(8)
    mu, mu_var, sigma, sigma_var = naive(h, 8)
    torch.testing.assert_close(torch.cat([found.mean, found.std]), torch.cat([mu, sigma]), rtol=1e-9, atol=0)
    variance = torch.cat([found.mean_std, found.std_std]).square()
    torch.testing.assert_close(variance, torch.cat([mu_var, sigma_var]), rtol=1e-8, atol=0)
    expected = analytic_moments(mu, sigma**2, (h - mu).pow(4).mean(0), 8)
    torch.testing.assert_close(found.std_std, expected.std_std, rtol=1e-8, atol=0)


def test_a_pass_visits_every_example_once_in_batches_of_at_least_m() -> None:
    x = torch.arange(47.0)[:, None]
    for data in (x, TensorDataset(x), DataLoader(TensorDataset(x), batch_size=3)):
        drawn = draws.pass_over(data, most=1, batch_size=5, seed=0)
        rows = [batch if isinstance(batch, Tensor) else batch[0] for batch in drawn.batches]
        assert sorted(torch.cat(rows).flatten().tolist()) == list(range(47))
        assert {len(row) for row in rows} == {5, 6}
        assert drawn.batch_size == 5
    orders = [[r.tolist() for r in draws.pass_over(x, most=1, batch_size=5, seed=s).batches] for s in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


class Endless(IterableDataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from self.x


def test_stream_passes_over_as_many_batches_as_draws() -> None:
    model, x = make("1d", n=64, dtype=torch.float64, batch_size=16)
    stream = mcbn.MCBN(model, "regression").fit(Endless(x), n_samples=4, batch_size=16, posterior="diagonal")
    whole = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=16, posterior="diagonal")
    for a, b in zip(parts(modelled(stream), "1"), parts(modelled(whole), "1"), strict=True):
        torch.testing.assert_close(a, b)


class Rows(nn.Module):
    """Rows that cannot be told apart by example: one more than examples."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(torch.cat([x, x[:1]]))[1:]


def test_rows_that_do_not_divide_into_examples_are_told() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"sees 9 rows for 8 examples.*use posterior='gaussian'"):
        mcbn.MCBN(Rows(), "regression").fit(torch.randn(40, 3), n_samples=2, batch_size=8, posterior="diagonal")


def test_diverged_network_is_named_in_one_pass() -> None:
    model, x = make("1d")
    with torch.no_grad():
        model[0].weight.mul_(1e38)
    with pytest.raises(mcbn.MCBNError, match="'1' has non-finite statistics"):
        mcbn.MCBN(model, "regression").fit(x * 1e3, n_samples=2, batch_size=8, posterior="diagonal")


def test_one_pass_warns_of_data_unlike_training() -> None:
    model, x = make("1d", n=64)
    with pytest.warns(UserWarning, match="disagree with the running statistics"):
        mcbn.MCBN(model, "regression").fit(3 * x + 2, n_samples=5, batch_size=8, posterior="diagonal")


# ---------------------------------------------------------------- through the network


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
    chosen = bayes._linearise.expansion(x[:5], 15).chosen
    rows = join(chosen.mean, chosen.var)  # (K, P)
    for i in range(5):
        J = torch.autograd.functional.jacobian(lambda row, i=i: forward(row, x[i]), model.location)  # (D, P)
        mean = torch.stack([forward(row, x[i]) - J @ (row - model.location) for row in rows]).mean(0).detach()
        torch.testing.assert_close(pred.mean[i], mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(pred.covariance[i], J @ dense(model) @ J.T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", MODELLED)
def test_linear_classification_averages_draws_of_the_gaussian(family: str) -> None:
    bayes, x = fitted("residual", posterior=family, task="classification")
    expansion = bayes._linearise(x, 2000)
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


# ---------------------------------------------------------------- another batch size


@pytest.mark.parametrize("family", MODELLED)
@pytest.mark.parametrize("M", [2, 5, 100])
def test_covariance_goes_with_one_over_the_batch_size_and_back(family: str, M: int) -> None:
    bayes, _ = fitted(posterior=family)
    there = bayes.posterior.at_batch_size(M)
    assert there.gaussian is not None
    torch.testing.assert_close(dense(there.gaussian), dense(modelled(bayes)) * 16 / M, rtol=1e-12, atol=0)
    assert torch.equal(there.gaussian.location, modelled(bayes).location)
    assert (there.batch_size, there.fitted_batch_size, there.family) == (M, 16, family)
    back = there.at_batch_size(16)
    assert back.gaussian is not None
    torch.testing.assert_close(dense(back.gaussian), dense(modelled(bayes)), rtol=1e-12, atol=0)
    torch.testing.assert_close(vector(back), vector(bayes.posterior), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("M", [2, 5, 100])
def test_sampled_draws_are_stretched_about_their_mean_and_back(M: int) -> None:
    bayes, _ = fitted(posterior="sample")
    there = bayes.posterior.at_batch_size(M)
    k = math.sqrt(16 / M)
    for name in ("1", "4"):
        mean, std = bayes.posterior.mean[name], bayes.posterior.var[name].sqrt()
        torch.testing.assert_close(there.mean[name], mean.mean(0) + k * (mean - mean.mean(0)))
        power = std**k
        torch.testing.assert_close(there.var[name].sqrt(), std.mean(0) * power / power.mean(0))
        torch.testing.assert_close(there.var[name].sqrt().mean(0), std.mean(0))
        relative = std.std(0) / std.mean(0)
        ratio = there.var[name].sqrt().std(0) / std.std(0) / k
        assert ((ratio - 1).abs() < 2 * k * relative + 0.02).all()  # the spread, to first order
    torch.testing.assert_close(vector(there.at_batch_size(16)), vector(bayes.posterior), rtol=1e-9, atol=1e-12)
    assert bayes.posterior.at_batch_size(16) is bayes.posterior


def test_images_drawn_one_by_one_rescale_and_return() -> None:
    model, x = make("2d", dtype=torch.float64)
    with pytest.warns(UserWarning, match="batch_size is 1"):
        bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=9, batch_size=1)
    back = bayes.posterior.at_batch_size(4).at_batch_size(1)
    torch.testing.assert_close(vector(back), vector(bayes.posterior))


def test_rescaled_draws_spread_like_draws_of_that_batch_size() -> None:
    model, x = make("1d", n=4000, dtype=torch.float64, batch_size=64)
    large, small = (mcbn.MCBN(model, "regression").fit(x, n_samples=800, batch_size=M) for M in (64, 16))
    large.posterior = large.posterior.at_batch_size(16)
    ratio = large.predict(x[:200]).epistemic.sqrt() / small.predict(x[:200]).epistemic.sqrt()
    assert 0.85 < ratio.median() < 1.15  # the average statistics stay those of M = 64
    torch.testing.assert_close(vector(large.posterior).std(0), vector(small.posterior).std(0), rtol=0.15, atol=0)


# ---------------------------------------------------------------- tuning M


def validation(bayes: mcbn.MCBN, x: Tensor, error: float) -> Tensor:
    """Targets about the network's own mean, with errors far below or above the spread of the draws."""
    mean = bayes.predict(x).mean
    return mean + error * torch.randn(mean.shape, generator=torch.Generator().manual_seed(2), dtype=mean.dtype)


def loss(bayes: mcbn.MCBN, x: Tensor, y: Tensor, score: str) -> float:
    pred = bayes.predict(x)
    per_point = crps_gaussian(pred.mean, pred.variance, y) if score == "crps" else -pred.log_prob(y)
    return per_point.mean().item()


@pytest.mark.parametrize("family", ["sample", "gaussian"])
@pytest.mark.parametrize("score", ["crps", "pll"])
@pytest.mark.parametrize("error", [0.02, 2.0])
def test_tuned_batch_size_is_never_worse_than_that_of_training(family: str, score: str, error: float) -> None:
    bayes, x = fitted(posterior=family, n_samples=50)
    bayes = mcbn.MCBN(bayes.model, "regression", output=lambda out: out[:, 0]).fit(
        x, n_samples=50, batch_size=16, posterior=family
    )
    y = validation(bayes, x, error)
    before = loss(bayes.tune((x, y), score=score), x, y, score)
    bayes.tune((x, y), score=score, batch_sizes="auto")
    assert loss(bayes, x, y, score) <= before + 1e-12
    if error == 0.02:  # the draws spread far wider than the errors
        assert bayes.posterior.batch_size == 256
        assert loss(bayes, x, y, score) < 0.9 * before + (0 if score == "crps" else -0.1 * abs(before))


def test_best_of_given_batch_sizes_is_what_trying_each_finds() -> None:
    bayes, x = fitted(posterior="gaussian", n_samples=50)
    y = validation(bayes, x, 0.3)
    reference = bayes.predict(x)
    losses: dict[int, Tensor] = {}
    for M in (16, 4, 64, 300):
        bayes.posterior = bayes.posterior.at_batch_size(M)
        pred = bayes.tune((x, y)).predict(x)
        losses[M] = crps_gaussian(pred.mean, pred.variance, y).mean(0)
    expected = min(losses, key=lambda M: (losses[M] / losses[16]).mean().item())
    bayes.tune((x, y), batch_sizes=[4, 64, 300])
    assert bayes.posterior.batch_size == expected != 16
    assert bayes.posterior.fitted_batch_size == 16
    bayes.tune((x, y), batch_sizes=[16])  # from a rescaled posterior back to that of the fit
    assert bayes.posterior.batch_size == 16
    torch.testing.assert_close(bayes.predict(x).epistemic, reference.epistemic)


@pytest.mark.parametrize("family", ["sample", *MODELLED])
def test_classification_tunes_m_and_inverse_temperature_together(family: str) -> None:
    bayes, x = fitted("residual", posterior=family, task="classification", n_samples=40)
    y = torch.multinomial(bayes.predict(x).probs, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    before = bayes.tune((x, y)).predict(x).log_prob(y).mean()
    bayes.tune(DataLoader(TensorDataset(x, y), batch_size=30), batch_sizes="auto")
    assert bayes.predict(x).log_prob(y).mean() >= before - 1e-12
    assert bayes.posterior.batch_size in (2, 4, 8, 16, 32, 64, 128, 256)


def test_interrupted_tuning_leaves_posterior_and_tau() -> None:
    bayes, x = fitted(posterior="gaussian", n_samples=20)
    y = validation(bayes, x, 1.0)
    bayes.tune((x, y))
    drawn, tau = bayes.posterior, bayes.tau
    with pytest.raises(mcbn.MCBNError, match="not finite"):
        bayes.tune((x, y * torch.nan), batch_sizes="auto")
    assert bayes.posterior is drawn
    assert torch.equal(bayes.tau, tau)


def test_outputs_of_any_unit_count_alike_in_the_choice_of_m() -> None:
    def tuned(*losses: float) -> noise.Tuned:
        return noise.Tuned(torch.tensor(1.0), torch.tensor(losses))

    crps = {16: tuned(1.0, 1000.0), 8: tuned(0.5, 1010.0), 32: tuned(1.1, 995.0)}
    assert noise.best(crps, "crps") == 8
    assert noise.best(crps, "pll") == 32
    assert noise.best({16: tuned(1.0), 8: tuned(1.0)}, "crps") == 16


def test_candidates_start_with_the_fitted_batch_size() -> None:
    assert noise.candidates("auto", 32) == [32, 2, 4, 8, 16, 64, 128, 256, 512]
    assert noise.candidates("auto", 3) == [3, 2, 6, 12, 24, 48]
    assert noise.candidates([8, 32, np.int64(64), 8], 32) == [32, 8, 64]


# ---------------------------------------------------------------- mistakes

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "family": (
        lambda: fitted(posterior="full"),
        r"one of \['sample', 'gaussian', 'layerwise', 'diagonal'\], got 'full'",
    ),
    "one draw": (lambda: fitted(posterior="gaussian", n_samples=1), "covariance.*at least 2; got 1"),
    "one draw a layer": (lambda: fitted(posterior="layerwise", n_samples=1), "covariance.*at least 2; got 1"),
    "one draw to convert": (
        lambda: fitted(posterior="sample", n_samples=1)[0].posterior.as_gaussian(),
        "at least 2 draws; got 1: raise n_samples",
    ),
    "convert to diagonal": (
        lambda: fitted(posterior="sample")[0].posterior.as_gaussian("diagonal"),
        r"one of \['gaussian', 'layerwise'\], got 'diagonal'",
    ),
    "convert twice": (lambda: fitted()[0].posterior.as_gaussian(), "a Gaussian already, of family 'gaussian'"),
    "sample a sample": (lambda: fitted(posterior="sample")[0].posterior.sample(3), "fit more of them, or draw from"),
    "no draws": (lambda: fitted()[0].posterior.sample(0), "n_samples must be a whole number, at least 1"),
    "negative seed": (lambda: fitted()[0].posterior.sample(3, seed=-1), "seed must be"),
    "diagonal without draws": (lambda: fitted(posterior="diagonal", n_samples=0), "n_samples must be .* at least 1"),
    "diagonal seed": (lambda: fitted(posterior="diagonal", seed=-1), "seed must be"),
    "diagonal batch": (lambda: fitted(posterior="diagonal", batch_size=0), "batch_size must be"),
    "diagonal, no batch": (
        lambda: mcbn.MCBN(make("1d")[0], "regression").fit(iter([]), posterior="diagonal"),
        "no batch at all",
    ),
    "small batch": (lambda: fitted()[0].posterior.at_batch_size(1), "batch_size must be .* at least 2; got 1"),
    "no batch": (lambda: fitted(posterior="sample")[0].posterior.at_batch_size(0), "at least 2; got 0"),
    "half a batch": (lambda: fitted()[0].posterior.at_batch_size(2.5), "at least 2; got 2.5"),  # type: ignore[arg-type]
    "more of a sample": (
        lambda: (lambda b, x: b.predict(x, n_samples=201))(*fitted(posterior="sample")),
        "n_samples=201 asked of a posterior of 200 draws; fit more of them, or a Gaussian",
    ),
    "other layers": (
        lambda: setattr(fitted()[0], "posterior", fitted("residual")[0].posterior),
        r"layers \(channels\) \{'first': 4.*this network \{'1': 6, '4': 6\}",
    ),
    "no batch sizes": (lambda: tune(batch_sizes=[]), r"at least one whole number, got \[\]"),
    "batch size of one": (lambda: tune(batch_sizes=[8, 1]), "each of batch_sizes must be .* at least 2; got 1"),
    "a word": (lambda: tune(batch_sizes="all"), "must be 'auto' or a list of whole numbers, got 'all'"),
    "a number": (lambda: tune(batch_sizes=8), "must be 'auto' or a list .* got 8"),
}


def tune(**options: Any) -> mcbn.MCBN:
    bayes, x = fitted(n_samples=5)
    return bayes.tune((x, validation(bayes, x, 1.0)), **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_what_came_and_what_to_do(name: str) -> None:
    function, message = MISTAKES[name]
    with pytest.raises(mcbn.MCBNError, match=f"(?s){message}"):
        function()


# ---------------------------------------------------------------- real data


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
