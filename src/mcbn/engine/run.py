"""Draws through the network: f_omega(x) for the statistics omega of every draw, in the way that is fastest.

Ways, from few inputs to many: *together*, several draws in one pass (`torch.vmap` over their scales and shifts);
*folded*, draw by draw with batch norm gone into the weights; *as it is*, draw by draw through the network's own code,
for networks that cannot be written down as a program, and where gradients are wanted. The numbers are the same.
"""

import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import Replay
from mcbn.engine import plan as plans
from mcbn.engine.plan import AsItIs, Plan
from mcbn.engine.program import Program, trace
from mcbn.engine.workspace import Workspace
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.posterior import Posterior

CPU_BLOCK = 2**17  # values of the widest result of the inputs of one pass: without convolutions,
CPU_BLOCK_CONVOLUTIONAL = 2**19  # and with them
PLANS_KEPT = 16
V = TypeVar("V")


class Engine:
    """Runs draws of one posterior through one network; finds its way per input shape and remembers it."""

    def __init__(self, network: Network, posterior: Posterior) -> None:
        self.network, self.posterior = network, posterior
        self._plans: dict[Any, Plan | AsItIs] = {}  # by shape of the inputs
        self._independence: dict[Any, bool] = {}  # by shape of the inputs: may they be cut into blocks
        self._scaled: tuple[list[tuple[Any, ...]], Tensor | None] = [], None  # layers, and their scales and shifts
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
        chunk, done = min(plan.at_once for _, plan in blocks), list[Tensor]()
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
            most = plans.GPU_GATHER - done[-1].numel()  # of those here, so that the next piece fits too
            if not gather or start == n_samples or sum(piece.numel() for piece in done) > most:
                yield done[0] if len(done) == 1 else torch.cat(done)
                done.clear()

    def explain(self, inputs: Any, n_samples: int, chunk_size: int | None = None) -> str:
        """Say in a sentence how draws would run for these inputs."""
        blocks = self._blocks(inputs, chunk_size, compile=False)
        plan = blocks[0][1]
        N = batches.size_of(inputs)
        size = f"{N} inputs" if len(blocks) == 1 else f"{N} inputs in {len(blocks)} blocks"
        if isinstance(plan, AsItIs):
            return f"{n_samples} draws for {size}: one by one through the network's own code, because {plan.reason}."
        shared = sum(node.op == "call_function" for node in plan.program.shared.graph.nodes)
        folded = sum(norm.folded_weight is not None for norm in plan.program.norms)
        how = f"{min(plan.chunk, n_samples)} draws in one pass"
        if plan.chunk == 1:
            how = f"one draw a pass, {folded} of {len(plan.program.norms)} batch norm calls folded into weights"
        if plan.program.kernels:
            how += f", {plan.program.kernels} convolutions in one kernel each with what follows"
        if plan.group > 1:
            how += f", {plan.group} passes in one CUDA graph"
        return (
            f"{n_samples} draws for {size}: {how}; {shared} operations before the first batch norm run once "
            f"(widest result {plan.program.width:,} values)."
        )

    def _replay(self, inputs: Any, t: int) -> Tensor:
        """Run one draw through the network's own code, on a copy: the network may change its inputs in place."""
        with Replay(*self.posterior.draw(t)):
            return self.network(batches.copied(inputs))

    def _plan(self, inputs: Any, chunk_size: int | None, compile: bool) -> Plan | AsItIs:
        """Look up how inputs of this shape run, or find out."""
        key = batches.key_of(inputs), chunk_size, compile
        plan = self._plans.get(key)
        if plan is None:
            with self._lock, torch.inference_mode(False), torch.no_grad():  # tracing follows changes in place
                plan = self._plans.get(key)  # another thread may have found it meanwhile
                if plan is None:
                    inputs = batches.map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)
                    plan = self._find_plan(inputs, chunk_size, compile)
                    keep(self._plans, key, plan, PLANS_KEPT)
        return plan

    def _find_plan(self, inputs: Any, chunk_size: int | None, compile: bool) -> Plan | AsItIs:
        """Trace the network and keep the first way that gives the numbers of the plain pass."""
        on_gpu = any(t.is_cuda for t in batches.tensors_of(inputs))
        T = self.posterior.n_samples
        at_once = partial(plans.draws_at_once, n_samples=T, chunk_size=chunk_size, on_gpu=on_gpu)
        try:
            program, first = trace(
                self.network, *self.posterior.draw(0), inputs, fold=lambda width, conv: at_once(width, conv) == 1
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a foreign network does while watched, it can still be run as it is
            self._replay(inputs, 0)  # unless these inputs are at fault: that says nothing about others of their shape
            return AsItIs(f"it cannot be traced ({error.__cause__ or error})")
        omega, last = self._omega(program), self._replay(inputs, T - 1)
        chunk = at_once(program.width, program.convolutional, narrow=program.narrow is not None)
        outputs = first.numel() if chunk_size is None else None
        for plan in plans.ways(program, omega, chunk, first.dtype, compile=compile, outputs=outputs):
            if self._agrees(inputs, plan, first, last):
                return plan
        return AsItIs("the traced program gave other numbers")

    def _omega(self, program: Program) -> Tensor:
        """Return scale and shift of every draw, (T, S): the same tensor for all shapes that meet the same layers."""
        found = [(norm.name, norm.eps, norm.weight, norm.bias) for norm in program.norms]
        known, omega = self._scaled
        if omega is None or len(known) != len(found) or not all(map(_identical, known, found)):
            omega = program.scales_and_shifts(self.posterior.mean, self.posterior.var)
            self._scaled = found, omega
        return omega

    def _agrees(self, inputs: Any, plan: Plan, first: Tensor, last: Tensor) -> bool:
        """Check a plan against the plain pass on the draw it was traced on and on another one."""
        T = self.posterior.n_samples
        try:
            run = self._run(inputs, plan)
            found = run(0, min(plan.chunk, 2))[0], run(max(T - plan.chunk, T - 2, 0), T)[-1]
        except Exception:  # no memory, an operation without a batching rule, a view that needs another layout
            return False
        return plans.close(found[0], first) and plans.close(found[1], last)

    def _run(self, inputs: Any, plan: Plan | AsItIs, workspace: Workspace | None = None) -> plans.Run:
        """Prepare a function that runs draws start to stop on these inputs."""
        if isinstance(plan, AsItIs):
            return lambda start, stop: torch.stack([self._replay(inputs, t) for t in range(start, stop)])
        return plan.prepare(inputs, workspace or Workspace())

    def _blocks(self, inputs: Any, chunk_size: int | None, compile: bool) -> list[tuple[Any, Plan | AsItIs]]:
        """Cut many inputs into blocks whose values fit the cache, where that changes nothing but the speed."""
        plan = self._plan(inputs, chunk_size, compile)
        tensors = batches.tensors_of(inputs)
        if isinstance(plan, AsItIs) or any(t.is_cuda for t in tensors):
            return [(inputs, plan)]
        most = CPU_BLOCK_CONVOLUTIONAL if plan.program.convolutional else CPU_BLOCK
        sizes = {t.shape[0] if t.ndim else 0 for t in tensors}
        count = min(*sizes, math.ceil(plan.program.width / most)) if len(sizes) == 1 else 1
        if count <= 1:
            return [(inputs, plan)]
        blocks = [(block, self._plan(block, chunk_size, compile)) for block in batches.cut(inputs, count)]
        return blocks if self._independent(inputs, plan, blocks) else [(inputs, plan)]

    def _independent(self, inputs: Any, plan: Plan, blocks: list[tuple[Any, Plan | AsItIs]]) -> bool:
        """Check on the first draw that outputs do not depend on which inputs run beside them."""
        key = batches.key_of(inputs)
        found = self._independence.get(key)
        if found is None:
            with self._lock, torch.no_grad():
                joined = torch.cat([self._run(*block)(0, 1)[0] for block in blocks])
                found = plans.close(joined, self._run(inputs, plan)(0, 1)[0])
                if any(bool((t != t[:1]).any()) for t in batches.tensors_of(inputs)):  # of equal inputs none can tell
                    keep(self._independence, key, found, PLANS_KEPT)
        return found

    def _halved(self, inputs: Any, start: int, stop: int, error: Exception) -> Iterator[Tensor]:
        """Go on after running out of memory with a single draw: half of the inputs at a time."""
        N = batches.size_of(inputs)
        if N < 2:
            width = next((plan.program.width for plan in self._plans.values() if isinstance(plan, Plan)), 0)
            raise MCBNError(
                f"one draw of one input does not fit into memory (its widest result has {width:,} values): {error}"
            ) from error
        halves = [self.outputs(half, stop, 1, start=start) for half in batches.cut(inputs, 2)]
        for parts in zip(*halves, strict=True):
            yield torch.cat(parts, 1)


def _identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[:2] == other[:2] and all(a is b for a, b in zip(one[2:], other[2:], strict=True))


def keep(found: dict[Any, V], key: Any, value: V, most: int) -> None:
    """Remember what was found, for inputs of one shape say, and forget the oldest."""
    while key not in found and len(found) >= most:
        del found[next(iter(found))]
    found[key] = value
