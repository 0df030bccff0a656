"""Laws of drawing and predicting: what seeds and draws do, whatever the task."""

import copy
import threading
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from kinds import make

TASKS = ["regression", "classification"]


@pytest.fixture(params=TASKS)
def fitted(request: pytest.FixtureRequest) -> tuple[mcbn.MCBN, Tensor]:
    result: tuple[mcbn.MCBN, Tensor] = request.getfixturevalue(request.param)
    return result


def centre(pred: Any) -> Tensor:
    return pred.mean if isinstance(pred, mcbn.RegressionPrediction) else pred.probs


def spread(pred: Any) -> Tensor:
    return pred.epistemic if isinstance(pred, mcbn.RegressionPrediction) else pred.variance


def test_same_seed_same_result_other_seed_other_result() -> None:
    model, x = make("1d")

    def mean(seed: int) -> Tensor:
        return mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8, seed=seed).predict(x).mean

    assert torch.equal(mean(1), mean(1))
    assert not torch.equal(mean(1), mean(2))


def test_more_draws_begin_with_the_same_draws() -> None:
    model, x = make("1d")
    few = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=8)
    many = mcbn.MCBN(model, "regression").fit(x, n_samples=9, batch_size=8)
    assert torch.equal(many.sample(x)[:3], few.sample(x))
    assert torch.equal(many.predict(x, n_samples=3).mean, few.predict(x).mean)


def test_permuting_inputs_permutes_outputs(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(centre(bayes.predict(x[order])), centre(bayes.predict(x))[order], rtol=1e-10, atol=1e-12)


def test_one_input_alone_equals_that_input_in_a_batch(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    whole, alone = bayes.predict(x), bayes.predict(x[3:4])
    torch.testing.assert_close(centre(alone)[0], centre(whole)[3], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(spread(alone)[0], spread(whole)[3], rtol=1e-8, atol=1e-12)


def test_single_draw_has_zero_epistemic_variance(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    pred = bayes.predict(x, n_samples=1)
    assert torch.all(spread(pred) == 0)
    assert pred.standard_error.isnan().all()


def test_what_is_no_posterior_and_draws_that_are_not_there_are_refused(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, _ = fitted
    with pytest.raises(mcbn.MCBNError, match=r"give a Posterior.*got NoneType"):
        bayes.posterior = None  # type: ignore[assignment]
    with pytest.raises(mcbn.MCBNError, match=r"draws \[99\] are not among"):
        bayes.posterior.select([0, 99])


@pytest.mark.parametrize("task", TASKS)
def test_batch_of_the_whole_set_has_zero_variance_and_warns(task: str) -> None:
    model, x = make("1d")
    with pytest.warns(UserWarning, match="takes in all 24 examples"):
        bayes = mcbn.MCBN(model, task).fit(x, n_samples=6, batch_size=24)
    assert torch.all(spread(bayes.predict(x)) == 0)


def test_float64_agrees_with_float32() -> None:
    single, x = make("residual")
    double = copy.deepcopy(single).double()
    a = mcbn.MCBN(single, "regression").fit(x, n_samples=10, batch_size=12).predict(x)
    b = mcbn.MCBN(double, "regression").fit(x.double(), n_samples=10, batch_size=12).predict(x.double())
    torch.testing.assert_close(a.mean.double(), b.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.epistemic.double(), b.epistemic, rtol=1e-3, atol=1e-4)


def test_monte_carlo_converges_to_enumeration_of_all_batches() -> None:
    model, x = make("1d", n=6, dtype=torch.float64)
    M, T = 3, 4000
    everything = [list(rows) for rows in combinations(range(6), M)]
    query = x[:4] + 0.3
    outputs = []
    for rows in everything:
        one = copy.deepcopy(model)
        for bn in (one[1], one[4]):
            bn.momentum, bn.training = 1.0, True
        with torch.no_grad():
            one(x[rows])
            for bn in (one[1], one[4]):
                bn.running_var.mul_((M - 1) / M)  # the running variance is stored unbiased
            outputs.append(one.eval()(query))
    exact = torch.stack(outputs)  # (20, 4, 2)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=T, batch_size=M)
    pred = bayes.predict(query)
    mean, variance = exact.mean(0), exact.var(0, correction=0)
    assert ((pred.mean - mean).abs() <= 5 * (variance / T).sqrt()).all()
    fourth = (exact - mean).pow(4).mean(0)
    assert ((pred.epistemic - variance).abs() <= 5 * ((fourth - variance**2) / T).sqrt() + 5 * variance / T).all()


def test_plain_is_the_untouched_network(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    with torch.no_grad():
        assert torch.equal(bayes.plain(x), bayes.model.eval()(x))


def test_plain_works_before_fit() -> None:
    model, x = make("residual")
    with torch.no_grad():
        assert torch.equal(mcbn.MCBN(model, "regression").plain(x), model(x))


def test_samples_are_differentiable_in_the_input(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    query = x[:3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda q: bayes.sample(q, n_samples=3), query)
    assert not bayes.sample(x[:3]).requires_grad
    assert not bayes.predict(query).mean.requires_grad


def test_samples_come_draws_first(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    outputs = bayes.plain(x).shape
    assert bayes.sample(x).shape == (20, *outputs)
    pred = bayes.predict(x, return_samples=True)
    assert pred.samples is not None
    assert torch.equal(pred.samples, bayes.sample(x))
    assert bayes.predict(x).samples is None


def test_loader_gives_what_its_batches_give(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    whole = bayes.predict(x, return_samples=True)
    dataset = TensorDataset(x, torch.zeros(len(x)))
    for data in (DataLoader(dataset, batch_size=5), dataset):
        parts = bayes.predict(data, return_samples=True)
        torch.testing.assert_close(centre(parts), centre(whole), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(spread(parts), spread(whole), rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(parts.samples, whole.samples, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(bayes.sample(DataLoader(x, batch_size=5)), bayes.sample(x), rtol=1e-10, atol=1e-12)


def test_deepcopy_predicts_the_same(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    twin = copy.deepcopy(bayes)
    assert torch.equal(centre(twin.predict(x)), centre(bayes.predict(x)))
    assert (spread(twin.predict(x)) > 0).any()


def test_repr_says_what_it_is(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    assert "n_samples=20, batch_size=8" in repr(bayes)
    assert "not fitted" in repr(mcbn.MCBN(bayes.model, bayes.task))
    assert f"shape={tuple(centre(bayes.predict(x)).shape)}" in repr(bayes.predict(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_data_moves_to_the_network_and_results_come_back() -> None:
    model, x = make("residual")
    here = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=12)
    there = mcbn.MCBN(copy.deepcopy(model).cuda(), "regression").fit(x, n_samples=5, batch_size=12)
    pred = there.predict(x)
    assert pred.mean.device.type == "cpu"
    assert there.predict(x.cuda()).mean.is_cuda
    torch.testing.assert_close(pred.mean, here.predict(x).mean, rtol=1e-3, atol=1e-3)


def test_predict_from_many_threads_at_once(fitted: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = fitted
    queries = [x[i : i + 4] for i in range(6)]
    expected = [centre(bayes.predict(q)) for q in queries]
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = centre(bayes.predict(queries[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(6))
