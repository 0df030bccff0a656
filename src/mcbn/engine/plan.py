"""How draws run for inputs of one shape: a program, how many draws go through it in one pass, and in what layout.

A `Program` is what a trace gives. For few inputs several draws go in one pass (stacked, or by `torch.vmap` over their
scales and shifts), for many one, batch norm folded into the weights. `plans_for` lists the plans, the fastest first.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mcbn import batches
from mcbn.batch_norm import scale_and_shift
from mcbn.engine import constants, rewrite
from mcbn.engine.rewrite import Buffers
from mcbn.engine.trace import Norm, ReplayTracer

Sampler = Callable[[int, int], Tensor]  # draws start to stop -> samples (t, N, ...)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced forward pass in two parts: `shared(*inputs)` once, `each(*shared, *parameters)` for every draw."""

    shared: fx.GraphModule
    each: fx.GraphModule
    norms: tuple[Norm, ...]
    width: int  # values of the largest intermediate result, all inputs together
    convolutional: bool
    clones_inputs: bool
    stackable: bool  # every operation takes one more axis in front as it is, so several draws need no `vmap`
    channels_last: bool = False
    folds: bool = False  # batch norm into weights, for one draw a pass
    by_kernels: fx.GraphModule | None = None  # `each` with kernels of ours, where there are any

    def laid_out(self, *, channels_last: bool) -> "Program":
        """Return the program for values and folded weights of this layout: a convolution copies weights of another."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        norms = tuple(replace(norm, folded_weight=_in_layout(norm.folded_weight, layout)) for norm in self.norms)
        return replace(self, norms=norms, channels_last=channels_last)

    def run_shared(self, inputs: Any) -> tuple[Tensor, ...]:
        """Run what no draw changes."""
        tensors = [t.clone() if self.clones_inputs else t for t in batches.tensors_of(inputs)]
        if self.channels_last:
            tensors = [_in_layout(t, torch.channels_last) for t in tensors]
        return tuple(self.shared.forward(*tensors))

    def run(self, shared: tuple[Tensor, ...], rows: Tensor, buffers: Buffers | None = None) -> Tensor:
        """Run draws in one pass, given their scales and shifts (t, S): samples (t, N, ...), in buffers if stacked."""
        values = (*shared, buffers) if self.stackable else shared

        def run_one(omega: Tensor) -> Tensor:
            return cast(Tensor, self.each.forward(*values, *self._parameters(omega)))

        if len(rows) == 1:
            return run_one(rows[0]).unsqueeze(0)
        return run_one(rows.unsqueeze(1)) if self.stackable else torch.vmap(run_one)(rows)

    def _parameters(self, omega: Tensor) -> list[Tensor]:
        """Cut a row into the parameters of `each`: scale and shift, or weight and bias they are folded into."""
        parameters: list[Tensor] = []
        sizes = [c for norm in self.norms for c in (norm.channels, norm.channels)]
        weights = (norm.folded_weight for norm in self.norms if norm.folded_weight is not None)
        lower = omega.to(next(weights, omega).dtype)  # of all at once: a kernel for each costs more than its work
        pieces = torch.split(omega, sizes, -1)
        lower_pieces = pieces if lower is omega else torch.split(lower, sizes, -1)
        by_norm = zip(self.norms, pieces[::2], pieces[1::2], lower_pieces[::2], lower_pieces[1::2], strict=True)
        for norm, scale, shift, lower_scale, lower_shift in by_norm:  # (C,) each
            if (weight := norm.folded_weight) is not None:
                if norm.folded_bias is not None:
                    lower_shift = torch.addcmul(shift, norm.folded_bias.to(scale.dtype), scale)
                scale = weight * lower_scale.to(weight.dtype).view(-1, *(1,) * (weight.ndim - 1))
                shift = lower_shift.to(weight.dtype)
            parameters += [scale, shift]
        return parameters

    def scales_and_shifts(self, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Tensor:
        """Precompute scale and shift of every draw and channel from statistics (T, C): one row a draw, (T, S)."""
        pairs = (scale_and_shift(means[n.name], variances[n.name], n.weight, n.bias, n.eps) for n in self.norms)
        return torch.cat([table for pair in pairs for table in pair], 1)


def _in_layout(value: Any, layout: torch.memory_format) -> Any:
    return value.contiguous(memory_format=layout) if value is not None and value.ndim == 4 else value


def build(tracer: ReplayTracer, fold: Callable[[int, bool], bool]) -> Program:
    """Make a program of a trace; `fold(width, convolutional)` decides whether batch norm goes into weights."""
    convolutional = any(node.target is F.conv2d for node in tracer.graph.nodes)
    depends, narrow, ours = rewrite.depends_on_draw(tracer.graph), 0.0, runs_kernels(tracer)
    if ours or tracer.on_gpu:
        from mcbn.engine import fuse

        narrow = fuse.narrow_share(tracer, depends) if ours and batches.tf32()[0] else 0.0  # as cuDNN rounds
    folds = fold(tracer.width, convolutional) and narrow < constants.MOSTLY_NARROW
    folded = rewrite.fold(tracer, depends) if folds else {}
    rewrite.work_in_place(tracer.graph, depends)
    stackable = not folds and all(rewrite.is_stackable(node, depends) for node in depends)
    shared, each, names = rewrite.split_by_draw(tracer, depends, folded, stacked=stackable)
    calls = tuple(tracer.norms[name] for name in names)
    if tracer.on_gpu and folds:
        each = fuse.fuse_activations(each)  # by cuDNN, which needs batch norm folded
    program = Program(shared, each, calls, tracer.width, convolutional, tracer.changes_inputs, stackable, folds=folds)
    if ours and kernels_in(by_kernels := fuse.fuse_kernels(each, narrow=narrow > 0 and not folds)):
        program = replace(program, by_kernels=by_kernels)
    return program.laid_out(channels_last=True) if convolutional else program


def runs_kernels(tracer: ReplayTracer) -> bool:
    """Tell whether kernels of ours can be had."""
    if not tracer.on_gpu:
        return False
    from mcbn.engine import kernels

    return kernels.available()


def kernels_in(each: fx.GraphModule) -> Counter[str]:
    """Count the kernels of ours in a pass, by name."""
    return Counter(str(node.target).split(".")[1] for node in each.graph.nodes if str(node.target).startswith("mcbn."))


@dataclass(frozen=True)
class OwnCode:
    """Draw by draw through the network's own code."""

    reason: str
    replay: Callable[[Any, int], Tensor]  # (inputs, t) -> sample (N, ...)
    at_once: int = 1

    def prepare(self, inputs: Any, buffers: Buffers) -> Sampler:
        """Return a function that runs draws start to stop on these inputs."""
        return lambda start, stop: torch.stack([self.replay(inputs, t) for t in range(start, stop)])


@dataclass(frozen=True, eq=False)
class Plan:
    """Draws through a program."""

    chunk: int  # draws in one pass
    program: Program
    omega: Tensor  # scale and shift of every draw, (T, S)
    dtype: torch.dtype  # of the network's own outputs
    group: int = 1  # passes in one CUDA graph
    runs: Counter[int] = field(default_factory=Counter)  # done so far, by number of draws
    captured: dict[int, Callable[..., Tensor]] = field(default_factory=dict)  # CUDA graphs, by number of draws

    @property
    def at_once(self) -> int:
        """Draws to ask for in one go."""
        return self.chunk * self.group

    def prepare(self, inputs: Any, buffers: Buffers) -> Sampler:
        """Run what no draw changes; return a function that runs draws start to stop on these inputs."""
        shared = self.program.run_shared(inputs)

        def run(start: int, stop: int) -> Tensor:
            rows = self.omega[start:stop]
            self.runs[len(rows)] += 1
            if self.program.stackable and not self.omega.is_cuda:
                samples = self.program.run(shared, rows, buffers).clone()  # the next pass overwrites the buffers
            elif self._is_worth_capture(len(rows)):
                from mcbn.engine.capture import capture_of

                if len(rows) not in self.captured:
                    self.captured[len(rows)] = capture_of(lambda *t: self.side_by_side(t[:-1], t[-1]), (*shared, rows))
                samples = self.captured[len(rows)](*shared, rows)
            else:
                samples = joined([self.program.run(shared, chunk) for chunk in torch.split(rows, self.chunk)])
            return samples.to(self.dtype)  # passes in buffers know nothing of autocast

        return run

    def _is_worth_capture(self, draws: int) -> bool:
        """Tell whether passes of so many draws are small, and run often enough, to be captured as a CUDA graph."""
        small = self.omega.is_cuda and self.program.width * self.chunk <= constants.GPU_GRAPH
        return small and self.runs[draws] >= constants.PASSES_BEFORE_CAPTURE and not torch.is_autocast_enabled("cuda")

    def side_by_side(self, shared: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Run rows (t, S), a chunk of them in one pass, passes beside each other on streams: to be captured."""
        small = self.chunk == 1 and self.program.width <= constants.SMALL_PASS
        count = constants.SMALL_SIDE_BY_SIDE if small else constants.SIDE_BY_SIDE
        others = [torch.cuda.Stream() for _ in range(count - 1)]  # type: ignore[no-untyped-call]
        main, samples = torch.cuda.current_stream(), list[Tensor]()
        for stream in others:
            stream.wait_stream(main)
        for chunk, stream in zip(torch.split(rows, self.chunk), cycle([main, *others])):
            with torch.cuda.stream(stream):
                samples.append(self.program.run(shared, chunk))
        for stream in others:
            main.wait_stream(stream)
        return joined(samples)


def joined(pieces: list[Tensor], axis: int = 0) -> Tensor:
    """Put pieces together, without a copy of a single one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def draws_at_once(
    width: int, convolutional: bool, *, n_samples: int, chunk_size: int | None, on_gpu: bool, narrow: bool = False
) -> int:
    """Choose how many of T draws go through in one pass of a width; narrow: by kernels of ours, which fold nothing."""
    if chunk_size is not None:
        return min(chunk_size, n_samples)
    if convolutional and not narrow and width > (constants.GPU_FOLD if on_gpu else constants.CPU_FOLD):
        return 1
    is_flat = not convolutional and 4 * width <= constants.GPU_CHUNK_FLAT
    gpu_chunk = constants.GPU_CHUNK_FLAT if is_flat else constants.GPU_CHUNK
    most = max(1, min(n_samples, (gpu_chunk if on_gpu else constants.CPU_CHUNK) // max(width, 1)))
    return _evenly(n_samples, most) if on_gpu else most


def passes_at_once(program: Program, omega: Tensor, chunk: int, outputs: int) -> int:
    """Choose how many passes of a chunk of the T draws, of so many outputs a draw, go into one CUDA graph."""
    if not omega.is_cuda or program.width * chunk > constants.GPU_GRAPH:
        return 1
    gathered = max(constants.SIDE_BY_SIDE, constants.GPU_GATHER // max(1, chunk * outputs))
    return _evenly(math.ceil(len(omega) / chunk), min(constants.GPU_PASSES, gathered))


def _evenly(count: int, most: int) -> int:
    """Return the size, at most `most`, of equal shares of a count: shares of one size share one CUDA graph."""
    return math.ceil(count / math.ceil(count / most))


def plans_for(program: Program, omega: Tensor, chunk: int, dtype: torch.dtype, outputs: int | None) -> list[Plan]:
    """List the plans for a program, the fastest first; outputs: of one draw, where several passes may go on at once."""
    layouts = [program, program.laid_out(channels_last=False)] if program.channels_last else [program]
    if program.by_kernels is not None:
        layouts.insert(0, replace(program, each=program.by_kernels, by_kernels=None))
    groups = {n: 1 if outputs is None else passes_at_once(program, omega, n, outputs) for n in (chunk, 1)}
    return [Plan(size, layout, omega, dtype, groups[size]) for layout in layouts for size in groups]
