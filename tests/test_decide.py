"""Decisions: risks that are kept, BatchBALD against brute force, and the risk-coverage curve."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

import mcbn
from mcbn import decide, metrics
from test_conformal import classes, fitted, noisy, regressor


def draw_errors(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """P(wrong | u) = u^2 / 2, u uniform: P(wrong | u < c) = c^2 / 6."""
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    return u, torch.rand(n, generator=generator, dtype=torch.float64) < u.square() / 2


@pytest.mark.parametrize("digits", [None, 1])
def test_promised_risk_is_exceeded_no_more_often_than_stated(digits: int | None) -> None:
    generator, exceeded, kept = torch.Generator().manual_seed(0), 0, 0.0
    for _ in range(1000):
        u, wrong = draw_errors(2000, generator)
        chosen = decide.threshold(u if digits is None else (u * 10).floor() / 10, wrong, risk=0.05, delta=0.1)
        c = min(1.0, max(0.0, chosen.threshold))
        exceeded += c**2 / 6 > 0.05 if chosen.kept else 0
        kept += c
    assert exceeded <= 100
    assert kept > 200


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    stats = pytest.importorskip("scipy.stats")
    for errors, n, risk in ((0, 50, 0.05), (3, 200, 0.04), (40, 500, 0.1), (7, 7, 0.3)):
        ours = decide.binomial_cdf(torch.tensor([errors]), torch.tensor([n]), risk).item()
        assert ours == pytest.approx(stats.binom.cdf(errors, n, risk), rel=1e-9)
        upper = stats.beta.ppf(1 - 0.005, errors + 1, n - errors) if errors < n else 1.0
        assert (ours <= 0.005) == (upper <= risk)


def test_the_largest_threshold_that_passes_is_taken() -> None:
    u = torch.arange(1000.0)
    chosen = decide.threshold(u, u >= 700, risk=0.1, delta=0.1)
    shares = torch.arange(50, 1001, 50)
    passing = decide.binomial_cdf((shares - 700).clamp(min=0), shares, 0.1) <= 0.1 / decide.N_THRESHOLDS
    assert chosen.kept == shares[passing].max() == chosen.threshold
    assert 700 < chosen.kept < 800
    assert decide.threshold(u, u < 0, risk=0.1).threshold == math.inf


def test_prediction_rejects_by_what_calibrate_kept() -> None:
    bayes, x = fitted("classification", 4).calibrate(classes(2000, 2)), classes(300, 3)[0]
    pred = bayes.predict(x)
    asked = pred.reject(0.3)
    chosen = decide.threshold(bayes.calibration.uncertainty, bayes.calibration.loss, risk=0.3)
    assert torch.equal(asked, 1 - pred.probs.amax(1) >= chosen.threshold)
    regression = regressor().calibrate(noisy(2000, 2))
    pred = regression.predict(noisy(300, 3)[0])
    assert pred.reject(0.2, tolerance=3.0).shape == (300,)
    assert pred.reject(0.2, tolerance=3.0).double().mean() <= pred.reject(0.2, tolerance=1.5).double().mean()
    with pytest.raises(mcbn.MCBNError, match="tolerance is the largest error to accept of a regression"):
        pred.reject(0.2)
    for wrong in (-1, "3", [3.0]):
        with pytest.raises(mcbn.MCBNError, match="tolerance must lie between 0 and inf, got"):
            pred.reject(0.2, tolerance=wrong)


def test_mistakes_of_reject() -> None:
    bayes, x = fitted("classification", 4), classes(10, 3)[0]
    with pytest.raises(mcbn.MCBNError, match="reject needs errors on held-out data"):
        bayes.predict(x).reject(0.1)
    pred = bayes.calibrate(classes(50, 2)).predict(x)
    with pytest.warns(UserWarning, match="is rejected; it takes at least 528 certain ones without an error"):
        assert pred.reject(0.01).all()
    for wrong in (1.5, 0, "0.1", None, [0.1], math.nan):
        with pytest.raises(mcbn.MCBNError, match=r"risk must lie between 0 and 1, got"):
            pred.reject(wrong)
        with pytest.raises(mcbn.MCBNError, match=r"delta must lie between 0 and 1, got"):
            pred.reject(0.1, delta=wrong)
    with pytest.raises(mcbn.MCBNError, match="calibrated with"):
        bayes.predict(x, n_samples=5).reject(0.3)
    with pytest.raises(mcbn.MCBNError, match=re.escape("must be (n,), one an example, without NaN")):
        decide.threshold([0.1, math.nan], [0, 1], risk=0.1)


def brute_force(probs: Tensor, indices: list[int]) -> float:
    """I(y_1..b; omega) by listing every configuration of labels."""
    T, _, K = probs.shape
    joint = 0.0
    for labels in itertools.product(range(K), repeat=len(indices)):
        p = sum(math.prod(float(probs[t, i, y]) for i, y in zip(indices, labels, strict=True)) for t in range(T)) / T
        joint -= p * math.log(p)
    own = sum(-float(p * math.log(p)) for i in indices for t in range(T) for p in probs[t, i].tolist()) / T
    return joint - own


def some_samples(T: int = 5, N: int = 6, K: int = 3) -> Tensor:
    return 2 * torch.randn(T, N, K, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_bald_is_the_information_of_one_label() -> None:
    samples = some_samples()
    for i, value in enumerate(decide.bald(samples).tolist()):
        assert value == pytest.approx(brute_force(samples.softmax(2), [i]), abs=1e-12)


def test_outputs_that_are_probabilities_are_not_taken_for_logits() -> None:
    samples = some_samples()
    for outputs in (samples.softmax(2), samples.log_softmax(2)):
        torch.testing.assert_close(decide.bald(outputs), decide.bald(samples))
    single = samples[:, :, :1].repeat(1, 4, 1)
    torch.testing.assert_close(decide.bald(single.sigmoid(), outputs="probs"), decide.bald(single))
    with pytest.raises(mcbn.MCBNError, match='pass outputs="probs" if the network gives probabilities'):
        decide.batch_bald(single.sigmoid(), 2)


def test_batch_bald_is_greedy_by_brute_force() -> None:
    samples, chosen = some_samples(), decide.batch_bald(some_samples(), 4)
    expected: list[int] = []
    for number in range(4):
        rest = [i for i in range(6) if i not in expected]
        expected.append(max(rest, key=lambda i: brute_force(samples.softmax(2), [*expected, i])))
        information = brute_force(samples.softmax(2), expected)
        assert chosen.information[number].item() == pytest.approx(information, abs=1e-10)
    assert chosen.indices.tolist() == expected


def test_drawn_configurations_estimate_the_joint_entropy() -> None:
    samples = some_samples()
    exact, drawn = decide.batch_bald(samples, 4), decide.batch_bald(samples, 4, n_configurations=2000 // 500)
    many = decide.batch_bald(samples, 4, n_configurations=20_000, seed=1)
    torch.testing.assert_close(many.information, exact.information, rtol=0.02, atol=0)
    assert not torch.equal(drawn.information, exact.information)
    few = [decide.batch_bald(samples, 3, n_configurations=8, seed=s).information for s in range(300)]
    spread = torch.stack(few)[:, 1]
    assert spread.mean().item() == pytest.approx(
        exact.information[1].item(), abs=4 * spread.std().item() / 300**0.5 + 1e-9
    )


def test_batch_bald_takes_no_copies() -> None:
    samples = torch.cat([20 * some_samples(N=1)] * 3 + [3 * some_samples(N=5)[:, 3:]], 1)
    assert set(decide.batch_bald(samples, 2).indices.tolist()) & {3, 4}
    assert set(decide.bald(samples).topk(2).indices.tolist()) <= {0, 1, 2}


def test_batch_bald_in_blocks_equals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decide.batch_bald(some_samples(), 3)
    monkeypatch.setattr(decide, "MOST_VALUES", 30)
    torch.testing.assert_close(decide.batch_bald(some_samples(), 3).information, whole.information)


def test_mistakes_of_choosing() -> None:
    with pytest.raises(mcbn.MCBNError, match="k=7 inputs asked of 6"):
        decide.batch_bald(some_samples(), 7)
    with pytest.raises(mcbn.MCBNError, match=re.escape("must be raw outputs (T, N, K)")):
        decide.bald(torch.zeros(2, 3, 4, 5))


def test_risk_coverage_and_its_area() -> None:
    generator = np.random.default_rng(0)
    uncertainty, loss = generator.random(50), generator.random(50)
    coverage, risk = metrics.risk_coverage(uncertainty, loss)
    order = np.argsort(uncertainty)
    naive = [loss[order[: k + 1]].mean() for k in range(50)]
    np.testing.assert_allclose(coverage, np.arange(1, 51) / 50)
    np.testing.assert_allclose(risk, naive)
    assert metrics.aurc(uncertainty, loss).item() == pytest.approx(np.mean(naive))
    assert metrics.aurc(loss, loss) < metrics.aurc(uncertainty, loss) < metrics.aurc(-loss, loss)


def test_area_with_ties_is_that_of_random_order() -> None:
    uncertainty, loss = np.array([0.0, 1, 1, 1, 2]), np.array([1.0, 0, 2, 4, 3])
    shuffled = []
    for middle in itertools.permutations(loss[1:4]):
        shuffled.append(metrics.aurc(np.arange(5.0), np.array([1.0, *middle, 3.0])).item())
    assert metrics.aurc(uncertainty, loss).item() == pytest.approx(np.mean(shuffled))
    with pytest.raises(mcbn.MCBNError, match=re.escape("must be (N,) without NaN")):
        metrics.aurc([0.0, math.nan], [0.0, 1.0])
