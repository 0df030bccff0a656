"""Predictive quantities against naive formulas over explicit samples."""

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mcbn
from kinds import make, settle
from mcbn import moments, prediction
from mcbn.metrics import pll
from mcbn.moments import Moments


def test_regression_moments_equal_the_papers_sums(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = torch.tensor([2.0, 8.0])
    f = bayes.sample(x)  # (T, N, D)
    T, N, D = f.shape
    pred = bayes.predict(x, covariance=True)
    mean = sum(f[t] for t in range(T)) / T
    torch.testing.assert_close(pred.mean, mean)
    noise = torch.diag(torch.tensor([1 / 2.0, 1 / 8.0], dtype=f.dtype))
    for n in range(N):  # tau^-1 I + 1/T sum f^T f - E[f]^T E[f]
        naive = noise + sum(torch.outer(f[t, n], f[t, n]) for t in range(T)) / T - torch.outer(mean[n], mean[n])
        torch.testing.assert_close(pred.covariance[n], naive)
        torch.testing.assert_close(pred.variance[n], naive.diagonal())
    torch.testing.assert_close(pred.epistemic, f.var(0, correction=0))
    torch.testing.assert_close(pred.aleatoric, noise.diagonal().expand(N, D))
    torch.testing.assert_close(pred.std, pred.variance.sqrt())
    torch.testing.assert_close(pred.standard_error, f.std(0) / math.sqrt(T))


def test_log_prob_is_the_mixture_of_the_draws(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = torch.tensor([2.0, 8.0])
    y = bayes.plain(x) + 0.5
    f = bayes.sample(x)
    components = torch.distributions.Normal(f, bayes.tau.rsqrt()).log_prob(y).sum(2)  # (T, N)
    naive = components.exp().mean(0).log()
    torch.testing.assert_close(bayes.predict(x).log_prob(y), naive)
    torch.testing.assert_close(bayes.predict(x, return_samples=True).log_prob(y), naive)
    torch.testing.assert_close(pll(f, y, bayes.tau), naive)


def test_log_prob_of_a_loader_needs_samples(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = 1.0
    y, loader = bayes.plain(x), DataLoader(x, batch_size=5)
    with pytest.raises(mcbn.MCBNError, match="return_samples=True"):
        bayes.predict(loader).log_prob(y)
    torch.testing.assert_close(bayes.predict(loader, return_samples=True).log_prob(y), bayes.predict(x).log_prob(y))


def test_single_column_targets_may_come_flat() -> None:
    net, x = make("1d", n=40)
    bayes = mcbn.MCBN(net, "regression", output=lambda y: y[:, :1]).fit(x, n_samples=5, batch_size=20)
    bayes.tau = 4.0
    flat = mcbn.MCBN(net, "regression", output=lambda y: y[:, 0]).fit(x, n_samples=5, batch_size=20)
    flat.tau = 4.0
    y = torch.randn(40)
    assert flat.predict(x).mean.shape == (40,)
    torch.testing.assert_close(bayes.predict(x).log_prob(y), flat.predict(x).log_prob(y))
    torch.testing.assert_close(flat.predict(x, covariance=True).covariance[:, 0, 0], flat.predict(x).variance)


def test_interval_has_the_gaussian_level(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = 3.0
    pred = bayes.predict(x)
    low, high = pred.interval(0.9)
    normal = torch.distributions.Normal(pred.mean, pred.std)
    torch.testing.assert_close(normal.cdf(high) - normal.cdf(low), torch.full_like(low, 0.9))


def test_interval_without_noise_level_warns(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    pred = bayes.predict(x)
    assert torch.all(pred.aleatoric == 0)
    with pytest.warns(UserWarning, match="the noise was never tuned"):
        pred.interval()


def test_classification_averages_probabilities(classification: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = classification
    p = torch.softmax(bayes.sample(x), 2)  # (T, N, K)
    pred = bayes.predict(x)
    torch.testing.assert_close(pred.probs, p.mean(0))
    assert torch.equal(pred.label, p.mean(0).argmax(1))
    entropy = -(p.mean(0) * p.mean(0).log()).sum(1)
    expected = -(p * p.log()).sum(2).mean(0)
    torch.testing.assert_close(pred.entropy, entropy)
    torch.testing.assert_close(pred.expected_entropy, expected)
    torch.testing.assert_close(pred.mutual_information, (entropy - expected).clamp(min=0))
    torch.testing.assert_close(pred.variance, p.var(0, correction=0))
    torch.testing.assert_close(pred.std, p.std(0, correction=0))
    torch.testing.assert_close(pred.standard_error, p.std(0) / math.sqrt(len(p)))
    y = torch.arange(len(x)) % 5
    torch.testing.assert_close(pred.log_prob(y), p.mean(0)[torch.arange(len(x)), y].log())


@pytest.mark.parametrize("size", [1, 1e-2, 1e-3])
@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_mutual_information_of_single_precision_keeps_its_digits(size: float, chunk: int) -> None:
    """Where draws hardly differ, about 1e-6 of an entropy of 1, a difference of entropies would be rounding alone."""
    logits = 2 * torch.randn(1, 50, 5) + size * torch.randn(20, 50, 5)
    p = logits.double().softmax(2)
    expected = (p * (p / p.mean(0)).log()).sum(2).mean(0)  # (N,)
    pred = moments.classification(logits.split(chunk), torch.tensor(1.0))
    torch.testing.assert_close(pred.mutual_information.double(), expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(prediction.mutual_information(logits.softmax(2)).double(), expected, rtol=1e-3, atol=0)


def test_mutual_information_where_a_class_is_impossible() -> None:
    """The first draw excludes a class that others are sure of."""
    logits = torch.tensor([[[0.0, -torch.inf]], [[-torch.inf, 0.0]], [[0.0, -200.0]], [[0.0, 0.0]]])  # (T, 1, K)
    p = logits.double().softmax(2)
    entropies = [torch.special.entr(q).sum(-1) for q in (p.mean(0), p)]
    pred = moments.classification([logits], torch.tensor(1.0))
    torch.testing.assert_close(pred.mutual_information.double(), entropies[0] - entropies[1].mean(0), rtol=1e-5, atol=0)


def test_segmentation_is_classification_per_pixel() -> None:
    net, x = make("fused-activation", dtype=torch.float64)
    bayes = mcbn.MCBN(net, "classification").fit(x, n_samples=6, batch_size=8)
    pred = bayes.predict(x)
    assert pred.probs.shape == (24, 2, 2, 2)
    assert pred.label.shape == pred.entropy.shape == pred.mutual_information.shape == (24, 2, 2)
    pixel = torch.softmax(bayes.sample(x)[:, :, :, 1, 0], 2).mean(0)
    torch.testing.assert_close(pred.probs[:, :, 1, 0], pixel)
    assert pred.log_prob(torch.zeros(24, 2, 2)).shape == (24, 2, 2)


@pytest.mark.parametrize("flat", [False, True])
def test_single_logit_is_a_binary_classifier(flat: bool) -> None:
    net, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(net, "classification", output=lambda y: y[:, 0] if flat else y[:, :1])
    pred = bayes.fit(x, n_samples=6, batch_size=8).predict(x)
    sigmoid = torch.sigmoid(bayes.sample(x).reshape(6, 24)).mean(0)
    torch.testing.assert_close(pred.probs, torch.stack([1 - sigmoid, sigmoid], 1))


@pytest.mark.parametrize("size", [1, 3, 7])
def test_streamed_moments_do_not_depend_on_the_chunks(size: int) -> None:
    samples = torch.randn(7, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e6
    moments = Moments(covariance=True)
    for chunk in samples.split(size):
        moments.add(chunk.clone())
    torch.testing.assert_close(moments.mean, samples.mean(0), rtol=1e-14, atol=0)
    torch.testing.assert_close(moments.variance, samples.var(0, correction=0), rtol=1e-8, atol=0)
    centred = samples - samples.mean(0)
    torch.testing.assert_close(
        moments.covariance, torch.einsum("tni,tnj->nij", centred, centred) / 7, rtol=1e-7, atol=1e-9
    )


def test_moments_hold_no_more_than_a_few_outputs(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    moments = Moments()
    for _ in range(50):
        moments.add(torch.randn(1, 10, 3))
    held = sum(t.numel() for t in vars(moments).values() if isinstance(t, Tensor))
    assert held == 3 * 30


def test_targets_in_another_layout_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    x = torch.randn(16, 1, 6, 6)
    settle(net, x)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=4, batch_size=8)
    y = bayes.plain(x) + 0.1 * torch.randn(16, 2, 6, 6)
    bayes.tune((x, y))
    with pytest.raises(mcbn.MCBNError, match=r"\(16, 6, 6, 2\) do not fit .*axes are in another order"):
        bayes.tune((x, y.permute(0, 2, 3, 1)))
    with pytest.raises(mcbn.MCBNError, match="axes are in another order"):
        bayes.predict(x).log_prob(y.permute(0, 2, 3, 1))


def test_log_prob_remembers_the_inputs_it_was_asked_for(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = 4.0
    y, buffer = bayes.plain(x), x.clone()
    prediction = bayes.predict(buffer)
    expected = prediction.log_prob(y)
    buffer.normal_()  # the caller reads the next batch into the same memory
    assert torch.equal(prediction.log_prob(y), expected)


def test_about_a_second_mean_the_mixture_moves_from_the_draws(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = 2.0
    pred, y = bayes.predict(x), bayes.plain(x) + 0.5
    once = pred.about(pred.mean + 3)
    torch.testing.assert_close(pred.about(pred.mean - 1).about(pred.mean + 3).log_prob(y), once.log_prob(y))
    torch.testing.assert_close(bayes.predict(x, mean="plain").about(pred.mean + 3).log_prob(y), once.log_prob(y))
    torch.testing.assert_close(once.log_prob(y + 3), pred.log_prob(y))


def test_another_mean_has_the_shape_of_the_first(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    pred = bayes.predict(x)
    with pytest.raises(mcbn.MCBNError, match="means of shape"):
        pred.about(pred.mean[:, :1])
    assert torch.equal(pred.about(pred.mean.numpy()).mean, pred.mean)
    net, x = make("1d")
    classes = mcbn.MCBN(net, "classification").fit(x, n_samples=4, batch_size=8).predict(x)
    with pytest.raises(mcbn.MCBNError, match="probabilities of shape"):
        classes.about(classes.probs[:, :1])


def test_batches_that_a_tolerance_stops_at_different_draws_are_joined() -> None:
    net, x = make("1d", n=40)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=64, batch_size=8)
    loader = DataLoader(torch.cat([x * 1e-3, x * 5]), batch_size=40)
    how: dict[str, Any] = {"tolerance": 0.2, "chunk_size": 8, "return_samples": True}
    parts = [bayes.predict(batch, **how) for batch in loader]
    fewest = min(part.n_samples for part in parts)
    assert fewest < max(part.n_samples for part in parts)
    whole = bayes.predict(loader, **how)
    assert torch.equal(whole.samples, torch.cat([part.samples[:fewest] for part in parts], 1))
    assert bool((whole.standard_error >= torch.cat([part.standard_error for part in parts])).all())
    y = torch.zeros_like(whole.mean)
    whole, first = (replace(pred, tau=torch.tensor(2.0)) for pred in (whole, bayes.predict(loader, n_samples=fewest)))
    first = replace(first, samples=whole.samples)
    torch.testing.assert_close(whole.log_prob(y), first.log_prob(y))


@pytest.mark.parametrize("method", ["sample", "linear"])
def test_predictions_go_through_a_pickle(method: str, regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    bayes.tau = 2.0
    pred, y = bayes.predict(x, method=method), bayes.plain(x)
    twin = pickle.loads(pickle.dumps(pred))
    assert torch.equal(twin.mean, pred.mean)
    assert torch.equal(twin.variance, pred.variance)
    with pytest.raises(mcbn.MCBNError, match="return_samples=True"):
        twin.log_prob(y)
    kept = bayes.predict(x, method=method, return_samples=True)
    torch.testing.assert_close(pickle.loads(pickle.dumps(kept)).log_prob(y), pred.log_prob(y))
