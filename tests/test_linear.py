"""Sampling-free moments: exact where the output is linear in the statistics, close to Monte Carlo elsewhere."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import mcbn
from kinds import KINDS, Twice, make, mlp, scramble, settle
from mcbn import linear
from mcbn.engine import jacobian


def fitted(kind: str, task: str = "regression", **options: int) -> tuple[mcbn.MCBN, Tensor]:
    model, x = make(kind, n=64, dtype=torch.float64, batch_size=16)
    return mcbn.MCBN(model, task).fit(x, **{"n_samples": 200, "batch_size": 16, **options}), x


@pytest.mark.parametrize("kind", ["1d-length", "bare", "lazy"])
def test_equals_monte_carlo_where_the_output_is_linear_in_the_statistics(kind: str) -> None:
    bayes, x = fitted(kind)  # nothing but linear layers behind the only batch norm, so linear in mu_B at equal sigma_B
    equal = {name: var.mean(0).expand_as(var).clone() for name, var in bayes.posterior.var.items()}
    bayes.posterior = replace(bayes.posterior, var=equal)
    sampled, exact = bayes.predict(x, covariance=True), bayes.predict(x, method="linear", covariance=True)
    assert (sampled.epistemic > 0).any()
    torch.testing.assert_close(exact.mean, sampled.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(exact.epistemic, sampled.epistemic, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(exact.covariance, sampled.covariance, rtol=1e-8, atol=1e-10)


def test_moments_are_those_of_their_equations() -> None:
    bayes, x = fitted("1d", n_samples=40)
    net, posterior = bayes.model, bayes.posterior
    omega = torch.cat([part for n in ("1", "4") for part in (posterior.mean[n], posterior.var[n].sqrt())], 1)  # (T, S)

    def forward(row: Tensor, example: Tensor) -> Tensor:
        for number, (mean, std) in zip((0, 3), (row.split(6)[:2], row.split(6)[2:]), strict=True):
            bn = net[number + 1]
            example = (net[number](example) - mean) / (std**2 + bn.eps).sqrt() * bn.weight + bn.bias
            example = net[number + 2](example)
        return net[6](example)

    centre, covariance = omega.mean(0), torch.cov(omega.T, correction=0)
    chosen = bayes.linearizer.expansion(x, 40).chosen
    rows = torch.cat([part for n in ("1", "4") for part in (chosen.mean[n], chosen.var[n].sqrt())], 1)  # (K, S)
    assert len(rows) == linear.REPRESENTATIVES
    assert all((row == omega).all(1).any() for row in rows)
    for again in range(3):  # the first by the network's own code, the others traced
        pred = bayes.predict(x[:5], method="linear", covariance=True)
        for n in range(5):
            J = torch.autograd.functional.jacobian(lambda row, n=n: forward(row, x[n]), centre)  # (D, S)
            mean = torch.stack([forward(row, x[n]) - J @ (row - centre) for row in rows]).mean(0)
            torch.testing.assert_close(pred.mean[n], mean.detach(), msg=f"pass {again}")
            torch.testing.assert_close(pred.covariance[n], J @ covariance @ J.T)


def test_few_draws_keep_their_own_mean() -> None:
    bayes, x = fitted("residual", n_samples=linear.REPRESENTATIVES)
    torch.testing.assert_close(bayes.predict(x, method="linear").mean, bayes.predict(x).mean)


def test_mean_is_nearer_to_monte_carlo_than_one_pass_at_the_average() -> None:
    bayes, x = fitted("1d", n_samples=400)
    expansion = bayes.linearizer.expansion(x, 400)
    sampled, found, alone = bayes.predict(x).mean, bayes.predict(x, method="linear").mean, expansion.differentiate(x)[0]
    assert (found - sampled).square().mean() < 0.5 * (alone - sampled).square().mean()


def test_representative_draws_have_the_second_moments_of_all() -> None:
    d = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = d.T @ d / len(d)

    def distance(rows: list[int]) -> float:
        return (d[rows].T @ d[rows] / len(rows) - target).norm().item()

    chosen = linear.representative(d, 8)
    for k in range(8):  # each is the best there is, given those before it
        others = [t for t in range(60) if t not in chosen[:k]]
        assert chosen[k] == min(others, key=lambda t, k=k: distance([*chosen[:k], t]))
    assert linear.representative(d[:3], 8) != linear.representative(d[:3], 2)
    assert sorted(linear.representative(d[:3], 8)) == [0, 1, 2]
    assert distance(chosen) < 0.5 * distance(list(range(8)))


@pytest.mark.parametrize("kind", KINDS)
def test_close_to_monte_carlo_for_large_batches(kind: str) -> None:
    model, x = make(kind, n=400, dtype=torch.float64, batch_size=200)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=100, batch_size=200)
    sampled, expanded = bayes.predict(x).epistemic.sqrt(), bayes.predict(x, method="linear").epistemic.sqrt()
    assert torch.corrcoef(torch.stack([sampled.flatten(), expanded.flatten()]))[0, 1] > 0.9
    assert 0.8 < (expanded.sum() / sampled.sum()) < 1.2


def test_classification_averages_linearised_draws() -> None:
    bayes, x = fitted("residual", "classification")
    pred = bayes.predict(x, method="linear", return_samples=True)
    assert pred.samples is not None
    torch.testing.assert_close(pred.probs, torch.softmax(pred.samples, 2).mean(0))
    expansion = bayes.linearizer(x, 200)
    torch.testing.assert_close(pred.samples.mean(0), expansion.mean)
    variance = (expansion.projected**2).sum(2)
    torch.testing.assert_close(pred.samples.var(0, correction=0), variance)
    assert (pred.probs - bayes.predict(x).probs).abs().mean() < 0.05


def test_regression_with_samples_agrees_with_the_closed_form() -> None:
    bayes, x = fitted("1d")
    bayes.tau = 2.0
    closed, sampled = bayes.predict(x, method="linear"), bayes.predict(x, method="linear", return_samples=True)
    torch.testing.assert_close(closed.mean, sampled.mean)
    torch.testing.assert_close(closed.epistemic, sampled.epistemic)
    torch.testing.assert_close(closed.log_prob(closed.mean), sampled.log_prob(closed.mean))


def test_blocks_of_inputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x = fitted("residual")
    whole = bayes.predict(x, method="linear")
    monkeypatch.setattr(linear, "BLOCK_VALUES", 1000)
    parts = bayes.predict(x, method="linear")
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.epistemic, whole.epistemic)


def test_first_draws_only_and_layers_only() -> None:
    net = mlp().double()
    scramble(net)
    x = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settle(net, x, 16)
    some = mcbn.MCBN(net, "regression", layers=1).fit(x, n_samples=50, batch_size=16)
    every = mcbn.MCBN(net, "regression").fit(x, n_samples=50, batch_size=16)
    few = mcbn.MCBN(net, "regression").fit(x, n_samples=20, batch_size=16)
    assert not torch.allclose(some.predict(x, method="linear").epistemic, every.predict(x, method="linear").epistemic)
    torch.testing.assert_close(
        every.predict(x, method="linear", n_samples=20).epistemic, few.predict(x, method="linear").epistemic
    )


def test_layer_that_does_not_see_the_inputs_one_by_one_is_told() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x.reshape(-1, 3)).reshape(len(x), -1)

    bayes = mcbn.MCBN(Rows(), "regression").fit(torch.randn(50, 6), n_samples=4, batch_size=20)
    with pytest.raises(mcbn.MCBNError, match=r"sees 10 rows for 5 inputs.*use method='sample'"):
        bayes.predict(torch.randn(5, 6), method="linear")


def test_single_draw_and_too_many_outputs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x = fitted("1d", n_samples=2)
    with pytest.raises(mcbn.MCBNError, match="at least 2 draws; got 1"):
        bayes.predict(x, method="linear", n_samples=1)
    monkeypatch.setattr(jacobian, "MOST_OUTPUTS", 1)
    with pytest.raises(mcbn.MCBNError, match="2 outputs an input need as many backward passes; use method='sample'"):
        bayes.predict(x, method="linear")


def test_layer_called_twice_counts_twice() -> None:
    net = Twice().double()
    scramble(net)
    x = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settle(net, x, 16)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=30, batch_size=16)
    assert bayes.linearizer(x, 30).jacobian.shape == (64, 6, 24)


def test_network_that_cannot_be_written_down_is_run_as_it_is() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.last = nn.BatchNorm1d(5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.bn(x)
            return self.last(h if h.sum() > 1e9 else h.tanh())

    torch.manual_seed(0)
    net, x = Peeks().double(), torch.randn(64, 5, dtype=torch.float64)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=20, batch_size=16)
    preds = [bayes.predict(x, method="linear") for _ in range(3)]
    differentiate = bayes.linearizer.expansion(x, 20).differentiate
    assert set(differentiate.methods.values()) == {differentiate.plain}
    assert all(torch.equal(preds[0].epistemic, pred.epistemic) for pred in preds)


def test_inputs_changed_in_place_by_the_network_stay_as_they_are() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x.mul_(2)).relu_()

    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = x.clone()
    with pytest.warns(UserWarning, match="running statistics"):
        bayes = mcbn.MCBN(Changes().double(), "regression").fit(x.clone(), n_samples=20, batch_size=16)
    preds = [bayes.predict(x, method="linear") for _ in range(3)]
    assert torch.equal(x, before)
    torch.testing.assert_close(preds[2].mean, preds[0].mean)
    torch.testing.assert_close(preds[2].epistemic, preds[0].epistemic)


def test_pickled_predictor_gives_the_same() -> None:
    bayes, x = fitted("1d", n_samples=20)
    before = [bayes.predict(x, method="linear") for _ in range(2)][-1]
    again = pickle.loads(pickle.dumps(bayes.linearizer))(x, 20)
    torch.testing.assert_close(again.mean, before.mean)


class Across(nn.Module):
    """Outputs that are not one row an input, or that depend on other inputs."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bn, self.last, self.after = nn.BatchNorm1d(5), nn.Linear(5, 2), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.last(self.bn(x)))


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda y: y.T, r"gives \(2, 7\) for 7 inputs, not a row each"),
        (lambda y: y - y.mean(0), "depends on inputs beside its own"),
        (lambda y: torch.softmax(y @ y.T, 1) @ y, "depends on inputs beside its own"),
        (lambda y: y.roll(1, 0), "depends on inputs beside its own"),
    ],
)
def test_outputs_without_a_gradient_per_input_are_refused(after: Callable[[Tensor], Tensor], message: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 5, dtype=torch.float64)
    bayes = mcbn.MCBN(settle(Across(after).double(), x), "regression").fit(x, n_samples=20, batch_size=16)
    for _ in range(3):
        with pytest.raises(mcbn.MCBNError, match=message):
            bayes.predict(x[:7], method="linear")


@pytest.mark.parametrize("posterior", ["sample", "gaussian", "layerwise", "diagonal"])
def test_draws_of_one_precision_predict_in_another(posterior: str) -> None:
    model, x = make("1d", n=64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=30, batch_size=16, posterior=posterior)
    single, stored = bayes.predict(x, method="linear"), bayes.state_dict()
    loaded = mcbn.MCBN(copy.deepcopy(model).double(), "regression").load_state_dict(stored)
    for double in (bayes.to(torch.float64), loaded):
        pred = double.predict(x, method="linear")
        assert pred.epistemic.dtype == torch.float64
        torch.testing.assert_close(pred.epistemic.float(), single.epistemic, rtol=1e-3, atol=1e-6)


def test_expansions_of_many_numbers_of_draws_are_not_all_kept() -> None:
    bayes, x = fitted("1d", n_samples=20)
    expected = bayes.predict(x, method="linear", n_samples=2)
    for T in range(2, 20):
        bayes.predict(x, method="linear", n_samples=T)
    assert len(bayes.linearizer._expansions) == linear.EXPANSIONS_KEPT
    torch.testing.assert_close(bayes.predict(x, method="linear", n_samples=2).variance, expected.variance)


def test_threads_share_a_predictor() -> None:
    bayes, x = fitted("1d", n_samples=20)
    sizes = [1 + (7 * i) % 60 for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: bayes.predict(x[:n], method="linear").epistemic, sizes))
    expected = bayes.predict(x, method="linear").epistemic
    for n, epistemic in zip(sizes, found, strict=True):
        torch.testing.assert_close(epistemic, expected[:n])


def test_value_that_the_gradient_needs_and_the_network_changes_is_told() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bn = nn.Linear(5, 5), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.bn(h) + h.add_(1)

    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bayes = mcbn.MCBN(settle(Changes().double(), x), "regression").fit(x, n_samples=5, batch_size=16)
    with pytest.raises(mcbn.MCBNError, match=r"cannot be differentiated .*inplace.*use method='sample'"):
        bayes.predict(x, method="linear")


def test_no_inputs_give_no_outputs() -> None:
    bayes, x = fitted("1d", n_samples=20)
    for _ in range(3):
        pred = bayes.predict(x[:0], method="linear", covariance=True)
        assert (pred.mean.shape, pred.variance.shape, pred.covariance.shape) == ((0, 2), (0, 2), (0, 2, 2))
