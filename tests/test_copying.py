"""Copies are private, however a network or an input leads to itself; what cannot be had is refused with the reason."""

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcbn
from mcbn import algorithm
from untouched import untouched

SEEN: list[Tensor] = []
KNOWN: dict[str, nn.Module] = {}


class Parts(nn.Module):
    """Linear, batch norm, linear: pieces for networks that reach them in odd ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 1)

    def second(self, h: Tensor) -> Tensor:
        return self.b(torch.relu(self.bn(h)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.a(x))


class Tap(Parts):
    """A hook writes into a dict that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tap = tap = {}
        self.bn.register_forward_hook(lambda module, args, out: tap.__setitem__("h", out))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.tap["h"].sum(1, keepdim=True)


class Lambda(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.rest = lambda h: self.second(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.a(x))


class Compiled(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.second, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(self.a(x))


class Listed(Parts):
    """Steps in a plain list: a method, a partial and a nested function."""

    def __init__(self) -> None:
        super().__init__()

        def last(h: Tensor) -> Tensor:
            return self.b(h)

        self.steps = [self.a.forward, functools.partial(lambda bn, h: bn(h), self.bn), torch.relu, last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@torch.no_grad()
@pytest.mark.parametrize("kind", [Tap, Lambda, Compiled, Listed])
@pytest.mark.parametrize("training", [False, True])
def test_functions_over_the_network_run_on_the_copy(kind: type[nn.Module], training: bool) -> None:
    net, x = kind().double().train(), torch.randn(64, 5).double()
    for rows in x.split(16):
        net(rows)
    twin = kind().double().eval()  # its functions close over itself, and no posterior is made of it
    twin.load_state_dict(net.state_dict())
    with untouched(net.train(training)):
        bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=4, batch_size=16)
        plain, samples, again = bayes.plain(x), bayes.sample(x), copy.deepcopy(bayes).sample(x)
    torch.testing.assert_close(plain, twin(x))
    for t, sample in enumerate(samples):
        mean, var = bayes.posterior.draw(t)
        torch.testing.assert_close(sample, algorithm.replay(twin, [(mean["bn"], var["bn"])], x))
    assert torch.equal(again, samples)
    net.b.weight.add_(1)
    net.bn.weight.mul_(3)
    assert torch.equal(bayes.sample(x), samples)


class Weak(Parts):
    """A part that finds its parent by a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = weakref.ref(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.parent().second(self.a(x))


class Cached(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.rest = functools.lru_cache(self.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.a(x))


class Backbone(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> "Backbone":
        return self


class Uncopied(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.a = Backbone(5, 8)


class Global(Parts):
    def __init__(self) -> None:
        super().__init__()
        KNOWN["network"] = self.bn
        self.rest = lambda h: self.b(KNOWN["network"](h))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.a(x))


@pytest.mark.parametrize("kind", [Weak, Cached, Uncopied, Global])
def test_copies_that_still_lead_to_the_network_are_refused(kind: type[nn.Module]) -> None:
    net, x = kind().train(), torch.randn(32, 5)
    with untouched(net), pytest.raises(mcbn.MCBNError, match="still leads to your own"):
        mcbn.MCBN(net, "regression").fit(x, n_samples=2, batch_size=8)
    with untouched(net), pytest.raises(mcbn.MCBNError, match="still leads to your own"):
        mcbn.MCBN(net, "regression").plain(x)


def tapped() -> tuple[nn.Module, Callable[[], Any]]:
    SEEN.clear()
    net = Parts().eval()
    net.bn.register_forward_hook(lambda module, args, out: SEEN.append(out))
    return net, lambda: len(SEEN)


class Counting(Parts):
    """Counts its calls in a list of the class."""

    calls: list[int] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x)


@pytest.mark.parametrize("make", [tapped, lambda: (Counting().eval(), lambda: len(Counting.calls))])
def test_networks_that_change_lists_of_the_user_are_refused_and_the_lists_put_back(make: Any) -> None:
    net, count = make()
    x = torch.randn(32, 5)
    for call in (lambda b: b.fit(x, n_samples=2, batch_size=8), lambda b: b.plain(x)):
        with pytest.raises(mcbn.MCBNError, match=r"changes an object of yours that no copy of it has, .*(SEEN|calls)"):
            call(mcbn.MCBN(net, "regression"))
        assert count() == 0


def test_a_hook_into_a_list_of_its_own_leaves_the_users_list_alone() -> None:
    seen: list[Tensor] = []
    net, x = Parts(), torch.randn(64, 5)
    net(x)
    net.eval().bn.register_forward_hook(lambda module, args, out: seen.append(out))
    mcbn.MCBN(net, "regression").fit(x, n_samples=2, batch_size=32).predict(x)
    assert seen == []


class Slotted:
    __slots__ = ("extra", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.extra = x, {"again": [x]}


@dataclass
class Graph:
    x: Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extra = {"again": [self.x]}


class Stored:
    """Attributes in a store, as in torch_geometric."""

    def __init__(self, x: Tensor) -> None:
        self.__dict__["store"] = {"x": x, "extra": {"again": [x]}}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["store"][name] = value


class OnObjects(Parts):
    """Assigns to its input object, changes what it nests in place, and leaves something behind."""

    def forward(self, data: Any) -> Tensor:
        data.extra["again"][0].mul_(2)
        data.extra["again"].append(1)
        data.extra["visited"] = True
        data.x = super().forward(data.x)
        return data.x


@pytest.mark.parametrize("kind", [Slotted, Graph, Stored])
def test_input_objects_are_handed_over_as_copies(kind: Callable[[Tensor], Any]) -> None:
    net, x = OnObjects().double(), torch.randn(32, 5).double()
    for _ in range(50):
        net(kind(x.clone()))
    rows = torch.utils.data.DataLoader(x, batch_size=8, collate_fn=lambda rows: kind(torch.stack(rows)))
    bayes = mcbn.MCBN(net.eval(), "regression").fit(rows, n_samples=3)
    query = kind(x[:4].clone())
    samples = bayes.sample(query)
    assert torch.equal(query.x, x[:4])
    assert list(query.extra) == ["again"]
    assert len(query.extra["again"]) == 1
    for t, sample in enumerate(samples):
        mean, var = bayes.posterior.draw(t)
        torch.testing.assert_close(sample, algorithm.replay(net, [(mean["bn"], var["bn"])], kind(x[:4].clone())))


class Itself(Graph):
    def __deepcopy__(self, memo: dict[int, Any]) -> "Itself":
        return self


def test_input_objects_that_copy_to_themselves_are_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="of type Itself shares tensors with the original"):
        mcbn.MCBN(OnObjects().eval(), "regression").plain(Itself(torch.randn(4, 5)))


class ByData(Parts):
    """Works on its input in place where version counters do not see it."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return super().forward(x)


def test_inputs_changed_through_data_stay_as_they_are() -> None:
    net, x = ByData().double(), torch.randn(64, 5).double()
    net(x.clone())
    kept = x.clone()
    bayes = mcbn.MCBN(net.eval(), "regression").fit(x, n_samples=4, batch_size=16)
    for _ in range(3):
        samples = bayes.sample(x)
        for t, sample in enumerate(samples):
            mean, var = bayes.posterior.draw(t)
            torch.testing.assert_close(sample, algorithm.replay(net, [(mean["bn"], var["bn"])], kept.clone()))
    assert torch.equal(x, kept)


class Noisy(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(len(x), 1)


def test_networks_that_draw_are_named_and_leave_the_generators() -> None:
    net, x = Noisy(), torch.randn(64, 5)
    net(x)
    with untouched(net.eval()):
        with pytest.warns(UserWarning, match="Noisy draws random numbers in eval mode"):
            bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=20, batch_size=32)
        bayes.tau = 1.0
        pred = bayes.predict(x)
        pred.log_prob(pred.mean)
        samples = bayes.sample(x)
    noise = samples - samples.mean(0)
    assert noise.std() > 0.2  # of 1 / sqrt(12): every draw has its own


class Numbers(threading.Thread):
    """Another thread that draws from the global generators as long as a block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.running = list[tuple[float, float]](), True

    def run(self) -> None:
        import random

        import numpy as np

        while self.running:
            self.drawn.append((float(torch.rand((), dtype=torch.float64)), random.random() + np.random.rand()))

    def __enter__(self) -> "Numbers":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.running = False
        self.join()


class Rows(torch.utils.data.Dataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i]


def sources(x: Tensor) -> Iterator[Any]:
    yield x
    yield Rows(x)
    yield torch.utils.data.DataLoader(Rows(x), batch_size=8)


@pytest.mark.parametrize("number", range(3))
def test_numbers_that_other_threads_draw_do_not_repeat(number: int) -> None:
    net, x = Parts(), torch.randn(64, 5)
    net(x)
    source = list(sources(x))[number]
    with Numbers() as other:
        for _ in range(3):
            bayes = mcbn.MCBN(net.eval(), "regression").fit(source, n_samples=40, batch_size=8)
            bayes.predict(x)
            bayes.plain(x)
    for column in zip(*other.drawn, strict=True):
        assert len(set(column)) == len(column)
