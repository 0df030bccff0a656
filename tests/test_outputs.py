"""Outputs of every kind: logits, probabilities, one unit, several labels, heads with a variance, correlated noise."""

import html
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import mcbn
from kinds import make, settle
from mcbn import metrics
from mcbn.baselines import DeepEnsemble, MCDropout
from mcbn.page import write_page
from mcbn.prediction import MultilabelPrediction
from mcbn.tables import scoring

Tried = tuple[mcbn.MCBN[Any], Tensor, Tensor]
FIT: dict[str, Any] = {"n_samples": 12, "batch_size": 16}


def mlp(units: int, *ending: nn.Module, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A settled network (float64) whose raw outputs are spread, and its inputs."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, units)).double()
    x = torch.randn(48, 5, dtype=torch.float64)
    with torch.no_grad():
        body[3].weight.mul_(6)
    settle(body, x)
    return nn.Sequential(*body, *ending).eval(), x


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ENDINGS: dict[str, tuple[int, nn.Module, str]] = {
    "softmax": (3, nn.Softmax(1), "probs"),
    "softmax function": (3, Function(lambda x: torch.softmax(x, 1)), "probs"),
    "softmax by hand": (3, Function(lambda x: x.exp() / x.exp().sum(1, keepdim=True)), "probs"),
    "log softmax": (3, nn.LogSoftmax(1), "log_probs"),
    "logits": (3, nn.Identity(), "logits"),
    "sigmoid": (1, nn.Sigmoid(), "probs"),
    "sigmoid of (N,)": (1, Function(lambda x: x.sigmoid().squeeze(1)), "probs"),
    "sigmoid, clamped and copied": (
        1,
        Function(lambda x: torch.sigmoid(x).clamp(1e-6, 1 - 1e-6).float().double()),
        "probs",
    ),
    "log sigmoid": (1, nn.LogSigmoid(), "log_probs"),
    "logit": (1, nn.Identity(), "logits"),
}


def two_ways(name: str, task: str = "classification") -> tuple[mcbn.MCBN[Any], mcbn.MCBN[Any], Tensor]:
    units, ending, _ = ENDINGS[name]
    (squashed, x), (direct, _) = mlp(units, ending), mlp(units)
    return mcbn.MCBN(squashed, task).fit(x, **FIT), mcbn.MCBN(direct, task).fit(x, **FIT), x


@pytest.mark.parametrize("method", ["sample", "linear"])
@pytest.mark.parametrize("name", ENDINGS)
def test_a_squashed_ending_gives_the_prediction_of_the_logits(name: str, method: str) -> None:
    bayes, direct, x = two_ways(name)
    assert bayes.reads == ENDINGS[name][2]
    for model in (bayes, direct):
        model.tau = 1.7
    got, expected = (model.predict(x, method=method) for model in (bayes, direct))
    for field in ("probs", "variance", "expected_entropy", "mutual_information"):
        torch.testing.assert_close(getattr(got, field), getattr(expected, field), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ENDINGS)
def test_plain_and_samples_are_what_the_network_itself_gives(name: str) -> None:
    bayes, direct, x = two_ways(name)
    torch.testing.assert_close(bayes.plain(x), bayes.model(x), rtol=0, atol=0)
    torch.testing.assert_close(bayes.plain_mean(x), direct.plain_mean(x), rtol=1e-5, atol=1e-6)
    own = torch.stack([ENDINGS[name][1](sample) for sample in direct.sample(x)])
    for samples in (bayes.sample(x), bayes.predict(x, return_samples=True).samples):
        torch.testing.assert_close(samples, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "log sigmoid"])
def test_a_squashed_ending_is_tuned_like_its_logits(name: str) -> None:
    bayes, direct, x = two_ways(name)
    y = direct.plain_mean(x).multinomial(1).flatten()
    assert bayes.tune((x, y)).tau == pytest.approx(direct.tune((x, y)).tau, rel=1e-4)


def test_saturated_probabilities_stay_finite() -> None:
    network, x = mlp(1, nn.Sigmoid())
    with torch.no_grad():
        network[3].weight.mul_(1e4)
    pred = mcbn.MCBN(network.float(), "classification").fit(x.float(), **FIT).predict(x.float())
    assert torch.isfinite(pred.probs).all()
    assert pred.probs.max() > 0.999


def test_what_was_asked_for_is_obeyed() -> None:
    (network, x), y = mlp(3, nn.Softmax(1)), torch.zeros(48, dtype=torch.int64)
    twice = mcbn.MCBN(network, "classification", outputs="logits").fit(x, **FIT)
    assert twice.predict(x).probs.max() < math.e / (math.e + 2) + 1e-9
    assert mcbn.MCBN(network, "classification", outputs="probs").fit(x, **FIT).predict(x).log_prob(y).shape == (48,)


class Endless(nn.Module):
    """A sigmoid written by hand: only its values speak."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))


@pytest.mark.parametrize(
    ("units", "ending", "task", "message"),
    [
        (1, Endless(), "classification", r'^pass outputs="probs" if the network gives probabilities'),
        (4, Endless(), "multilabel", r'^pass outputs="probs" if the network gives probabilities'),
        (3, nn.Sigmoid(), "classification", r'^take task="multilabel": the network ends in a sigmoid of 3 units'),
        (3, nn.Softmax(0), "classification", "^put classes on axis 1"),
        (3, nn.Softmax(1), "multilabel", '^take task="classification": it ends in a softmax'),
        (1, nn.Softmax(1), "classification", "^end the network in a sigmoid: it ends in a softmax"),
    ],
)
def test_outputs_that_fit_no_reading_are_told_at_fit(units: int, ending: nn.Module, task: str, message: str) -> None:
    network, x = mlp(units, ending)
    with pytest.raises(mcbn.MCBNError, match=message):
        mcbn.MCBN(network, task).fit(x, **FIT)


@pytest.mark.parametrize("given", ["softmax", None])
def test_wrong_settings_are_told(given: Any) -> None:
    network, _ = mlp(3)
    with pytest.raises(mcbn.MCBNError, match=r"outputs must be one of .*got"):
        mcbn.MCBN(network, "classification", outputs=given)
    with pytest.raises(mcbn.MCBNError, match=r"noise must be one of .*got"):
        mcbn.MCBN(network, "classification", noise="head")
    with pytest.raises(mcbn.MCBNError, match="outputs must be one of"):
        mcbn.MCBN(network, "regression", outputs="probs")


@pytest.mark.parametrize("kind", [MCDropout, DeepEnsemble])
def test_baselines_never_squash_twice(kind: Any) -> None:
    def model(*ending: nn.Module) -> Any:
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.3), nn.Linear(12, 1), *ending).double().eval()
        return kind(network if kind is MCDropout else [network], "classification")

    x = torch.randn(48, 5, dtype=torch.float64)
    squashed, direct = model(nn.Sigmoid()), model()
    torch.testing.assert_close(squashed.predict(x).probs, direct.predict(x).probs)
    torch.testing.assert_close(squashed.sample(x), direct.sample(x).sigmoid())
    torch.testing.assert_close(squashed.predict(x, mean="plain").probs[:, 1:], squashed.plain(x))


# Several labels an input.


@pytest.fixture(params=["logits", "probs"])
def labelled(request: pytest.FixtureRequest) -> Tried:
    network, x = mlp(4, *([nn.Sigmoid()] if request.param == "probs" else []))
    bayes = mcbn.MCBN(network, "multilabel").fit(x, **FIT)
    return bayes, x, bayes.plain_mean(x).bernoulli().long()


def test_labels_are_each_a_binary_class(labelled: Tried) -> None:
    bayes, x, y = labelled
    pred = bayes.predict(x)
    assert isinstance(pred, MultilabelPrediction)
    raw = bayes.sample(x)
    p = raw if bayes.reads == "probs" else raw.sigmoid()  # (T, N, K)
    binary_entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    mean = p.mean(0)
    torch.testing.assert_close(pred.probs, mean)
    torch.testing.assert_close(pred.variance, p.var(0, correction=0), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(pred.entropy, -(mean * mean.log() + (1 - mean) * (1 - mean).log()))
    torch.testing.assert_close(pred.mutual_information, pred.entropy - binary_entropy.mean(0), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(pred.log_prob(y), torch.where(y == 1, mean, 1 - mean).log())
    assert torch.equal(pred.label, (mean > 0.5).long())
    assert pred.to("cpu").probs.shape == (48, 4)


def test_labels_are_scored_and_tuned(labelled: Tried) -> None:
    bayes, x, y = labelled
    pred = bayes.tune((x, y)).predict(x)
    assert metrics.nll(pred.probs, y) == pytest.approx(float(-pred.log_prob(y).mean()))
    assert metrics.accuracy(pred.probs, y) == pytest.approx(float((pred.label == y).double().mean()))
    assert metrics.brier(pred.probs, y) == pytest.approx(float(2 * (pred.probs - y).square().mean()))
    assert metrics.ece(pred.probs, y).ndim == 0
    raw = bayes.sample(x)
    logits = raw.logit() if bayes.reads == "probs" else raw
    grid = torch.linspace(-3, 3, 601, dtype=torch.float64)
    p = torch.stack([(t.exp() * logits).sigmoid().mean(0) for t in grid])  # (grid, N, K)
    best = grid[torch.where(y == 1, p, 1 - p).log().mean((1, 2)).argmax()].exp()
    assert bayes.tau == pytest.approx(float(best), rel=0.02)


def test_joined_predictions_of_labels_stay_such(labelled: Tried) -> None:
    bayes, x, y = labelled
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=10)
    torch.testing.assert_close(bayes.predict(loader).log_prob(y), bayes.predict(x).log_prob(y))


# Keeping and exporting.


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "log sigmoid"])
def test_the_reading_is_kept(name: str, tmp_path: Path) -> None:
    bayes, _, x = two_ways(name)
    assert f"outputs={bayes.reads!r}" in repr(bayes)
    bayes.save(tmp_path / "net.mcbn")
    loaded = mcbn.MCBN.load(tmp_path / "net.mcbn", bayes.model)
    assert loaded.reads == bayes.reads
    torch.testing.assert_close(loaded.predict(x[:1]).probs, bayes.predict(x[:1]).probs)
    stated = mcbn.MCBN(bayes.model, "classification").load_state_dict(bayes.state_dict())
    torch.testing.assert_close(stated.predict(x[:1]).probs, bayes.predict(x[:1]).probs)


@pytest.mark.parametrize(
    ("units", "ending", "task", "method"),
    [
        (3, nn.Softmax(1), "classification", "sample"),
        (3, nn.LogSoftmax(1), "classification", "linear"),
        (1, nn.Sigmoid(), "classification", "sample"),
        (4, nn.Identity(), "multilabel", "sample"),
    ],
)
def test_outputs_of_every_kind_are_exported(
    units: int, ending: nn.Module, task: str, method: str, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    network, x = mlp(units, ending)
    bayes = mcbn.MCBN(network.float(), task).fit(x.float(), n_samples=6, batch_size=16)
    bayes.export(tmp_path / "net.onnx", x[:4].float(), method=method)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x.float().numpy()}), strict=True))
    pred = bayes.predict(x.float(), method=method)
    np.testing.assert_allclose(got["probs"], pred.probs, atol=1e-4)
    np.testing.assert_allclose(got["mutual_information"], pred.mutual_information, atol=1e-4)


# Regression: a head that gives the noise, and noise correlated between outputs.


@pytest.fixture
def head() -> Tried:
    """Two means and their log variances, T = 12 (float64)."""
    network, x = mlp(4)
    with torch.no_grad():
        network[3].weight.mul_(0.3)
    y = network(x)[:, :2].detach() + torch.randn(48, 2, dtype=torch.float64)
    return mcbn.MCBN(network, "regression", noise="head").fit(x, **FIT), x, y


def naive_head(bayes: mcbn.MCBN[Any], x: Tensor, y: Tensor, tau: Tensor | float) -> tuple[Tensor, ...]:
    samples = bayes.sample(x)  # (T, N, 4)
    f, variance = samples[..., :2], samples[..., 2:].exp() / tau
    mean, epistemic, aleatoric = f.mean(0), f.var(0, correction=0), variance.mean(0)
    log_p = [sum(torch.distributions.Normal(f[t], variance[t].sqrt()).log_prob(y).unbind(1)) for t in range(len(f))]
    return mean, epistemic, aleatoric, torch.stack(log_p).logsumexp(0) - math.log(len(f))


def test_a_head_gives_the_noise_and_tau_scales_it(head: Tried) -> None:
    bayes, x, y = head
    assert bayes.tau == 1
    for tau in (1.0, torch.tensor([0.5, 3.0], dtype=torch.float64)):
        bayes.tau = tau
        pred = bayes.predict(x)
        mean, epistemic, aleatoric, log_prob = naive_head(bayes, x, y, tau)
        torch.testing.assert_close(pred.mean, mean)
        torch.testing.assert_close(pred.epistemic, epistemic, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(pred.aleatoric, aleatoric)
        torch.testing.assert_close(pred.std, (epistemic + aleatoric).sqrt())
        torch.testing.assert_close(pred.log_prob(y), log_prob)
        torch.testing.assert_close(bayes.predict(x, return_samples=True).log_prob(y), log_prob)


@pytest.mark.parametrize("score", ["crps", "pll"])
def test_tau_of_a_head_is_the_best_of_its_score(head: Tried, score: str) -> None:
    bayes, x, y = head
    bayes.tune((x, y), score=score)
    samples = bayes.sample(x)
    mean, epistemic, aleatoric, _ = naive_head(bayes, x, y, 1.0)

    def loss(log_tau: float, output: int) -> float:
        if score == "crps":
            variance = epistemic + aleatoric * math.exp(-log_tau)
            return float(metrics.crps_gaussian(mean, variance, y)[:, output].mean())
        f, scale = samples[..., output], (samples[..., 2 + output] - log_tau).exp().sqrt()
        log_p = torch.distributions.Normal(f, scale).log_prob(y[:, output])
        return -float(log_p.logsumexp(0).mean())

    grid = np.linspace(-4, 6, 251)
    for output in range(2):
        best = grid[np.argmin([loss(log_tau, output) for log_tau in grid])]
        assert math.log(bayes.tau[output]) == pytest.approx(best, abs=0.05)


def test_a_linear_head_has_the_moments_of_a_lognormal(head: Tried) -> None:
    bayes, x, y = head
    pred = bayes.predict(x, method="linear", covariance=True)
    linear = bayes.linearizer(x, 12)
    covariance = linear.projected @ linear.projected.transpose(1, 2)  # (N, 4, 4)
    torch.testing.assert_close(pred.mean, linear.mean[:, :2])
    torch.testing.assert_close(pred.epistemic, covariance.diagonal(dim1=1, dim2=2)[:, :2])
    of_log = covariance.diagonal(dim1=1, dim2=2)[:, 2:]
    torch.testing.assert_close(pred.aleatoric, torch.exp(linear.mean[:, 2:] + of_log / 2))
    torch.testing.assert_close(pred.covariance, covariance[:, :2, :2] + torch.diag_embed(pred.aleatoric))
    assert torch.isfinite(pred.log_prob(y)).all()


def test_a_pair_of_means_and_log_variances_is_a_head(head: Tried, tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            output = self.network(x)
            return output[:, :2], output[:, 2:]

    bayes, x, y = head
    pair = mcbn.MCBN(Pair(bayes.model), "regression", noise="head").fit(x, **FIT).tune((x, y))
    pair.save(tmp_path / "pair.mcbn")
    loaded = mcbn.MCBN.load(tmp_path / "pair.mcbn", pair.model)
    assert "noise='head'" in repr(loaded)
    expected = bayes.tune((x, y)).predict(x)
    for model in (pair, loaded):
        torch.testing.assert_close(model.predict(x).variance, expected.variance)
    with pytest.raises(mcbn.MCBNError, match="is of noise='head'"):
        mcbn.MCBN(pair.model, "regression", output=0).load_state_dict(pair.state_dict())
    with pytest.raises(mcbn.MCBNError, match='noise="head" is not exported'):
        pair.export(tmp_path / "net.onnx", x)


def test_an_odd_number_of_outputs_is_no_head() -> None:
    network, x = mlp(3)
    with pytest.raises(mcbn.MCBNError, match=r"needs 2 D outputs on axis 1.*one input gives shape \(3,\)"):
        mcbn.MCBN(network, "regression", noise="head").fit(x, **FIT).predict(x)


@pytest.fixture(scope="module")
def correlated() -> Tried:
    """Two outputs, tuned on 2,000 targets whose noise is correlated 0.8, of variances 1 and 4 (float64)."""
    network, _ = mlp(2)
    x = torch.randn(2000, 5, dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.tensor([[1.0, 1.6], [1.6, 4.0]], dtype=torch.float64))
    bayes = mcbn.MCBN(network, "regression", noise="full").fit(x, n_samples=30, batch_size=32)
    y = bayes.predict(x).mean + torch.randn(2000, 2, dtype=torch.float64) @ factor.T
    return bayes.tune((x, y)), x, y


def test_correlated_noise_is_found_and_predicted(correlated: Tried) -> None:
    bayes, x, y = correlated
    pred = bayes.predict(x, covariance=True)
    residual = y - pred.mean
    torch.testing.assert_close(pred.covariance.mean(0), torch.cov(residual.T), rtol=0.1, atol=0.05)
    seen = torch.corrcoef(residual.T)[0, 1]
    mean = pred.covariance.mean(0)
    assert float(mean[0, 1] / (mean[0, 0] * mean[1, 1]).sqrt()) == pytest.approx(float(seen), abs=0.03)
    torch.testing.assert_close(pred.aleatoric[0].sqrt(), bayes.noise_std)
    torch.testing.assert_close(pred.variance, pred.covariance.diagonal(dim1=1, dim2=2))


def test_log_prob_of_correlated_noise_is_that_of_the_joint_mixture(
    correlated: Tried,
) -> None:
    bayes, x, y = correlated
    samples, covariance = bayes.sample(x[:20]).numpy(), np.linalg.inv(np.asarray(bayes.tau))
    density = [np.mean([multivariate_normal.pdf(y[n].numpy(), f[n], covariance) for f in samples]) for n in range(20)]
    np.testing.assert_allclose(bayes.predict(x[:20]).log_prob(y[:20]), np.log(density), rtol=1e-8)


def test_full_noise_is_kept_and_exported(correlated: Tried, tmp_path: Path) -> None:
    bayes, x, y = correlated
    bayes.save(tmp_path / "net.mcbn")
    loaded = mcbn.MCBN.load(tmp_path / "net.mcbn", bayes.model)
    torch.testing.assert_close(loaded.predict(x[:5]).log_prob(y[:5]), bayes.predict(x[:5]).log_prob(y[:5]))
    assert "noise='full'" in repr(loaded)
    pytest.importorskip("onnxruntime")
    bayes.export(tmp_path / "net.onnx", x[:4])
    linear = bayes.predict(x[:5], method="linear", covariance=True)
    torch.testing.assert_close(
        linear.covariance - linear.epistemic_covariance, torch.linalg.inv(bayes.tau).expand(5, 2, 2)
    )


def test_full_noise_refuses_what_it_is_not_for() -> None:
    network, x = mlp(2)
    bayes = mcbn.MCBN(network, "regression", noise="full").fit(x, **FIT)
    with pytest.raises(mcbn.MCBNError, match=r"score must be one of .'pll'., got 'crps'"):
        bayes.tune((x, network(x)), score="crps")
    for wrong in ([[1.0, 0.0], [0.5, 1.0]], [[1.0, 2.0], [2.0, 1.0]]):
        with pytest.raises(mcbn.MCBNError, match="or their precision matrix"):
            bayes.tau = torch.tensor(wrong)


# The network's own mean.


@pytest.mark.parametrize("method", ["sample", "linear"])
def test_the_plain_mean_keeps_the_spread_of_the_draws(regression: tuple[mcbn.MCBN, Tensor], method: str) -> None:
    bayes, x = regression
    bayes.tau = 3.0
    drawn, plain = (bayes.predict(x, method=method, mean=mean, covariance=True) for mean in ("drawn", "plain"))
    torch.testing.assert_close(plain.mean, bayes.plain(x))
    for field in ("epistemic", "variance", "covariance"):
        torch.testing.assert_close(getattr(plain, field), getattr(drawn, field))
    y = torch.randn_like(drawn.mean)
    moved = y - plain.mean + drawn.mean
    torch.testing.assert_close(plain.log_prob(y), drawn.log_prob(moved))


@pytest.mark.parametrize("method", ["sample", "linear"])
def test_the_plain_labels_keep_the_disagreement_of_the_draws(method: str) -> None:
    for units, ending in ((3, nn.Softmax(1)), (3, nn.Identity()), (1, nn.Sigmoid())):
        network, x = mlp(units, ending)
        bayes = mcbn.MCBN(network, "classification").fit(x, **FIT)
        drawn, plain = (bayes.predict(x, method=method, mean=mean) for mean in ("drawn", "plain"))
        torch.testing.assert_close(plain.probs, bayes.plain_mean(x))
        for field in ("variance", "mutual_information"):
            torch.testing.assert_close(getattr(plain, field), getattr(drawn, field), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_worse_mean_is_said_in_the_headline(task: str, tmp_path: Path) -> None:
    """Targets are the network's own outputs: no other mean can be better."""
    network, x = mlp(3 if task == "classification" else 1)
    bayes = mcbn.MCBN(network, task).fit(x, n_samples=8, batch_size=4)
    bayes.tau = 4.0
    y = bayes.plain(x).argmax(1) if task == "classification" else bayes.plain(x) + 0.01 * torch.randn(48, 1)
    name = "RMSE" if task == "regression" else "error rate"
    words = f"the mean over the draws is worse than the plain network's: {name}"
    advice = 'predict(x, mean="plain"), or --mean plain, keeps that of the network'
    evaluate = scoring.evaluate_regression if task == "regression" else scoring.evaluate_classification
    report = scoring.gather(bayes, evaluate(bayes, [(x, y)]), data="test", n_samples=None, tuned_on=None)
    second = scoring.as_text(report).splitlines()[1]
    assert second.startswith(f"! {words}")
    assert advice in second
    diagnosis = bayes.check((x, y))
    assert str(diagnosis).splitlines()[1].startswith(f"! {words}")
    assert "nothing speaks against" not in str(diagnosis)
    page = write_page(tmp_path / "page.html", bayes, x, y).read_text()
    assert f"But {html.escape(words, quote=False)}" in html.unescape(page)


def test_a_better_mean_is_not_complained_of() -> None:
    network, x = mlp(1)
    bayes = mcbn.MCBN(network, "regression").fit(x, n_samples=8, batch_size=4)
    assert bayes.check((x, bayes.predict(x).mean)).worse_mean == ""
    assert bayes.check(x).worse_mean == ""  # no targets to compare by


def test_another_mean_is_told(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    with pytest.raises(mcbn.MCBNError, match=r"mean must be one of \['drawn', 'plain'\], got 'median'"):
        bayes.predict(x, mean="median")


# What tuning says.


def test_a_tau_at_its_bound_is_said_and_kept(tmp_path: Path) -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=30, batch_size=3)
    y = bayes.predict(x).mean + 1e-3 * torch.randn(24, 2, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"lower bound: the draws alone spread wider.*larger batch_size \(now 3\)"):
        bayes.tune((x, y))
    bayes.save(tmp_path / "net.mcbn")
    for told in (bayes, mcbn.MCBN.load(tmp_path / "net.mcbn", model)):
        text = str(told.check(x))
        assert "! the noise stopped at its lower bound" in text
        assert "nothing speaks against" not in text
    bayes.tau = 1.0
    assert not bayes.tau_at_bound
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bayes.tune((x, y + 3 * torch.randn(24, 2, dtype=torch.float64)))


@pytest.mark.parametrize("name", ["softmax", "logit"])
def test_a_temperature_that_nothing_bounds_is_said(name: str) -> None:
    """Labels are those of the network itself: the surer, the likelier."""
    bayes, _, x = two_ways(name)
    bayes.fit(x, n_samples=12, batch_size=40)
    y = bayes.predict(x).label
    sure = bayes.predict(x).probs.max(1).values > 0.9
    with pytest.warns(UserWarning, match="lower bound: every label of the validation data is right"):
        bayes.tune((x[sure], y[sure]))
    assert bayes.tau == pytest.approx(100, rel=1e-3)
    assert "! the temperature stopped at its lower bound: every label" in str(bayes.check(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bayes.tune((x, bayes.plain_mean(x).multinomial(1).flatten()))
    assert "lower bound" not in str(bayes.check(x))


def test_std_before_tune_says_that_noise_is_missing(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    pred = bayes.predict(x)
    with pytest.warns(UserWarning, match="never tuned, so the std holds the network's own uncertainty only"):
        assert torch.equal(pred.std, pred.epistemic.sqrt())
    bayes.tau = 2.0
    assert (bayes.predict(x).std > pred.epistemic.sqrt()).all()
