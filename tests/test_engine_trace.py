"""Networks that are hard to trace: the numbers of Algorithm 1 all the same."""

import copy
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcbn
from drawn import check_equal, fit, loop, rows_of_draw
from kinds import make, norms_in_training
from mcbn.batch_norm import Record
from mcbn.engine import run as run_module


class Doubling(torch.autograd.Function):
    """A custom autograd Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Awkward(nn.Module):
    """Batch norm followed by something that resists being traced or batched."""

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
    expected = torch.stack([bayes.engine.replay(x.clone(), t) for t in range(5)])
    check_equal(bayes.sample(x, chunk_size=chunk_size), expected, 1e-12)
    assert torch.equal(x, before)


def test_looking_at_values_is_run_as_it_is_and_said() -> None:
    bayes = fit(Awkward("branch"), torch.randn(30, 5))
    assert "own code, because it cannot be traced (__bool__ looks at values)" in bayes.explain(torch.randn(30, 5))


def test_random_numbers_are_not_shared_by_draws() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x) + torch.rand(())

    bayes = fit(Random(), torch.randn(30, 5))
    assert "rand draws random numbers" in bayes.explain(torch.randn(30, 5))
    assert len(bayes.sample(torch.zeros(1, 5))[:, 0, 0].unique()) == 5


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
def test_a_plan_found_on_blank_inputs_holds_for_all(run: Any, chunk_size: int | None) -> None:
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
        with Record(frozenset(["", "bn"])) as mode, torch.no_grad():
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
    differentiate = bayes.linearizer.expansion(x, 5).differentiate
    for q in x.split(6):
        for found, expected in zip(differentiate(q), differentiate.plain(q), strict=True):
            torch.testing.assert_close(found, expected)


def test_threads_find_a_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    sought, original = [], run_module.build

    def build(*arguments: Any, **options: Any) -> Any:
        sought.append(arguments)
        time.sleep(0.05)
        return original(*arguments, **options)

    monkeypatch.setattr(run_module, "build", build)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bayes.sample(x), range(4)))
    assert len(sought) == 1
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("attribute", ["T", "mT", "data", "real"])
def test_attributes_that_are_tensors_are_traced(attribute: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    net = Written(lambda net, x: net.last(net.bn(net.first(x))) @ getattr(net.bn(net.first(x))[:2, :2], attribute))
    bayes = fit(net.double(), x)
    assert "own code" not in bayes.explain(x)
    for chunk_size in (None, 1):
        check_equal(bayes.sample(x, chunk_size=chunk_size), loop(bayes, x), 1e-12)


def test_attention_is_traced() -> None:
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
