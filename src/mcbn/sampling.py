"""Draws through the network: f_omega(x) for the statistics omega of every draw, in the way that is fastest.

Ways, from few inputs to many: *together*, several draws in one pass (`torch.vmap` over their scales and shifts);
*folded*, draw by draw with batch norm gone into the weights; *as it is*, draw by draw through the network's own code,
for networks that cannot be written down as a program, and where gradients are wanted. The numbers are the same.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.posterior import Posterior
from mcbn.program import Program, trace
from mcbn.statistics import Replay
from mcbn.workspace import Workspace

# Sizes count the values of the widest intermediate result; measured on 2 cores and on an H200 (benchmarks/).
CPU_CHUNK = 600_000  # several draws in one pass: together they stay in the cache
CPU_BLOCK = 2**17  # inputs of one pass without convolutions
CPU_BLOCK_CONVOLUTIONAL = 2**19
CPU_FOLD = 2**17  # convolutions are efficient enough alone from here on: fold, one draw a pass
GPU_CHUNK = 2**27  # 512 MB in single precision, what was measured; `python -m mcbn.bench.chunks` compares bounds
GPU_FOLD = 2**24
GPU_GRAPH = 2**26  # up to here launching kernels costs more than running them: capture a CUDA graph
GPU_GATHER = 2**22  # outputs handed on at once
PASSES_BEFORE_CAPTURE = 4  # verifying and a first call alone are not worth a graph
PROGRAMS_KEPT = 16
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
}  # a program against the plain pass, relative to its largest value
COARSE_TOLERANCE = 0.1  # half precision and TF32: rounding of a deep network adds up


@dataclass(frozen=True, eq=False)
class Plan:
    """How draws run for inputs of one shape."""

    chunk: int  # draws in one pass
    program: Program | None  # None: the network as it is
    omega: Tensor | None  # scale and shift of every draw, (T, S)
    reason: str = ""
    one_pass: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None  # (shared, rows (t, S)) -> (t, N, ...)
    passes: Counter[int] = field(default_factory=Counter)  # done so far, by number of draws
    graphs: dict[int, "Graphed"] = field(default_factory=dict)  # captured, by number of draws


class Graphed:
    """One pass captured as a CUDA graph over fixed memory; replaying it costs one launch instead of hundreds."""

    def __init__(self, function: Callable[[tuple[Tensor, ...], Tensor], Tensor], shared: Any, rows: Tensor) -> None:
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


class Engine:
    """Runs draws of one posterior through one network; finds its way per input shape and remembers it."""

    def __init__(self, network: Network, posterior: Posterior) -> None:
        self.network, self.posterior = network, posterior
        self._plans: dict[Any, Plan] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"network": self.network, "posterior": self.posterior}  # plans are found again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def outputs(
        self, inputs: Any, n_samples: int, chunk_size: int | None = None, compile: bool = False, *, start: int = 0
    ) -> Iterator[Tensor]:
        """Yield outputs for draws start to T-1 in order, chunk by chunk, each (t, N, ...).

        Every input meets the same draws, so an input alone and in a batch give the same numbers.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in batches.tensors_of(inputs)):
            yield from (self._replay(inputs, t).unsqueeze(0) for t in range(start, n_samples))
            return
        try:
            blocks = self._blocks(inputs, chunk_size, compile)
            workspace = Workspace()  # one for all blocks: they run in turn, and one set of buffers stays in the cache
            runs = [self._run(block, plan, workspace) for block, plan in blocks]
        except torch.OutOfMemoryError as error:
            yield from self._halved(inputs, start, n_samples, error)
            return
        chunk, done = min(plan.chunk for _, plan in blocks), list[Tensor]()
        while start < n_samples:
            stop = min(start + chunk, n_samples)
            try:
                parts = [run(start, stop) for run in runs]  # each (t, n, ...)
            except torch.OutOfMemoryError as error:
                if chunk == 1:
                    yield from done
                    yield from self._halved(inputs, start, n_samples, error)
                    return
                chunk = max(1, chunk // 2)
                continue
            done.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))  # (t, n, ...)
            start = stop
            gather = chunk_size is None and done[0].is_cuda  # few large pieces: whoever reads them launches kernels too
            if not gather or start == n_samples or sum(piece.numel() for piece in done) >= GPU_GATHER:
                yield done[0] if len(done) == 1 else torch.cat(done)
                done.clear()

    def explain(self, inputs: Any, n_samples: int, chunk_size: int | None = None, compile: bool = False) -> str:
        """Say in a sentence how draws would run for these inputs."""
        blocks = self._blocks(inputs, chunk_size, compile)
        plan = blocks[0][1]
        N = batches.size_of(inputs)
        size = f"{N} inputs" if len(blocks) == 1 else f"{N} inputs in {len(blocks)} blocks"
        if plan.program is None:
            return f"{n_samples} draws for {size}: one by one through the network's own code, because {plan.reason}."
        shared = sum(node.op == "call_function" for node in plan.program.shared.graph.nodes)
        folded = sum(norm.folded_weight is not None for norm in plan.program.norms)
        how = f"{min(plan.chunk, n_samples)} draws in one pass"
        if plan.chunk == 1:
            how = f"one draw a pass, {folded} of {len(plan.program.norms)} batch norm calls folded into weights"
        return (
            f"{n_samples} draws for {size}: {how}; {shared} operations before the first batch norm run once "
            f"(widest result {plan.program.width:,} values)."
        )

    def _replay(self, inputs: Any, t: int) -> Tensor:
        """Run one draw through the network's own code, on a copy: the network may change its inputs in place."""
        with Replay(*self.posterior.draw(t)):
            return self.network(batches.map_tensors(torch.clone, inputs))

    def _plan(self, inputs: Any, chunk_size: int | None, compile: bool) -> Plan:
        """Look up how inputs of this shape run, or find out."""
        key = batches.key_of(inputs), chunk_size, compile
        plan = self._plans.get(key)
        if plan is None:
            with self._lock, torch.no_grad():
                plan = self._find_plan(inputs, chunk_size, compile)
                self._keep(key, plan)
        return plan

    def _keep(self, key: Any, plan: Plan) -> None:
        while len(self._plans) >= PROGRAMS_KEPT:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan

    def _find_plan(self, inputs: Any, chunk_size: int | None, compile: bool) -> Plan:
        """Trace the network and keep the first way that gives the numbers of the plain pass."""
        on_gpu = any(t.is_cuda for t in batches.tensors_of(inputs))
        T = self.posterior.n_samples

        def draws_at_once(width: int, convolutional: bool) -> int:
            if chunk_size is not None:
                return min(chunk_size, T)
            if convolutional and width > (GPU_FOLD if on_gpu else CPU_FOLD):
                return 1
            most = max(1, min(T, (GPU_CHUNK if on_gpu else CPU_CHUNK) // max(width, 1)))
            return -(-T // -(-T // most)) if on_gpu else most  # equal passes share one CUDA graph

        try:
            program, expected = trace(
                self.network, *self.posterior.draw(0), inputs, fold=lambda width, conv: draws_at_once(width, conv) == 1
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a foreign network does while watched, it can still be run as it is
            return Plan(1, None, None, f"it cannot be traced ({error.__cause__ or error})")
        chunk = draws_at_once(program.width, program.convolutional)
        first = Plan(chunk, program, program.scales_and_shifts(self.posterior.mean, self.posterior.var))
        plans = [first, replace(first, chunk=1)]
        if program.channels_last:
            plans += [replace(plan, program=replace(program, channels_last=False)) for plan in plans]
        ready = [replace(plan, one_pass=_one_pass(plan.program)) for plan in plans if plan.program]
        if compile and not (on_gpu and program.folds):  # cuDNN's fused convolutions are faster than compiled ones
            ready.insert(0, replace(first, one_pass=_compiled(_one_pass(program))))
        last = self._replay(inputs, T - 1)
        for plan in ready:
            if self._agrees(inputs, plan, expected, last):
                return plan
        return Plan(1, None, None, "the traced program gave other numbers")

    def _agrees(self, inputs: Any, plan: Plan, first: Tensor, last: Tensor) -> bool:
        """Check a plan against the plain pass on the draw it was traced on and on another one."""
        T = self.posterior.n_samples
        try:
            run = self._run(inputs, plan)
            found = run(0, min(plan.chunk, 2))[0], run(max(T - plan.chunk, T - 2, 0), T)[-1]
        except Exception:  # no memory, an operation without a batching rule, a view that needs another layout
            return False
        return _close(found[0], first) and _close(found[1], last)

    def _run(self, inputs: Any, plan: Plan, workspace: Workspace | None = None) -> Callable[[int, int], Tensor]:
        """Prepare a function that runs draws start to stop on these inputs."""
        program, omega, one_pass = plan.program, plan.omega, plan.one_pass
        if program is None or omega is None or one_pass is None:
            return lambda start, stop: torch.stack([self._replay(inputs, t) for t in range(start, stop)])
        shared, workspace = program.run_shared(inputs), workspace or Workspace()
        capture = omega.is_cuda and program.width * plan.chunk <= GPU_GRAPH and not torch.is_autocast_enabled("cuda")

        def run(start: int, stop: int) -> Tensor:
            rows = omega[start:stop]
            plan.passes[len(rows)] += 1
            if program.stackable and not omega.is_cuda:
                with workspace.active():
                    return one_pass(shared, rows).clone()  # the workspace is overwritten by the next pass
            if not capture or plan.passes[len(rows)] < PASSES_BEFORE_CAPTURE:
                return one_pass(shared, rows)
            if len(rows) not in plan.graphs:
                plan.graphs[len(rows)] = Graphed(one_pass, shared, rows)
            return plan.graphs[len(rows)](shared, rows)

        return run

    def _blocks(self, inputs: Any, chunk_size: int | None, compile: bool) -> list[tuple[Any, Plan]]:
        """Cut many inputs into blocks whose values fit the cache, where that changes nothing but the speed."""
        plan = self._plan(inputs, chunk_size, compile)
        tensors = batches.tensors_of(inputs)
        if plan.program is None or any(t.is_cuda for t in tensors):
            return [(inputs, plan)]
        most = CPU_BLOCK_CONVOLUTIONAL if plan.program.convolutional else CPU_BLOCK
        sizes = {t.shape[0] if t.ndim else 0 for t in tensors}
        count = min(*sizes, math.ceil(plan.program.width / most)) if len(sizes) == 1 else 1
        if count <= 1:
            return [(inputs, plan)]
        blocks = [(block, self._plan(block, chunk_size, compile)) for block in batches.cut(inputs, count)]
        return blocks if self._independent(inputs, plan, blocks) else [(inputs, plan)]

    def _independent(self, inputs: Any, plan: Plan, blocks: list[tuple[Any, Plan]]) -> bool:
        """Check on the first draw that outputs do not depend on which inputs run beside them."""
        key = "independent", batches.key_of(inputs)
        found = self._plans.get(key)
        if found is None:
            with self._lock, torch.no_grad():
                joined = torch.cat([self._run(*block)(0, 1)[0] for block in blocks])
                same = _close(joined, self._run(inputs, plan)(0, 1)[0])
                found = replace(plan, reason="independent" if same else "")
                self._keep(key, found)
        return found.reason == "independent"

    def _halved(self, inputs: Any, start: int, stop: int, error: Exception) -> Iterator[Tensor]:
        """Go on after running out of memory with a single draw: half of the inputs at a time."""
        N = batches.size_of(inputs)
        if N < 2:
            width = next((plan.program.width for plan in self._plans.values() if plan.program), 0)
            raise MCBNError(
                f"one draw of one input does not fit into memory (its widest result has {width:,} values): {error}"
            ) from error
        halves = [self.outputs(half, stop, 1, start=start) for half in batches.cut(inputs, 2)]
        for parts in zip(*halves, strict=True):
            yield torch.cat(parts, 1)


def _one_pass(program: Program) -> FunctionType:
    """Return the function that runs rows (t, S) of scales and shifts in one pass: (t, N, ...)."""

    def one_pass(shared: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        if len(rows) == 1:
            return program.run_each(shared, rows[0]).unsqueeze(0)
        return program.run_together(shared, rows)

    return cast(FunctionType, one_pass)


def _compiled(function: FunctionType) -> Callable[..., Tensor]:
    """Compile a copy of a function with code of its own: torch.compile counts its recompilations by code object."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, dynamic=False)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Tell whether a faster way gave the numbers of the plain pass, up to rounding."""
    if found.shape != expected.shape or not expected.numel():
        return False
    coarse = expected.is_cuda and torch.backends.cudnn.allow_tf32 and expected.dtype == torch.float32
    relative = COARSE_TOLERANCE if coarse else TOLERANCE.get(expected.dtype, COARSE_TOLERANCE)
    tolerance = relative * expected.abs().max().clamp(min=1e-6)
    return bool(((found - expected).abs() <= tolerance).all())
