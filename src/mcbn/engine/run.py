"""Draws through the network: f_omega(x) for the statistics omega of every draw, by the plan that is fastest.

Plans, from few inputs to many: several draws in one pass (stacked, or by `torch.vmap` over their scales and shifts);
one draw a pass, batch norm folded into the weights; draw by draw through the network's own code, for networks that
cannot be traced, and where gradients are wanted. The numbers are the same.
"""

import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import Replay
from mcbn.engine import constants
from mcbn.engine import plan as plans
from mcbn.engine.agree import agree
from mcbn.engine.plan import OwnCode, Plan, Program, build, joined
from mcbn.engine.rewrite import Workspace
from mcbn.engine.trace import ReplayTracer
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.posterior import Posterior


class Engine:
    """Runs draws of one posterior through one network; finds a plan per input shape and remembers it."""

    def __init__(self, network: Network, posterior: Posterior) -> None:
        self.network, self.posterior = network, posterior
        self.plans: dict[Any, Plan | OwnCode] = {}  # by shape of the inputs
        self._independence: dict[Any, bool] = {}  # by shape of the inputs: may they be cut into blocks
        self._scaled: tuple[list[Any], list[Any], Tensor] | None = None  # layers, their tensors, scales and shifts
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.network, self.posterior)  # plans are found again

    def outputs(
        self, inputs: Any, n_samples: int, chunk_size: int | None = None, compile: bool = False, *, start: int = 0
    ) -> Iterator[Tensor]:
        """Yield samples of draws start to T-1 in order, some at a time, (t, N, ...).

        Every input meets the same draws, so an input alone and in a batch give the same numbers.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in batches.tensors_of(inputs)):
            return (self.replay(inputs, t).unsqueeze(0) for t in range(start, n_samples))
        chunks = self._chunks(inputs, start, n_samples, chunk_size, compile)
        return chunks if chunk_size is not None else _gathered(chunks)

    def _chunks(self, inputs: Any, start: int, stop: int, chunk_size: int | None, compile: bool) -> Iterator[Tensor]:
        """Yield samples of as many draws as go through at once; fewer, then of fewer inputs, where memory runs out."""
        try:
            blocks = self._blocks(inputs, chunk_size, compile)
            workspace = Workspace()  # one for all blocks: they run in turn, and one set of buffers stays in the cache
            samplers = [plan.prepare(block, workspace) for block, plan in blocks]
        except torch.OutOfMemoryError as error:
            yield from self._halved(inputs, start, stop, error)
            return
        chunk = min(plan.at_once for _, plan in blocks)
        while start < stop:
            try:
                samples = joined([sampler(start, min(start + chunk, stop)) for sampler in samplers], 1)
            except torch.OutOfMemoryError as error:
                if chunk == 1:
                    yield from self._halved(inputs, start, stop, error)
                    return
                chunk //= 2
                continue
            yield samples  # (t, N, ...)
            start += chunk

    def explain(self, inputs: Any, n_samples: int, chunk_size: int | None = None) -> str:
        """Say in a sentence how draws would run for these inputs."""
        blocks = self._blocks(inputs, chunk_size, compile=False)
        plan = blocks[0][1]
        N = batches.size_of(inputs)
        size = f"{N} inputs" if len(blocks) == 1 else f"{N} inputs in {len(blocks)} blocks"
        if isinstance(plan, OwnCode):
            return f"{n_samples} draws for {size}: one by one through the network's own code, because {plan.reason}."
        program = plan.program
        shared = sum(node.op == "call_function" for node in program.shared.graph.nodes)
        how = f"{min(plan.chunk, n_samples)} draws in one pass"
        if plan.chunk == 1:
            how = f"one draw a pass, {program.folded} of {len(program.norms)} batch norm calls folded into weights"
        if program.kernels:
            how += f", {program.kernels} convolutions in one kernel each with what follows"
        if plan.group > 1:
            how += f", {plan.group} passes in one CUDA graph"
        return (
            f"{n_samples} draws for {size}: {how}; {shared} operations before the first batch norm run once "
            f"(widest result {program.width:,} values)."
        )

    def replay(self, inputs: Any, t: int) -> Tensor:
        """Run draw t through the network's own code, on a copy: the network may change its inputs in place."""
        with Replay(*self.posterior.draw(t)):
            return self.network.run_copy(inputs)

    def plan(self, inputs: Any, chunk_size: int | None = None, *, compile: bool = False) -> Plan | OwnCode:
        """Look up how inputs of this shape run, or find out."""
        key = batches.key_of(inputs), chunk_size, compile
        plan = self.plans.get(key)
        if plan is None:
            with self._lock, torch.inference_mode(False), torch.no_grad():  # tracing follows changes in place
                plan = self.plans.get(key)  # another thread may have found it meanwhile
                if plan is None:
                    inputs = batches.map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)
                    plan = self._find_plan(inputs, chunk_size, compile)
                    keep(self.plans, key, plan, constants.PLANS_KEPT)
        return plan

    def _find_plan(self, inputs: Any, chunk_size: int | None, compile: bool) -> Plan | OwnCode:
        """Trace the network and keep the first plan that agrees with a replay."""
        on_gpu = any(t.is_cuda for t in batches.tensors_of(inputs))
        T = self.posterior.n_samples
        at_once = partial(plans.draws_at_once, n_samples=T, chunk_size=chunk_size, on_gpu=on_gpu)
        tracer = ReplayTracer(*self.posterior.draw(0))
        try:
            first = tracer.trace(self.network, inputs)
            program = build(tracer, fold=lambda width, convolutional: at_once(width, convolutional) == 1)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a foreign network does while watched, its own code can still be run
            self.replay(inputs, 0)  # unless these inputs are at fault: that says nothing about others of their shape
            return OwnCode(f"it cannot be traced ({error.__cause__ or error})", self.replay)
        omega, last = self._omega(program), self.replay(inputs, T - 1)
        chunk = at_once(program.width, program.convolutional, narrow=program.narrow is not None)
        outputs = first.numel() if chunk_size is None else None
        for plan in plans.plans_for(program, omega, chunk, first.dtype, compile=compile, outputs=outputs):
            if self._agrees(inputs, plan, first, last):
                return plan
        return OwnCode("the traced program gave other numbers", self.replay)

    def _omega(self, program: Program) -> Tensor:
        """Return scale and shift of every draw, (T, S): the same tensor for all shapes that meet the same layers."""
        layers = [(norm.name, norm.eps, id(norm.weight), id(norm.bias)) for norm in program.norms]
        if self._scaled is None or self._scaled[0] != layers:
            omega = program.scales_and_shifts(self.posterior.mean, self.posterior.var)
            held = [(norm.weight, norm.bias) for norm in program.norms]  # while these live, no others have their ids
            self._scaled = layers, held, omega
        return self._scaled[2]

    def _agrees(self, inputs: Any, plan: Plan, first: Tensor, last: Tensor) -> bool:
        """Check a plan against replays of the draw it was traced on and of another one."""
        T = self.posterior.n_samples
        try:
            sampler = plan.prepare(inputs, Workspace())
            samples = sampler(0, min(plan.chunk, 2))[0], sampler(max(T - plan.chunk, T - 2, 0), T)[-1]
        except Exception:  # no memory, an operation without a batching rule, a view that needs another layout
            return False
        return agree(samples[0], first) and agree(samples[1], last)

    def _blocks(self, inputs: Any, chunk_size: int | None, compile: bool) -> list[tuple[Any, Plan | OwnCode]]:
        """Cut many inputs into blocks whose values fit the cache, where that changes nothing but the speed."""
        plan = self.plan(inputs, chunk_size, compile=compile)
        tensors = batches.tensors_of(inputs)
        if isinstance(plan, OwnCode) or any(t.is_cuda for t in tensors):
            return [(inputs, plan)]
        most = constants.CPU_BLOCK_CONVOLUTIONAL if plan.program.convolutional else constants.CPU_BLOCK
        sizes = {t.shape[0] if t.ndim else 0 for t in tensors}
        count = min(*sizes, math.ceil(plan.program.width / most)) if len(sizes) == 1 else 1
        if count <= 1:
            return [(inputs, plan)]
        blocks = [(block, self.plan(block, chunk_size, compile=compile)) for block in batches.cut(inputs, count)]
        return blocks if self._independent(inputs, plan, blocks) else [(inputs, plan)]

    def _independent(self, inputs: Any, plan: Plan, blocks: list[tuple[Any, Plan | OwnCode]]) -> bool:
        """Check on the first draw that outputs do not depend on which inputs run beside them."""
        key = batches.key_of(inputs)
        independent = self._independence.get(key)
        if independent is None:
            with self._lock, torch.no_grad():
                apart = torch.cat([of_block.prepare(block, Workspace())(0, 1)[0] for block, of_block in blocks])
                independent = agree(apart, plan.prepare(inputs, Workspace())(0, 1)[0])
                if any(bool((t != t[:1]).any()) for t in batches.tensors_of(inputs)):  # of equal inputs none can tell
                    keep(self._independence, key, independent, constants.PLANS_KEPT)
        return independent

    def _halved(self, inputs: Any, start: int, stop: int, error: Exception) -> Iterator[Tensor]:
        """Go on after running out of memory with a single draw: half of the inputs at a time."""
        N = batches.size_of(inputs)
        if N < 2:
            width = next((plan.program.width for plan in self.plans.values() if isinstance(plan, Plan)), 0)
            raise MCBNError(
                f"one draw of one input does not fit into memory (its widest result has {width:,} values): {error}"
            ) from error
        halves = [self.outputs(half, stop, 1, start=start) for half in batches.cut(inputs, 2)]
        for pieces in zip(*halves, strict=True):
            yield torch.cat(pieces, 1)


def _gathered(chunks: Iterator[Tensor]) -> Iterator[Tensor]:
    """Join chunks on a GPU into few large ones: whoever reads them launches kernels too."""
    waiting: list[Tensor] = []
    for samples in chunks:
        waiting.append(samples)
        full = sum(one.numel() for one in waiting) > constants.GPU_GATHER - samples.numel()  # the next would not fit
        if full or not samples.is_cuda:
            yield joined(waiting)
            waiting.clear()
    if waiting:
        yield joined(waiting)


def keep(known: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Remember what was found, for inputs of one shape say, and forget the oldest."""
    while key not in known and len(known) >= most:
        del known[next(iter(known))]
    known[key] = value
