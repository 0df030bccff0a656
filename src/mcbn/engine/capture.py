"""Work over fixed memory captured as a CUDA graph: replaying it costs one launch instead of hundreds.

What a graph asks of whoever captures it stands in `graph.md`.
"""

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 3  # runs before a capture, in which kernels are chosen and loaded; torch's own examples take as many
_CAPTURING = threading.Lock()  # one at a time: torch captures on one stream


def warm_up(function: Callable[[], Any], times: int = 1) -> None:
    """Run a function on a stream of its own, as it will be captured: what libraries set up first is then set up."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            for _ in range(times):
                function()
    finally:
        main.wait_stream(side)


def capture(
    function: Callable[[], Any], *, warm_ups: int = WARM_UPS, around: AbstractContextManager[Any] | None = None
) -> Callable[[], None]:
    """Capture a function, return what runs it again; `around` puts back what the runs before the capture change.

    What is returned keeps the function: a graph reads freed memory once a tensor that the function holds is gone.
    """
    with around or nullcontext():
        warm_up(function, warm_ups)
    graph = torch.cuda.CUDAGraph()
    with _CAPTURING:
        sweeps = gc.isenabled()
        gc.disable()  # an old graph that is swept ends the capture that is under way
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may take memory
                function()
        finally:
            if sweeps:
                gc.enable()

    def replay(kept: Callable[[], Any] = function) -> None:
        graph.replay()

    return replay


def capture_of(function: Callable[..., Tensor], arguments: Iterable[Tensor]) -> Callable[..., Tensor]:
    """Capture a function of tensors; what is returned takes others of the same shapes, in one thread at a time."""
    places = [tensor.clone() for tensor in arguments]
    results: list[Tensor] = []

    def run() -> None:
        results[:] = [function(*places)]

    replay, lock = capture(run), threading.Lock()
    (result,) = results  # of the capture: where every replay writes

    def captured(*arguments: Tensor) -> Tensor:
        with lock:
            for place, value in zip(places, arguments, strict=True):
                place.copy_(value)
            replay()
            return result.clone()

    return captured
