"""Sampling-free moments: exact where the output is linear in the statistics, close to Monte Carlo elsewhere."""

import pytest
import torch
from torch import Tensor, nn

import mcbn
from kinds import KINDS, Twice, make, mlp, scramble, settle
from mcbn import linear


def fitted(kind: str, task: str = "regression", **options: int) -> tuple[mcbn.MCBN, Tensor]:
    model, x = make(kind, n=64, dtype=torch.float64, batch_size=16)
    return mcbn.MCBN(model, task).fit(x, **{"n_samples": 200, "batch_size": 16, **options}), x


@pytest.mark.parametrize("kind", ["1d-length", "bare", "lazy"])
def test_equals_monte_carlo_where_the_output_is_linear_in_the_statistics(kind: str) -> None:
    bayes, x = fitted(kind)  # nothing but linear layers behind the only batch norm
    sampled, exact = bayes.predict(x, covariance=True), bayes.predict(x, method="linear", covariance=True)
    torch.testing.assert_close(exact.mean, sampled.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(exact.epistemic, sampled.epistemic, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(exact.covariance, sampled.covariance, rtol=1e-8, atol=1e-10)


def test_variance_is_j_c_j_transposed() -> None:
    bayes, x = fitted("1d", n_samples=40)
    net, posterior = bayes.model, bayes.posterior
    scale = [(posterior.var[n] + 1e-5).rsqrt() * bn.weight for n, bn in (("1", net[1]), ("4", net[4]))]
    shift = [bn.bias - posterior.mean[n] * s for (n, bn), s in zip((("1", net[1]), ("4", net[4])), scale, strict=True)]
    omega = torch.cat([scale[0], shift[0], scale[1], shift[1]], 1).detach()  # (T, S)

    def forward(row: Tensor, example: Tensor) -> Tensor:
        a, b, c, d = row.split(6)
        h = net[2](net[0](example) * a + b)
        return net[6](net[5](net[3](h) * c + d))

    centre = omega.mean(0)
    covariance = torch.cov(omega.T, correction=0)
    pred = bayes.predict(x[:5], method="linear", covariance=True)
    for n in range(5):
        jacobian = torch.autograd.functional.jacobian(lambda row, n=n: forward(row, x[n]), centre)  # (D, S)
        torch.testing.assert_close(pred.mean[n], forward(centre, x[n]).detach())
        torch.testing.assert_close(pred.covariance[n], jacobian @ covariance @ jacobian.T)


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
    expansion = bayes._linearise(x, 200)
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
    monkeypatch.setattr(linear, "MOST_OUTPUTS", 1)
    with pytest.raises(mcbn.MCBNError, match="has 2 for each input; use method='sample'"):
        bayes.predict(x, method="linear")


def test_layer_called_twice_counts_twice() -> None:
    net = Twice().double()
    scramble(net)
    x = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settle(net, x, 16)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=30, batch_size=16)
    assert bayes._linearise(x, 30).jacobian.shape == (64, 6, 24)
