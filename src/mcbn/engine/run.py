"""Draws through the network: f_omega(x) for the statistics omega of every draw, by the plan that is fastest.

When a plan is prepared and compared again stands in docs/networks.md: who predicts once does not lose by it.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mcbn import batches
from mcbn.batch_norm import OTHER_PATH, Replay
from mcbn.engine import constants, plan as plans
from mcbn.engine.agree import ROUNDING, TF32_DIGIT, is_tf32, tolerance, within
from mcbn.engine.plan import OwnCode, Plan, Program, build, joined
from mcbn.engine.rows import are_independent
from mcbn.engine.trace import ReplayTracer
from mcbn.errors import MCBNError
from mcbn.layers import settings_of
from mcbn.network import Network, ProcessLock
from mcbn.posterior import Posterior

V = TypeVar("V")


class RefutedError(Exception):
    """A plan gave other numbers than the network's own code."""


@dataclass
class History:
    """What inputs of one shape have been through."""

    own_draws: int = 0  # asked for before there was a plan
    postponed: int = 0  # calls while the kernels of a plan were being compiled
    calls: int = 0  # of the plan
    largest: float = 0.0  # value of an input that the plan was compared on
    smallest: float = math.inf  # of such largest values
    width: int = 0  # of its widest result
    digit: float = 0.0  # to which its convolutions may round

    def is_due(self, largest: float) -> bool:
        """Count a call, and tell whether the plan is to be compared on its inputs, whose largest value is this."""
        self.calls += 1
        grown = largest > constants.GROWN_RANGE * self.largest or self.smallest > constants.GROWN_RANGE * largest
        if grown:
            self.largest, self.smallest = max(self.largest, largest), min(self.smallest, largest)
        return grown or (self.calls > 1 and self.calls.bit_count() == 1)


class Engine:
    """Runs draws of one posterior through one network; finds a plan per input shape and remembers it."""

    def __init__(self, network: Network, posterior: Posterior) -> None:
        self.network, self.posterior = network, posterior
        self.version = posterior.version()  # changed in place since: its plans are of other statistics
        self.plans: dict[Any, Plan | OwnCode] = {}  # by shape of the inputs
        self._histories: dict[Any, History] = {}  # likewise
        self._refuted = ""  # why no plan is used for this network any more
        self._warned = False
        self._own_code = OwnCode("a plan does not pay yet, or its kernels are being compiled", self.replay)
        self._independence: dict[Any, bool] = {}  # by shape of the inputs and sizes of blocks
        self._scaled: tuple[list[Any], Any, Tensor] | None = None  # layers, their tensors, scales and shifts
        self.plans_at_once = False  # from the first draw on: results then do not depend on the calls before
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.network, self.posterior)  # plans are found again

    def outputs(self, inputs: Any, n_samples: int, chunk_size: int | None = None, start: int = 0) -> Iterator[Tensor]:
        """Yield samples of draws start to T-1 in order, some at a time, (t, N, ...); all inputs meet the same draws."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in batches.tensors_of(inputs)):
            return (self.replay(inputs, t).unsqueeze(0) for t in range(start, n_samples))
        run = torch.no_grad()(self._chunks) if torch.is_grad_enabled() else self._chunks  # plans are traced so
        chunks = run(inputs, start, n_samples, chunk_size)
        return chunks if chunk_size is not None else _gathered(chunks)

    def _chunks(self, inputs: Any, start: int, stop: int, chunk_size: int | None) -> Iterator[Tensor]:
        """Yield samples by the plan; where it fails, by halves of the inputs or by the network's own code."""
        key = self._key(inputs, chunk_size)
        try:
            for samples in self._passes(key, inputs, start, stop, chunk_size):
                yield samples
                start += len(samples)
            return
        except torch.OutOfMemoryError as error:
            rest = self._halved(inputs, start, stop, error)
        except Exception as error:
            rest = self._replaced(key, inputs, start, stop, error)
        yield from rest

    def _passes(self, key: Any, inputs: Any, start: int, stop: int, chunk_size: int | None) -> Iterator[Tensor]:
        """Yield samples of as many draws as go through at once, fewer where memory runs out."""
        history = self._history(key)
        pays = self.plans_at_once or key in self.plans or chunk_size is not None  # who asks for chunks has a plan
        if not pays:
            history.own_draws += stop - start
            pays = history.own_draws >= constants.DRAWS_BEFORE_PLAN
        plan = self.plans.get(key) or (self.plan(inputs, chunk_size) if pays else self._own_code)
        blocks = self._blocks(inputs, chunk_size, plan)
        buffers = dict[int, Tensor]()  # one set for all blocks, which run in turn: it stays in the cache
        samplers = [plan.prepare(block, buffers) for block, plan in blocks]
        chunk = min(plan.at_once for _, plan in blocks)
        due = isinstance(blocks[0][1], Plan) and history.is_due(_largest(inputs))
        while start < stop:
            try:
                samples = joined([sampler(start, min(start + chunk, stop)) for sampler in samplers], 1)
            except torch.OutOfMemoryError:
                if chunk == 1:
                    raise
                chunk //= 2
                continue
            if due:
                self._compare_again(history, inputs, samples, start)
                due = False
            yield samples  # (t, N, ...)
            start += chunk

    def _history(self, key: Any) -> History:
        return self._histories.get(key) or keep(self._histories, key, History(), constants.PLANS_KEPT)

    def _compare_again(self, history: History, inputs: Any, samples: Tensor, start: int) -> None:
        """Compare one of the samples (t, N, ...) with the network's own code; `RefutedError` where they differ."""
        number = history.calls % len(samples)
        t = start + number
        own = {t: self.replay(inputs, t) for t in {*self._references(), t}}
        finite = all(bool(sample.isfinite().all()) for sample in own.values())  # of what overflows nothing is learnt
        if finite and not self._agrees({t: samples[number]}, own, inputs, history):
            raise RefutedError(f"on call {history.calls} it gave other numbers than the network itself")

    def _replaced(self, key: Any, inputs: Any, start: int, stop: int, error: Exception) -> Iterator[Tensor]:
        """Go on by the network's own code after a plan failed; where the inputs are at fault, that fails too."""
        samples = self.replay(inputs, start)
        if not isinstance(self.plans.get(key), Plan):
            raise error
        reason = f"a plan of it failed on later inputs ({type(error).__name__}: {error})"
        with self._lock:
            self.plans[key] = OwnCode(reason, self.replay)
            if isinstance(error, RefutedError):  # what one trace did not see, no other does
                self._refuted = reason
                self.plans.clear()
            warned, self._warned = self._warned, True
        if not warned:
            follows = "these results and all that follow come from the network's own code, draw by draw"
            warnings.warn(f"mcbn: {reason}; {follows}", UserWarning, stacklevel=2)
        yield samples.unsqueeze(0)
        yield from (self.replay(inputs, t).unsqueeze(0) for t in range(start + 1, stop))

    def explain(self, inputs: Any, n_samples: int, chunk_size: int | None = None) -> str:
        """Say in a sentence how draws would run for these inputs."""
        blocks = self._blocks(inputs, chunk_size, self.plan(inputs, chunk_size))
        plan = blocks[0][1]
        size = f"{batches.size_of(inputs)} inputs" + (f" in {len(blocks)} blocks" if len(blocks) > 1 else "")
        if isinstance(plan, OwnCode):
            return f"{n_samples} draws for {size}: one by one through the network's own code, because {plan.reason}."
        program = plan.program
        shared = sum(node.op == "call_function" for node in program.shared.graph.nodes)
        how = f"{min(plan.chunk, n_samples)} draws in one pass"
        if plan.chunk == 1:
            folded = sum(norm.folded_weight is not None for norm in program.norms)
            how = f"one draw a pass, {folded} of {len(program.norms)} batch norm calls folded into weights"
        kernels = plans.kernels_in(program.each)
        for name, what in (("narrow", "convolutions"), ("scaled", "batch norms")):
            how += f", {kernels[name]} {what} in one kernel each with what follows" if kernels[name] else ""
        if plan.group > 1:
            how += f", {plan.group} passes in one CUDA graph"
        once = f"{shared} operations before the first batch norm run once (widest result {program.width:,} values)"
        return f"{n_samples} draws for {size}: {how}; {once}."

    def replay(self, inputs: Any, t: int) -> Tensor:
        """Run draw t through the network's own code, on a copy: the network may change its inputs in place."""
        with Replay(*self.posterior.draw(t)) as mode:
            output = self.network.run_copy(inputs)
        alone = self.network.left_alone
        if alone is not None and (strange := mode.calls.keys() - mode.chosen - alone):
            what = f"layer {min(strange)!r} was not called when the posterior was drawn"
            raise MCBNError(f"{what}; {OTHER_PATH}, or leave it out with layers=")
        return output

    def plan(self, inputs: Any, chunk_size: int | None = None) -> Plan | OwnCode:
        """Look up how inputs of this shape run, or find out."""
        key = self._key(inputs, chunk_size)
        if (plan := self.plans.get(key)) is not None:
            return plan
        with self._lock, torch.inference_mode(False), torch.no_grad():  # tracing follows changes in place
            if (plan := self.plans.get(key)) is None:  # or another thread has found it meanwhile
                inputs = batches.map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)
                plan = self._find_plan(inputs, chunk_size)
                if plan is not self._own_code:
                    keep(self.plans, key, plan, constants.PLANS_KEPT)
        return plan

    def _key(self, inputs: Any, *others: Any) -> Any:
        """Identify all that a trace depends on, and what else is given."""
        return batches.key_of(inputs), settings_of(self.network).values, *others

    def _find_plan(self, inputs: Any, chunk_size: int | None) -> Plan | OwnCode:
        """Trace the network and keep the first plan that agrees with its own code."""
        if self._refuted:
            return OwnCode(self._refuted, self.replay)
        on_gpu = any(t.is_cuda for t in batches.tensors_of(inputs))
        T, history = self.posterior.n_samples, self._history(self._key(inputs, chunk_size))
        convolutional = any(isinstance(child, nn.Conv2d) for child in self.network.module.modules())
        if on_gpu and convolutional and history.own_draws and not history.postponed:
            history.postponed = 1  # cuDNN sets another layout up for seconds, and who predicts once has no use for it
            return self._own_code
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
        if history.own_draws and history.postponed < constants.CALLS_WITHOUT_KERNELS and program.by_kernels is not None:
            from mcbn.engine import fuse

            history.postponed += 1  # who predicts once does not share the processor with the compiler either
            if history.postponed == 1 or not fuse.compiled(program.by_kernels, first.device):
                return self._own_code
        narrow = program.by_kernels is not None and not program.folds
        chunk = at_once(program.width, program.convolutional, narrow=narrow)
        outputs = first.numel() if chunk_size is None else None
        choices = plans.plans_for(program, self._omega(program), chunk, first.dtype, outputs)
        plan = self._proven(choices, inputs, first, history)
        return plan or OwnCode("the traced program gave other numbers", self.replay)

    def _proven(self, choices: list[Plan], inputs: Any, first: Tensor, history: History) -> Plan | None:
        """Return the first plan that agrees with the network's own code, whose first sample is known."""
        own, program = {0: first} | {t: self.replay(inputs, t) for t in self._references() if t}, choices[0].program
        history.digit = TF32_DIGIT if program.convolutional and is_tf32(first) else 0.0
        history.largest = history.smallest = _largest(inputs)
        history.width = program.width
        return next((p for p in choices if self._agrees(self._samples(p, inputs), own, inputs, history)), None)

    def _references(self) -> list[int]:
        """Return the draws by which a plan is judged: of few outputs, two alone say little about their spread."""
        T = self.posterior.n_samples
        return sorted({0, min(1, T - 1), max(T - 2, 0), T - 1})

    def _samples(self, plan: Plan, inputs: Any) -> dict[int, Tensor]:
        """Run the draws by which a plan is judged, among as many others as it takes at once; none where it fails."""
        T, samples = self.posterior.n_samples, dict[int, Tensor]()
        try:
            sampler = plan.prepare(inputs, {})
            for start in {0, max(0, T - plan.chunk)}:
                together = sampler(start, min(start + plan.chunk, T))
                samples |= {t: together[t - start] for t in self._references() if 0 <= t - start < len(together)}
        except Exception:  # no memory, an operation without a batching rule, a view that needs another layout
            return {}
        return samples

    def _agrees(self, samples: Mapping[int, Tensor], own: Mapping[int, Tensor], inputs: Any, history: History) -> bool:
        """Tell whether samples are those of the network's own code; measure its rounding if need be."""
        draws = torch.stack([*own.values()])
        if not samples or not draws.numel():
            return False
        values, expected = torch.stack([*samples.values()]), torch.stack([own[t] for t in samples])
        if within(tolerance(draws, digit=history.digit), values, expected):
            return True
        return within(tolerance(draws, self._rounding(inputs, history.width), digit=history.digit), values, expected)

    def _rounding(self, inputs: Any, width: int) -> Tensor:
        """Measure how far the network's own pass is from double precision, (n, ...) for inputs: few if it is wide."""
        tensors = batches.tensors_of(inputs)
        sizes = {t.shape[0] if t.ndim else 0 for t in tensors}
        few = constants.EXACT_INPUTS
        if len(sizes) == 1 and 0 not in sizes:
            wide = constants.GPU_EXACT_WIDTH if tensors[0].is_cuda else constants.CPU_EXACT_WIDTH
            few = min(*sizes, few, max(2, wide * max(sizes) // max(width, 1)))
            inputs = batches.map_tensors(lambda t: t[:few], inputs)
        draws = self._references()[: constants.EXACT_INPUTS // few]
        own = torch.stack([self.replay(inputs, t) for t in draws])  # (t, n, ...)
        if own.dtype != torch.float64:
            with suppress(Exception), torch.autocast(own.device.type, enabled=False):  # what cannot be had in double
                exact = Engine(self.network.to(None, torch.float64), self.posterior.rows(draws).to(None, torch.float64))
                inputs = batches.move(inputs, None, torch.float64)
                return torch.stack([sample - exact.replay(inputs, t) for t, sample in enumerate(own)]).flatten(0, 1)
        return ROUNDING.at(own) * own.abs().amax(0)

    def _omega(self, program: Program) -> Tensor:
        """Return scale and shift of every draw, (T, S): the same tensor for all shapes that meet the same layers."""
        layers = [(norm.name, norm.eps, id(norm.weight), id(norm.bias)) for norm in program.norms]
        if self._scaled is None or self._scaled[0] != layers:
            omega = program.scales_and_shifts(self.posterior.mean, self.posterior.var)
            self._scaled = layers, program.norms, omega  # while these norms live, no other tensors have their ids
        return self._scaled[2]

    def _blocks(self, inputs: Any, chunk_size: int | None, plan: Plan | OwnCode) -> list[tuple[Any, Plan | OwnCode]]:
        """Cut many inputs into blocks whose values fit the cache, where that changes nothing but the speed."""
        tensors = batches.tensors_of(inputs)
        if isinstance(plan, OwnCode) or any(t.is_cuda for t in tensors):
            return [(inputs, plan)]
        most = constants.CPU_BLOCK_CONVOLUTIONAL if plan.program.convolutional else constants.CPU_BLOCK
        sizes = {t.shape[0] if t.ndim else 0 for t in tensors}
        count = min(*sizes, math.ceil(plan.program.width / most)) if len(sizes) == 1 else 1
        if count <= 1:
            return [(inputs, plan)]
        blocks = [(block, self.plan(block, chunk_size)) for block in batches.cut(inputs, count)]
        return blocks if self.independent(inputs, *(block for block, _ in blocks)) else [(inputs, plan)]

    def independent(self, inputs: Any, *blocks: Any) -> bool:
        """Tell whether inputs may run apart, in these blocks: by the structure of the network (`mcbn.engine.rows`)."""
        key = self._key(inputs, tuple(map(batches.size_of, blocks)))
        proven = self._independence.get(key)
        if proven is None:
            with self._lock:
                ends = (blocks[0], blocks[-1]) if blocks else ()  # of all sizes there are
                proven = are_independent(self.network, self.posterior.draw(0), inputs, *ends)
                keep(self._independence, key, proven, constants.PLANS_KEPT)
        return proven

    def _halved(self, inputs: Any, start: int, stop: int, error: Exception) -> Iterator[Tensor]:
        """Go on after running out of memory with a single draw: half of the inputs at a time."""
        N = batches.size_of(inputs)
        if N < 2:
            width = next((plan.program.width for plan in self.plans.values() if isinstance(plan, Plan)), 0)
            what = f"one draw of one input does not fit into memory (its widest result has {width:,} values)"
            raise MCBNError(f"{what}: {error}") from error
        sizes = {t.shape[0] if t.ndim else 0 for t in batches.tensors_of(inputs)}
        if sizes != {N} or not self.independent(batches.cut(inputs, N // 2)[0]):
            what = "nothing shows that this network treats each of them by itself, so they are not cut into blocks"
            cure = f"give fewer at a time ({error})"
            raise MCBNError(f"one draw of {N} inputs does not fit into memory, and {what}; {cure}") from error
        for pieces in zip(*(self.outputs(half, stop, 1, start=start) for half in batches.cut(inputs, 2)), strict=True):
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


def _largest(inputs: Any) -> float:
    """Return the largest absolute value of the inputs."""
    tensors = (t.detach() for t in batches.tensors_of(inputs) if t.numel())
    tensors = (t.float() if torch.can_cast(t.dtype, torch.int64) else t for t in tensors)  # of bool and whole numbers
    return max((float(torch.linalg.vector_norm(t, torch.inf)) for t in tensors), default=0.0)


def keep(known: dict[Any, V], key: Any, value: V, most: int) -> V:
    """Remember and return what was found, for inputs of one shape say, and forget the oldest."""
    while key not in known and len(known) >= most:
        del known[next(iter(known))]
    known[key] = value
    return value
