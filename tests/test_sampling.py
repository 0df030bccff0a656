"""Every fast way gives the numbers of the plain loop, and what cannot be fast still runs."""

import copy
import gc
import linecache
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcbn
from kinds import KINDS, make, norms_in_training
from mcbn import sampling, statistics, workspace
from mcbn.bench.networks import UNet, resnet32, resnet50
from mcbn.draws import rows_of_draw
from mcbn.program import trace
from mcbn.rewriting import fuse_activations


def loop(bayes: mcbn.MCBN, x: Any) -> Tensor:
    """Run every draw through the network's own code."""
    engine = bayes._fitted()
    with torch.no_grad():
        return torch.stack([engine._replay(x, t) for t in range(engine.posterior.n_samples)])


def fit(net: nn.Module, x: Tensor, **options: Any) -> mcbn.MCBN:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mcbn.MCBN(net.eval(), "regression").fit(x, **{"n_samples": 5, "batch_size": 8, **options})


def check_equal(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size_equals_the_loop(kind: str, chunk_size: int | None) -> None:
    model, x = make(kind, dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    check_equal(bayes.sample(x, chunk_size=chunk_size), loop(bayes, x), 1e-12)
    pred, expected = bayes.predict(x, chunk_size=chunk_size), loop(bayes, x)
    torch.testing.assert_close(pred.mean, expected.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pred.epistemic, expected.var(0, correction=0), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_down_as_a_program(kind: str) -> None:
    model, x = make(kind, dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    assert "own code" not in bayes.explain(x)
    assert "one by one" not in bayes.explain(x, chunk_size=1)
    assert bayes.explain(x, n_samples=3).startswith("3 draws")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_net", "shape"),
    [(resnet32, (3, 32, 32)), (UNet, (3, 32, 32)), (resnet50, (3, 64, 64))],
    ids=["resnet32", "unet", "resnet50"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_real_networks(make_net: Any, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    if make_net is resnet50 and dtype == torch.float32:
        tolerance = 1e-4  # 53 layers of random weights on 2x2 maps: the loop itself is no nearer to the truth
    torch.manual_seed(0)
    x = torch.randn(32, *shape, dtype=dtype)
    bayes = fit(make_net().to(dtype), x, n_samples=3, batch_size=16)
    expected = loop(bayes, x[:4])
    for chunk_size in (None, 1, 3):
        check_equal(bayes.sample(x[:4], chunk_size=chunk_size), expected, tolerance)


def test_batch_norm_is_folded_and_the_first_layer_runs_once() -> None:
    bayes = fit(resnet32(), torch.randn(16, 3, 32, 32))
    assert "one draw a pass, 30 of 31 batch norm calls folded" in bayes.explain(torch.randn(32, 3, 32, 32))
    assert "5 draws in one pass; 1 operations before the first batch norm run once" in bayes.explain(
        torch.randn(1, 3, 32, 32)
    )


def test_many_inputs_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CPU_BLOCK", 60)
    model, x = make("1d", n=50, dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    assert "50 inputs in 5 blocks" in bayes.explain(x)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_many_inputs_have_batch_norm_in_the_weights_of_each_draw(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4, bias=bias), nn.BatchNorm1d(4)]
    x = torch.randn(40, 5, dtype=torch.float64)
    bayes = fit(nn.Sequential(*layers, nn.ReLU(), nn.Linear(4, 2)).double(), x)
    assert "5 draws in one pass" in bayes.explain(x)
    products: list[Tensor] = []
    plain = torch.baddbmm

    def counted(*args: Any, **options: Any) -> Tensor:
        products.append(plain(*args, **options))
        return products[-1]

    monkeypatch.setattr(torch, "baddbmm", counted)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)
    assert not products
    monkeypatch.setattr(workspace, "FOLD_FROM", len(x))
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)
    assert [found.shape for found in products] == [(5, 40, 4)]


class Neighbours(nn.Module):
    """A network whose outputs depend on the inputs beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        return y - y.mean(0)


def test_inputs_that_need_each_other_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CPU_BLOCK", 60)
    x = torch.randn(50, 5, dtype=torch.float64)
    bayes = fit(Neighbours().double(), x)
    assert "blocks" not in bayes.explain(x)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)


def test_equal_inputs_do_not_decide_whether_others_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CPU_BLOCK", 60)
    x = torch.randn(50, 5, dtype=torch.float64)
    bayes = fit(Neighbours().double(), x)
    bayes.sample(torch.zeros(50, 5))  # less their mean they are zero, however they are cut
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)


class Doubling(torch.autograd.Function):
    """A custom autograd Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Awkward(nn.Module):
    """Batch norm followed by something that resists being written down or batched."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.bn, self.last, self.how = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.first(x))
        if self.how == "branch":
            h = h if h.sum() > 0 else -h
        elif self.how == "item":
            h = h * h.abs().max().item()
        elif self.how == "function":
            h = Doubling.apply(h)
        elif self.how == "numpy":
            h = h + torch.from_numpy(h.detach().cpu().numpy()) * 0.5
        elif self.how == "in place shared":
            shared = self.first(x)
            shared += h
            h = shared
        elif self.how == "nonzero":
            h = h + h[torch.nonzero(h.sum(1) > 0)].sum()
        elif self.how == "setitem":
            h = h.clone()
            h[:, 0] = 0
        elif self.how == "input in place":
            x.mul_(2)
            h = h + x.sum(1, keepdim=True)
        elif self.how == "several results":
            a, b = h.chunk(2, 1)
            h = torch.cat([b, a], 1).sort(1).values
        return self.last(h.relu())


HOWS = ["branch", "item", "function", "numpy", "in place shared", "nonzero", "setitem", "input in place"]


@pytest.mark.parametrize("how", [*HOWS, "several results"])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_networks_that_resist_give_the_same_numbers(how: str, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    before = x.clone()
    bayes = fit(Awkward(how).double(), x)
    expected = torch.stack([bayes._fitted()._replay(x.clone(), t) for t in range(5)])
    check_equal(bayes.sample(x, chunk_size=chunk_size), expected, 1e-12)
    assert torch.equal(x, before)


def test_looking_at_values_is_run_as_it_is_and_said() -> None:
    bayes = fit(Awkward("branch"), torch.randn(30, 5))
    assert "own code, because it cannot be traced (__bool__ looks at values)" in bayes.explain(torch.randn(30, 5))


def test_program_that_gives_other_numbers_is_not_used() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x) + torch.rand(())

    bayes = fit(Random(), torch.randn(30, 5))
    assert "gave other numbers" in bayes.explain(torch.randn(30, 5))


def test_new_shapes_and_dtypes_find_new_plans() -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    for n in range(1, 24):
        check_equal(bayes.sample(x[:n]), loop(bayes, x[:n]), 1e-5)
    wide = torch.randn(3, 3, 9, 7)
    check_equal(bayes.sample(wide), loop(bayes, wide), 1e-5)
    assert len(bayes._fitted()._plans) <= sampling.PLANS_KEPT
    assert bayes.sample(x[:0]).shape == (5, 0, 5)


def test_inputs_are_not_remembered_between_calls() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    first = bayes.sample(x)
    check_equal(bayes.sample(x + 1), loop(bayes, x + 1), 1e-12)
    assert not torch.equal(bayes.sample(x + 1), first)


def test_copies_and_pickles_find_their_plans_again(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    expected = bayes.sample(x)
    assert torch.equal(copy.deepcopy(bayes).sample(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(bayes)).sample(x), expected)


def test_out_of_memory_halves_the_chunk_then_the_inputs(
    regression: tuple[mcbn.MCBN, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    bayes, x = regression
    expected, engine = bayes.sample(x), bayes._fitted()
    tried: list[tuple[int, int]] = []
    original = sampling.Engine._run
    limit = 3 * len(x)

    def scarce(self: sampling.Engine, inputs: Any, plan: Any, workspace: Any = None) -> Any:
        run, n = original(self, inputs, plan), len(inputs)

        def limited(start: int, stop: int) -> Tensor:
            tried.append((stop - start, n))
            if (stop - start) * n > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(start, stop)

        return limited

    engine._plan(x, None, False)
    monkeypatch.setattr(sampling.Engine, "_run", scarce)
    torch.testing.assert_close(bayes.sample(x), expected)
    assert tried[:4] == [(20, 24), (10, 24), (5, 24), (2, 24)]
    engine._plan(x[:12], 1, False)
    limit = 12
    torch.testing.assert_close(bayes.sample(x), expected)
    limit = 0
    with pytest.raises(mcbn.MCBNError, match=r"one draw of one input does not fit .*values\): CUDA out of memory"):
        bayes.sample(x[:1])


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, True])
def test_bad_chunk_size(regression: tuple[mcbn.MCBN, Tensor], chunk_size: Any) -> None:
    bayes, x = regression
    for call in (bayes.predict, bayes.sample, bayes.explain):
        with pytest.raises(mcbn.MCBNError, match="chunk_size must be a whole number, at least 1"):
            call(x, chunk_size=chunk_size)


@pytest.mark.slow
def test_compiled_passes_give_the_same_numbers() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pred = bayes.predict(x, compile=True)
    torch.testing.assert_close(pred.mean, bayes.predict(x).mean, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- adaptive T


def test_tolerance_stops_once_every_standard_error_is_below() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=400, batch_size=8)
    reached = bayes.predict(x, n_samples=100).standard_error.max().item()
    pred = bayes.predict(x, tolerance=reached, chunk_size=10)
    assert pred.n_samples % 10 == 0
    assert 20 <= pred.n_samples < 400
    assert pred.standard_error.max() < reached
    before = bayes.predict(x, n_samples=pred.n_samples - 10)
    assert before.standard_error.max() >= reached
    torch.testing.assert_close(pred.mean, bayes.predict(x, n_samples=pred.n_samples).mean)
    bayes.tau = 1.0
    adaptive, fixed = bayes.predict(x, tolerance=reached, chunk_size=10), bayes.predict(x, n_samples=pred.n_samples)
    torch.testing.assert_close(adaptive.log_prob(pred.mean), fixed.log_prob(pred.mean))


def test_tolerance_that_cannot_be_reached_uses_all_draws(classification: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = classification
    assert bayes.predict(x, tolerance=1e-9).n_samples == 20
    loose = bayes.predict(x, tolerance=0.5, chunk_size=1)
    assert loose.n_samples == 8


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan")])
def test_bad_tolerance(regression: tuple[mcbn.MCBN, Tensor], tolerance: float) -> None:
    bayes, x = regression
    with pytest.raises(mcbn.MCBNError, match="tolerance must be a positive number"):
        bayes.predict(x, tolerance=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["1d", "2d", "residual", "fused-activation"])
def test_gpu_ways_equal_the_loop(kind: str) -> None:
    model, x = make(kind)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        bayes = fit(model.cuda(), x, n_samples=6)
        q = x.cuda()
        expected = loop(bayes, q)
        for chunk_size in (None, 1, 2, 6):
            for _ in range(6):  # the later calls replay a CUDA graph
                check_equal(bayes.sample(q, chunk_size=chunk_size), expected, 1e-5)
        check_equal(bayes.sample(q + 1), loop(bayes, q + 1), 1e-5)


# ---------------------------------------------------------------- operations that no trace can see


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted_swish = torch.jit.script(swish)


HIDDEN = {
    "scripted function": scripted_swish,
    "vmap": lambda h: torch.vmap(lambda row: row * 2)(h),
    "new parameter": lambda h: nn.Parameter(h, requires_grad=False) * 2,
    "no torch function": lambda h: _without_torch_function(h),
}


def _without_torch_function(h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.sin(h)


class Hidden(nn.Module):
    """Two batch norms with an operation between them that the trace does not see."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.between, self.how = nn.Linear(5, 5), how

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(HIDDEN[self.how](self.a(x))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", HIDDEN)
def test_operations_that_cannot_be_seen_do_not_freeze(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64)
    net = Hidden(how).double()
    bayes = fit(net, x)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)
    assert (bayes.posterior.var["b"].std(0) > 1e-6).all()
    for t in range(5):
        batch = x[rows_of_draw(40, 8, 0, t)]
        with torch.no_grad():
            expected = norms_in_training(copy.deepcopy(net))(batch)
        check_equal(bayes.sample(batch)[t], expected, 1e-10)


# ---------------------------------------------------------------- values that share memory, sizes that follow values


def chunks_in_place(net: nn.Module, x: Tensor) -> Tensor:
    h = net.bn(net.first(x))
    a, b = h.chunk(2, 1)
    a.relu_()
    b += x[:, :3]
    return net.last(h)


def view_of_a_changed_value(net: nn.Module, x: Tensor) -> Tensor:
    h = net.bn(net.first(x))
    view = h[:, :3]
    h.add_(x.sum(1, keepdim=True))
    return net.last(torch.cat([view, view], 1))


def rows_and_columns_assigned(net: nn.Module, x: Tensor) -> Tensor:
    h = net.bn(net.first(x))
    h[:, :2] = h[:, :2] * 2 + x[:, :2]
    h[x.sum(1) > 0] = 0.5
    h[..., -1] -= x[:, 0]
    return net.last(h)


def input_of_the_norm_changed_later(net: nn.Module, x: Tensor) -> Tensor:
    shared = net.first(x)
    h = net.bn(shared)
    shared[:, :3].add_(x[:, :3])
    return net.last(h + shared)


def shared_value_under_another_name(net: nn.Module, x: Tensor) -> Tensor:
    shared, h = net.first(x), net.bn(net.first(x))
    alias = shared.view_as(h)
    alias.add_(h * x.sum(1, keepdim=True))
    return net.last(alias)


def values_exchanged(net: nn.Module, x: Tensor) -> Tensor:
    h = net.bn(net.first(x))
    h.data = h.data * (1 + x.sum(1, keepdim=True))
    return net.last(h)


def activation_in_place_under_a_view(net: nn.Module, x: Tensor) -> Tensor:
    h = net.bn(net.first(x))
    view = h[:, :3]
    h = nn.functional.relu(h, inplace=True) + x.sum(1, keepdim=True)
    return net.last(torch.cat([view, h[:, :3]], 1))


def weights_from_the_inputs(net: nn.Module, x: Tensor) -> Tensor:
    bn = net.bn
    return net.last(
        nn.functional.batch_norm(net.first(x), bn.running_mean, bn.running_var, bn.weight + x.mean(), bn.bias)
    )


def rows_of_a_mask(net: nn.Module, x: Tensor) -> Tensor:
    return net.last(net.bn(net.first(x))) * x[x[:, 0] > 0].shape[0]


def longest(net: nn.Module, x: Tensor) -> Tensor:
    return net.last(net.bn(net.first(x))) * torch.arange(x.abs().max().mul(4).long()).numel()


def prefix(net: nn.Module, x: Tensor) -> Tensor:
    return net.last(net.bn(net.first(x))) * len(x.T[: x.abs().sum().long() % 5])


def classes_seen(net: nn.Module, x: Tensor) -> Tensor:
    return net.last(net.bn(net.first(x))) * nn.functional.one_hot(x[:, 0].abs().mul(4).long()).size(1)


def positions(net: nn.Module, x: Tensor) -> Tensor:
    return net.last(net.bn(net.first(x))) * torch.where(x > 0)[0].shape[0]


class Written(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.first, self.bn, self.last, self.run = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


IN_PLACE = [chunks_in_place, view_of_a_changed_value, activation_in_place_under_a_view, rows_and_columns_assigned]
SHARED = [input_of_the_norm_changed_later, shared_value_under_another_name, values_exchanged]
BY_VALUES = [weights_from_the_inputs, rows_of_a_mask, longest, prefix, classes_seen, positions]


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("run", [*IN_PLACE, *SHARED, *BY_VALUES])
def test_a_way_found_on_blank_inputs_holds_for_all(run: Any, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    bayes = fit(Written(run).double(), x)
    bayes.sample(torch.zeros(6, 5), chunk_size=chunk_size)  # where much that is wrong gives the right numbers
    for q in x.split(6):
        check_equal(bayes.sample(q, chunk_size=chunk_size), loop(bayes, q), 1e-12)
    assert ("own code" in bayes.explain(x[:6])) == (run not in IN_PLACE)


@pytest.mark.parametrize("run", [*IN_PLACE, *SHARED, *BY_VALUES])
def test_draws_are_those_of_training_whatever_shares_memory_or_sizes(run: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64)
    net = Written(lambda net, x: net.bn(run(net, x).repeat(1, 3))).double()
    bayes = fit(net, x, n_samples=40)
    for t in (0, 1, 2, 39):
        batch = x[rows_of_draw(40, 8, 0, t)]
        with statistics.Record(frozenset(["", "bn"])) as mode, torch.no_grad():
            network = copy.deepcopy(bayes.network)
            network(batch.clone())
        for name, mean in mode.mean.items():
            torch.testing.assert_close(bayes.posterior.mean[name][t], mean, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(bayes.posterior.var[name][t], mode.var[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("run", [view_of_a_changed_value, activation_in_place_under_a_view, rows_and_columns_assigned])
def test_gradients_found_on_blank_inputs_hold_for_all(run: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    bayes = fit(Written(lambda net, x: run(net, x)[:, 0]).double(), x)
    for _ in range(3):
        bayes.predict(torch.zeros(6, 5), method="linear")
    differentiate = bayes._linearise.expansion(x, 5).differentiate
    for q in x.split(6):
        for found, expected in zip(differentiate(q), differentiate.plain(q), strict=True):
            torch.testing.assert_close(found, expected)


def test_threads_find_a_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    sought, original = [], sampling.Engine._find_plan

    def find(self: sampling.Engine, *arguments: Any) -> Any:
        sought.append(arguments)
        time.sleep(0.05)
        return original(self, *arguments)

    monkeypatch.setattr(sampling.Engine, "_find_plan", find)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bayes.sample(x), range(4)))
    assert len(sought) == 1
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("attribute", ["T", "mT", "data", "real"])
def test_attributes_that_are_tensors_are_written_down(attribute: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    net = Written(lambda net, x: net.last(net.bn(net.first(x))) @ getattr(net.bn(net.first(x))[:2, :2], attribute))
    bayes = fit(net.double(), x)
    assert "own code" not in bayes.explain(x)
    for chunk_size in (None, 1):
        check_equal(bayes.sample(x, chunk_size=chunk_size), loop(bayes, x), 1e-12)


class Residual(nn.Module):
    """A block in the manner of torchvision's ResNet."""

    def __init__(self, alpha: int) -> None:
        super().__init__()
        self.before, self.first = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.bn, self.relu, self.alpha = nn.BatchNorm2d(4), nn.ReLU(inplace=True), alpha

    def forward(self, x: Tensor) -> Tensor:
        identity = self.before(x)
        out = self.bn(self.first(identity))
        if self.alpha == 1:
            out += identity
        else:
            out.add_(identity, alpha=self.alpha)
        return self.relu(out)


@pytest.mark.parametrize(("alpha", "fused"), [(1, 1), (2, 0)])
def test_residual_added_in_place_is_fused_into_its_convolution(alpha: int, fused: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 6, 6, dtype=torch.float64)
    bayes = fit(Residual(alpha).double(), x)
    assert bayes.network is not None
    check_equal(bayes.sample(x, chunk_size=1), loop(bayes, x), 1e-12)
    with torch.no_grad():
        program, _ = trace(bayes.network, *bayes.posterior.draw(0), x, fold=lambda width, convolutional: True)
    fuse_activations(program.each)  # runs on a GPU alone: seen here is what would run
    targets = [node.target for node in program.each.graph.nodes]
    assert targets.count(torch.cudnn_convolution_add_relu) == fused
    assert targets.count(torch.nn.functional.conv2d) == 1 - fused


def test_attention_is_written_down() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.layer = nn.BatchNorm1d(4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.bn(x).transpose(1, 2)).mean(1)

    x = torch.randn(30, 4, 5, dtype=torch.float64)
    bayes = fit(Attention().double(), x)
    assert "own code" not in bayes.explain(x)
    for chunk_size in (None, 1):
        check_equal(bayes.sample(x, chunk_size=chunk_size), loop(bayes, x), 1e-12)


# ---------------------------------------------------------------- what stays between calls


def test_inference_mode_takes_the_same_way() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8, posterior="gaussian")
    with torch.inference_mode():
        assert "own code" not in bayes.explain(x)
        inside = bayes.sample(x.clone(), n_samples=9)
    assert torch.equal(inside, bayes.sample(x, n_samples=9))
    wanted = x.clone().requires_grad_()
    bayes.sample(wanted, n_samples=9).sum().backward()
    assert wanted.grad is not None


def test_inputs_that_fail_say_nothing_about_others_of_their_shape() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 2))
    x = torch.randint(0, 9, (40, 3))
    bayes = fit(net, x)
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        bayes.sample(torch.full((7, 3), 9))
    assert "own code" not in bayes.explain(x[:7])


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.stop = nn.BatchNorm1d(5), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.stop[0] -= 1
            if self.stop[0] == 0:
                raise KeyboardInterrupt
            return self.bn(x)

    x = torch.randn(30, 5, dtype=torch.float64)
    bayes = fit(Interrupted().double(), x)
    assert bayes.network is not None
    expected, stop = loop(bayes, x), bayes.network.module.stop
    for count in (1, 2):
        stop[0] = count
        with pytest.raises(KeyboardInterrupt):
            bayes.sample(x, chunk_size=count)
        assert torch.nn.functional.batch_norm(x, torch.zeros(5).double(), torch.ones(5).double(), eps=0).equal(x)
    check_equal(bayes.sample(x), expected, 1e-12)


def test_shapes_share_the_scales_and_shifts_of_the_draws() -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    for n in (1, 2, 3):
        bayes.sample(x[:n])
    found = [plan.omega for plan in bayes._fitted()._plans.values() if isinstance(plan, sampling.Plan)]
    assert len(found) == 3
    assert all(omega is found[0] for omega in found)


def test_source_of_written_down_passes_goes_with_them() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    gc.collect()
    before = sum(name.startswith("<eval_with_key>") for name in linecache.cache)
    for n in range(1, 24):
        bayes.sample(x[:n])
    del bayes
    gc.collect()
    assert sum(name.startswith("<eval_with_key>") for name in linecache.cache) <= before
