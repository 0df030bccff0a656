"""What lies outside the tensors of a network: settings, objects given, memory reused, threads, copies that are none."""

import contextvars
import copy
import functools
import gc
import logging
import operator
import os
import pickle
import random
import sys
import threading
import time
import warnings
import weakref
from array import array
from collections import OrderedDict, UserList
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm as normalised, interpolate
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from drawn import check_equal
from mcbn import MCBN, MCBNError, algorithm, batches
from mcbn.layers import candidates

pytestmark = pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics:UserWarning")
T, M = 40, 8
NESTED = SimpleNamespace(model=SimpleNamespace(gain=1.0))
CONTEXT = contextvars.ContextVar("gain", default=1.0)
FUNCTIONS = {"scale": lambda x: x}
MEMBERS = {1}
LONG = dict.fromkeys(range(300), 1.0)
LATE = None
POOL = ThreadPoolExecutor(1)


class Slots:
    __slots__ = ("gain",)


class Kind:
    gain = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * scaled.gain


SLOTS = Slots()
SLOTS.gain = scaled.gain = 1.0


class Outside(nn.Module):
    def __init__(self, how: Callable[[Any, Any], Tensor] = lambda net, x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.last, self.how = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), how

    def forward(self, x: Any) -> Tensor:
        return self.last(self.bn(self.first(self.how(self, x))).relu())


def data(n: int = 48, seed: int = 1, width: int = 5) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(net: nn.Module, x: Any = None) -> MCBN:
    return MCBN(net.double().eval(), "regression").fit(data() if x is None else x, n_samples=T, batch_size=M)


def by_loop(bayes: MCBN, x: Any) -> Tensor:
    draws = [[(mean[n], var[n]) for n in mean] for mean, var in map(bayes.posterior.draw, range(T))]
    return torch.stack([algorithm.replay(bayes.model, draw, copy.deepcopy(x)) for draw in draws]).detach()


def environment(net: nn.Module, x: Tensor) -> Tensor:
    return x * float(os.environ.get("MCBN_TEST_GAIN", "1"))


SETTINGS = {
    "nested object": (lambda net, x: x * NESTED.model.gain, lambda p: p.setattr(NESTED.model, "gain", 3.0)),
    "slots": (lambda net, x: x * SLOTS.gain, lambda p: p.setattr(SLOTS, "gain", 3.0)),
    "environment": (environment, lambda p: p.setenv("MCBN_TEST_GAIN", "3")),
    "context variable": (lambda net, x: x * CONTEXT.get(), lambda p: CONTEXT.set(3.0)),
    "attribute of a function": (lambda net, x: scaled(x), lambda p: p.setattr(scaled, "gain", 3.0)),
    "attribute of a class": (lambda net, x: x * Kind.gain, lambda p: p.setattr(Kind, "gain", 3.0)),
    "table of functions": (
        lambda net, x: FUNCTIONS["scale"](x), lambda p: p.setitem(FUNCTIONS, "scale", lambda x: 3 * x)
    ),
    "function": (lambda net, x: scaled(x), lambda p: p.setattr(sys.modules[__name__], "scaled", lambda x: 3 * x)),
    "set": (lambda net, x: x * len(MEMBERS), lambda p: p.setattr(sys.modules[__name__], "MEMBERS", {1, 2, 3})),
    "long table": (lambda net, x: x * LONG[7], lambda p: p.setitem(LONG, 7, 3.0)),
    "None": (lambda net, x: x * (LATE or 1.0), lambda p: p.setattr(sys.modules[__name__], "LATE", 3.0)),
    "default dtype": (
        lambda net, x: x * (3 if torch.get_default_dtype() == torch.float64 else 1),
        lambda p: torch.set_default_dtype(torch.float64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SETTINGS)
def test_a_plan_ends_where_what_the_code_names_changes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = SETTINGS[how]
    q = data(7)
    bayes = contextvars.copy_context().run(fitted, Outside(read))
    try:
        for _ in range(5):
            bayes.sample(q)
        assert "own code" not in bayes.explain(q)
        change(monkeypatch)
        check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)
    finally:
        torch.set_default_dtype(torch.float32)
        CONTEXT.set(1.0)


class Renamed(Outside):
    """Its forward has a second name."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x) * NESTED.model.gain

    infer = forward


def test_a_plan_ends_where_what_a_forward_of_two_names_reads_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, q = fitted(Renamed()), data(7)
    bayes.sample(q)
    assert "own code" not in bayes.explain(q)
    monkeypatch.setattr(NESTED.model, "gain", 3.0)
    check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)


MODULE = sys.modules["mcbn_test_settings"] = ModuleType("mcbn_test_settings")
MODULE.gain = 1.0  # type: ignore[attr-defined]
TAKE = operator.attrgetter("gain")
DEEP = {"a": {"b": {"c": {"d": 1.0}}}}
ROWS = [[1.0] for _ in range(2000)]
NUMBERS, BYTES, TABLE = array("d", [1.0]), bytearray(b"\x01"), pd.Series([1.0])
TIMES = functools.partial(torch.mul, other=1.0)
STORED = {"gain": 1.0}


class Inherits(Kind):
    """What it has comes from another class, its property and whatever is missing from elsewhere."""

    @property
    def stored(self) -> float:
        return STORED["gain"]

    def __getattr__(self, name: str) -> float:
        return STORED["gain"]


OBJECT = Inherits()
REFERENCE = weakref.ref(OBJECT)


def with_default(net: nn.Module, x: Tensor, *, gains: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return x * gains[0]


def with_import(net: nn.Module, x: Tensor) -> Tensor:
    import mcbn_test_settings as settings  # type: ignore[import-not-found]

    return x * settings.gain


@functools.singledispatch
def dispatched(x: Any) -> Tensor:
    return x


def register(value: float) -> None:
    dispatched.register(Tensor)(lambda x, value=value: x * value)


register(1.0)
INDIRECT: dict[str, tuple[Any, Callable[[float], Any]]] = {  # how a network reads a setting, how the user changes it
    "getattr": (lambda net, x: x * getattr(MODULE, "ga" + "in"), partial(setattr, MODULE, "gain")),
    "namespace": (lambda net, x: x * vars(MODULE)["gain"], partial(setattr, MODULE, "gain")),
    "attrgetter": (lambda net, x: x * TAKE(MODULE), partial(setattr, MODULE, "gain")),
    "import": (with_import, partial(setattr, MODULE, "gain")),
    "modules": (lambda net, x: x * sys.modules["mcbn_test_settings"].gain, partial(setattr, MODULE, "gain")),
    "eval": (lambda net, x: x * eval("MODULE.gain"), partial(setattr, MODULE, "gain")),
    "deep": (lambda net, x: x * DEEP["a"]["b"]["c"]["d"], partial(DEEP["a"]["b"]["c"].__setitem__, "d")),
    "many": (lambda net, x: x * ROWS[1999][0], partial(ROWS[1999].__setitem__, 0)),
    "array": (lambda net, x: x * NUMBERS[0], partial(NUMBERS.__setitem__, 0)),
    "bytes": (lambda net, x: x * BYTES[0], lambda value: BYTES.__setitem__(0, int(value))),
    "table": (lambda net, x: x * float(TABLE.iloc[0]), partial(TABLE.__setitem__, 0)),
    "partial": (lambda net, x: TIMES(x), partial(TIMES.keywords.__setitem__, "other")),
    "default": (with_default, partial(with_default.__kwdefaults__["gains"].__setitem__, 0)),
    "inherited": (lambda net, x: x * OBJECT.gain, partial(setattr, Kind, "gain")),
    "property": (lambda net, x: x * OBJECT.stored, partial(STORED.__setitem__, "gain")),
    "missing": (lambda net, x: x * OBJECT.nothing, partial(STORED.__setitem__, "gain")),
    "reference": (lambda net, x: x * REFERENCE().later, partial(OBJECT.__dict__.__setitem__, "later")),
    "dispatch": (lambda net, x: dispatched(x), register),
}


@pytest.mark.parametrize("how", INDIRECT)
def test_a_setting_is_seen_however_it_is_reached(how: str) -> None:
    read, change = INDIRECT[how]
    bayes, x = fitted(Outside(read)), data(7, seed=2)
    try:
        for value in (1.0, 2.0, 3.0, 2.0):
            change(value)
            check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)
    finally:
        change(1.0)


@pytest.mark.parametrize("how", [lambda path: float(path.read_text()), lambda path: float(np.loadtxt(path))])
def test_what_is_read_from_a_file_is_read_again(how: Callable[[Path], float], tmp_path: Path) -> None:
    path = tmp_path / "gain.txt"
    path.write_text("1")
    bayes, x = fitted(Outside(lambda net, x: x * how(path))), data(7, seed=2)
    for value in ("1", "2", "3"):
        path.write_text(value)
        check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)


class Told(type):
    @property
    def by_its_type(cls) -> float:
        return STORED["gain"]


class Held(metaclass=Told):
    gain, one = 1.0, None

    @classmethod
    def get(cls) -> "Held":
        cls.one = cls.one or cls()
        return cls.one

    def __call__(self, x: Tensor) -> Tensor:
        return x * Held.gain


HELD = Held.get()
HELD.own = 1.0  # type: ignore[attr-defined]


@functools.lru_cache
def remembered() -> dict[str, float]:
    return {"gain": 1.0}


def by_name(net: nn.Module, x: Tensor) -> Tensor:
    try:
        return x * NOT_YET  # type: ignore[name-defined]
    except NameError:
        return x


def of_module(value: float) -> float:
    return value * MODULE.gain


MODULE.of_module = of_module  # type: ignore[attr-defined]
AMONG = sys.modules["mcbn_test_functions"] = ModuleType("mcbn_test_functions")
AMONG.scale = lambda x: x * MODULE.gain  # type: ignore[attr-defined]


def comes(owner: Any, name: str) -> Callable[[float], Any]:
    """Change a setting that is not there while it is 1."""
    return lambda value: setattr(owner, name, value) if value != 1 else delattr(owner, name)


UNNAMED: dict[str, tuple[Any, Callable[[float], Any]]] = {
    "class, by getattr": (lambda net, x: x * getattr(Held, "gain"), partial(setattr, Held, "gain")),  # noqa: B009
    "class, by vars": (lambda net, x: x * vars(Held)["gain"], partial(setattr, Held, "gain")),
    "class, when called": (lambda net, x: HELD(x), partial(setattr, Held, "gain")),
    "metaclass": (lambda net, x: x * Held.by_its_type, partial(STORED.__setitem__, "gain")),
    "object of a class": (lambda net, x: x * Held.get().own, partial(setattr, HELD, "own")),
    "remembered": (lambda net, x: x * remembered()["gain"], partial(remembered().__setitem__, "gain")),
    "function of a module": (lambda net, x: AMONG.scale(x), partial(setattr, MODULE, "gain")),
    "environment": (
        lambda net, x: x * float(os.getenv("MCBN_GAIN", "1")),
        lambda v: os.environ.update(MCBN_GAIN=str(v)),
    ),
    "new in a module": (lambda net, x: x * getattr(MODULE, "late", 1.0), comes(MODULE, "late")),
    "new in a class": (lambda net, x: x * getattr(Kind, "late", 1.0), comes(Kind, "late")),
    "new in a function": (lambda net, x: x * getattr(scaled, "late", 1.0), comes(scaled, "late")),
    "new in the network's class": (lambda net, x: x * getattr(net, "late", 1.0), comes(Outside, "late")),
    "new global": (by_name, comes(sys.modules[__name__], "NOT_YET")),
    "switch": (
        lambda net, x: x * (3 if torch.backends.cudnn.enabled else 1),
        lambda v: setattr(torch.backends.cudnn, "enabled", v == 1),
    ),
}


def check_followed(net: nn.Module, change: Callable[[float], object]) -> str:
    """Change a setting after calls that compare; say how draws ran before."""
    bayes, x = fitted(net), data(7, seed=2)
    for _ in range(4):  # the next calls are not compared
        bayes.sample(x)
    how = bayes.explain(x)
    try:
        for value in (2.0, 3.0):
            change(value)
            check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)
    finally:
        change(1.0)
    return how


@pytest.mark.parametrize("how", UNNAMED)
def test_a_setting_is_seen_that_is_named_nowhere_or_not_there_yet(how: str) -> None:
    read, change = UNNAMED[how]
    check_followed(Outside(read), change)


class Scales:
    """An output function with a setting that is its class's at first."""

    gain = 1.0

    def __call__(self, output: Tensor) -> Tensor:
        return output * self.gain


@pytest.mark.parametrize("output", [Scales(), lambda output: output * STORED["gain"]])
def test_a_setting_of_the_output_function_is_seen(output: Any) -> None:
    bayes = MCBN(Outside().double().eval(), "regression", output=output).fit(data(), n_samples=T, batch_size=M)
    x, expected = data(7), bayes.sample(data(7))
    for _ in range(4):
        bayes.sample(x)
    try:
        for value in (2.0, 3.0):
            STORED["gain"] = output.gain = value  # type: ignore[attr-defined]
            check_equal(bayes.sample(x), value * expected, 1e-9)
    finally:
        STORED["gain"] = 1.0


class Closes(Outside):
    """A part of it closes over it, so what its code reads leads to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = lambda h: self.last(self.bn(h).relu())

    def forward(self, x: Any) -> Tensor:
        return self.rest(self.first(x))


def test_networks_that_their_own_code_leads_to_are_let_go() -> None:
    bayes = fitted(Closes())
    bayes.sample(data(7))
    copied = pickle.loads(pickle.dumps(bayes.network.settings))
    gone = weakref.ref(bayes.network.module)
    del bayes
    gc.collect()
    assert (gone(), copied) == (None, None)


@functools.lru_cache
def places(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64)


def test_a_table_that_a_function_remembers_is_no_object_of_the_user() -> None:
    bayes, x = fitted(Outside(lambda net, x: x + places(x.shape[1]))), data(7)
    check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)


def test_a_plan_ends_where_a_hook_on_all_modules_comes() -> None:
    bayes, q = fitted(Outside()), data(7)
    for _ in range(5):
        bayes.sample(q)
    double = lambda module, args, out: 2 * out if isinstance(module, nn.Linear) else None  # noqa: E731
    hook = nn.modules.module.register_module_forward_hook(double)
    try:
        check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "how",
    [
        lambda net, x: x * (3 if POOL.submit(lambda: float(x.abs().max())).result() < 0.5 else 1),
        lambda net, x: x * (1 if next(net.counter) < 10**6 else 2),
        lambda net, x: x if net.random.random() < 0.999 else -x,
        lambda net, x: x * globals().get("NOT_THERE_YET", 1.0),
    ],
    ids=["thread", "iterator", "generator of its own", "globals"],
)
def test_what_may_give_something_else_each_time_is_not_traced(how: Any) -> None:
    net = Outside(how)
    if how.__code__.co_names[0] == "next":
        net.counter = iter(range(10**7))  # one of itertools cannot be copied from Python 3.14 on
    elif "random" in how.__code__.co_names:
        net.random = random.Random(0)
    bayes = fitted(net, 3 * data())
    assert "own code" in bayes.explain(data(7), chunk_size=1)
    for q in (3 * data(7), 3 * data(7, 2), 0.01 * data(7, 3)):
        check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method, as libraries do that note how a network was made."""
    return lambda self, *args: function(self, *args)


class Wrapped(Outside):
    __init__ = kept(lambda self, *args: setattr(self, "made", time.time()) or Outside.__init__(self, *args))
    stamp = kept(lambda self, x: x * (time.time() > 0))


class Stamped(Wrapped):
    def forward(self, x: Any) -> Tensor:
        return super().forward(self.stamp(x))


@pytest.mark.parametrize(("kind", "traced"), [(Wrapped, True), (Stamped, False)])
def test_wrapped_methods_count_where_the_pass_calls_them(kind: type[Outside], traced: bool) -> None:
    assert ("own code" in fitted(kind()).explain(data(7))) is not traced


def test_functions_of_torch_count_as_known_however_they_are_imported() -> None:
    bayes = fitted(Outside(lambda net, x: interpolate(x[:, None], size=5)[:, 0]))  # its code imports by name
    assert "own code" not in bayes.explain(data(7))
    check_equal(bayes.sample(data(7)), by_loop(bayes, data(7)), 1e-9)


def test_batch_norm_is_found_under_another_name() -> None:
    class Renamed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return normalised(x, None, None, training=True)

    assert candidates(nn.Sequential(nn.Linear(5, 6), Renamed())) == ["1"]


def test_a_plan_is_compared_again_on_inputs_much_smaller() -> None:
    bayes, q = fitted(Outside()), data(7)
    for _ in range(3):
        bayes.sample(q)
    (history,) = bayes.engine._histories.values()
    assert history.is_due(0.1 * history.smallest)
    assert not history.is_due(0.1 * history.largest)


class Doubled(dict):
    def __getitem__(self, key: str) -> Tensor:
        return 2 * super().__getitem__(key)


class Named(Outside):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["a"] * (3 if isinstance(x, OrderedDict) else 1) + x["b"])


def entries(seed: int, n: int = 7) -> dict[str, Tensor]:
    return {"a": data(n, seed), "b": data(n, seed + 1)}


@pytest.mark.parametrize("kind", [Doubled, OrderedDict])
def test_dicts_keep_their_kind(kind: type) -> None:
    bayes = fitted(Named(), entries(3, 48))
    for q in (entries(5), kind(entries(5)), entries(7), kind(entries(7))):
        check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)


def test_batches_of_a_list_are_joined_by_key_or_refused() -> None:
    bayes, one, other = fitted(Named(), entries(3, 48)), entries(5), entries(7)
    expected = torch.cat([bayes.sample(one), bayes.sample(other)], 1)
    check_equal(bayes.sample([one, dict(reversed(other.items()))]), expected, 1e-12)
    with pytest.raises(MCBNError, match="must be alike"):
        bayes.sample([one, {"a": data(7), "b": 1.0}])


class InPlace(Outside):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return super().forward(b)


@pytest.mark.parametrize("part", [lambda q: q.view(q.shape), lambda q: q[:, :], lambda q: q.detach()])
def test_inputs_in_one_memory_are_so_for_the_network(part: Callable[[Tensor], Tensor]) -> None:
    bayes = MCBN(InPlace().double().eval(), "regression", inputs=lambda q: q).fit(
        (data(), data()), n_samples=4, batch_size=M
    )
    for seed in range(12):
        q, other = data(7, seed), data(7, seed + 50)
        check_equal(bayes.sample((q, part(q))), bayes.sample((other, 2 * q)), 1e-9)
        assert torch.equal(q, data(7, seed))


class Sums(Outside):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a + b)


def test_gradients_reach_inputs_in_one_memory() -> None:
    bayes = MCBN(Sums().double().eval(), "regression", inputs=lambda q: q).fit(
        (data(), data()), n_samples=4, batch_size=M
    )
    shared, apart = (data(7).requires_grad_() for _ in range(2))
    bayes.sample((shared, shared[:, :])).sum().backward()
    bayes.sample((apart, apart.clone())).sum().backward()
    check_equal(shared.grad, apart.grad, 1e-9)


def test_parts_of_one_large_table_are_copied_without_what_lies_between() -> None:
    table = data(1000)
    first, last = batches.copied((table[:3], table[-3:]))
    assert torch.equal(last, table[-3:])
    assert first.untyped_storage().nbytes() == 3 * 5 * 8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    with pytest.raises(MCBNError, match="nested tensor; pad it"):
        fitted(Outside()).predict(torch.nested.nested_tensor([data(3), data(4)]))


def test_one_tensor_given_twice_is_one_for_the_network() -> None:
    net, q, other = InPlace().double().eval(), data(7), data(7, 2)
    bayes = MCBN(net, "regression", inputs=lambda batch: batch).fit((data(), data()), n_samples=4, batch_size=M)
    for _ in range(12):
        check_equal(bayes.sample((q, q)), bayes.sample((other, 2 * q)), 1e-9)
        check_equal(bayes.sample((other, q)), bayes.sample((data(7, 5), q)), 1e-9)


@pytest.mark.parametrize("x", [data(14)[::2], data(7, width=10)[:, ::2], data(1).expand(7, 5), data(5, width=7).T])
def test_copies_of_inputs_lie_as_they_do(x: Tensor) -> None:
    def by_layout(net: nn.Module, x: Tensor) -> Tensor:
        return x * (1 + x.stride(0)) * (2 if x.is_contiguous() else 1)

    bayes = fitted(Outside(by_layout))
    assert torch.equal(bayes.plain(x), bayes.model(x).detach())


def test_tensors_keep_what_is_put_on_them() -> None:
    bayes = fitted(Outside(lambda net, x: x * getattr(x, "gain", 1.0)))
    for _ in range(5):
        bayes.sample(data(7))
    tagged = data(7)
    tagged.gain = 3.0
    check_equal(bayes.sample(tagged), bayes.sample(3 * data(7)), 1e-9)


class Backend:
    """Reads its argument, as backends of einops do; no table, though it has the name of one's method."""

    def to_numpy(self, x):
        return x


BACKEND = Backend()


def test_objects_with_a_method_named_as_that_of_tables_are_left_alone() -> None:
    bayes, x = fitted(Outside(lambda net, x: BACKEND.to_numpy(x))), data(7)
    check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)


def test_arrays_of_any_make_are_read_and_masked_ones_refused() -> None:
    bayes, x = fitted(Outside()), data(7)
    array = x.numpy()
    for other in (array[::-1][::-1], array.astype(">f8"), array.astype(np.longdouble)):
        check_equal(bayes.sample(other), bayes.sample(x), 1e-12)
    check_equal(bayes.sample(array[::-1]), bayes.sample(x.flip(0)), 1e-12)
    with pytest.raises(MCBNError, match="1 values of an array are masked"):
        bayes.sample(np.ma.masked_array(array, array == array.max()))


class Reused(IterableDataset):
    """Hands out the same memory every time."""

    def __init__(self, x: Tensor, y: Tensor | None = None) -> None:
        self.tensors = [t for t in (x, y) if t is not None]
        self.memory = [torch.empty(M, t.shape[1], dtype=t.dtype) for t in self.tensors]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.tensors[0]), M):
            for memory, t in zip(self.memory, self.tensors, strict=True):
                memory.copy_(t[start : start + M])
            yield tuple(self.memory) if len(self.memory) > 1 else self.memory[0]


@pytest.mark.parametrize("as_loader", [True, False])
def test_a_stream_may_reuse_its_memory(as_loader: bool) -> None:
    x = data(M * T)
    stream = DataLoader(Reused(x), batch_size=None) if as_loader else iter(Reused(x))
    reused = MCBN(Outside().double().eval(), "regression").fit(stream, n_samples=T).posterior
    right = MCBN(Outside().double().eval(), "regression").fit(iter(x.split(M)), n_samples=T).posterior
    check_equal(reused.mean["bn"], right.mean["bn"], 1e-12)


def test_held_out_data_and_references_may_reuse_their_memory() -> None:
    x, y = data(320), data(320, 2, width=2)
    one, other = fitted(Outside()), fitted(Outside())
    tau = one.tune(DataLoader(Reused(x, y), batch_size=None)).tau
    check_equal(tau, other.tune((x, y)).tau, 1e-9)
    watches = [one.watch(r, batch_size=M, false_alarms=0.1) for r in (DataLoader(Reused(x), batch_size=None), x)]
    kept = x.clone()
    p_values = [watch(kept[:M] + 0.3).p_value for watch in watches]
    assert p_values[0] == p_values[1]
    watch = one.watch(x, batch_size=M, false_alarms=0.1)
    x.zero_()
    assert watch(kept[:M] + 0.3).p_value == p_values[1]


class Keeps(Outside):
    def forward(self, x: Tensor) -> Tensor:
        float(x.mean())  # so that no plan takes over
        self.h = self.bn(self.first(x))
        torch.sin(self.h).sum()
        return self.last(self.h.relu())


def test_threads_do_not_meet_on_a_network_that_keeps_features(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, inputs, wrong = fitted(Keeps()), (data(7), data(7, 2)), []
    expected = [by_loop(bayes, q) for q in inputs]

    def run(k: int) -> None:
        for _ in range(10):
            wrong.extend([k] * (not torch.allclose(bayes.sample(inputs[k]), expected[k])))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number % 2,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


class Streams(Outside):
    last_h = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.first(x))
        h = h if self.last_h is None or len(self.last_h) != len(h) else 0.5 * (h + self.last_h)
        self.last_h = h
        return self.last(h.relu())


def test_a_network_that_keeps_a_state_is_named() -> None:
    with pytest.warns(UserWarning, match="Streams keeps a state from call to call"):
        fitted(Streams())


class Remade(Outside):
    def __deepcopy__(self, memo: dict[int, Any]) -> "Remade":
        return Remade().double().eval()


class Forgets(Outside):
    gain = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "gain"}


def test_a_copy_that_is_none_is_refused() -> None:
    remade, forgets = Remade(), Forgets()
    nn.init.ones_(remade.first.weight)
    forgets.gain = 3.0
    for net, name in ((remade, "first.weight"), (forgets, "gain")):
        with pytest.raises(MCBNError, match=f"has another '{name}'"):
            fitted(net)


class Cached(Outside):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if getattr(self, "grid", None) is None or len(self.grid) != len(x):
            self.grid = torch.zeros(len(x), 2, dtype=x.dtype)
        return {"out": super().forward(x) + self.grid, "grid": self.grid}


def test_outputs_are_not_the_networks_own_memory() -> None:
    bayes = fitted(Cached())
    bayes.output = bayes.network.output = "grid"
    bayes.plain(data(7)).add_(1)
    assert not bayes.plain(data(7)).any()


class Frozen1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.rand(6))
        self.register_buffer("running_var", torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.running_var.rsqrt()


class HidesOne(Outside):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own, self.cond, self.more, self.other = own, nn.Identity(), Frozen1d(), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cond(self.bn(self.first(x)))
        mean, var = self.other.running_mean, self.other.running_var
        return self.last(
            self.more(h) if self.own else torch.native_batch_norm(h, None, None, mean, var, False, 0, 0)[0]
        )


@pytest.mark.parametrize(("own", "name"), [(True, "more"), (False, "other")])
def test_batch_norm_by_own_arithmetic_is_named_whatever_modules_are_called(own: bool, name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(HidesOne(own=own))
    assert any(f"batch norm of '{name}' runs by arithmetic" in str(warning.message) for warning in told)


def test_batch_norm_under_vmap_is_refused() -> None:
    class Mapped(Outside):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(torch.vmap(self.bn)(torch.stack([h, 2 * h])).mean(0))

    with pytest.raises(MCBNError, match="'bn' runs inside torch"):
        fitted(Mapped())


def test_checkpointed_networks_are_fitted() -> None:
    class Checkpointed(Outside):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.bn, self.first(x), use_reentrant=False))

    bayes = fitted(Checkpointed())
    check_equal(bayes.sample(data(7)), by_loop(bayes, data(7)), 1e-9)


def test_complex_outputs_are_refused() -> None:
    class Complex(Outside):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(super().forward(x), super().forward(x))

    with pytest.raises(MCBNError, match="complex numbers"):
        fitted(Complex()).predict(data(7))


def test_a_network_that_keeps_features_is_never_taken_for_one_that_keeps_nothing() -> None:
    networks = [fitted(Keeps()).engine.network for _ in range(60)]  # memory given anew has the address of the old
    assert not [network for network in networks if isinstance(network.busy, nullcontext)]


# ---------------------------------------------------------------- settings behind other settings


class Reads:
    """What reads a setting by a method, as a function, or where an attribute is asked for."""

    def apply(self, x: Tensor) -> Tensor:
        return x * STORED["gain"]

    def __getitem__(self, key: str) -> float:
        return STORED["gain"]

    def __get__(self, owner: Any, kind: Any) -> float:
        return STORED["gain"]


class Kept(Outside):
    described = Reads()

    def __init__(self, how: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(how)
        self.functions, self.objects = [READS.apply, lambda x: x * STORED["gain"]], {"reads": Reads()}

    def __getattr__(self, name: str) -> Any:
        return STORED["gain"] if name == "made_up" else super().__getattr__(name)

    def times(self, x: Tensor, power: int) -> Tensor:
        return x * STORED["gain"] ** power

    once = functools.partialmethod(times, power=1)


class Gained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * STORED["gain"]


def closing(over: dict[str, float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * over["gain"]


READS, SLOPE, GAINED, USERS, LOG = Reads(), nn.LeakyReLU(1.0), Gained(), UserList([1.0]), logging.getLogger("mcbn_test")
GAINED.gain = 1.0  # type: ignore[assignment]
REGISTRY: dict[str, Any] = {"function": lambda x: x * STORED["gain"], "class": Kind, "object": READS}
BOUND, PARTLY, CLOSED = READS.apply, partial(lambda x: x * STORED["gain"]), closing(STORED)
ARRAY = np.ones(3000)
store, of_kind = partial(STORED.__setitem__, "gain"), partial(setattr, Kind, "gain")
BEHIND: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "function in a table": (lambda net, x: REGISTRY["function"](x), store),
    "class in a table": (lambda net, x: x * REGISTRY["class"].gain, of_kind),
    "object in a table": (lambda net, x: x * REGISTRY["object"]["gain"], store),
    "bound method": (lambda net, x: BOUND(x), store),
    "partial function": (lambda net, x: PARTLY(x), store),
    "closure of a global function": (lambda net, x: CLOSED(x), store),
    "bound method in a list": (lambda net, x: net.functions[0](x), store),
    "function in a list": (lambda net, x: net.functions[1](x), store),
    "method of an object in a dict": (lambda net, x: net.objects["reads"].apply(x), store),
    "operator of an object in a dict": (lambda net, x: x * net.objects["reads"]["gain"], store),
    "descriptor": (lambda net, x: x * net.described, store),
    "attribute made up": (lambda net, x: x * net.made_up, store),
    "partial method": (lambda net, x: net.once(x), store),
    "module elsewhere": (lambda net, x: GAINED(x), partial(setattr, GAINED, "gain")),
    "code of a module elsewhere": (lambda net, x: GAINED(x), store),
    "torch's module elsewhere": (lambda net, x: SLOPE(x), partial(setattr, SLOPE, "negative_slope")),
    "list of Python's": (lambda net, x: x * USERS[0], partial(USERS.__setitem__, 0)),
    "object of a library": (lambda net, x: x * LOG.level, lambda value: LOG.setLevel(int(value))),
    "long array": (lambda net, x: x * ARRAY[2000], partial(ARRAY.__setitem__, 2000)),
}


@pytest.mark.parametrize("how", BEHIND)
def test_a_setting_is_seen_behind_what_the_code_names(how: str) -> None:
    read, change = BEHIND[how]
    change(1.0)
    assert "own code" not in check_followed(Kept(read), change)


class Other:
    gain = 1.0


OTHER = {"gain": 1.0}
CHOSEN: Any = Kind
SCALED: Any = CLOSED


@pytest.mark.parametrize(
    ("read", "name", "new", "change"),
    [
        (lambda net, x: x * CHOSEN.gain, "CHOSEN", Other, partial(setattr, Other, "gain")),
        (lambda net, x: SCALED(x), "SCALED", lambda x: x * OTHER["gain"], partial(OTHER.__setitem__, "gain")),
    ],
    ids=["class", "function"],
)
def test_settings_of_what_is_exchanged_are_seen(
    read: Any, name: str, new: Any, change: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bayes, x = fitted(Outside(read)), data(7, seed=2)
    bayes.sample(x)
    monkeypatch.setattr(sys.modules[__name__], name, new)
    for _ in range(4):
        bayes.sample(x)
    try:
        change(2.0)
        check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)
    finally:
        change(1.0)


class Holds:
    def __init__(self, draw: Any) -> None:
        self.draw = draw


@pytest.mark.parametrize(
    "tool",
    [
        {"draw": random.Random(0).random},
        Holds(random.Random(0).random),
        Holds(partial(np.random.default_rng(0).uniform, 0, 1)),
        [iter([0.5] * 10**5).__next__],
        SimpleNamespace(draw=[random.Random(0)]),
    ],
    ids=["dict", "object", "partial function", "iterator", "generator"],
)
def test_what_holds_generators_is_not_traced(tool: Any) -> None:
    net = Outside(lambda net, x: x if rare(net.tool) < 0.999 else -x)
    net.tool = tool
    assert "'tool', which may give something else each time" in fitted(net).explain(data(7), chunk_size=1)


def rare(tool: Any) -> float:
    draw = tool["draw"] if isinstance(tool, dict) else tool[0] if isinstance(tool, list) else tool.draw
    return draw[0].random() if isinstance(draw, list) else draw()


@dataclass
class Config:
    gain: float = 1.0


CONFIG = Config()


@pytest.mark.parametrize(
    "how",
    [
        lambda net, x: x / np.sqrt(x.shape[1]),
        lambda net, x: x.reshape(-1, np.prod(x.shape[1:]))[:, : np.int64(5)] * np.float32(2),
        lambda net, x: (x * (1 + 2j)).real,
        lambda net, x: x * CONFIG.gain,
    ],
    ids=["NumPy", "sizes of NumPy", "complex", "dataclass"],
)
def test_numbers_of_any_make_keep_the_plan(how: Callable[[Any, Any], Tensor]) -> None:
    bayes = fitted(Outside(how))
    check_equal(bayes.sample(data(7)), by_loop(bayes, data(7)), 1e-9)
    assert "own code" not in bayes.explain(data(7))


class Noted(dict):
    """Training batches of a dict are plain, without attributes."""


class ReadsNotes(Outside):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["a"] * getattr(x, "gain", 1.0))


def noted(gain: float, n: int = 7) -> Noted:
    batch = Noted(a=data(n, 2))
    batch.gain = gain
    return batch


def test_attributes_of_a_dict_are_part_of_the_inputs() -> None:
    bayes = fitted(ReadsNotes(), noted(1.0, 48))
    for gain in (1.0, 1.0, 1.0, 1.0, 2.0, 3.0):
        check_equal(bayes.sample(noted(gain)), by_loop(bayes, noted(gain)), 1e-9)


def test_inputs_that_overlap_from_some_call_on_do_so_for_the_network() -> None:
    bayes, whole = fitted(InPlace(), {"a": data(), "b": data(seed=2)}), data(14)
    for start in (7, 7, 7, 7, 3, 7):
        changed = torch.cat([2 * whole[:7], whole[7:]])[start : start + 7].clone()
        found = bayes.sample({"a": whole[:7], "b": whole[start : start + 7]})
        check_equal(found, bayes.sample({"a": data(7), "b": changed}), 1e-9)
        assert torch.equal(whole, data(14))


class OfParts(Outside):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x.real + 2 * x.imag)


def test_the_range_of_complex_inputs_is_that_of_both_parts() -> None:
    bayes, x = fitted(OfParts(), torch.complex(data(), data(seed=2))), torch.complex(data(7), 9 * data(7, 2))
    check_equal(bayes.sample(x), by_loop(bayes, x), 1e-9)  # without a warning of torch
    (history,) = bayes.engine._histories.values()
    assert history.largest == float(x.abs().max())


READ: dict[str, Callable[[Any], Any]] = {  # a number that code makes of a value, of a kind that compares by value
    "complex": lambda v: v.imag,
    "bytes": lambda v: float(v[0]),
    "decimal": lambda v: float(v),
    "range": lambda v: float(len(v)),
    "slice": lambda v: float(v.stop),
    "seconds": lambda v: v.total_seconds(),
    "dtype": lambda v: 1.0 if v is torch.float32 else 2.0,
    "device": lambda v: 1.0 if v.type == "cpu" else 2.0,
    "layout": lambda v: 1.0 if v is torch.strided else 2.0,
}
VALUES: dict[str, tuple[Any, Any]] = {
    "complex": (1j, 2j),
    "bytes": (b"\1", b"\2"),
    "decimal": (Decimal(1), Decimal(2)),
    "range": (range(1), range(2)),
    "slice": (slice(1), slice(2)),
    "seconds": (timedelta(seconds=1), timedelta(seconds=2)),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "layout": (torch.strided, torch.sparse_coo),
}
OPTIONS = {"deeper": {"value": None}}


@pytest.mark.parametrize("kind", VALUES)
def test_a_plan_ends_where_a_value_in_a_table_changes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = READ[kind]
    monkeypatch.setitem(OPTIONS["deeper"], "value", VALUES[kind][0])
    bayes, q = fitted(Outside(lambda net, x: x * read(OPTIONS["deeper"]["value"]))), data(7)
    for _ in range(4):
        check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)
    assert "own code" not in bayes.explain(q)
    monkeypatch.setitem(OPTIONS["deeper"], "value", VALUES[kind][1])
    check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)


def reloaded(x: Tensor, gain: float = 1.0, *, shift: float = 0.0) -> Tensor:
    return x * gain + shift


def edited(x: Tensor, gain: float = 1.0, *, shift: float = 0.0) -> Tensor:
    return x * gain - 3 + shift


@pytest.mark.parametrize(
    ("part", "value"), [("__code__", edited.__code__), ("__defaults__", (2.0,)), ("__kwdefaults__", {"shift": 1.0})]
)
def test_a_plan_ends_where_a_function_is_reloaded_in_place(
    part: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As IPython's autoreload does."""
    bayes, q = fitted(Outside(lambda net, x: reloaded(x))), data(7)
    for _ in range(4):
        check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)
    assert "own code" not in bayes.explain(q)
    monkeypatch.setattr(reloaded, part, value)
    check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)


class Registered(Outside):
    """Making a class of it runs code that its passes do not; it holds a member of an enumeration."""

    layout = Enum("Layout", ["NCHW"])

    def __init__(self) -> None:
        super().__init__()
        self.kind = self.layout.NCHW

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.made = time.time()

    def forward(self, x: Any) -> Tensor:
        return super().forward(x) * (1 if self.kind is self.layout.NCHW else 2)


def test_what_makes_a_class_and_members_of_an_enumeration_keep_nobody_from_a_plan() -> None:
    bayes, q = fitted(type("Made", (Registered,), {})()), data(7)
    assert "own code" not in bayes.explain(q)
    check_equal(bayes.sample(q), by_loop(bayes, q), 1e-9)
