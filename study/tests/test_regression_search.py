"""Cross-validation with early stopping, and networks trained for chosen epochs, each against a naive reference."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mcbn.data import load
from mcbn_study.regression import train as training
from mcbn_study.regression.measure import Evaluator, rmse
from mcbn_study.regression.profile import PAPER, Configuration, Profile
from mcbn_study.regression.search import CrossValidation, fold_problem, grid_networks, winners
from mcbn_study.regression.stack import Networks
from mcbn_study.regression.train import Trainer, train_streams
from test_regression_train import H, M, assert_same, problem

RULES = Profile(n_folds=3, evaluate_every=4, patience=2, max_epochs=60, selection_samples=5, n_samples=20)
DECAYS = (1.0, 0.1, 1e-4)


def naive_search(given, family, configuration, rules):
    """Train the fold networks of one configuration by themselves and follow the protocol's words."""
    wanted = grid_networks(given, [configuration], family, H)
    trainer = Trainer(given, wanted)
    wanted = trainer.networks
    evaluator = Evaluator(given, wanted.batch_size, rules.selection_samples)
    best, waited = {"mc": (math.inf, 0, None), "plain": (math.inf, 0, None)}, {"mc": 0, "plain": 0}
    for epoch in range(rules.evaluate_every, rules.max_epochs + 1, rules.evaluate_every):
        trainer.advance(rules.evaluate_every)
        if rules.fresh_draws:
            evaluator.draw_anew(epoch)
        found = {
            "mc": evaluator.moments(trainer.values, wanted)[0],
            "plain": evaluator.plain(trainer.values, wanted),
        }
        for name, prediction in found.items():
            mean = float(rmse(prediction, given, wanted.stream).mean())
            if mean < best[name][0]:
                best[name], waited[name] = (mean, epoch, {n: v.clone() for n, v in trainer.values.items()}), 0
            else:
                waited[name] += 1
        if min(waited.values()) >= rules.patience:
            break
    return best, epoch


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_search_follows_the_protocol(family, fresh, monkeypatch):
    monkeypatch.setattr(training, "LEARNING_RATE", 0.03)  # so that some overfit within few epochs
    rules = replace(RULES, fresh_draws=fresh)
    given = problem()  # one split of three folds, whose epochs have 3, 3 and 4 batches
    configurations = [Configuration(decay, M, None if family == "bn" else 0.1) for decay in DECAYS]
    search = CrossValidation(given, rules, grid_networks(given, configurations, family, H))
    found = search.run()
    naive = [naive_search(given, family, configuration, rules) for configuration in configurations]
    for i, name in enumerate(("mc", "plain")):
        scores = [best[name][0] for best, _ in naive]
        assert_same(found["rmse"][i, 0], torch.tensor(scores, dtype=torch.float64), 1e-8)
        assert found["epoch"][i, 0].tolist() == [best[name][1] for best, _ in naive]
        winner = scores.index(min(scores))
        assert int(found["winner"][i, 0]) == winner
        kept = naive[winner][0][name][2]
        assert_same(winners(found, i, 0), kept, 1e-8)
    assert found["stopped"][0].tolist() == [end for _, end in naive]
    assert len(set(found["stopped"][0].tolist())) > 1, "the case should have configurations that stop early"
    assert len(search.trainer.networks.stream) < 9, "the stack should have shrunk"


def test_validation_moments_are_those_of_the_kept_networks_in_original_units():
    given = problem()
    search = CrossValidation(given, RULES, grid_networks(given, [Configuration(0.1, M)], "bn", H))
    found = search.run()
    wanted = grid_networks(given, [Configuration(0.1, M)], "bn", H)
    values = winners(found, 0, 0)
    samples = Evaluator(given, M, RULES.n_samples).samples(values, wanted)
    for f, n in enumerate((10, 9, 8)):
        drawn = samples[f, :, :n] * given.y_std[f] + given.y_mean[f]
        assert_same(found["mean"][0, 0, f, :n], drawn.mean(0))
        assert_same(found["variance"][0, 0, f, :n], drawn.var(0, correction=0))
        assert found["y"][0, 0, f, n:].isnan().all()
    assert (found["variance"][1, 0, 0] == 0).all()  # plain networks have none


def test_winner_can_be_given():
    configurations = [Configuration(decay, M) for decay in DECAYS]
    search = CrossValidation(problem(), RULES, grid_networks(problem(), configurations, "bn", H), winner=[0])
    assert search.run()["winner"].tolist() == [[0], [0]]


def test_batch_size_above_the_smallest_part_means_that_part():
    assert grid_networks(problem(), [Configuration(0.1, 1024)], "bn", H).batch_size == 30


@pytest.mark.parametrize("epochs", [(3, 2, 1), (2, 4, 2)])
@pytest.mark.parametrize("sizes", [(8, 16, 8), (8, 8, 8)])
def test_streams_get_their_own_epochs_and_configuration(epochs, sizes):
    given = problem()
    chosen = [
        (Configuration(decay, size), end) for decay, size, end in zip((0.1, 1e-3, 1e-2), sizes, epochs, strict=True)
    ]
    trained = train_streams(given, chosen, "bn", H)
    for r, (configuration, end) in enumerate(chosen):
        decay, zero = torch.tensor([configuration.weight_decay]), torch.zeros(1)
        alone = Trainer(given, Networks("bn", torch.tensor([r]), decay, zero, configuration.batch_size, H))
        alone.advance(end)
        networks, values = trained[r]
        assert networks.stream.tolist() == [r]
        assert_same(values, alone.values)


def test_switches_of_the_published_code_change_the_search_alone():
    published = replace(PAPER, fresh_draws=True, full_batches=True, one_stream=True)
    assert PAPER.batch_sizes_of("boston") == (32, 64, 128, 256)
    assert published.batch_sizes_of("boston") == PAPER.batch_sizes
    assert published.batch_sizes_of("energy") == (32, 64, 128, 256, 512)
    assert "one_stream" not in PAPER.settings()
    assert published.hash != PAPER.hash
    study = SimpleNamespace(dataset="yacht", data=load("yacht"), profile=published, device="cpu")
    assert len(set(fold_problem(study, splits=(1, 2)).streams)) == 1
    study.profile = PAPER
    assert len(set(fold_problem(study, splits=(1, 2)).streams)) == 10
