"""One capture for all: on a GPU against the function itself; elsewhere the order of warm-ups and capture."""

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from mcbn.engine import capture as capturing
from mcbn.engine.capture import WARM_UPS, capture, capture_of, warm_up


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that do nothing."""
    for name in ("current_stream", "Stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **_named: mock.MagicMock())


@pytest.mark.usefixtures("no_gpu")
def test_what_warm_ups_change_is_put_back_before_the_capture() -> None:
    steps: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        steps.append("in")
        yield
        steps.append("out")

    capture(lambda: steps.append("run"), around=around())
    assert steps == ["in", *["run"] * WARM_UPS, "out", "run"]


@pytest.mark.usefixtures("no_gpu")
def test_a_function_that_ran_already_needs_no_warm_up() -> None:
    steps: list[str] = []
    warm_up(lambda: steps.append("first"))
    capture(lambda: steps.append("run"), warm_ups=0)
    assert steps == ["first", "run"]


@pytest.mark.usefixtures("no_gpu")
def test_what_a_captured_function_holds_lives_as_long_as_its_graph() -> None:
    weight = torch.ones(3)
    held = weakref.ref(weight)
    replay = capture(partial(torch.neg, weight))
    del weight
    assert held() is not None
    del replay
    assert held() is None


@pytest.mark.usefixtures("no_gpu")
def test_arguments_are_copied_in_and_results_out(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        places.append(x)
        return 2 * x

    def replaying(function, **_):
        function()
        return function

    monkeypatch.setattr(capturing, "capture", replaying)
    x = torch.ones(3)
    captured = capture_of(double, [x])
    captured(torch.full((3,), 5.0))
    assert torch.equal(places[0], torch.full((3,), 5.0))
    assert all(place is places[0] for place in places)
    assert torch.equal(x, torch.ones(3))
    with pytest.raises(ValueError, match="zip"):
        captured(x, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_captured_functions_give_the_numbers_of_the_function() -> None:
    weight = torch.randn(4, 4, device="cuda")
    captured = capture_of(lambda x: torch.relu(x @ weight), [torch.zeros(2, 4, device="cuda")])
    for _ in range(3):
        x = torch.randn(2, 4, device="cuda")
        first = captured(x)
        captured(x + 1)
        assert torch.equal(first, torch.relu(x @ weight))  # a copy: later replays do not reach it
    count = torch.zeros((), device="cuda")

    @contextmanager
    def zeroed() -> Iterator[None]:
        yield
        count.zero_()

    step = capture(lambda: count.add_(1), around=zeroed())
    assert count.item() == 0  # capturing runs nothing
    step()
    step()
    assert count.item() == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_threads_capture_beside_threads_that_capture_and_take_memory() -> None:
    weights, x = torch.randn(8, 64, 64, device="cuda"), torch.randn(32, 64, device="cuda")

    def work(number: int) -> None:
        for size in range(1, 9):
            if number < 4:
                captured = capture_of(lambda x: torch.relu(x @ weights[number]), [torch.zeros(32, 64, device="cuda")])
                assert torch.equal(captured(x), torch.relu(x @ weights[number]))
            else:  # memory that torch has not had yet
                torch.ones(size * 2**22 + number * 2**20, device="cuda").sum().item()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_an_old_graph_that_is_swept_does_not_end_a_capture() -> None:
    def add(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            held: list[object] = [*graphs]
            graphs.clear()
            held.append(held)  # swept, not freed by itself
            del held
            for _ in range(5000):
                some: list[object] = []
                some.append(some)  # enough of them, and Python sweeps
        return x + 1

    graphs: list[object] = [capture_of(lambda x: x * 2, [torch.zeros(3, device="cuda")])]
    captured = capture_of(add, [torch.zeros(3, device="cuda")])
    assert torch.equal(captured(torch.ones(3, device="cuda")), torch.full((3,), 2.0, device="cuda"))


@pytest.mark.usefixtures("no_gpu")
def test_nothing_is_swept_during_a_capture() -> None:
    swept: list[bool] = []
    capture(lambda: swept.append(gc.isenabled()), warm_ups=1)
    assert swept == [True, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / len(swept[2:]), warm_ups=0)
    assert gc.isenabled()


@pytest.mark.usefixtures("no_gpu")
def test_one_thread_captures_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [0, 0]  # now, and at most

    @contextmanager
    def graph(*_: object, **_named: object) -> Iterator[None]:
        inside[0] += 1
        inside[1] = max(inside)
        time.sleep(0.01)
        yield
        inside[0] -= 1

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: capture(lambda: None), range(8)))
    assert inside == [0, 1]
