"""Predictions of stacked networks against modules run one draw at a time; tau and scores against their equations."""

import math

import pytest
import torch
from torch import nn

from mcbn.stacked import network as stacked_network
from mcbn_study.regression import measure
from mcbn_study.regression.measure import Evaluator, rmse, score_run, tune_tau
from mcbn_study.regression.problem import batch_draws, purpose_key, uniforms
from mcbn_study.regression.stack import matrices, population_statistics
from mcbn_study.regression.train import Trainer
from test_regression_train import STREAMS, H, M, Q, assert_same, networks, problem, toy

T = 12


def trained(family):
    trainer = Trainer(problem(), networks(family))
    trainer.advance(3)
    return trainer


def module(trainer, index):
    return stacked_network(trainer.values, index, Q)


def naive_draw(network, batch, query):
    """Set the statistics of one training batch, both layers jointly, then predict."""
    norms = [layer for layer in network if isinstance(layer, nn.BatchNorm1d)]
    for norm in norms:
        norm.momentum, norm.running_mean, norm.running_var = 1.0, torch.zeros(H).double(), torch.ones(H).double()
    with torch.no_grad():
        network.train()(batch)
        for norm in norms:
            norm.running_var *= (len(batch) - 1) / len(batch)  # the module keeps the unbiased one
        return network.eval()(query)[:, 0]


@pytest.mark.parametrize(("index", "r"), [(1, 0), (4, 2)])
def test_draws_equal_algorithm_1(index, r):
    trainer = trained("bn")
    given = trainer.problem
    found = Evaluator(given, M, T).samples(trainer.values, trainer.networks)[index]  # (T, n)
    n = int(given.query.n[r])
    batches = batch_draws(STREAMS[r], int(given.train.n[r]), T, M)
    network = module(trainer, index)
    naive = torch.stack([naive_draw(network, given.train.x[r, rows], given.query.x[r, :n]) for rows in batches])
    assert_same(found[:, :n], naive, 1e-9)


@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_draws_made_anew_belong_to_one_evaluation(family):
    trainer = trained(family)
    evaluator = Evaluator(trainer.problem, M, T)
    drawn = [evaluator.samples(trainer.values, trainer.networks)]
    for evaluation in (20, 40, 20):
        evaluator.draw_anew(evaluation)
        drawn.append(evaluator.samples(trainer.values, trainer.networks))
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_batches_made_anew_hold_distinct_rows_of_their_stream():
    given = problem()
    evaluator = Evaluator(given, M, T)
    evaluator.draw_anew(20)
    assert evaluator._batches.shape == (len(given.streams), T, M)
    for batches, n in zip(evaluator._batches, given.train.n, strict=True):
        assert int(batches.max()) < n
        assert all(len(set(batch.tolist())) == M for batch in batches)


@pytest.mark.parametrize(("index", "r"), [(0, 0), (5, 2)])
def test_dropout_draws_equal_masked_forward_passes(index, r):
    trainer = trained("dropout")
    given, rate = trainer.problem, trainer.networks.rate[index]
    found = Evaluator(given, M, T).samples(trainer.values, trainer.networks)[index]
    n = int(given.query.n[r])
    u = uniforms(torch.tensor([purpose_key(STREAMS[r], "dropout draws")]), torch.arange(T), n, Q + 2 * H)[0]
    masks = (u >= rate).double() / (1 - rate)
    w = [part[index] for part in matrices(trainer.values, Q)]
    b = [trainer.values[f"bias{i}"][index] for i in (1, 2, 3)]
    a = torch.relu((given.query.x[r, :n] * masks[..., :Q]) @ w[0] + b[0])
    a = torch.relu((a * masks[..., Q : Q + H]) @ w[1] + b[1])
    assert_same(found[:, :n], ((a * masks[..., Q + H :]) @ w[2] + b[2])[..., 0])


@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_moments_are_those_of_the_draws_in_any_chunks(family, monkeypatch):
    trainer = trained(family)
    evaluator = Evaluator(trainer.problem, M, T)
    samples = evaluator.samples(trainer.values, trainer.networks)
    for numbers in (1, 5 * 10 * H, 2**20):
        monkeypatch.setitem(measure.CHUNK_NUMBERS, "cpu", numbers)
        mean, variance = evaluator.moments(trainer.values, trainer.networks)
        assert_same(mean, samples.mean(1))
        assert_same(variance, samples.var(1, correction=0))


def test_plain_uses_the_statistics_of_the_whole_training_part():
    trainer = trained("bn")
    given = trainer.problem
    found = Evaluator(given, M, T).plain(trainer.values, trainer.networks)
    statistics = population_statistics(trainer.values, trainer.networks, given)
    for index, r in ((0, 0), (3, 1), (5, 2)):
        n, n_train = int(given.query.n[r]), int(given.train.n[r])
        network = module(trainer, index)
        naive = naive_draw(network, given.train.x[r, :n_train], given.query.x[r, :n])
        assert_same(found[index, :n], naive, 1e-9)
        for layer, (mean, variance) in zip((network[1], network[4]), statistics, strict=True):
            assert_same(layer.running_mean, mean[index])
            assert_same(layer.running_var, variance[index])


def test_plain_dropout_keeps_every_unit():
    trainer = trained("dropout")
    found = Evaluator(trainer.problem, M, T).plain(trainer.values, trainer.networks)[4]
    w = [part[4] for part in matrices(trainer.values, Q)]
    b = [trainer.values[f"bias{i}"][4] for i in (1, 2, 3)]
    a = torch.relu(trainer.problem.query.x[2] @ w[0] + b[0])
    assert_same(found, (torch.relu(a @ w[1] + b[1]) @ w[2] + b[2])[:, 0])


def test_batch_of_all_rows_gives_no_variance_and_the_plain_network():
    trainer = Trainer(problem([0]), networks("bn", 1))
    evaluator = Evaluator(trainer.problem, 30, T)
    mean, variance = evaluator.moments(trainer.values, trainer.networks)
    assert variance.max() < 1e-12
    assert_same(mean, evaluator.plain(trainer.values, trainer.networks), 1e-9)


def test_rmse_is_in_original_units_over_own_rows():
    given = problem()
    y = toy().y
    prediction = (y[30:].mean() - given.y_mean[:, None]) / given.y_std[:, None]  # (3, 1): the same in original units
    found = rmse(prediction.expand(3, 10), given, torch.arange(3))
    for r, n in enumerate((30, 31, 32)):
        assert_same(found[r], (y[n:] - y[30:].mean()).square().mean().sqrt())


# --- scores -----------------------------------------------------------------------------------------------


def normal_crps(e, variance):
    sigma = math.sqrt(variance)
    z = e / sigma
    cumulative = 0.5 * (1 + math.erf(z / math.sqrt(2)))
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return sigma * (z * (2 * cumulative - 1) + 2 * density - 1 / math.sqrt(math.pi))


def test_tau_minimises_crps_averaged_over_folds():
    generator = torch.Generator().manual_seed(1)
    error = 0.7 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    variance = 0.1 * torch.rand(3, 6, generator=generator, dtype=torch.float64)
    error[2, 2:] = torch.nan  # a fold of two rows counts as much as one of six
    mean = torch.zeros_like(error)

    def score(tau):
        folds = []
        for row, own in zip(error.tolist(), variance.tolist(), strict=True):
            points = [normal_crps(e, v + 1 / tau) for e, v in zip(row, own, strict=True) if not math.isnan(e)]
            folds.append(sum(points) / len(points))
        return sum(folds) / 3

    found = tune_tau(mean, variance, error, (0.01, 100.0))
    best = min((0.01 * 1.001**k for k in range(9210)), key=score)
    assert found == pytest.approx(best, rel=1e-2)
    assert score(found) <= score(best) + 1e-12


def test_tau_stays_within_the_range():
    y = torch.randn(2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros_like(y)
    assert tune_tau(zero, zero, y, (10.0, 1000.0)) == pytest.approx(10.0, rel=1e-6)
    assert tune_tau(zero, zero, y, (0.001, 0.01)) == pytest.approx(0.01, rel=1e-6)


def test_scores_equal_their_equations():
    generator = torch.Generator().manual_seed(2)
    samples = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(5, generator=generator, dtype=torch.float64)
    tau, constant = 2.0, 0.8
    found = score_run(samples, y, tau, constant)
    mean = [sum(column) / 7 for column in samples.T.tolist()]
    variance = [sum((f - m) ** 2 for f in c) / 7 for c, m in zip(samples.T.tolist(), mean, strict=True)]
    e = [a - b for a, b in zip(y.tolist(), mean, strict=True)]
    log_2pi = math.log(2 * math.pi)

    def pll(drawn, target, precision):
        terms = [math.exp(-precision / 2 * (target - f) ** 2) for f in drawn]
        return math.log(sum(terms) / len(terms)) - 0.5 * log_2pi + 0.5 * math.log(precision)

    expected = {
        "rmse": math.sqrt(sum(x * x for x in e) / 5),
        "crps": sum(normal_crps(x, v + 1 / tau) for x, v in zip(e, variance, strict=True)) / 5,
        "pll": sum(pll(c, t, tau) for c, t in zip(samples.T.tolist(), y.tolist(), strict=True)) / 5,
        "crps_constant": sum(normal_crps(x, 1 / constant) for x in e) / 5,
        "pll_constant": sum(pll([m], t, constant) for m, t in zip(mean, y.tolist(), strict=True)) / 5,
        "crps_optimum": sum(normal_crps(x, x * x / math.log(2)) for x in e) / 5,
        "pll_optimum": sum(-0.5 * log_2pi - 0.5 - math.log(abs(x)) for x in e) / 5,
    }
    for name in ("crps", "pll"):
        low, high = expected[f"{name}_constant"], expected[f"{name}_optimum"]
        expected[f"{name}_normalized"] = 100 * (expected[name] - low) / (high - low)
    assert found == pytest.approx(expected, rel=1e-10)


def test_an_exact_prediction_has_no_finite_optimum():
    found = score_run(torch.ones(3, 2), torch.tensor([1.0, 2.0]), 1.0, 1.0)
    assert found["pll_optimum"] is None
    assert found["pll_normalized"] is None
    assert found["crps_normalized"] is not None
