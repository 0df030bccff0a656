"""Predictions of stacked networks against modules run one draw at a time."""

import pytest
import torch
from torch import nn

from mcbn.stacked import network as stacked_network
from mcbn_study.regression import measure
from mcbn_study.regression.measure import Evaluator, rmse
from mcbn_study.regression.problem import batch_draws, purpose_key, uniforms
from mcbn_study.regression.stack import matrices, population_statistics
from mcbn_study.regression.train import Trainer
from test_reproduce_training import STREAMS, H, M, Q, assert_same, networks, problem, toy

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
