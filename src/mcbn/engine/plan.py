"""How draws run for inputs of one shape: several in one pass or one by one, compiled, captured as a CUDA graph, or not.

`ways` lists the plans for a traced pass, the fastest first. The engine (`sampling`) keeps the first that gives the
numbers of the plain pass, and runs the network `AsItIs` where none does.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from mcbn.engine.kernels.narrow import is_tf32
from mcbn.engine.program import Program
from mcbn.engine.workspace import Workspace

# Sizes count the values of the widest intermediate result; measured on 2 cores and on an H200 (benchmarks/).
CPU_CHUNK = 600_000  # several draws in one pass: together they stay in the cache
CPU_FOLD = 2**17  # convolutions are efficient enough alone from here on: fold, one draw a pass
GPU_CHUNK = 2**24  # 64 MB in single precision; larger ones win at most 2 % of time (`python -m mcbn_benchmarks chunks`)
GPU_CHUNK_FLAT = 2**22  # without convolutions, where four draws fit: larger ones win nothing
GPU_FOLD = 2**21
GPU_GRAPH = 2**26  # up to here launching kernels costs more than running them: capture a CUDA graph
GPU_GATHER = 2**22  # outputs handed on at once
GPU_PASSES = 8  # at most in one graph
SIDE_BY_SIDE = 2  # of them: a pass of one draw leaves part of the GPU idle
PASSES_BEFORE_CAPTURE = 4  # verifying and a first call alone are not worth a graph
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # against the plain pass, relative to its largest value
COARSE_TOLERANCE = 0.1  # half precision and TF32: rounding of a deep network adds up

OnePass = Callable[[tuple[Tensor, ...], Tensor], Tensor]  # (shared, rows (t, S)) -> (t, N, ...)
Run = Callable[[int, int], Tensor]  # draws start to stop -> (t, N, ...)


@dataclass(frozen=True)
class AsItIs:
    """Draw by draw through the network's own code."""

    reason: str
    at_once: int = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """Draws through a traced pass."""

    chunk: int  # draws in one pass
    program: Program
    omega: Tensor  # scale and shift of every draw, (T, S)
    one_pass: OnePass
    dtype: torch.dtype  # of the network's own outputs
    group: int = 1  # passes in one CUDA graph
    runs: Counter[int] = field(default_factory=Counter)  # done so far, by number of draws
    graphs: dict[int, "Graphed"] = field(default_factory=dict)  # captured, by number of draws

    @property
    def at_once(self) -> int:
        """Draws to ask for in one go."""
        return self.chunk * self.group

    def prepare(self, inputs: Any, workspace: Workspace) -> Run:
        """Run what no draw changes; return a function that runs draws start to stop on these inputs."""
        shared = self.program.run_shared(inputs)

        def run(start: int, stop: int) -> Tensor:
            rows = self.omega[start:stop]
            self.runs[len(rows)] += 1
            if self.program.stackable and not self.omega.is_cuda:
                with workspace.active():
                    found = self.one_pass(shared, rows).clone()  # the workspace is overwritten by the next pass
            else:
                found = self._graphed(shared, rows)(shared, rows)
            return found.to(self.dtype)  # passes in a workspace know nothing of autocast

        return run

    def _graphed(self, shared: tuple[Tensor, ...], rows: Tensor) -> OnePass:
        """Return the passes as a CUDA graph where that pays: small, and run often enough."""
        small = self.omega.is_cuda and self.program.width * self.chunk <= GPU_GRAPH
        if not small or torch.is_autocast_enabled("cuda") or self.runs[len(rows)] < PASSES_BEFORE_CAPTURE:
            return self._in_turn
        if len(rows) not in self.graphs:
            self.graphs[len(rows)] = Graphed(self._side_by_side, shared, rows)
        return self.graphs[len(rows)]

    def _in_turn(self, shared: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Run rows (t, S), a chunk of them in one pass."""
        return _joined([self.one_pass(shared, part) for part in torch.split(rows, self.chunk)])

    def _side_by_side(self, shared: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Run rows (t, S) as `_in_turn` does, every second pass on a stream of its own: to be captured."""
        streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(SIDE_BY_SIDE - 1))]  # type: ignore[no-untyped-call]
        done = []
        for beside in streams[1:]:
            beside.wait_stream(streams[0])
        for part, stream in zip(torch.split(rows, self.chunk), cycle(streams)):
            with torch.cuda.stream(stream):
                done.append(self.one_pass(shared, part))
        for beside in streams[1:]:
            streams[0].wait_stream(beside)
        return _joined(done)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Graphed:
    """Passes captured as a CUDA graph over fixed memory; replaying it costs one launch instead of hundreds."""

    def __init__(self, function: OnePass, shared: tuple[Tensor, ...], rows: Tensor) -> None:
        self.shared, self.rows = tuple(t.clone() for t in shared), rows.clone()
        self.lock = threading.Lock()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(self.shared, self.rows)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function(self.shared, self.rows)

    def __call__(self, shared: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Replay on other values of the same shapes."""
        with self.lock:
            for own, given in zip(self.shared, shared, strict=True):
                own.copy_(given)
            self.rows.copy_(rows)
            self.graph.replay()
            return self.output.clone()


def draws_at_once(
    width: int, convolutional: bool, *, n_samples: int, chunk_size: int | None, on_gpu: bool, narrow: bool = False
) -> int:
    """Choose how many of T draws go through in one pass whose widest result has so many values.

    narrow: its convolutions are kernels of ours, which fold nothing.
    """
    if chunk_size is not None:
        return min(chunk_size, n_samples)
    if convolutional and not narrow and width > (GPU_FOLD if on_gpu else CPU_FOLD):
        return 1
    is_flat = not convolutional and 4 * width <= GPU_CHUNK_FLAT
    bound = (GPU_CHUNK_FLAT if is_flat else GPU_CHUNK) if on_gpu else CPU_CHUNK
    most = max(1, min(n_samples, bound // max(width, 1)))
    return _evenly(n_samples, most) if on_gpu else most


def passes_at_once(program: Program, omega: Tensor, chunk: int, outputs: int) -> int:
    """Choose how many passes of a chunk of the T draws, of so many outputs a draw, go into one CUDA graph."""
    if not omega.is_cuda or program.width * chunk > GPU_GRAPH:
        return 1
    most = min(GPU_PASSES, max(SIDE_BY_SIDE, GPU_GATHER // max(1, chunk * outputs)))
    return _evenly(math.ceil(len(omega) / chunk), most)


def _evenly(count: int, most: int) -> int:
    """Return the size, at most `most`, of equal shares of a count: shares of one size share one CUDA graph."""
    return math.ceil(count / math.ceil(count / most))


def ways(
    program: Program, omega: Tensor, chunk: int, dtype: torch.dtype, *, compile: bool, outputs: int | None = None
) -> list[Plan]:
    """List the plans for a traced pass, the fastest first: each asks less of the network's operations.

    outputs: values of one draw's output, where several passes may be handed on at once.
    """
    layouts = [program, program.laid_out(channels_last=False)] if program.channels_last else [program]
    if program.narrow is not None:
        layouts.insert(0, program.narrowed())
    sizes = dict.fromkeys((chunk, 1))
    groups = {size: passes_at_once(program, omega, size, outputs) if outputs is not None else 1 for size in sizes}
    plans = [Plan(size, layout, omega, _one_pass(layout), dtype, groups[size]) for layout in layouts for size in sizes]
    if compile and not (omega.is_cuda and program.folds):  # cuDNN's fused convolutions are faster than compiled ones
        plans.insert(0, Plan(chunk, program, omega, _compiled(_one_pass(program)), dtype, groups[chunk]))
    return plans


def _one_pass(program: Program) -> FunctionType:
    """Return the function that runs rows (t, S) of scales and shifts in one pass: (t, N, ...)."""

    def one_pass(shared: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        if len(rows) == 1:
            return program.run_each(shared, rows[0]).unsqueeze(0)
        return program.run_together(shared, rows)

    return cast(FunctionType, one_pass)


def _compiled(function: FunctionType) -> OnePass:
    """Compile a copy of a function with code of its own: torch.compile counts its recompilations by code object."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, dynamic=False)


def close(found: Tensor, expected: Tensor) -> bool:
    """Tell whether a faster way gave the numbers of the plain pass, up to rounding."""
    if found.shape != expected.shape or not expected.numel():
        return False
    relative = COARSE_TOLERANCE if is_tf32(expected) else TOLERANCE.get(expected.dtype, COARSE_TOLERANCE)
    tolerance = relative * expected.abs().max().clamp(min=1e-6)
    return bool(((found - expected).abs() <= tolerance).all())
