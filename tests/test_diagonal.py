"""The factorised family: population moments of every batch-norm input, from one pass over the data."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mcbn
from kinds import make
from mcbn import batching
from mcbn.diagonal import Population
from mcbn_study.theory import analytic_moments
from modelled import fitted, modelled, parts


def naive(h: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Appendix 1.3 for inputs (N, C): mean and variance of mu_B, mean and variance of sigma_B."""
    mu, sigma2 = h.mean(0), h.var(0, correction=0)
    fourth = (h - mu).pow(4).mean(0)
    return mu, sigma2 / M, sigma2.sqrt(), (fourth - sigma2**2) / (4 * sigma2 * M)


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
    net = bayes.model
    seen = []
    with torch.no_grad():
        for batch in batching.draw_batches(x, n_samples=1, batch_size=16, seed=0, once=True).batches:
            h = net[0](batch)
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
        drawn = batching.draw_batches(data, n_samples=1, batch_size=5, seed=0, once=True)
        rows = [batch if isinstance(batch, Tensor) else batch[0] for batch in drawn.batches]
        assert sorted(torch.cat(rows).flatten().tolist()) == list(range(47))
        assert {len(row) for row in rows} == {5, 6}
        assert drawn.batch_size == 5
    passes = [batching.draw_batches(x, n_samples=1, batch_size=5, seed=s, once=True).batches for s in (0, 0, 1)]
    orders = [[rows.tolist() for rows in batches] for batches in passes]
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


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "diagonal without draws": (lambda: fitted(posterior="diagonal", n_samples=0), "n_samples must be .* at least 1"),
    "diagonal seed": (lambda: fitted(posterior="diagonal", seed=-1), "seed must be"),
    "diagonal batch": (lambda: fitted(posterior="diagonal", batch_size=0), "batch_size must be"),
    "diagonal, no batch": (
        lambda: mcbn.MCBN(make("1d")[0], "regression").fit(iter([]), posterior="diagonal"),
        "no batch at all",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_what_came_and_what_to_do(name: str) -> None:
    function, message = MISTAKES[name]
    with pytest.raises(mcbn.MCBNError, match=f"(?s){message}"):
        function()
