"""A posterior at another batch size M: rescaled without data, and M tuned on held-out data beside tau."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import make
from mcbn import noise
from mcbn.metrics import crps_gaussian
from modelled import MODELLED, dense, fitted, modelled, vector


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
@pytest.mark.filterwarnings(
    "ignore:mcbn. the noise stopped at its lower bound"
)  # errors as small as the spread of the draws
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


def tune(**options: Any) -> mcbn.MCBN:
    bayes, x = fitted(n_samples=5)
    return bayes.tune((x, validation(bayes, x, 1.0)), **options)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "small batch": (lambda: fitted()[0].posterior.at_batch_size(1), "batch_size must be .* at least 2; got 1"),
    "no batch": (lambda: fitted(posterior="sample")[0].posterior.at_batch_size(0), "at least 2; got 0"),
    "half a batch": (lambda: fitted()[0].posterior.at_batch_size(2.5), "at least 2; got 2.5"),  # type: ignore[arg-type]
    "no batch sizes": (lambda: tune(batch_sizes=[]), r"at least one whole number, got \[\]"),
    "batch size of one": (lambda: tune(batch_sizes=[8, 1]), "each of batch_sizes must be .* at least 2; got 1"),
    "a word": (lambda: tune(batch_sizes="all"), "must be 'auto' or a list of at least one whole number, got 'all'"),
    "a number": (lambda: tune(batch_sizes=8), "must be 'auto' or a list .* got 8"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_what_came_and_what_to_do(name: str) -> None:
    function, message = MISTAKES[name]
    with pytest.raises(mcbn.MCBNError, match=f"(?s){message}"):
        function()
