"""Laws of MCBN: what is left alone, what seeds and draws do, and what every mistake is told."""

import copy
import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mcbn
from kinds import KINDS, make
from untouched import untouched

TASKS = ["regression", "classification"]


@pytest.fixture(params=TASKS)
def fitted(request: pytest.FixtureRequest) -> tuple[mcbn.MCBN, Tensor]:
    result: tuple[mcbn.MCBN, Tensor] = request.getfixturevalue(request.param)
    return result


def centre(pred: Any) -> Tensor:
    return pred.mean if isinstance(pred, mcbn.RegressionPrediction) else pred.probs


def spread(pred: Any) -> Tensor:
    return pred.epistemic if isinstance(pred, mcbn.RegressionPrediction) else pred.variance


# ---------------------------------------------------------------- the user's things stay as they are


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_model_and_generators_are_bit_identical_after_every_call(kind: str, training: bool) -> None:
    model, x = make(kind)
    model.train(training)
    next(iter(model.parameters())).requires_grad_(False)
    model.register_forward_hook(lambda *args: None)
    loader = DataLoader(TensorDataset(x, x), batch_size=8, shuffle=True)
    with untouched(model):
        bayes = mcbn.MCBN(model, "regression")
        bayes.fit(loader, n_samples=3)
        bayes.plain(x)
        target = bayes.sample(x)[0] + 1
        bayes.tune((x, target))
        bayes.predict(x).log_prob(target)
        bayes.predict(loader)
        copy.deepcopy(bayes).predict(x)


class Interrupting(Dataset[Tensor]):
    """Examples that consume the global generators and break off at one of them."""

    def __init__(self, x: Tensor, error: type[BaseException], at: int) -> None:
        self.x, self.error, self.left = x, error, at

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        self.left -= 1
        torch.rand(1)
        if self.left == 0:
            raise self.error
        return self.x[i]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 20])
def test_interrupted_fit_leaves_model_generators_and_old_posterior(error: type[BaseException], at: int) -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=8)
    before, old = bayes.predict(x), bayes.posterior
    with untouched(model), pytest.raises(error):
        bayes.fit(Interrupting(x, error, at), n_samples=9, batch_size=8)
    assert bayes.posterior is old
    assert torch.equal(bayes.predict(x).mean, before.mean)


def test_exception_in_the_forward_pass_leaves_everything(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    with untouched(bayes.model), pytest.raises(mcbn.MCBNError, match="could not run"):
        bayes.predict(x[:, :2])
    assert bayes.predict(x).mean.isfinite().all()


def test_two_objects_on_one_model_are_independent() -> None:
    model, x = make("1d")
    first = mcbn.MCBN(model, "regression", layers=1).fit(x, n_samples=5, batch_size=8)
    before = first.predict(x)
    mcbn.MCBN(model, "regression").fit(x, n_samples=7, batch_size=4, seed=3)
    after = first.predict(x)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.epistemic, after.epistemic)


def test_training_on_after_fit_does_not_change_the_fitted_object() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    before, plain = bayes.predict(x).mean, bayes.plain(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(bayes.predict(x).mean, before)
    assert torch.equal(bayes.plain(x), plain)


def test_fit_uses_the_weights_of_the_moment() -> None:
    model, x = make("1d")
    early = mcbn.MCBN(model, "regression")
    with torch.no_grad():
        model[6].bias.add_(5)
    late = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    assert torch.equal(early.fit(x, n_samples=5, batch_size=8).predict(x).mean, late.predict(x).mean)


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


# ---------------------------------------------------------------- laws of drawing and predicting


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


# ---------------------------------------------------------------- mistakes


def plain_mlp(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), *norm, nn.ReLU(), nn.Linear(6, 2))


class HandNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.InstanceNorm1d(6), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


def call(function: Callable[[mcbn.MCBN, Tensor], Any]) -> Callable[[], Any]:
    def run() -> Any:
        model, x = make("1d")
        return function(mcbn.MCBN(model, "regression"), x)

    return run


def classify(function: Callable[[mcbn.MCBN, Tensor], Any]) -> Callable[[], Any]:
    def run() -> Any:
        model, x = make("1d")
        return function(mcbn.MCBN(model, "classification").fit(x, n_samples=2, batch_size=8), x)

    return run


def fit(b: mcbn.MCBN, x: Tensor, **options: Any) -> mcbn.MCBN:
    return b.fit(x, **{"n_samples": 2, "batch_size": 8, **options})


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "not a module": (lambda: mcbn.MCBN(3, "regression"), "must be a torch.nn.Module, got int"),  # type: ignore[call-overload]
    "wrong task": (lambda: mcbn.MCBN(make("1d")[0], "segmentation"), "task must be one of.*'segmentation'"),
    "no batch norm": (lambda: mcbn.MCBN(plain_mlp(), "regression"), "no normalisation layer of any kind"),
    "layer norm": (lambda: mcbn.MCBN(plain_mlp(nn.LayerNorm(6)), "regression"), "1 x LayerNorm"),
    "instance norm": (lambda: mcbn.MCBN(HandNormed(), "regression"), "1 x InstanceNorm1d"),
    "uninitialised": (lambda: mcbn.MCBN(nn.LazyBatchNorm1d(), "regression"), "not initialised; run one batch"),
    "no such layer": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=["9"]), r"'9'.*there are \['1', '4'\]"),
    "predicate": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=lambda n, m: False), "matches no batch norm"),
    "no layers": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=[]), "must be None, a positive number"),
    "layers 0": (lambda: mcbn.MCBN(make("1d")[0], "regression", layers=0), "must be None, a positive number"),
    "predict first": (call(lambda b, x: b.predict(x)), "not fitted yet; call fit"),
    "sample first": (call(lambda b, x: b.sample(x)), "not fitted yet"),
    "save first": (call(lambda b, x: b.save("x.mcbn")), "not fitted yet"),
    "posterior first": (call(lambda b, x: b.posterior), "not fitted yet"),
    "empty": (call(lambda b, x: fit(b, x[:0])), r"holds 0 example\(s\)"),
    "single": (call(lambda b, x: fit(b, x[:1])), r"holds 1 example\(s\)"),
    "empty loader": (call(lambda b, x: b.fit(DataLoader(TensorDataset(x[:0]), batch_size=4))), r"holds 0 example"),
    "no batch": (call(lambda b, x: b.fit(iter([]))), "no batch at all"),
    "not data": (call(lambda b, x: b.fit(3)), "takes a DataLoader, a Dataset or tensors; got a int"),
    "n_samples": (call(lambda b, x: fit(b, x, n_samples=0)), "n_samples must be a whole number, at least 1; got 0"),
    "batch_size": (call(lambda b, x: fit(b, x, batch_size=0)), "batch_size must be"),
    "seed": (call(lambda b, x: fit(b, x, seed=-1)), "seed must be"),
    "nan training": (
        call(lambda b, x: fit(b, x.index_fill(0, torch.tensor([1]), torch.nan), batch_size=23)),
        "non-finite",
    ),
    "nan query": (call(lambda b, x: fit(b, x).predict(x * torch.inf)), "non-finite values"),
    "too many draws": (call(lambda b, x: fit(b, x).predict(x, n_samples=3)), "n_samples=3 asked of a posterior of 2"),
    "method": (call(lambda b, x: fit(b, x).predict(x, method="magic")), "method must be .*'magic'"),
    "wrong structure": (call(lambda b, x: fit(b, {"image": x})), "'image': a Tensor.*pass inputs="),
    "wrong width": (call(lambda b, x: fit(b, x[:, :3])), r"shape \(8, 3\).*pass inputs="),
    "ragged": (call(lambda b, x: fit(b, (x, x[:3]))), "share their first axis"),
    "tau": (call(lambda b, x: setattr(b, "tau", -1)), "tau must be a positive number"),
    "tau count": (call(lambda b, x: [setattr(b, "tau", torch.ones(3)), fit(b, x).predict(x)]), "tau holds 3 values"),
    "empty prediction": (call(lambda b, x: fit(b, x).predict(DataLoader(TensorDataset(x[:0])))), "gives no batch"),
    "log_prob untuned": (call(lambda b, x: fit(b, x).predict(x).log_prob(x[:, :2])), "needs the noise precision"),
    "level": (call(lambda b, x: fit(b, x).predict(x).interval(95)), "level must lie between 0 and 1, got 95"),
    "covariance": (call(lambda b, x: fit(b, x).predict(x).covariance), r"predict\(x, covariance=True\)"),
    "target shape": (call(lambda b, x: fit(b, x).tune((x, x))), r"targets of shape \(24, 5\) do not fit"),
    "target nan": (
        call(lambda b, x: fit(b, x).tune((x, x[:, :2] * torch.nan))),
        "48 validation targets are not finite",
    ),
    "no target": (call(lambda b, x: fit(b, x).tune(DataLoader(TensorDataset(x)))), "no targets in"),
    "score": (call(lambda b, x: fit(b, x).tune((x, x[:, :2]), score="mse")), "score must be crps or pll, got 'mse'"),
    "one target": (call(lambda b, x: fit(b, x).tune((x[:0], x[:0, :2]))), "at least 2 held-out targets"),
    "no residual": (call(lambda b, x: fit(b, x).tune((x, b.predict(x).mean))), "equal every validation target"),
    "class score": (classify(lambda b, x: b.tune((x, x[:, 0].long()), score="crps")), "score must be pll"),
    "label range": (classify(lambda b, x: b.tune((x, torch.full((24,), 2)))), r"labels must lie in 0..1 .*got 2..2"),
    "label negative": (classify(lambda b, x: b.tune((x, torch.full((24,), -1)))), "labels must lie in 0..1"),
    "label shape": (classify(lambda b, x: b.tune((x, torch.zeros(24, 2)))), r"shape \(24,\); got \(24, 2\)"),
    "label fraction": (classify(lambda b, x: b.tune((x, torch.full((24,), 0.5)))), "labels must be whole numbers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_what_came_and_what_to_do(name: str) -> None:
    function, message = MISTAKES[name]
    with pytest.raises(mcbn.MCBNError, match=f"(?s){message}"):
        function()


def test_batch_of_one_warns_and_fails_only_where_a_layer_sees_one_value() -> None:
    model, x = make("1d")
    with pytest.warns(UserWarning, match="batch_size is 1"), pytest.raises(mcbn.MCBNError, match="one value a channel"):
        mcbn.MCBN(model, "regression").fit(DataLoader(TensorDataset(x), batch_size=1), n_samples=2)
    model, x = make("2d")
    with pytest.warns(UserWarning, match="batch_size is 1"):
        bayes = mcbn.MCBN(model, "regression").fit(DataLoader(TensorDataset(x), batch_size=1), n_samples=4)
    assert (bayes.predict(x).epistemic > 0).any()


def test_diverged_network_is_named() -> None:
    model, x = make("1d")
    with torch.no_grad():
        model[0].weight.mul_(1e38)
    with pytest.raises(mcbn.MCBNError, match="'1' has non-finite statistics"):
        mcbn.MCBN(model, "regression").fit(x * 1e3, n_samples=2, batch_size=8)


def test_uncopyable_network_is_told() -> None:
    model, x = make("1d")
    model.lock = threading.Lock()
    with pytest.raises(mcbn.MCBNError, match="cannot be copied"):
        mcbn.MCBN(model, "regression").fit(x, n_samples=2, batch_size=8)


def test_unused_batch_norm_is_told() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.last = nn.BatchNorm1d(5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x)

    with pytest.raises(mcbn.MCBNError, match="without a single batch norm call"):
        mcbn.MCBN(Unused(), "regression").fit(torch.randn(9, 5), batch_size=4)
