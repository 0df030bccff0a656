"""CIFAR-10: fresh batches for every query, curves over T, and the evaluation."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import mcbn
from cifar import TINY, images, trained
from mcbn_study.cifar10.measure import Evaluation, curve, difference, per_query, score
from mcbn_study.cifar10.profile import Split
from mcbn_study.cifar10.train import Augmented
from mcbn_study.networks import standardize


def naive_per_query(network: nn.Module, drawn: mcbn.Posterior, x: torch.Tensor, n_samples: int) -> torch.Tensor:
    """For each image and pass: a draw of its own set as running statistics, the image run."""
    logits = torch.zeros(n_samples, len(x), 10, dtype=x.dtype)
    for n, t in ((n, t) for n in range(len(x)) for t in range(n_samples)):
        taught = copy.deepcopy(network)
        for name, module in taught.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean, module.running_var = (
                    values[name][n * n_samples + t] for values in (drawn.mean, drawn.var)
                )
        logits[t, n] = taught.eval()(x[n : n + 1])[0]
    return logits


def test_per_query_is_the_loop_by_hand() -> None:
    network, data = trained().double(), Augmented(images().x)
    before = copy.deepcopy(network.state_dict())
    x = standardize(images(5, seed=9).x).double()
    drawn = mcbn.MCBN(network, "classification").fit(data, n_samples=15, batch_size=7, seed=4).posterior
    with torch.no_grad():
        expected = naive_per_query(network, drawn, x, 3)
    logits = per_query(network, data, x, n_samples=3, batch_size=8, seed=4, pool=None)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())


def test_per_query_in_small_passes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network, data = trained().double(), Augmented(images().x)
    x = standardize(images(3, seed=9).x)
    whole = per_query(network, data, x, n_samples=4, batch_size=8, seed=4, pool=None)
    monkeypatch.setitem(per_query.__globals__, "ROWS", 5)
    torch.testing.assert_close(per_query(network, data, x, n_samples=4, batch_size=8, seed=4, pool=None), whole)


def test_images_that_draw_from_a_pool_have_different_batches_of_it_each() -> None:
    network, data = trained().double(), Augmented(images().x)
    x = standardize(images(1, seed=9).x.expand(3, -1, -1, -1)).double()  # one image thrice: outputs tell the batches
    logits = per_query(network, data, x, n_samples=4, batch_size=8, seed=4, pool=5)[..., 0]  # (T, N)
    drawn = mcbn.MCBN(network, "classification").fit(data, n_samples=5, batch_size=7, seed=4).posterior
    with torch.no_grad():
        pool = naive_per_query(network, drawn, x[:1], 5)[:, 0, 0]
    nearest = (logits[..., None] - pool).abs().min(-1)
    assert float(nearest.values.max()) < 1e-9
    assert all(len(set(batches.tolist())) == 4 for batches in nearest.indices.T)
    assert len({tuple(batches.tolist()) for batches in nearest.indices.T}) > 1


def logits_and_labels(draws: int = 16, n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(draws, n, 10, generator=generator), torch.randint(10, (n,), generator=generator)


def test_curve_is_the_direct_computation_on_disjoint_sets() -> None:
    logits, y = logits_and_labels(12)
    found = curve(logits, y, [1, 4, 5, 16])
    assert [(s["n_samples"], s["n_sets"]) for s in found] == [(1, 12), (4, 3), (5, 2)]
    for scored in found:
        T = scored["n_samples"]
        values = []
        for s in range(12 // T):
            p = logits[s * T : (s + 1) * T].double().softmax(2).mean(0)
            values.append(sum(math.log(p[n, y[n]]) for n in range(len(y))) / len(y))
        assert scored["scores"]["pll"] == pytest.approx(np.mean(values), abs=1e-12)
        assert scored["errors"]["pll"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-12)


def test_curve_cannot_fall_where_sets_are_nested() -> None:
    found = curve(*logits_and_labels(16), [1, 2, 4, 8, 16])
    values = [scored["scores"]["pll"] for scored in found]
    assert values == sorted(values)
    assert "pll" not in found[-1]["errors"]  # one set has no error


def test_curve_at_all_draws_is_the_score_of_the_prediction() -> None:
    network, x = trained(), standardize(images(20, seed=9).x)
    y = torch.arange(20) % 10
    bayes = mcbn.MCBN(network, "classification").fit(Augmented(images().x), n_samples=4, batch_size=8)
    prediction = bayes.predict(x)
    (scored,) = curve(bayes.sample(x), y, [4])
    wrong = prediction.label != y
    expected = {
        "pll": prediction.log_prob(y).mean(),
        "accuracy": (~wrong).double().mean(),
        "ece": mcbn.metrics.ece(prediction.probs, y),
        "brier": mcbn.metrics.brier(prediction.probs, y),
        "auroc_entropy": mcbn.metrics.auroc(prediction.entropy, wrong),
        "auroc_max_probability": mcbn.metrics.auroc(1 - prediction.probs.amax(1), wrong),
        "auroc_mutual_information": mcbn.metrics.auroc(prediction.mutual_information, wrong),
    }
    assert scored["scores"].keys() == expected.keys()
    for name, value in expected.items():
        assert scored["scores"][name] == pytest.approx(float(value), abs=2e-2 if "auroc" in name else 1e-5), name


def test_scores_leave_out_what_cannot_be_told() -> None:
    probs = torch.eye(10).double()[None] * 0.9 + 0.01
    assert set(score(probs, torch.arange(10))) == {"pll", "accuracy", "ece", "brier"}


def test_difference_of_estimators_is_paired() -> None:
    shared, y = logits_and_labels(16)
    gap, error = difference(shared[:4], shared[:4], y)
    assert (gap, error) == (0.0, 0.0)
    gap, error = difference(shared[:4], shared[4:], y)
    p = [shared[i : i + 4].double().softmax(2).mean(0)[range(50), y].log().numpy() for i in range(0, 16, 4)]
    d = p[0] - np.mean(p[1:], 0)
    sets = [v.mean() for v in p[1:]]
    assert gap == pytest.approx(d.mean(), abs=1e-12)
    assert error == pytest.approx(math.sqrt(d.var(ddof=1) / 50 + np.var(sets, ddof=1) / 3), abs=1e-12)


def evaluate(seed: int = 0) -> list[dict]:
    data = Split(train=images(), validation=images(10, seed=7), test=images(20, seed=8))
    return list(Evaluation(trained(), TINY, data, seed=seed).rows())


def test_evaluation_measures_every_method_once() -> None:
    rows = evaluate()
    keys = [(r["method"], r["part"], r["batch_size"], r["n_samples"]) for r in rows]
    assert sorted(keys, key=str) == sorted(
        [
            ("plain", "validation", None, None),
            ("plain", "test", None, None),
            *(("mcbn", "test", 8, T) for T in (1, 2, 4)),
            *(("mcbn", "validation", M, 2) for M in (4, 8)),
            ("mcbn", "test", 4, 2),
            *(("mcbn_per_query", "query", 8, T) for T in (1, 2)),
            *(("mcbn_shared", "query", M, T) for M in (7, 8) for T in (1, 2)),
        ],
        key=str,
    )
    assert {r["n_images"] for r in rows if r["part"] == "query"} == {6}
    scores = [[r["scores"] for r in evaluate()], [r["scores"] for r in rows]]
    assert scores[0] == scores[1]
