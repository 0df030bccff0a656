"""Laws that every baseline obeys, and what each mistake is told."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mcbn
from kinds import make, scramble
from mcbn.baselines import ConstantUncertainty, DeepEnsemble, MCDropout, Temperature
from mcbn_study.mnf.predictor import MNF
from untouched import untouched


def net(seed: int, outputs: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, outputs))
    scramble(model, seed)
    return model.double().eval()


def cubn(task: str, seed: int) -> ConstantUncertainty:
    return ConstantUncertainty(mcbn.MCBN(net(0), task)).fit(data()[0], n_samples=6, batch_size=8, seed=seed)


@functools.cache
def trained(seed: int) -> MNF:
    return MNF(hidden=(4,)).fit(*data(), epochs=200, n_samples=6, seed=seed)


METHODS: dict[str, Callable[[str, int], Any]] = {
    "dropout": lambda task, seed: MCDropout(net(0), task).fit(n_samples=6, seed=seed),
    "ensemble": lambda task, seed: DeepEnsemble([net(seed), net(seed + 10), net(seed + 20)], task),
    "mnf": lambda task, seed: copy.copy(trained(seed)),
    "cubn": cubn,
    "temperature": lambda task, seed: Temperature(net(seed), task),
    "cudo": lambda task, seed: ConstantUncertainty(MCDropout(net(0), task)).fit(n_samples=6, seed=seed),
}
REGRESSION_ALONE = ("mnf", "cubn", "cudo")
CASES = [(method, "regression") for method in METHODS]
CASES += [(method, "classification") for method in METHODS if method not in REGRESSION_ALONE]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(20, 3, generator=generator, dtype=torch.float64)


def targets(task: str) -> Tensor:
    return data()[1] if task == "regression" else data()[0][:, :3].argmax(1)


def centre(pred: Any) -> Tensor:
    return pred.mean if isinstance(pred, mcbn.RegressionPrediction) else pred.probs


def spread(pred: Any) -> Tensor:
    return pred.epistemic if isinstance(pred, mcbn.RegressionPrediction) else pred.variance


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[Callable[[int], Any], str]:
    method, task = request.param
    return lambda seed: METHODS[method](task, seed), task


Case = tuple[Callable[[int], Any], str]


def test_same_seed_same_result_other_seed_other_result(case: Case) -> None:
    build, _ = case
    x, _ = data()
    assert torch.equal(centre(build(1).predict(x)), centre(build(1).predict(x)))
    assert not torch.equal(centre(build(1).predict(x)), centre(build(2).predict(x)))


def test_permuting_inputs_permutes_outputs(case: Case) -> None:
    build, _ = case
    x, _ = data()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    whole, permuted = build(0).predict(x), build(0).predict(x[order])
    torch.testing.assert_close(centre(permuted), centre(whole)[order], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(spread(permuted), spread(whole)[order], rtol=1e-8, atol=1e-12)


def test_one_input_alone_equals_that_input_in_a_batch(case: Case) -> None:
    build, _ = case
    x, _ = data()
    whole, alone = build(0).predict(x), build(0).predict(x[3:4])
    torch.testing.assert_close(centre(alone)[0], centre(whole)[3], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(spread(alone)[0], spread(whole)[3], rtol=1e-8, atol=1e-12)


def test_single_draw_has_zero_epistemic_variance(case: Case) -> None:
    build, _ = case
    assert torch.all(spread(build(0).predict(data()[0], n_samples=1)) == 0)


def test_moments_are_those_of_the_samples(case: Case) -> None:
    build, task = case
    x, _ = data()
    method = build(0)
    samples = method.sample(x)  # (T, N, 3)
    if task == "classification":
        samples = samples.softmax(2)
    pred = method.predict(x)
    torch.testing.assert_close(centre(pred), samples.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(spread(pred), samples.var(0, correction=0), rtol=1e-8, atol=1e-12)


def test_loader_equals_tensor(case: Case) -> None:
    build, task = case
    x, _ = data()
    loader = DataLoader(TensorDataset(x, targets(task)), batch_size=7)
    method = build(0)
    torch.testing.assert_close(centre(method.predict(loader)), centre(method.predict(x)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(method.sample(loader), method.sample(x), rtol=1e-10, atol=1e-12)
    by_loader, by_pair = build(0).tune(loader).tau, build(0).tune((x, targets(task))).tau
    torch.testing.assert_close(torch.as_tensor(by_loader), torch.as_tensor(by_pair), rtol=1e-6, atol=0)


def test_tune_improves_the_score_it_tunes(case: Case) -> None:
    build, task = case
    x, y = data()[0], targets(task)
    tuned = build(0).tune((x, y))
    at = torch.as_tensor(tuned.tau)

    def score(factor: float) -> Tensor:
        tuned.tau = at * factor
        pred = tuned.predict(x)
        if task == "classification":
            return -pred.log_prob(y).mean()
        return mcbn.metrics.crps_gaussian(pred.mean, pred.variance, y).mean()

    best = score(1.0)
    others = [f for f in (0.9, 1.1) if task == "regression" or 0.01 <= at * f <= 100]  # the range that is searched
    assert all(best <= score(factor) + 1e-9 for factor in others)


def test_log_prob_is_the_mixture_of_the_samples(case: Case) -> None:
    build, task = case
    x, y = data()[0], targets(task)
    method = build(0).tune((x, y))
    found = method.predict(x).log_prob(y)
    if task == "regression":
        naive = mcbn.metrics.pll(method.sample(x), y, method.tau)
    else:
        naive = (method.sample(x) * method.tau).softmax(2).mean(0).gather(1, y.unsqueeze(1)).log().squeeze(1)
    torch.testing.assert_close(found, naive, rtol=1e-8, atol=1e-10)


def test_regression_tunes_by_pll_too() -> None:
    x, y = data()
    tuned = METHODS["dropout"]("regression", 0).tune((x, y), score="pll")
    assert tuned.tau.shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_model_and_generators_are_bit_identical_after_every_call_and_an_error(training: bool) -> None:
    x, y = data()
    model = net(0).train(training)
    model.register_forward_hook(lambda *args: None)
    with untouched(model):
        wrapped = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=8)
        for method in (MCDropout(model, "regression"), DeepEnsemble([model], "regression"), wrapped):
            for each in (method, ConstantUncertainty(method)):
                each.plain(x), each.sample(x), each.tune((x, y)), each.predict(DataLoader(TensorDataset(x)))
                with pytest.raises(mcbn.MCBNError, match="could not run"):
                    each.predict(x[:, :2])


def test_inputs_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Linear(5, 3).double())
    x, _ = data()
    before = x.clone()
    for method in (MCDropout(model, "regression"), DeepEnsemble([model, model], "regression")):
        method.sample(x), method.plain(x), method.predict(x)
        assert torch.equal(x, before)


# ---------------------------------------------------------------- constant uncertainty, ensemble


def test_constant_twin_has_the_same_mean_and_one_variance() -> None:
    x, y = data()
    base = MCDropout(net(0), "regression").tune((x, y))
    constant = ConstantUncertainty(base)
    kept = base.tau
    pred = constant.tune((x, y)).predict(x)
    assert torch.equal(pred.mean, base.predict(x).mean)
    assert torch.equal(pred.variance, pred.variance[:1].expand_as(pred.variance))
    assert torch.equal(base.tau, kept)
    assert not torch.equal(constant.tau, kept)
    naive = torch.distributions.Normal(pred.mean, pred.std).log_prob(y).sum(1)
    torch.testing.assert_close(pred.log_prob(y), naive, rtol=1e-8, atol=1e-10)


def test_constant_twin_uses_the_draws_asked_for() -> None:
    x, _ = data()
    base = MCDropout(net(0), "regression").fit(n_samples=5)
    assert torch.equal(ConstantUncertainty(base).predict(x, n_samples=2).mean, base.predict(x, n_samples=2).mean)
    assert torch.equal(ConstantUncertainty(base).plain(x), base.plain(x))


def test_constant_twin_follows_a_new_fit_of_its_base() -> None:
    x, _ = data()
    base = mcbn.MCBN(net(0), "regression").fit(x, n_samples=3, batch_size=8)
    constant = ConstantUncertainty(base)
    before = constant.predict(x).mean
    base.fit(x, n_samples=5, batch_size=4, seed=7)
    assert torch.equal(constant.predict(x).mean, base.predict(x).mean)
    assert not torch.equal(constant.predict(x).mean, before)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Pairs that come one after the other, their number unknown."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*data(), strict=True))


@pytest.mark.parametrize("score", ["crps", "pll"])
def test_tune_on_a_stream_equals_tune_on_tensors(score: str) -> None:
    tuned = [METHODS["ensemble"]("regression", 0).tune(held, score=score).tau for held in (Stream(), data())]
    torch.testing.assert_close(*tuned, rtol=1e-6, atol=0)


def test_classification_ensemble_averages_probabilities() -> None:
    x, _ = data()
    members = [net(1), net(2)]
    naive = (members[0](x).softmax(1) + members[1](x).softmax(1)) / 2
    torch.testing.assert_close(DeepEnsemble(members, "classification").predict(x).probs, naive, rtol=1e-10, atol=1e-12)


def test_equal_members_have_zero_variance() -> None:
    x, _ = data()
    assert torch.all(DeepEnsemble([net(1)] * 3, "regression").predict(x).epistemic == 0)


# ---------------------------------------------------------------- mistakes


def test_empty_ensemble_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="at least one network"):
        DeepEnsemble([], "regression")


def test_member_that_is_no_module_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="member 1"):
        DeepEnsemble([net(0), "net"], "regression")  # type: ignore[list-item]


def test_members_with_different_output_shapes_are_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"\(20, 3\), \(20, 2\)"):
        DeepEnsemble([net(0), net(1, outputs=2)], "regression").predict(data()[0])


def test_more_draws_than_members_are_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="ensemble of 2"):
        DeepEnsemble([net(0), net(1)], "regression").predict(data()[0], n_samples=3)


def test_tune_on_targets_that_are_not_finite_is_refused(case: Case) -> None:
    build, task = case
    if task == "regression":
        x, y = data()
        y[0, 0] = torch.nan
        with pytest.raises(mcbn.MCBNError, match="not finite"):
            build(0).tune((x, y))


@pytest.mark.parametrize("n_samples", [0, -1, 1.5, True])
def test_fewer_than_one_sample_is_refused(case: Case, n_samples: Any) -> None:
    build, _ = case
    with pytest.raises(mcbn.MCBNError, match="n_samples must be a whole number"):
        build(0).predict(data()[0], n_samples=n_samples)


@pytest.mark.parametrize("build", [lambda: MCDropout(net(0), "ranking"), lambda: DeepEnsemble([net(0)], "ranking")])
def test_unknown_task_is_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(mcbn.MCBNError, match="task must be one of"):
        build()


def test_constant_uncertainty_of_classification_or_of_a_bare_network_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="for regression"):
        ConstantUncertainty(MCDropout(net(0), "classification"))
    with pytest.raises(mcbn.MCBNError, match="got Sequential"):
        ConstantUncertainty(net(0))  # type: ignore[arg-type]


def test_constant_uncertainty_of_an_unfitted_predictor_says_so() -> None:
    model, x = make("1d")
    with pytest.raises(mcbn.MCBNError, match="not fitted"):
        ConstantUncertainty(mcbn.MCBN(model, "regression")).predict(x)


@pytest.mark.parametrize("score", ["rmse", "crps"])
def test_unknown_score_is_refused(score: str) -> None:
    with pytest.raises(mcbn.MCBNError, match="score must be one of"):
        METHODS["ensemble"]("classification", 0).tune((data()[0], targets("classification")), score=score)


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_tau_that_is_not_positive_is_refused(tau: float) -> None:
    with pytest.raises(mcbn.MCBNError, match="tau must be a positive number"):
        METHODS["dropout"]("regression", 0).tau = tau
