"""Calibrated intervals and sets: scores as printed, thresholds as counted, promises that hold, and mistakes."""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import mcbn
from mcbn import conformal
from mcbn.baselines import ConstantUncertainty, DeepEnsemble, MCDropout, Temperature
from mcbn.conformal import set_scores
from mcbn.prediction import join

N = 400


def noisy(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Targets whose noise grows with the input, skewed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    noise = torch.rand(n, 1, generator=generator, dtype=torch.float64).log().neg()
    return x, x[:, :1] + (0.2 + x[:, 1:2].abs()) * noise


def classes(n: int, seed: int, K: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.multinomial((2 * x @ torch.eye(3, K, dtype=torch.float64)).softmax(1), 1, generator=generator)[:, 0]


def fitted(task: str, outputs: int = 1, **options: Any) -> mcbn.MCBN:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, momentum=None)
    network = nn.Sequential(nn.Linear(3, 8), norm, nn.Tanh(), nn.Linear(8, outputs)).double()
    x, y = (classes if task == "classification" else noisy)(N, 1)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y) if y.ndim == 1 else (network(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    norm.reset_running_stats()
    with torch.no_grad():
        network(x)
    return mcbn.MCBN(network.eval(), task).fit(x, n_samples=20, batch_size=16, **options)


def regressor(**options: Any) -> mcbn.MCBN:
    bayes = fitted("regression", **options)
    bayes.tau = 2.0
    return bayes


def inside(interval: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (interval[0] <= y) & (y <= interval[1])


def covers(sets: Tensor, y: Tensor) -> Tensor:
    return sets.gather(1, y.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(("n", "level", "k"), [(9, 0.9, 9), (10, 0.9, 10), (99, 0.9, 90), (100, 0.9, 91)])
def test_threshold_is_the_kth_smallest_score(n: int, level: float, k: int) -> None:
    scores = torch.arange(1.0, n + 1).unsqueeze(1)
    calibration = conformal.Calibration("std", {0: scores}, {0: n})
    assert calibration.threshold(level).item() == k == math.ceil(round((n + 1) * level, 6))


@pytest.mark.parametrize("score", ["std", "absolute", "quantile"])
def test_intervals_hold_exactly_the_targets_that_score_below_the_threshold(score: str) -> None:
    bayes, (x, y) = regressor().calibrate(noisy(99, 2), score=score), noisy(200, 3)
    pred = bayes.predict(x)
    errors = (y - pred.mean).abs()
    scores = {
        "std": lambda: errors / pred.std,
        "absolute": lambda: errors,
        "quantile": lambda: conformal.mixture_scores(bayes.sample(x), pred.tau, y),
    }[score]()
    for level in (0.5, 0.9, 0.99):
        threshold = bayes.calibration.threshold(level)
        assert torch.equal(inside(pred.interval(level), y), scores <= threshold)


def test_mixture_scores_are_the_smaller_tail_of_the_mixture() -> None:
    samples, tau = torch.tensor([[[0.0]], [[3.0]]], dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    for y in (-2.0, 0.5, 1.5, 7.0):
        below, above = (sum(0.25 * math.erfc(s * 2 * (y - f) / math.sqrt(2)) for f in (0.0, 3.0)) for s in (-1, 1))
        score = conformal.mixture_scores(samples, tau, torch.tensor([[y]], dtype=torch.float64))
        assert score.item() == pytest.approx(-math.log(min(below, above)), rel=1e-9)
    far = conformal.mixture_scores(samples, tau, torch.tensor([[50.0]], dtype=torch.float64))
    assert 4000 < far.item() < math.inf


def test_quantile_intervals_lean_to_the_side_of_skewed_draws() -> None:
    samples = torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=torch.float64).reshape(4, 1, 1)
    low, high = conformal.mixture_interval(samples, torch.tensor(25.0), torch.tensor([[-math.log(0.05)]]))
    assert -low.item() < high.item() - 2  # the mean is 1.25
    assert conformal.mixture_scores(samples, torch.tensor(25.0), low).item() == pytest.approx(-math.log(0.05), rel=1e-6)


def published_scores(probs: Tensor, penalty: Any = (0.0, 0), share: Tensor | None = None) -> Tensor:
    """Score the most probable class like any other."""
    return set_scores(probs, penalty, torch.zeros_like(probs[:, :1]) if share is None else share)


@pytest.mark.parametrize("penalty", [(0.0, 0), (0.1, 2)])
def test_class_scores_are_those_of_the_papers(penalty: tuple[float, int]) -> None:
    probs = torch.softmax(torch.randn(5, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1)
    scores = published_scores(probs, penalty)
    for n in range(5):
        for k in range(6):
            for pixel in range(2):
                p = probs[n, :, pixel].tolist()
                rank = sum(other >= p[k] for other in p)
                naive = sum(other for other in p if other >= p[k]) + penalty[0] * max(0, rank - penalty[1])
                assert scores[n, k, pixel].item() == pytest.approx(naive - 1, abs=1e-12)


def test_the_least_probable_class_scores_exactly_nothing() -> None:
    probs = torch.softmax(3 * torch.randn(500, 7, generator=torch.Generator().manual_seed(0)), 1)
    assert (set_scores(probs).gather(1, probs.argmin(1, keepdim=True)) == 0).all()


def test_rounding_does_not_put_every_class_into_the_sets_of_a_sure_network() -> None:
    """The second class of three scores what is left to the third: 1e-9 and 1e-20 differ, though 1 less either is 1."""
    left = 10 ** torch.linspace(-3, -30, 400)
    probs = torch.stack([1 - 2 * left, left.sqrt() / 9, left / 9], 1)
    y = (torch.arange(400) % 8 == 7).long()  # one in eight is of the second class
    scores = set_scores(probs).gather(1, y[:, None]).double()
    sets = conformal.Calibration("aps", {0: scores.sort(0).values}, {0: 400}).set(probs, 0.95)
    assert 0.95 <= covers(sets, y).double().mean() < 0.96
    assert sets.sum(1).double().mean() < 1.7
    assert not sets[:, 2].any()


def test_calibrations_saved_before_scores_lost_their_one_give_the_same_sets() -> None:
    bayes, x = fitted("classification", 4).calibrate(classes(99, 2)), classes(50, 3)[0]
    sets = bayes.predict(x).set(0.8)
    assert bayes.calibration is not None
    tensors, text = bayes.calibration.pack()
    old = {n: t + 1 if ".scores." in n else t for n, t in tensors.items()}
    settings = json.loads(text["calibration"])
    settings.pop("less")
    found = conformal.Calibration.unpack(old, {"calibration": json.dumps(settings)})
    assert torch.equal(found.set(bayes.predict(x).probs, 0.8), sets)


def mean_coverage(bayes: mcbn.MCBN, draw: Any, count: Any, n: int, **options: Any) -> tuple[float, float]:
    """Calibrate on new data again and again: mean share covered at 0.8 and its standard error."""
    x, y = draw(300, 99)
    shares = []
    for seed in range(40):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pred = bayes.calibrate(draw(n, 1000 + seed), **options).predict(x)
        shares.append(count(pred, y).double().mean())
    values = torch.stack(shares)
    return values.mean().item(), 4 * (values.std().item() / 40**0.5 + (0.16 / 300) ** 0.5)


@pytest.mark.parametrize("score", ["std", "absolute", "quantile"])
def test_intervals_keep_their_promise(score: str) -> None:
    n = 39
    share, error = mean_coverage(regressor(), noisy, lambda p, y: inside(p.interval(0.8), y), n, score=score)
    assert 0.8 - error < share < 0.8 + 1 / (n + 1) + error


@pytest.mark.parametrize(("score", "randomize"), [("aps", False), ("raps", False), ("lac", False), ("aps", True)])
def test_sets_keep_their_promise(score: str, randomize: bool) -> None:
    options = {"score": score, "randomize": randomize}
    bayes = fitted("classification", 4)
    share, error = mean_coverage(bayes, classes, lambda p, y: covers(p.set(0.8), y), 49, **options)
    assert share > 0.8 - error
    if randomize or score == "lac":
        assert share < 0.82 + error


def test_lac_keeps_the_classes_probable_enough_and_needs_the_fewest_of_them() -> None:
    """Sadinle et al. 2019: of all sets with a share inside these are smallest; by class each class holds its share."""
    bayes, (held, labels), (x, y) = fitted("classification", 4), classes(3000, 2), classes(3000, 3)
    pred = bayes.calibrate((held, labels), score="lac").predict(x)
    least = bayes.predict(held).probs.gather(1, labels[:, None])[:, 0].sort().values[math.floor(3001 * 0.2) - 1]
    torch.testing.assert_close(pred.set(0.8), pred.probs >= least - 1e-6)
    smallest = pred.set(0.8).double().sum(1).mean()
    for score in ("aps", "raps"):
        assert smallest < bayes.calibrate((held, labels), score=score).predict(x).set(0.8).double().sum(1).mean()
    sets = bayes.calibrate((held, labels), score="lac", groups="class").predict(x).set(0.8)
    for k in range(4):
        assert abs(covers(sets, y)[y == k].double().mean() - 0.8) < 4 * (2 * 0.16 / 700) ** 0.5
    with pytest.raises(mcbn.MCBNError, match='sets of "lac" hold the level without'):
        bayes.calibrate((held, labels), score="lac", randomize=True)


def test_promise_of_each_class_and_of_each_group() -> None:
    bayes, (x, y) = fitted("classification", 4), classes(4000, 5)
    sets = bayes.calibrate(classes(4000, 6), groups="class").predict(x).set(0.8)
    for k in range(4):
        assert covers(sets, y)[y == k].double().mean() > 0.8 - 4 * (2 * 0.16 / 900) ** 0.5
    bayes, held, new = regressor(), noisy(2000, 7), noisy(2000, 8)
    group = [(x[:, 1].abs() > 1).long() for x, _ in (held, new)]
    pred = bayes.calibrate(held, score="absolute", groups=group[0]).predict(new[0])
    low, high = pred.interval(0.9, groups=group[1])
    for g in (0, 1):
        share = inside((low, high), new[1])[group[1] == g].double().mean().item()
        assert abs(share - 0.9) < 4 * (2 * 0.09 / 600) ** 0.5
    width = (high - low)[:, 0]
    assert width[group[1] == 1].min() > width[group[1] == 0].max()


def test_even_a_known_spread_widens_intervals_of_a_low_level_and_narrows_those_of_a_high_one() -> None:
    """Mean width by the true spread of each input, over the one width that holds as many: low levels gain nothing."""
    generator = torch.Generator().manual_seed(0)
    noise, spread = torch.randn(2, 200_000, generator=generator).double()
    noise, spread = noise.abs(), (0.5 * spread).exp()
    levels = torch.tensor([0.5, 0.8, 0.9, 0.95, 0.99], dtype=torch.float64)
    ratio = spread.mean() * noise.quantile(levels) / (spread * noise).quantile(levels)
    assert ratio[:2].min() > 1.02
    assert ratio[2:].max() < 0.94
    assert (ratio.diff() < 0).all()


def test_outputs_one_by_one_and_together() -> None:
    bayes = fitted("regression", 2)
    bayes.tau = 1.0
    held, new = (torch.cat([noisy(2000, seed)[1], noisy(2000, seed + 50)[1]], 1) for seed in (1, 2))
    x, x_new = noisy(2000, 1)[0], noisy(2000, 2)[0]
    each = inside(bayes.calibrate((x, held)).predict(x_new).interval(0.9), new)
    both = inside(bayes.calibrate((x, held), joint=True).predict(x_new).interval(0.9), new)
    bound = 4 * (2 * 0.09 / 2000) ** 0.5
    assert all(abs(share - 0.9) < bound for share in each.double().mean(0).tolist())
    assert abs(both.all(1).double().mean().item() - 0.9) < bound
    assert each.all(1).double().mean() < 0.9 - bound


def scenes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 6, 6, generator=generator)
    noise = torch.randn(n, 1, 1, 1, generator=generator)  # pixels of an image err together
    return x, (x[:, 0] + noise[:, 0] > 0).long()


def test_images_by_pixel_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformal, "PIXELS", 20)
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Conv2d(4, 3, 1))
    x, y = scenes(300, 0)
    network(x)
    bayes = mcbn.MCBN(network.eval(), "classification").fit(x, n_samples=8, batch_size=16)
    held = scenes(300, 1)
    held[1][:, 0] = 255
    x, y = scenes(300, 2)
    for joint in (False, True):
        sets = bayes.calibrate(held, joint=joint, ignore_index=255).predict(x).set(0.9)
        assert sets.shape == (300, 3, 6, 6)
        covered = covers(sets, y)[:, 1:].double().flatten(1)  # (N, P)
        share = covered.amin(1) if joint else covered.mean(1)
        assert share.mean() > 0.9 - 4 * (2 * 0.09 / 300) ** 0.5
    with pytest.raises(mcbn.MCBNError, match="pixels of an image are not independent"):
        bayes.calibrate(held, groups="class", ignore_index=255)


def test_void_in_some_batches_of_a_loader_alone() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, momentum=None))
    x, y = scenes(60, 0)
    network(x)
    bayes = mcbn.MCBN(network.eval(), "classification").fit(x, n_samples=8, batch_size=16)
    y[:10, 0], y[3] = 255, 255  # the first batch has void, and an image of nothing else; the others have none
    bayes.calibrate(DataLoader(TensorDataset(x, y), batch_size=20), ignore_index=255)
    assert bayes.calibration is not None
    assert bayes.calibration.counts == {0: 59}
    sets, valid = bayes.predict(x).set(0.8), y != 255
    covered = covers(sets, y.masked_fill(~valid, 0)) & valid
    shares = covered.flatten(1).sum(1) / valid.flatten(1).sum(1)
    assert shares.nanmean() > 0.8 - 0.02  # of the calibration data itself, by 256 drawn pixels


def test_sets_are_never_empty_and_hold_the_label() -> None:
    pred = fitted("classification", 4).calibrate(classes(99, 2)).predict(classes(50, 3)[0])
    assert covers(pred.set(0.05), pred.label).all()
    scores = conformal.set_scores(pred.probs)
    assert (scores.gather(1, pred.label[:, None]) == -1).all()
    others = torch.ones_like(scores, dtype=torch.bool).scatter(1, pred.label[:, None], False)
    assert torch.equal(scores[others], published_scores(pred.probs)[others])


def test_sure_inputs_do_not_use_up_the_share_that_may_be_missed() -> None:
    bayes, held, (x, y) = fitted("classification", 4), classes(2000, 2), classes(2000, 3)
    bayes.tau = 4.0  # too sure of itself
    right = (bayes.predict(held[0]).label == held[1]).double().mean().item()
    pred = bayes.calibrate(held).predict(x)
    assert torch.equal(pred.set(right - 0.05).sum(1), torch.ones(2000, dtype=torch.long))
    share = covers(pred.set(right + 0.1), y).double().mean().item()
    assert abs(share - right - 0.1) < 4 * (2 * 0.2 / 2000) ** 0.5


def test_without_calibration_the_old_interval_and_the_smallest_set() -> None:
    bayes, x = regressor(), noisy(20, 3)[0]
    before = bayes.predict(x).interval(0.9)
    after = bayes.calibrate(noisy(50, 4)).predict(x).interval(0.9, calibrated=False)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pred = fitted("classification", 4).predict(classes(50, 3)[0])
    for level in (0.3, 0.9):
        for probs, row in zip(pred.probs.tolist(), pred.set(level).tolist(), strict=True):
            order = sorted(range(4), key=lambda k, p=probs: -p[k])
            size = next(s for s in range(1, 5) if sum(probs[k] for k in order[:s]) >= level)
            assert {k for k in range(4) if row[k]} == set(order[:size])


def test_level_of_calibrate_is_the_default() -> None:
    bayes, x = regressor().calibrate(noisy(99, 2), level=0.5), noisy(5, 3)[0]
    pred = bayes.predict(x)
    assert torch.equal(pred.interval()[0], pred.interval(0.5)[0])
    assert not torch.equal(pred.interval()[0], pred.interval(0.9)[0])


def test_loader_equals_tensors() -> None:
    held = noisy(90, 2)
    whole = regressor().calibrate(held).calibration
    batched = regressor().calibrate(DataLoader(TensorDataset(*held), batch_size=16)).calibration
    torch.testing.assert_close(whole.scores[0], batched.scores[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("groups", [None, "class"])
def test_calibration_is_saved_and_loaded(tmp_path: Path, groups: Any) -> None:
    bayes, x = fitted("classification", 4), classes(30, 3)[0]
    bayes.calibrate(classes(200, 2), level=0.8, score="raps", groups=groups)
    wanted = bayes.predict(x)
    bayes.save(tmp_path / "net.mcbn")
    twin = mcbn.MCBN(bayes.model, "classification").load_state_dict(bayes.state_dict())
    for other in (mcbn.MCBN.load(tmp_path / "net.mcbn", bayes.model), twin):
        pred = other.predict(x)
        assert torch.equal(pred.set(), wanted.set())
        assert torch.equal(pred.reject(0.4), wanted.reject(0.4))


def test_what_changes_predictions_drops_the_calibration_with_a_warning() -> None:
    held, x = noisy(60, 2), noisy(N, 1)[0]
    changes = {
        "fit": lambda b: b.fit(x, n_samples=20, batch_size=16),
        "tune": lambda b: b.tune(held),
        "tau": lambda b: setattr(b, "tau", 3.0),
        "posterior": lambda b: setattr(b, "posterior", b.posterior.at_batch_size(8)),
    }
    for change in changes.values():
        bayes = regressor().calibrate(held)
        with pytest.warns(UserWarning, match=r"calibration is dropped; call calibrate\(held_out_data\) again"):
            change(bayes)
        assert bayes.calibration is None
    bayes = regressor().calibrate(held)
    assert bayes.to("cpu").calibration is not None
    assert bayes.with_posterior(bayes.posterior).calibration is None


def test_another_way_to_predict_is_not_covered_by_the_promise() -> None:
    bayes, x = regressor().calibrate(noisy(60, 2)), noisy(5, 3)[0]
    for options in ({"method": "linear"}, {"n_samples": 10}):
        pred = bayes.predict(x, **options)
        with pytest.raises(
            mcbn.MCBNError, match=r"calibrated with method='sample', n_samples=20, mean='drawn', but predicted with"
        ):
            pred.interval(0.9)
        pred.interval(0.9, calibrated=False)
    linear = regressor().calibrate(noisy(60, 2), method="linear")
    linear.predict(x, method="linear").interval(0.9)


def test_a_promise_that_lacks_for_one_batch_lacks_for_all_of_a_loader() -> None:
    bayes = regressor().calibrate(noisy(100, 1))
    x = noisy(4, 2)[0]
    wide, sure = (bayes.predict(x, tolerance=t, chunk_size=2) for t in (1e-9, 1e9))  # all draws, and few
    assert wide.n_samples == bayes.posterior.n_samples > sure.n_samples
    for parts in ([wide, sure], [sure, wide]):
        both = join(parts)
        assert both.n_samples == sure.n_samples  # so that no standard error is told too small
        with pytest.raises(mcbn.MCBNError, match="calibrated with"):
            both.interval(0.9)


def test_baselines_calibrate_as_well() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)).double().eval()
    held, (x, y) = noisy(400, 2), noisy(400, 3)
    for method in (
        MCDropout(network, "regression"),
        DeepEnsemble([network], "regression"),
        Temperature(network, "regression"),
    ):
        method.tau = 1.0
        share = inside(method.calibrate(held).predict(x).interval(0.8), y).double().mean().item()
        assert abs(share - 0.8) < 4 * (2 * 0.16 / 400) ** 0.5
        with pytest.warns(UserWarning, match="calibration is dropped"):
            method.fit()
        assert method.calibration is None
    twin = ConstantUncertainty(regressor()).tune(held).calibrate(held)
    with pytest.warns(UserWarning, match="calibration is dropped"):
        twin.fit(held[0], n_samples=5, batch_size=16)
    assert twin.calibration is None


@pytest.mark.parametrize(
    ("held", "options", "message"),
    [
        (noisy(18, 2), {"level": 0.95}, "level 0.95 needs at least 19 held-out examples, calibrate was given 18"),
        (noisy(0, 2), {}, "calibrate needs held-out examples with targets, got none"),
        (noisy(30, 2), {"level": 1.0}, "level must lie between 0 and 1, got 1.0"),
        (noisy(30, 2), {"score": "aps"}, "score must be one of"),
        (noisy(30, 2), {"groups": "class"}, 'groups="class" is for classification'),
        (noisy(30, 2), {"groups": torch.zeros(29, dtype=torch.long)}, "groups holds 29 numbers for 30 held-out"),
        (noisy(30, 2), {"groups": torch.zeros(30)}, "whole numbers, one an example; got (30,) torch.float32"),
        ((noisy(3, 2)[0], torch.tensor([[1.0], [math.nan], [2.0]])), {}, "1 validation targets are not finite"),
    ],
)
def test_mistakes_of_regression(held: Any, options: Any, message: str) -> None:
    with pytest.raises(mcbn.MCBNError, match=re.escape(message)):
        regressor().calibrate(held, **options)


def test_mistakes_when_asking() -> None:
    pred = regressor().calibrate(noisy(18, 2)).predict(noisy(4, 3)[0])
    with pytest.raises(mcbn.MCBNError, match=r"give it more, or ask for 0\.947 at most"):
        pred.interval(0.95)
    for level in (0.0, 1.2):
        with pytest.raises(mcbn.MCBNError, match="level must lie between 0 and 1"):
            pred.interval(level)
    with pytest.raises(mcbn.MCBNError, match="groups= goes with a calibration by groups"):
        pred.interval(0.9, groups=[0, 0, 0, 0])
    grouped = regressor().calibrate(noisy(40, 2), groups=[0, 1] * 20).predict(noisy(4, 3)[0])
    with pytest.raises(mcbn.MCBNError, match="no held-out example was of group 7; there are"):
        grouped.interval(0.5, groups=[0, 1, 7, 0])
    with pytest.raises(mcbn.MCBNError, match="4 whole numbers, one an example"):
        grouped.interval(0.5, groups=[0, 1])


def test_mistakes_of_classification() -> None:
    bayes, (x, y) = fitted("classification", 4), classes(30, 2)
    with pytest.raises(mcbn.MCBNError, match=r"labels must lie in 0\.\.3 \(4 classes\); got"):
        bayes.calibrate((x, y + 1))
    with pytest.raises(mcbn.MCBNError, match=r"needs at least 19 held-out examples of class \d"):
        bayes.calibrate((x, y), groups="class", level=0.95)
    with pytest.raises(mcbn.MCBNError, match="this DataLoader shuffles: pass shuffle=False"):
        bayes.calibrate(DataLoader(TensorDataset(x, y), shuffle=True), groups=[0] * 30)
    with pytest.raises(mcbn.MCBNError, match="needs held-out examples with targets, got none"):
        bayes.calibrate((x, torch.full_like(y, 255)), ignore_index=255)
    with pytest.raises(mcbn.MCBNError, match="groups holds 29 numbers for 30 held-out examples"):
        bayes.calibrate((x, y), groups=[0] * 29)
    for penalty in (None, 5, "a", (1,), (1, 2, 3), ("a", 1), (-1, 2), (math.nan, 2)):
        with pytest.raises(mcbn.MCBNError, match="penalty must be"):
            bayes.calibrate((x, y), score="raps", penalty=penalty)


@pytest.mark.parametrize("options", [{}, {"batch_sizes": [8]}])
def test_a_mistake_drops_no_calibration(options: Any) -> None:
    held, (x, _) = noisy(60, 2), noisy(5, 3)
    bayes = regressor().calibrate(held)
    low = bayes.predict(x).interval(0.5)[0]
    with pytest.raises(mcbn.MCBNError, match="not finite"):
        bayes.tune((held[0], held[1] * math.nan), **options)
    with pytest.raises(mcbn.MCBNError, match="tau must be"):
        bayes.tau = -1.0
    assert torch.equal(bayes.predict(x).interval(0.5)[0], low)
    with pytest.warns(UserWarning, match="calibration is dropped") as told:
        bayes.tune(held, **options)
    assert told[0].filename == __file__
    assert bayes.calibration is None


def test_groups_take_batches_in_order_alone() -> None:
    bayes, held = regressor(), TensorDataset(*noisy(60, 2))
    groups = [0, 1] * 30
    whole = bayes.calibrate(held[:], groups=groups).calibration
    ordered = DataLoader(held, batch_sampler=BatchSampler(SequentialSampler(held), 7, drop_last=False))
    for loader in (ordered, DataLoader(held, batch_size=7)):
        kept = bayes.calibrate(loader, groups=groups).calibration
        assert all(torch.allclose(kept.scores[g], whole.scores[g]) for g in (0, 1))
    mixed = DataLoader(held, batch_sampler=BatchSampler(RandomSampler(held), 7, drop_last=False))
    with pytest.raises(mcbn.MCBNError, match="this DataLoader shuffles"):
        bayes.calibrate(mixed, groups=groups)


def tied(score: str) -> tuple[Any, Tensor, Tensor]:
    """Few distinct inputs and targets, in single precision: most scores are ties."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 2, (1200, 3), generator=generator).float()
    y = torch.poisson(3 + 2 * x.sum(1, keepdim=True), generator=generator)
    y = torch.where(torch.rand(1200, 1, generator=generator) < 0.3, 0.0, y)
    network = fitted("regression").model.float()
    network[1].reset_running_stats()
    network.train()(x)
    network.eval()
    bayes = mcbn.MCBN(network, "regression").fit(x, n_samples=20, batch_size=16)
    bayes.tau = 0.3
    return bayes.calibrate((x[:200], y[:200]), score=score), x, y


@pytest.mark.parametrize("score", ["std", "absolute", "quantile"])
def test_ties_with_the_threshold_are_inside_whatever_is_rounded(score: str) -> None:
    bayes, x, y = tied(score)
    for size in (1, 7, 1000):
        pred = bayes.predict(x[200 : 200 + size], return_samples=True)
        new = y[200 : 200 + size]
        ours = conformal._score_values(pred, new, bayes.calibration, torch.zeros(size), (False, 0, None))[0][:, 0, 0]
        for level in torch.linspace(0.02, 0.98, 49).tolist():
            below = ours <= bayes.calibration.threshold(level)[0]
            assert inside(pred.interval(level), new)[below, 0].all()


def test_predictions_that_are_not_finite_calibrate_nothing_and_are_left_to_a_human() -> None:
    class Sometimes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x[:, 2:] > 1, math.nan, super().forward(x))

    for task, (x, y), how in (("classification", classes(900, 2), {}), ("regression", noisy(900, 2), {"tolerance": 5})):
        broken = Sometimes(*fitted(task, 4 if task == "classification" else 1).model).eval()
        bayes = mcbn.MCBN(broken, task).fit(x, n_samples=20, batch_size=16)
        bayes.tau, lost = 1.0, x[:, 2] > 1
        with pytest.raises(mcbn.MCBNError, match=r"predictions of \d+ held-out examples are NaN: look at these inputs"):
            bayes.calibrate((x, y))
        pred = bayes.calibrate((x[~lost], y[~lost])).predict(x)
        asked = pred.reject(0.6, **how)
        assert asked[lost].all()
        assert not asked[~lost].all()
        if task == "classification":
            assert pred.set(0.9)[lost].all()


def test_levels_and_groups_of_other_libraries(tmp_path: Path) -> None:
    held, (x, _) = noisy(60, 2), noisy(20, 3)
    bayes = regressor().calibrate(held, level=np.float32(0.75))
    bayes.save(tmp_path / "kept.mcbn")
    assert mcbn.MCBN.load(tmp_path / "kept.mcbn", bayes.model).calibration.level == 0.75
    assert torch.equal(bayes.predict(x).interval(torch.tensor(0.5))[0], bayes.predict(x).interval(0.5)[0])
    with pytest.raises(mcbn.MCBNError, match=r"level must lie between 0 and 1, got '0\.9'"):
        bayes.predict(x).interval("0.9")
    pandas = pytest.importorskip("pandas")
    groups = pandas.Series([0, 1] * 30, index=range(100, 160))
    known, other = ([0, 1] * 10, pandas.Series([0, 1] * 10, index=range(7, 27)))
    low = regressor().calibrate(held, groups=groups).predict(x).interval(0.5, groups=other)[0]
    assert torch.equal(low, regressor().calibrate(held, groups=[0, 1] * 30).predict(x).interval(0.5, groups=known)[0])
    with pytest.raises(mcbn.MCBNError, match="encode text as numbers first"):
        regressor().calibrate(held, groups=["a", "b"] * 30)


def test_a_mean_that_is_given_has_no_promise() -> None:
    pred = regressor().calibrate(noisy(60, 2)).predict(noisy(5, 3)[0])
    assert pred.about(pred.mean + 100).calibration is None


def test_a_class_that_was_not_held_out_is_not_promised() -> None:
    x, y = classes(200, 2)
    bayes = fitted("classification", 4).calibrate((x[y > 0], y[y > 0]), groups="class")
    assert not conformal.promised(bayes.predict(x), 0.5)
    conformal.inside(bayes.predict(x), y, 0.5)


def test_constant_predictions_have_no_scale() -> None:
    bayes = fitted("regression")
    with pytest.raises(mcbn.MCBNError, match='score="quantile" needs the noise of the targets'):
        bayes.calibrate(noisy(30, 2), score="quantile")
    x, y = noisy(40, 2)
    torch.nn.init.zeros_(bayes.model[3].weight)
    constant = mcbn.MCBN(bayes.model, "regression").fit(x, n_samples=4, batch_size=8)
    with pytest.raises(mcbn.MCBNError, match=r"predictive std is 0 for .* tune\(validation_data\) first"):
        constant.calibrate((x, y))
    constant.calibrate((x, y), score="absolute")
    with pytest.raises(mcbn.MCBNError, match="not fitted yet; call fit"):
        mcbn.MCBN(bayes.model, "regression").calibrate((x, y))


def test_drawn_samples_must_be_kept_for_quantiles_of_a_loader() -> None:
    bayes = regressor().calibrate(noisy(40, 2), score="quantile")
    loader = DataLoader(TensorDataset(*noisy(20, 3)), batch_size=8)
    with pytest.raises(mcbn.MCBNError, match="return_samples=True"):
        bayes.predict(loader).interval(0.9)
    kept = bayes.predict(loader, return_samples=True).interval(0.9)
    torch.testing.assert_close(kept[0], bayes.predict(noisy(20, 3)[0]).interval(0.9)[0], rtol=1e-9, atol=1e-9)


def test_calibration_and_prediction_draw_random_shares_of_their_own() -> None:
    """Equal shares would tie each new input to the held-out one of the same place."""
    bayes, (x, y) = fitted("classification", 4), classes(60, 2)
    pred = bayes.calibrate((x, y), randomize=True).predict(x)
    new = pred.calibration.score_classes(pred.probs, 0).gather(1, y.unsqueeze(1))
    held = pred.calibration.scores[0]
    assert not torch.isin(held, new).any()
    assert abs(held.mean() - new.mean()) < 0.1
