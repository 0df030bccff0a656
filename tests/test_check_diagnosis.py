"""The check of fitted draws: each figure against a naive one, each warning provoked once."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import KINDS, make, normal, settle
from mcbn.batching import draw_batches
from mcbn.check import diagnosis
from mcbn.check.diagnosis import Diagnosis, check, ks_distance, lilliefors
from mcbn.diagonal import Population
from mcbn_study.theory import activation_moments, analytic_moments, kolmogorov_smirnov
from untouched import untouched


def fitted(
    kind: str = "1d", *, n: int = 400, T: int = 100, M: int = 16, **options: Any
) -> tuple[mcbn.MCBN[Any], Tensor, nn.Module]:
    model, x = make(kind, n=n, dtype=torch.float64, batch_size=M)
    return mcbn.MCBN(model, "regression", **options).fit(x, n_samples=T, batch_size=M), x, model


def said(found: Diagnosis, word: str) -> bool:
    return any(text.startswith(word) for text in found.warnings)


def test_distance_agrees_with_scipy() -> None:
    values = 0.9 * normal(200, 40) + torch.linspace(-0.3, 0.3, 40)  # fits well and badly
    expected = [stats.kstest(column.numpy(), "norm").statistic for column in values.unbind(1)]
    np.testing.assert_allclose(ks_distance(values, 0.0, 1.0), expected, rtol=1e-10)


def test_lilliefors_keeps_its_level_where_plain_ks_does_not() -> None:
    values = 3 + 2 * normal(100, 4000, seed=5)
    rejected = (lilliefors(values) <= 0.05).double().mean().item()
    assert abs(rejected - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000)
    plain = kolmogorov_smirnov(values, values.mean(0), values.std(0))
    assert (plain <= 0.05).double().mean() < 0.005  # estimating from the same draws: far too mild


def test_lilliefors_rejects_what_is_not_gaussian_and_leaves_constants_out() -> None:
    values = torch.cat([normal(300, 1).exp(), torch.full((300, 1), 0.1, dtype=torch.float64)], 1)
    p = lilliefors(values)
    assert p[0] < 0.001
    assert p[1].isnan()


def test_lilliefors_agrees_with_the_published_critical_value() -> None:
    """Lilliefors (1967), 5 % level: 0.886 / sqrt(T) for large T."""
    values = normal(400, 500, seed=2)
    at = ks_distance(values, values.mean(0), values.std(0)) > 0.886 / 20
    assert ((lilliefors(values) < 0.05) == at).double().mean() > 0.97


def test_spread_of_the_first_layer_is_that_of_the_paper() -> None:
    bayes, x, model = fitted(T=2000)
    row = check(bayes, x).layers[0]
    h = x @ model[0].weight.T
    fourth = (h - h.mean(0)).pow(4).mean(0)
    expected = analytic_moments(h.mean(0), h.var(0, correction=0), fourth, 16)
    factor = ((400 - 16) / 399) ** 0.5
    drawn_mean, drawn_std = bayes.posterior.mean["1"], bayes.posterior.var["1"].sqrt()
    naive = (drawn_mean.std(0) / (factor * expected.mean_std)).median().item()
    assert row.mean_spread == pytest.approx(naive, rel=1e-9)
    assert row.mean_spread == pytest.approx(1, abs=0.05)
    naive = (drawn_std.std(0) / (factor * expected.std_std)).median().item()
    assert row.std_spread == pytest.approx(naive, rel=1e-9)


def test_streamed_moments_are_those_of_the_activations() -> None:
    h, centre = normal(50, 3, 4).exp(), torch.tensor([0.1, 2.0, -1.0], dtype=torch.float64)
    population = Population(centre)
    for batch in h.split([10, 25, 15]):
        population.add(batch.unsqueeze(1))
    for got, wanted in zip(population.moments(7), activation_moments(h, 7), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=0)


def test_means_behind_a_normalised_layer_spread_by_what_normalisation_leaves() -> None:
    """ReLU of a Gaussian less its part along 1, h and h^2, which the first layer has fixed: 0.18 of the spread."""
    x = normal(2000, 8)
    net = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    with torch.no_grad():
        net[2].weight.copy_(normal(6, 8, seed=1))
        for _ in range(200):
            net.train()(x)
    first, second = check(mcbn.MCBN(net.eval(), "regression").fit(x, n_samples=1000, batch_size=64), x).layers
    relu = 0.5 - 1 / (2 * math.pi)  # variance of max(h, 0)
    left = math.sqrt((relu - 1 / 4 - 1 / (4 * math.pi)) / relu)
    assert first.mean_spread == pytest.approx(1, abs=0.05)
    assert second.mean_spread == pytest.approx(left, rel=0.1)


def test_shares_of_gaussian_units_are_those_of_the_draws() -> None:
    bayes, x, _ = fitted()
    for row in check(bayes, x).layers:
        mean, std = bayes.posterior.mean[row.layer], bayes.posterior.var[row.layer].sqrt()
        assert row.units == mean.shape[1]
        assert row.mean_gaussian == (lilliefors(mean) > 0.05).double().mean()
        assert row.std_gaussian == (lilliefors(std) > 0.05).double().mean()


def test_shares_are_covariances_with_the_linear_prediction() -> None:
    """Layer by layer, by finite differences of the network in the statistics of its normalisation."""
    bayes, x, model = fitted(T=60)
    found = check(bayes, x)
    rows = next(iter(draw_batches(x, n_samples=1, batch_size=16, seed=0, once=True).batches))  # the first of all rows
    drawn = bayes.posterior
    statistics = {n: torch.stack([drawn.mean[n], drawn.var[n].sqrt()]) for n in drawn.layers}  # (2, T, C) each

    def run(of: dict[str, Tensor]) -> Tensor:
        h = rows
        for number in (0, 3):
            (mean, std), bn = of[str(number + 1)], model[number + 1]
            h = ((model[number](h) - mean) / (std**2 + bn.eps).sqrt() * bn.weight + bn.bias).relu()
        return h @ model[6].weight.T + model[6].bias

    centre = {name: value.mean(1) for name, value in statistics.items()}
    moved: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in ("1", "4"):
            steps = []
            for t in range(60):
                step = 1e-7 * (statistics[name][:, t] - centre[name])
                high, low = (run(centre | {name: centre[name] + sign * step}) for sign in (1, -1))
                steps.append((high - low) / 2e-7)
            moved[name] = torch.stack(steps)
    whole = moved["1"] + moved["4"]  # (T, N, D)
    for row in found.layers:
        share = (moved[row.layer] * whole).sum() / whole.square().sum()
        assert row.share == pytest.approx(share.item(), rel=1e-4)
        assert row.alone == pytest.approx((moved[row.layer].square().sum() / whole.square().sum()).item(), rel=1e-4)
    assert sum(row.share for row in found.layers) == pytest.approx(1, abs=1e-9)


def test_a_layer_alone_has_the_variance_of_its_own_linear_prediction() -> None:
    """One stochastic layer explains everything; of two, the linear variance with the other at its average."""
    bayes, x, _ = fitted(T=60, layers=["4"])
    (row,) = check(bayes, x).layers
    assert row.share == pytest.approx(1, abs=1e-12)
    assert row.alone == pytest.approx(1, abs=1e-12)


def test_alone_and_share_differ_by_half_of_the_cross_terms() -> None:
    bayes, x, _ = fitted(T=60)
    a, b = check(bayes, x).layers
    assert a.share - a.alone == pytest.approx(b.share - b.alone, abs=1e-9)  # both hold Cov(a, b) / V
    assert a.alone + b.alone + 2 * (a.share - a.alone) == pytest.approx(1, abs=1e-9)


def test_predictions_that_do_not_vary_have_no_shares() -> None:
    model, x = make("1d", n=400, dtype=torch.float64, batch_size=16)
    with torch.no_grad():
        model[6].weight.zero_()
    found = check(mcbn.MCBN(model, "regression").fit(x, n_samples=60, batch_size=16), x)
    assert all(row.share is None for row in found.layers)
    assert said(found, "the share of each layer in the variance is not known: the predictions do not vary")


def test_shares_that_cost_much_come_of_fewer_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x, _ = fitted("2d", n=64, T=60, M=8)
    monkeypatch.setattr(diagnosis, "SHARE_VALUES", 100)
    few = [row.share for row in check(bayes, x).layers]
    monkeypatch.undo()
    monkeypatch.setattr(diagnosis, "SHARE_EXAMPLES", 1)
    assert few == [row.share for row in check(bayes, x).layers]
    assert sum(few) == pytest.approx(1, abs=1e-12)


def test_random_sums_stand_for_the_outputs_of_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)]
        network, x = nn.Sequential(*body, nn.ReLU(), nn.Conv2d(3, 2, 1)), torch.randn(30, 2, 7, 7, dtype=torch.float64)
    settle(network.double(), x, batch_size=5)
    bayes = mcbn.MCBN(network, "classification").fit(x, n_samples=40, batch_size=5)
    monkeypatch.setattr(diagnosis, "SHARE_EXAMPLES", 2)
    exact = [row.share for row in check(bayes, x).layers]
    monkeypatch.setattr(diagnosis, "MOST_OUTPUTS", 10)
    few = [row.share for row in check(bayes, x).layers]
    assert sum(few) == pytest.approx(1, abs=1e-9)
    monkeypatch.setattr(diagnosis, "SUMS", 400)
    many = [row.share for row in check(bayes, x).layers]
    assert many == pytest.approx(exact, abs=0.06)
    assert many != pytest.approx(exact, abs=1e-9)


def test_number_of_draws_counts_shared_examples() -> None:
    bayes, x, _ = fitted(T=100, M=16)
    found = check(bayes, x)
    assert (found.n_samples, found.batch_size, found.n_examples) == (100, 16, 400)
    assert found.n_effective == pytest.approx(100 / (1 + 99 * 16 / 400))
    assert found.variance_factor == pytest.approx((400 - 16) / 399)


def test_effective_number_is_the_variance_of_the_average_over_training_sets() -> None:
    N, M, T = 40, 8, 10
    generator = np.random.default_rng(0)
    averages = []
    for _ in range(4000):
        x = generator.normal(size=N)
        averages.append(np.mean([x[generator.choice(N, M, replace=False)].mean() for _ in range(T)]))
    effective = (1 / M) / np.var(averages)
    assert effective == pytest.approx(T / (1 + (T - 1) * M / N), rel=4 * math.sqrt(2 / 4000))


def test_healthy_draws_have_no_warning() -> None:
    found = check(*fitted(T=200, M=32)[:2])
    assert found.warnings == ()
    assert "nothing speaks against these draws" in str(found)


def test_table_names_every_layer_and_warning() -> None:
    found = check(*fitted(T=20)[:2])
    text = str(found)
    assert "20 draws of batches of 16 from 400 examples, worth 11.4 independent batches" in text
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["1", "4"]
    assert all(f"! {warning}" in text for warning in found.warnings)


def test_few_draws_are_named() -> None:
    assert said(check(*fitted(T=20)[:2]), "few draws: of n_samples=20 a predictive variance is known to 32%")
    assert not said(check(*fitted(T=50)[:2]), "few draws")


@pytest.mark.parametrize("T", [1, 2, 3])
def test_next_to_no_draws_can_be_checked(T: int) -> None:
    found = check(*fitted(T=T)[:2])
    assert said(found, "few draws")
    assert math.isnan(found.layers[0].mean_gaussian)
    assert (found.layers[0].share is None) == (T == 1)
    assert str(found)


def test_batches_close_to_the_data_are_named() -> None:
    found = check(*fitted(n=40, M=32)[:2])
    assert said(found, "batch_size=32 is close to the 40 training examples: draws share them, which leaves 21%")


def test_a_batch_of_all_data_is_named_and_does_not_vary() -> None:
    model, x = make("1d", n=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=60, batch_size=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = check(bayes, x)
    assert said(found, "constant units: 12 of 12 never vary")
    assert said(found, "batch_size=40 is close to the 40 training examples")
    assert found.variance_factor == 0


def test_less_data_than_a_batch_can_be_checked() -> None:
    bayes, x, _ = fitted(T=60)
    found = check(bayes, x[:10])
    assert (found.n_examples, found.variance_factor, found.n_effective) == (10, 0, 1)
    assert said(found, "batch_size=16 is close to the 10 training examples")


def test_drift_and_other_data_are_named() -> None:
    model, x = make("1d", n=400, batch_size=16)
    with pytest.warns(UserWarning, match="disagree"):
        bayes = mcbn.MCBN(model, "regression").fit(x + 1, n_samples=60, batch_size=16)
    found = check(bayes, x + 1)
    assert said(found, "drift: drawn batch statistics disagree with the running statistics in")
    assert not said(found, "other data")
    assert said(check(bayes, x), "other data: in layer")


def test_constant_units_are_named() -> None:
    """BN behind ReLU: one unit is never active."""
    x = normal(400, 5)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    with torch.no_grad():
        net[0].bias[0] = -100.0
        for _ in range(200):
            net.train()(x)
    bayes = mcbn.MCBN(net.eval(), "regression").fit(x, n_samples=60, batch_size=16)
    found = check(bayes, x)
    assert said(found, "constant units: 1 of 6 never vary over the draws ('2' 1)")
    assert found.layers[0].constant == 1
    passing = lilliefors(bayes.posterior.mean["2"][:, 1:]) > 0.05  # the constant unit is not counted
    assert found.layers[0].mean_gaussian == passing.double().mean()


def test_units_that_are_not_gaussian_are_named() -> None:
    x = normal(4000, 30).exp().square()  # heavy tails: 4 examples are far from their limit
    net = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 1)).double()
    with torch.no_grad():
        for _ in range(200):
            net.train()(x)
    bayes = mcbn.MCBN(net.eval(), "regression").fit(x, n_samples=300, batch_size=4)
    found = check(bayes, x)
    assert said(found, "not Gaussian: batch means fail the test in 1 layer(s), most in '0', where 0%")
    assert said(found, "not Gaussian: batch standard deviations")


def test_batches_that_are_not_random_are_named() -> None:
    """A stream in sorted order: whole batches of like examples."""
    model, x = make("1d", n=400, dtype=torch.float64, batch_size=16)
    x = x[x[:, 0].argsort()]
    with pytest.warns(UserWarning, match="starts over"), pytest.warns(UserWarning, match="differences add up"):
        bayes = mcbn.MCBN(model, "regression").fit(list_of_batches(x), n_samples=60)
    assert said(check(bayes, x), "spread: statistics of the first layer, '1', vary")


def list_of_batches(x: Tensor) -> Any:
    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(x)

    return DataLoader(Stream(), batch_size=16)


def test_a_stream_has_no_number_of_examples() -> None:
    bayes, x, _ = fitted(T=60)
    found = check(bayes, list_of_batches(x))  # it starts over, which is no matter here
    assert found.n_examples is None
    assert found.n_effective == 60
    assert "from a stream" in str(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network_can_be_checked_and_is_not_changed(kind: str) -> None:
    bayes, x, model = fitted(kind, n=64, T=20, M=8)
    with untouched(model):
        found = check(bayes, x)
    assert tuple(row.layer for row in found.layers) == KINDS[kind].calls
    assert sum(row.share for row in found.layers) == pytest.approx(1, abs=1e-9)
    assert all(0 < row.std_spread < 3 for row in found.layers)


def test_same_seed_same_diagnosis() -> None:
    bayes, x, _ = fitted()
    assert str(check(bayes, x)) == str(check(bayes, x))


def test_large_data_is_sampled_by_seed() -> None:
    bayes, x, _ = fitted(n=2500)
    assert str(check(bayes, x)) == str(check(bayes, x))
    exact = check(bayes, x[:2048]).layers[0].mean_spread
    spreads = [check(bayes, x, seed=seed).layers[0].mean_spread for seed in (0, 1)]
    assert spreads[0] != spreads[1]
    assert spreads[0] == pytest.approx(exact, rel=0.1)


def test_loader_and_tensor_agree() -> None:
    bayes, x, _ = fitted()
    loader = DataLoader(TensorDataset(x, x[:, 0]), batch_size=7)
    a, b = check(bayes, x), check(bayes, loader)  # of a batch size of its own, which does not count
    assert a.layers[1].mean_spread == pytest.approx(b.layers[1].mean_spread, rel=1e-9)


def test_bad_calls_are_refused() -> None:
    bayes, x, model = fitted(T=20)
    with untouched(model), pytest.raises(mcbn.MCBNError, match=r"could not run on what it was given.*, 3\)"):
        check(bayes, x[:, :3])
    with pytest.raises(mcbn.MCBNError, match="not fitted yet"):
        check(mcbn.MCBN(model, "regression"), x)
    with pytest.raises(mcbn.MCBNError, match="data must be a DataLoader"):
        check(bayes, 3)
    with pytest.raises(mcbn.MCBNError, match=r"values must be \(T, C\)"):
        lilliefors(torch.zeros(3, 2))
    with pytest.raises(mcbn.MCBNError, match=r"values must be \(T, C\)"):
        ks_distance(torch.zeros(3), 0.0, 1.0)


@pytest.mark.slow
def test_shuffled_data_raise_no_alarm_of_spread_in_200_seeds() -> None:
    """T = 16, heavy tails in every second, M tuned in every fourth; at a ratio of 1.25 alone, whatever T, many did."""
    alarms = []
    for seed in range(200):
        heavy, tuned = seed % 2 == 1, seed % 4 == 2
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(442, 10, generator=generator) @ torch.randn(10, 10, generator=generator)
        x = x.pow(3) if heavy else x
        torch.manual_seed(seed)
        network = settle(nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)), x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bayes = mcbn.MCBN(network, "regression").fit(x, n_samples=16, batch_size=16, seed=seed)
            if tuned:
                bayes.tune((x, x[:, :1] + torch.randn(442, 1, generator=generator)), batch_sizes=[64, 256])
            alarms += [text for text in bayes.check(x).warnings if text.startswith("spread")]
    assert len(alarms) <= 1, alarms


def test_sorted_data_still_raise_the_alarm_of_spread() -> None:
    torch.manual_seed(0)
    x = torch.randn(442, 10) @ torch.randn(10, 10)
    network = settle(nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)), x)
    ordered = x[x[:, 0].argsort()].split(16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bayes = mcbn.MCBN(network, "regression").fit(iter(ordered), n_samples=16)
    assert any(text.startswith("spread") for text in bayes.check(x).warnings)
