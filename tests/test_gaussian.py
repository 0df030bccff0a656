"""Gaussian families of q(omega): the moments fitted to the draws, and draws that follow them."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import make
from mcbn import gaussian
from mcbn.gaussian import Gaussian
from modelled import MODELLED, dense, fitted, modelled, vector
from untouched import untouched

# ---------------------------------------------------------------- moments of draws


def naive_fit(drawn: list[float], positive: bool) -> tuple[float, list[float]]:
    """Fit one statistic: its moments, or those of the log-normal with its logarithm's moments if that is narrower."""
    m, v = statistics.mean(drawn), statistics.variance(drawn)
    if positive and min(drawn) > 0:
        logs = [math.log(value) for value in drawn]
        a, w = statistics.mean(logs), statistics.variance(logs)
        if w < math.log(1 + v / m**2):
            m = math.exp(a + w / 2)
            v = m**2 * (math.exp(w) - 1)
            return m, [(value - a) * math.sqrt(v / w) for value in logs]
    return m, [value - m for value in drawn]


def naive_deviations(posterior: mcbn.Posterior) -> tuple[Tensor, Tensor]:
    """Return location (P,) and deviations (T, P) of all statistics."""
    positive = [
        kind for name in posterior.layers for kind in (False, True) for _ in range(posterior.mean[name].shape[1])
    ]
    columns = zip(vector(posterior).T.tolist(), positive, strict=True)
    found = [naive_fit(*column) for column in columns]
    deviations = torch.tensor([own for _, own in found], dtype=torch.float64).T
    return torch.tensor([m for m, _ in found], dtype=torch.float64), deviations


@pytest.mark.parametrize("family", ["gaussian", "layerwise"])
@pytest.mark.parametrize("T", [2, 3, 7, 40])
def test_location_and_variance_of_every_statistic_are_those_of_the_draws(family: str, T: int) -> None:
    bayes, _ = fitted(posterior="sample", n_samples=T)
    model = gaussian.from_draws(bayes.posterior.mean, bayes.posterior.var, family)
    location, deviations = naive_deviations(bayes.posterior)
    torch.testing.assert_close(model.location, location, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.variance, deviations.var(0), rtol=1e-9, atol=1e-16)
    torch.testing.assert_close(model.location, vector(bayes.posterior).mean(0), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("T", [10, 60])  # below and above P = 24
def test_covariance_is_that_of_the_draws_shrunk_towards_its_diagonal(T: int) -> None:
    bayes, _ = fitted(posterior="sample", n_samples=T)
    _, deviations = naive_deviations(bayes.posterior)
    S = torch.cov(deviations.T)
    intensity = gaussian.shrinkage(deviations)
    model = gaussian.from_draws(bayes.posterior.mean, bayes.posterior.var, "gaussian")
    assert len(model.factors[0]) == min(T, 24)
    expected = (1 - intensity) * S + intensity * torch.diag(S.diagonal())
    torch.testing.assert_close(dense(model), expected, rtol=1e-9, atol=1e-15)


def model_of(std: Tensor) -> Gaussian:
    """Model draws (T, C) of standard deviations whose means do not move."""
    return gaussian.from_draws({"bn": torch.zeros_like(std)}, {"bn": std.square()}, "gaussian")


def test_outliers_that_few_batches_meet_leave_the_others_as_they_are() -> None:
    std = torch.empty(1000, 1, dtype=torch.float64).log_normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    std[::33] *= 20
    _, var = model_of(std).statistics(1000, seed=0)
    assert abs(var["bn"].sqrt().median() / std.median() - 1) < 0.15  # 0.35 by the draws' mean and variance


def test_a_unit_that_some_batches_leave_dead_keeps_its_moments() -> None:
    std = torch.linspace(0.9, 1.1, 200, dtype=torch.float64)[:, None].repeat(1, 2)
    std[:10, 0] = 0.0
    std[:10, 1] = 1e-12  # hardly alive is no other case
    model = model_of(std)
    for i in (0, 1):
        torch.testing.assert_close(model.location[2 + i], std[:, i].mean())
        torch.testing.assert_close(model.variance[2 + i], std[:, i].var())


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


def is_std(model: Gaussian) -> Tensor:
    return torch.cat([torch.arange(2 * C) >= C for C in model.channels.values()])


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
        labels = first.predict(x).label.roll(1)  # not all of them right
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


# ---------------------------------------------------------------- mistakes

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "family": (
        lambda: fitted(posterior="full"),
        r"one of \['sample', 'gaussian', 'layerwise', 'diagonal'\], got 'full'",
    ),
    "one draw": (lambda: fitted(posterior="gaussian", n_samples=1), "covariance.*at least 2 draws; got 1"),
    "one draw a layer": (lambda: fitted(posterior="layerwise", n_samples=1), "covariance.*at least 2 draws; got 1"),
    "one draw to convert": (
        lambda: fitted(posterior="sample", n_samples=1)[0].posterior.as_gaussian(),
        "at least 2 draws; got 1: raise n_samples",
    ),
    "convert to diagonal": (
        lambda: fitted(posterior="sample")[0].posterior.as_gaussian("diagonal"),
        r"one of \['gaussian', 'layerwise'\], got 'diagonal'",
    ),
    "convert twice": (lambda: fitted()[0].posterior.as_gaussian(), "a Gaussian already, of family 'gaussian'"),
    "sample a sample": (lambda: fitted(posterior="sample")[0].posterior.sample(3), "fit more, or take as_gaussian"),
    "no draws": (lambda: fitted()[0].posterior.sample(0), "n_samples must be a whole number, at least 1"),
    "negative seed": (lambda: fitted()[0].posterior.sample(3, seed=-1), "seed must be"),
    "more of a sample": (
        lambda: (lambda b, x: b.predict(x, n_samples=201))(*fitted(posterior="sample")),
        "n_samples=201 asked of a posterior of 200 draws; fit more of them, or a Gaussian",
    ),
    "other layers": (
        lambda: setattr(fitted()[0], "posterior", fitted("residual")[0].posterior),
        r"layers \(channels\) \{'first': 4.*this network \{'1': 6, '4': 6\}",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_what_came_and_what_to_do(name: str) -> None:
    function, message = MISTAKES[name]
    with pytest.raises(mcbn.MCBNError, match=f"(?s){message}"):
        function()
