"""tau against scipy's bounded minimiser on naive scores."""

import numpy as np
import pytest
import scipy.optimize
import scoringrules
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import make, normal
from mcbn import metrics, noise


def problem(scale: float) -> tuple[mcbn.MCBN, Tensor, Tensor]:
    """A network in target units of any scale, with noisy targets around it: std 0.5 and 2 times the scale."""
    net, x = make("1d", n=200, dtype=torch.float64, batch_size=50)
    with torch.no_grad():
        net[6].weight.mul_(scale * 0.3)
        net[6].bias.mul_(scale * 0.3)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=30, batch_size=50)
    error = torch.randn(200, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return bayes, x, bayes.predict(x).mean + scale * error * torch.tensor([0.5, 2.0])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_tau_minimises_crps_for_targets_of_any_scale(scale: float) -> None:
    bayes, x, y = problem(scale)
    bayes.tune((x, y))
    pred = bayes.predict(x)
    for d in range(2):

        def crps(log_tau: float, d: int = d) -> float:
            std = (pred.epistemic[:, d] + np.exp(-log_tau) * scale**2).sqrt().numpy()
            return float(np.mean(scoringrules.crps_normal(y[:, d].numpy(), pred.mean[:, d].numpy(), std)))

        best = scipy.optimize.minimize_scalar(crps, bounds=(-7, 7), method="bounded", options={"xatol": 1e-10})
        assert abs(np.log(bayes.tau[d].item() * scale**2) - best.x) < 1e-3


def test_tau_recovers_the_noise_that_was_put_in() -> None:
    bayes, x, y = problem(1.0)
    bayes.tune((x, y))
    assert torch.allclose(torch.as_tensor(bayes.noise_std), torch.tensor([0.5, 2.0], dtype=torch.float64), rtol=0.2)


def test_tau_by_pll_maximises_the_mixture() -> None:
    bayes, x, y = problem(1.0)
    bayes.tune((x, y), score="pll")
    f = bayes.sample(x)
    for d in range(2):

        def nll(log_tau: float, d: int = d) -> float:
            return -mcbn.metrics.pll(f[:, :, d], y[:, d], float(np.exp(log_tau))).mean().item()

        best = scipy.optimize.minimize_scalar(nll, bounds=(-7, 7), method="bounded", options={"xatol": 1e-10})
        assert abs(np.log(bayes.tau[d].item()) - best.x) < 1e-4


def test_one_output_has_one_number() -> None:
    bayes, x, y = problem(1.0)
    single = mcbn.MCBN(bayes.model, "regression", output=lambda out: out[:, :1]).fit(x, n_samples=30, batch_size=50)
    assert isinstance(single.tune((x, y[:, 0])).tau, float)
    assert isinstance(single.noise_std, float)
    assert abs(single.tau - bayes.tune((x, y)).tau[0]) < 1e-6 * single.tau


def test_loader_and_dataset_tune_like_the_whole() -> None:
    bayes, x, y = problem(1.0)
    whole = bayes.tune((x, y)).tau
    for data in (DataLoader(TensorDataset(x, y), batch_size=33), TensorDataset(x, y)):
        torch.testing.assert_close(bayes.tune(data).tau, whole)
        torch.testing.assert_close(bayes.tune(data, score="pll").tau, bayes.tune((x, y), score="pll").tau)


def test_dense_regression_has_one_tau_a_channel() -> None:
    net, x = make("fused-activation", n=60, dtype=torch.float64, batch_size=20)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=10, batch_size=20)
    error = torch.randn(60, 2, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = bayes.predict(x).mean + error * torch.tensor([1.0, 9.0]).reshape(2, 1, 1)
    bayes.tune((x, y))
    ratio = bayes.noise_std[1] / bayes.noise_std[0]
    assert 5 < ratio < 16
    pred = bayes.predict(x)
    assert torch.equal(pred.aleatoric[3, :, 1, 0], 1 / bayes.tau)


def test_outlier_does_not_hide_the_noise_of_the_rest() -> None:
    residual = torch.cat(
        [torch.randn(999, 1, generator=torch.Generator().manual_seed(0)) * 1e-3, torch.tensor([[1e4]])]
    )
    tau = noise.tau_by_crps(torch.zeros(1000, 1), torch.zeros(1000, 1), residual)
    assert 0.5e-3 < tau.rsqrt().item() < 2e-3


def test_golden_sections_find_minima_of_many_functions_at_once() -> None:
    centre = torch.tensor([-3.0, 0.2, 4.5], dtype=torch.float64)
    low, high = torch.full_like(centre, -5), torch.full_like(centre, 5)
    minimum = noise.minimize_bounded(lambda z: (z - centre).abs() ** 1.5, low, high)
    torch.testing.assert_close(minimum, centre, rtol=0, atol=1e-6)
    edge = noise.minimize_bounded(lambda z: z, low, high)
    torch.testing.assert_close(edge, low, rtol=0, atol=1e-10)


def classifier(stretch: float) -> tuple[mcbn.MCBN, Tensor, Tensor]:
    """A classifier whose logits are `stretch` times what its labels were drawn from."""
    net, x = make("1d", n=400, dtype=torch.float64, batch_size=100)
    truth = mcbn.MCBN(net, "classification").fit(x, n_samples=10, batch_size=100).predict(x).probs
    y = torch.multinomial(truth, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    with torch.no_grad():
        net[6].weight.mul_(stretch)
        net[6].bias.mul_(stretch)
    return mcbn.MCBN(net, "classification").fit(x, n_samples=10, batch_size=100), x, y


def test_classification_tau_is_the_inverse_temperature() -> None:
    bayes, x, y = classifier(5.0)
    assert bayes.tau == 1.0
    before = bayes.predict(x).log_prob(y).mean()
    assert 0.12 < bayes.tune((x, y)).tau < 0.33
    assert bayes.predict(x).log_prob(y).mean() > before
    p = torch.softmax(bayes.tau * bayes.sample(x), 2).mean(0)
    torch.testing.assert_close(bayes.predict(x).probs, p)

    def nll(log_tau: float) -> float:
        mixed = torch.softmax(np.exp(log_tau) * bayes.sample(x), 2).mean(0)
        return -mixed[torch.arange(400), y].log().mean().item()

    best = scipy.optimize.minimize_scalar(nll, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    assert abs(np.log(bayes.tau) - best.x) < 1e-4


def test_ignored_labels_do_not_count() -> None:
    bayes, x, y = classifier(3.0)
    expected = bayes.tune((x[:300], y[:300])).tau
    y = y.clone()
    y[300:] = 255
    assert abs(bayes.tune((x, y), ignore_index=255).tau - expected) < 1e-9
    with pytest.raises(mcbn.MCBNError, match="255"):
        bayes.tune((x, y))


def test_tuning_by_samples_keeps_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x, y = classifier(3.0)
    full = bayes.tune((x, y)).tau
    monkeypatch.setattr(noise, "BUDGET", 10 * 2 * 200)
    half = bayes.tune((x, y)).tau
    assert half != full
    assert 0.5 < half / full < 2


def test_noise_is_not_tuned_on_a_stream_without_targets() -> None:
    bayes, x, _ = problem(1.0)
    with pytest.raises(mcbn.MCBNError, match="no targets"):
        bayes.tune(x)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 2), (10, 2, 4)])
def test_constant_tau_is_the_best_precision_of_each_output_on_a_grid(shape: tuple[int, ...]) -> None:
    mean = normal(*shape)
    y = mean + 0.3 * normal(*shape, seed=1)
    grid = torch.logspace(0, 2, 4001, dtype=torch.float64)  # (G,)
    losses = torch.stack([metrics.crps_gaussian(mean, torch.full_like(mean, 1 / tau), y) for tau in grid.tolist()])
    losses = losses.flatten(1) if len(shape) == 1 else losses.movedim(2, -1).reshape(4001, -1, shape[1])
    best = grid[losses.mean(1).argmin(0)]  # (D,)
    torch.testing.assert_close(noise.constant_tau(mean, y), best.reshape(-1), rtol=2e-3, atol=0)
