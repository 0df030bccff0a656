"""Values that leave the tensors of a network, however they leave, are not those of the first inputs for ever."""

import copy
import random
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawn import check_equal, rows_of_draw
from mcbn import MCBN, algorithm

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:mcbn. drawn batch statistics:UserWarning",
    "ignore:mcbn. Frozen draws random numbers:UserWarning",
    "ignore:mcbn. Frozen keeps a state:UserWarning",
    "ignore:Using a non-tuple sequence:UserWarning",
)
N, M, T = 48, 8, 60
SETTING = 1.0
OPTIONS = SimpleNamespace(gain=1.0)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def level(x: Tensor) -> float:
        return float(x.mean())

    @torch.jit.script
    def clip_(x: Tensor) -> Tensor:
        return x.clamp_(max=0.5)

    @torch.jit.script
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@torch.library.custom_op("mcbn_test::peak", mutates_args=())
def peak(x: Tensor) -> float:
    return float(x.abs().max())


@torch.library.custom_op("mcbn_test::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("mcbn_test::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * float(x.mean())


def doubled_in_place(net: nn.Module, x: Tensor) -> Tensor:
    h = x.clone()
    double_(h)
    return h


def caught(net: nn.Module, x: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(torch.eye(5, dtype=x.dtype) * x.mean())
    except RuntimeError:
        return -x
    return x


def swallowed(net: nn.Module, x: Tensor) -> Tensor:
    try:
        return x * float(x.mean())
    except Exception:  # also what a trace raises
        return x


def by_thread(net: nn.Module, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x * pool.submit(lambda: float(x.mean())).result()


def by_memory(net: nn.Module, x: Tensor) -> Tensor:
    return x * np.frombuffer(memoryview(x.contiguous().numpy()).tobytes()).mean()


def data_changed(net: nn.Module, x: Tensor) -> Tensor:
    x.data.clamp_(max=0.3)
    return x


def counted(net: nn.Module, x: Tensor) -> Tensor:
    net.calls += 1
    return x * (1 + net.calls % 2)


def counted_in_a_list(net: nn.Module, x: Tensor) -> Tensor:
    net.seen[0] += 1
    return x * (1 + (net.seen[0] > 40))


def moving(net: nn.Module, x: Tensor) -> Tensor:
    net.state = 0.5 * net.state + x.mean()
    return x + net.state


def moving_in_place(net: nn.Module, x: Tensor) -> Tensor:
    return x + net.level.mul_(0.5).add_(x.mean())


def counting() -> Any:
    calls = 0

    def closure(net: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * (1 + (calls > 10**6))

    return closure


def controlled(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,))


FROZEN = {
    "TorchScript number": lambda net, x: x * (2 if level(x) > 0 else 1),
    "TorchScript in place": lambda net, x: clip_(x.clone()),
    "custom operator that gives a number": lambda net, x: x / peak(x),
    "custom operator in place": doubled_in_place,
    "custom operator": lambda net, x: scaled(x),
    "f-string": lambda net, x: x * float(f"{x.mean():.4f}"),
    "percent": lambda net, x: x * float("%.4f" % x.mean()),  # noqa: UP031
    "repr": lambda net, x: x * (1 + len(repr(x.mean())) % 3 + ("-" in repr(x.mean()))),
    "tolist": lambda net, x: x * x.mean(0).tolist()[0],
    "numpy": lambda net, x: x * x.mean().numpy().item(),
    "memory": by_memory,
    "topk by a tensor": lambda net, x: x + x.topk((x > 0).sum(1).min().clamp(1, 5), 1).values.shape[1],
    "bytes of a mask": lambda net, x: x * x[x > 0].nbytes,
    "stride of a mask": lambda net, x: x * (1 + x.expand(3, *x.shape)[:, x[:, 0] > 0].stride()[0]),
    "list of masks": lambda net, x: x * x[[x[:, 0] > 0]].shape[0],
    "sparse": lambda net, x: x * torch.relu(x).to_sparse()._nnz(),
    "sparse values": lambda net, x: x * torch.relu(x).to_sparse().values().shape[0],
    "range of quantisation": lambda net, x: x * torch._choose_qparams_per_tensor(x.float(), False)[0],
    "bincount": lambda net, x: x * torch.bincount(x.abs().flatten().mul(3).long()).numel(),
    "exception": caught,
    "exception swallowed": swallowed,
    "thread": by_thread,
    "as_strided": lambda net, x: torch.as_strided(x, x.shape, x.stride()) * 1,
    "counter": counted,
    "counter in a list": counted_in_a_list,
    "closure": counting(),
    "state": moving,
    "state in place": moving_in_place,
    "data": data_changed,
    "max in Python": lambda net, x: x * max(x[0]),
    "math": lambda net, x: x * round(float(x.abs().sum()), 2),
    "format of a layout": lambda net, x: x.contiguous() * (2 if x.is_contiguous() else 1),
    "offset": lambda net, x: x * (1 + x.storage_offset()),
    "deep copy": lambda net, x: copy.deepcopy(x) * 2,
    "interned": lambda net, x: x * {True: 2, False: 3}[bool((x > 0).all())],
    "bounds": lambda net, x: F.hardtanh(x, -float(x.std()), float(x.std())),
    "size by a tensor": lambda net, x: x * torch.full((2,), 1.0).expand(x.abs().max().long() + 1, 2).shape[0],
}
STATEFUL = ("counter", "counter in a list", "state", "state in place", "closure")


class Frozen(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.last, self.how = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), how
        self.calls, self.seen, self.state = 0, [0], torch.zeros(())
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bn(self.first(self.how(self, x))).relu())


def data() -> Tensor:
    return torch.randn(N, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def queries() -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    positive = torch.rand(7, 5, generator=g, dtype=torch.float64) + 0.1
    mixed = 2 * torch.randn(7, 5, generator=g, dtype=torch.float64) + 0.5
    return [positive, -3 * positive, mixed, mixed.t().contiguous().t(), mixed.repeat(2, 1)[3:10], mixed / 100]


def batches_of(x: Tensor) -> list[Tensor]:
    return [x[rows_of_draw(len(x), M, 0, t)] for t in range(T)]


@pytest.mark.parametrize("how", [name for name in FROZEN if name not in STATEFUL])
def test_values_that_leave_are_those_of_every_input(how: str) -> None:
    net, x = Frozen(FROZEN[how]).double().eval(), data()
    bayes = MCBN(net, "regression").fit(x, n_samples=T, batch_size=M)
    draws = [algorithm.record(copy.deepcopy(net), batch.clone()) for batch in batches_of(x)]
    for t in (0, 1, 2, T - 1):  # groups of batches too
        ((mean, var),) = draws[t]
        check_equal(bayes.posterior.mean["bn"][t], mean, 1e-9)
        check_equal(bayes.posterior.var["bn"][t], var, 1e-9)
    for q in queries():
        before = q.clone()
        for chunk_size in (None, 1):
            found = bayes.sample(q, chunk_size=chunk_size)
            expected = torch.stack([algorithm.replay(net, draw, q.clone()) for draw in draws]).detach()
            check_equal(found, expected, 1e-9)
        assert torch.equal(q, before)


@pytest.mark.parametrize("how", STATEFUL)
def test_a_network_that_keeps_a_state_runs_by_its_own_code(how: str) -> None:
    bayes = MCBN(Frozen(FROZEN[how]).double().eval(), "regression").fit(data(), n_samples=T, batch_size=M)
    assert "own code" in bayes.explain(queries()[0], chunk_size=1)


@pytest.mark.parametrize(
    "how",
    [
        lambda net, x: x + torch.rand(len(x), 1, dtype=x.dtype),
        lambda net, x: x * (torch.rand(len(x), 1) > 0.02),
        lambda net, x: F.dropout(x, 0.5, training=True),
        lambda net, x: x + torch.empty_like(x).normal_(),
        lambda net, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda net, x: x * (1 + random.random()),
        lambda net, x: x * (1 + np.random.rand()),
        lambda net, x: x if random.random() < 0.99 else 2 * x,
        lambda net, x: x * (1 + time.perf_counter() % 1),
    ],
)
def test_random_numbers_are_drawn_for_every_draw(how: Any) -> None:
    bayes = MCBN(Frozen(how).double().eval(), "regression").fit(data(), n_samples=T, batch_size=M)
    reason = bayes.explain(queries()[0], chunk_size=1)
    assert "own code" in reason
    assert "random" in reason or "different steps" in reason or "something else each time" in reason


@pytest.mark.parametrize(
    ("how", "change"),
    [
        (lambda net, x: x * SETTING, lambda patch: patch.setattr(sys.modules[__name__], "SETTING", 3.0)),
        (lambda net, x: x * OPTIONS.gain, lambda patch: patch.setattr(OPTIONS, "gain", 3.0)),
        (lambda net, x: x * net.factor, lambda patch: patch.setattr(Frozen, "factor", 3.0)),
    ],
)
def test_settings_outside_a_network_are_those_of_the_call(how: Any, change: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Frozen, "factor", 1.0, raising=False)
    net, q = Frozen(how).double().eval(), queries()[0]
    bayes = MCBN(net, "regression").fit(data(), n_samples=T, batch_size=M)
    draws = [algorithm.record(net, batch) for batch in batches_of(data())]
    for _ in range(6):
        bayes.sample(q)
        bayes.predict(q, method="linear")
    assert "own code" not in bayes.explain(q)
    before = bayes.predict(q, method="linear").epistemic
    change(monkeypatch)
    check_equal(bayes.sample(q), torch.stack([algorithm.replay(net, draw, q) for draw in draws]).detach(), 1e-9)
    assert not torch.allclose(bayes.predict(q, method="linear").epistemic, before)


def cached(net: nn.Module, x: Tensor) -> Tensor:
    if getattr(net, "grid", None) is None or net.grid.shape != x.shape:
        net.grid = torch.arange(x.numel(), dtype=x.dtype).view(x.shape)
    return x + net.grid


@pytest.mark.parametrize(
    "how",
    [cached, lambda net, x: x if x.shape[1] == 5 else -x, lambda net, x: x.to(x.dtype).contiguous()],
    ids=["cache", "shape", "layout"],
)
def test_what_depends_on_shapes_alone_keeps_its_plan(how: Any) -> None:
    bayes = MCBN(Frozen(how).double().eval(), "regression").fit(data(), n_samples=T, batch_size=M)
    assert "own code" not in bayes.explain(queries()[0])


@pytest.mark.slow
def test_control_flow_of_torch_runs_by_its_own_code() -> None:
    net, q = Frozen(controlled).double().eval(), queries()[1]
    bayes = MCBN(net, "regression").fit(data(), n_samples=3, batch_size=M)
    draws = [algorithm.record(net, batch) for batch in batches_of(data())[:3]]
    check_equal(bayes.sample(q), torch.stack([algorithm.replay(net, draw, q) for draw in draws]).detach(), 1e-9)
    assert "own code" in bayes.explain(q)


def test_attention_with_padding_is_the_same_in_plain_and_draws() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
            self.first, self.bn = nn.Linear(3, 6), nn.BatchNorm1d(6)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.bn(self.first(x).transpose(1, 2)).transpose(1, 2)
            return self.encoder(h, src_key_padding_mask=x[..., 0] > 0.9)

    x = torch.rand(24, 5, 3, generator=torch.Generator().manual_seed(0)).sort(1).values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = Padded().eval()
        bayes = MCBN(net, "regression").fit(x, n_samples=3, batch_size=8)
        mean, var = net.bn.running_mean, net.bn.running_var
        for posterior in (bayes.posterior.mean, bayes.posterior.var):
            posterior["bn"][:] = mean if posterior is bayes.posterior.mean else var
        same = bayes.with_posterior(bayes.posterior)
        check_equal(same.sample(x)[0], same.plain(x), 1e-5)
        assert "own code" not in same.explain(x)
    assert torch.backends.mha.get_fastpath_enabled()
