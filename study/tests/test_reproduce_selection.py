"""Cross-validation with early stopping, tau, test scores and final networks, each against a naive reference."""

import math

import pytest
import torch

from mcbn_study.regression import train as training
from mcbn_study.regression.measure import Evaluator, rmse, score_run, tune_tau
from mcbn_study.regression.profile import Configuration
from mcbn_study.regression.search import CrossValidation, Rules, grid_networks
from mcbn_study.regression.stack import Networks
from mcbn_study.regression.train import Job, Trainer, train_jobs
from test_reproduce_training import H, M, assert_same, problem

RULES = Rules(evaluate_every=4, patience=2, max_epochs=60, search_samples=5, n_samples=20)
DECAYS = (1.0, 0.1, 1e-4)


def naive_search(given, family, configuration, rules):
    """Train the fold networks of one configuration by themselves and follow the protocol's words."""
    wanted = grid_networks(given, [configuration], family, H)
    trainer = Trainer(given, wanted)
    wanted = trainer.networks
    evaluator = Evaluator(given, wanted.batch_size, rules.search_samples)
    best, waited = {"mc": (math.inf, 0, None), "plain": (math.inf, 0, None)}, {"mc": 0, "plain": 0}
    for epoch in range(rules.evaluate_every, rules.max_epochs + 1, rules.evaluate_every):
        trainer.advance(rules.evaluate_every)
        found = {
            "mc": evaluator.moments(trainer.values, wanted).mean,
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


@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_search_follows_the_protocol(family, monkeypatch):
    monkeypatch.setattr(training, "LEARNING_RATE", 0.03)  # so that some overfit within few epochs
    given = problem()  # one split of three folds, whose epochs have 3, 3 and 4 batches
    configurations = [Configuration(decay, M, None if family == "bn" else 0.1) for decay in DECAYS]
    epochs_seen = []
    search = CrossValidation(given, 3, configurations, RULES, hidden=H, family=family)
    found = search.run(epochs_seen.append)
    naive = [naive_search(given, family, configuration, RULES) for configuration in configurations]
    for i, name in enumerate(("mc", "plain")):
        scores = [best[name][0] for best, _ in naive]
        assert_same(found.rmse[i, 0], torch.tensor(scores, dtype=torch.float64), 1e-8)
        assert found.epoch[i, 0].tolist() == [best[name][1] for best, _ in naive]
        winner = scores.index(min(scores))
        assert int(found.winner[i, 0]) == winner
        kept = naive[winner][0][name][2]
        assert_same({n: v[i, 0] for n, v in found.values.items()}, kept, 1e-8)
    assert found.stopped[0].tolist() == [end for _, end in naive]
    assert len(set(found.stopped[0].tolist())) > 1, "the case should have configurations that stop early"
    assert len(search.trainer.networks.stream) < 9, "the stack should have shrunk"
    assert epochs_seen[-1] == max(found.stopped[0].tolist())


@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_a_search_goes_on_from_its_state(family, monkeypatch):
    monkeypatch.setattr(training, "LEARNING_RATE", 0.03)
    configurations = [Configuration(decay, M, None if family == "bn" else 0.1) for decay in DECAYS]

    def search():
        return CrossValidation(problem(), 3, configurations, RULES, hidden=H, family=family)

    first, states = search(), {}
    whole = first.run(lambda epoch: states.update({epoch: {n: v.clone() for n, v in first.state().items()}}))
    for state in list(states.values())[:: max(1, len(states) // 3)]:
        later = search()
        later.restore(state)
        found = later.run()
        for name, value in vars(whole).items():
            torch.testing.assert_close(getattr(found, name), value, rtol=0, atol=0, equal_nan=True)


def test_validation_moments_are_those_of_the_kept_networks_in_original_units():
    given = problem()
    search = CrossValidation(given, 3, [Configuration(0.1, M)], RULES, hidden=H, family="bn")
    found = search.run()
    wanted = grid_networks(given, [Configuration(0.1, M)], "bn", H)
    values = {name: value[0, 0] for name, value in found.values.items()}
    samples = Evaluator(given, M, RULES.n_samples).samples(values, wanted)
    for f, n in enumerate((10, 9, 8)):
        drawn = samples[f, :, :n] * given.y_std[f] + given.y_mean[f]
        assert_same(found.mean[0, 0, f, :n], drawn.mean(0))
        assert_same(found.variance[0, 0, f, :n], drawn.var(0, correction=0))
        assert found.y[0, 0, f, n:].isnan().all()
    assert (found.variance[1, 0, 0] == 0).all()  # plain networks have none


def test_winner_can_be_given():
    configurations = [Configuration(decay, M) for decay in DECAYS]
    search = CrossValidation(problem(), 3, configurations, RULES, hidden=H, family="bn", winner=[0])
    assert search.run().winner.tolist() == [[0], [0]]


def test_batch_size_above_the_smallest_part_means_that_part():
    assert grid_networks(problem(), [Configuration(0.1, 1024)], "bn", H).batch_size == 30


def test_jobs_get_their_own_epochs_and_configuration():
    given = problem()
    jobs = [
        Job(2, Configuration(0.1, 8), 3),
        Job(0, Configuration(1e-3, 16), 2),
        Job(1, Configuration(1e-3, 8), 1),
        Job(0, Configuration(1e-3, 8), 4),
    ]
    trained = train_jobs(given, jobs, "bn", H)
    assert sorted(place for part in trained for place in part.jobs) == [0, 1, 2, 3]
    for part in trained:
        for i, place in enumerate(part.jobs):
            job, zero = jobs[place], torch.zeros(1)
            decay = torch.tensor([job.configuration.weight_decay])
            alone = Trainer(
                given, Networks("bn", torch.tensor([job.stream]), decay, zero, job.configuration.batch_size, H)
            )
            alone.advance(job.epochs)
            assert int(part.networks.stream[i]) == job.stream
            assert_same({n: v[i] for n, v in part.values.items()}, {n: v[0] for n, v in alone.values.items()})


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
