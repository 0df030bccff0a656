"""A network's forward pass as a straight list of operations, so that hundreds of draws can share one run of it.

One pass under a tracing mode gives the operations for inputs of one shape (`tracing`). What does not depend on the draw
is split off and runs once; a batch norm right behind a Linear or convolution goes into its weights; activations and
additions on values nobody else reads work in place (`rewriting`). A program is only ever used after its first draw
agreed with the plain pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mcbn import batches
from mcbn.batch_norm import normalize, scale_and_shift
from mcbn.engine import fuse as fusing
from mcbn.engine import rewrite as rewriting
from mcbn.engine.kernels import available
from mcbn.engine.trace import Norm, Trace, UntraceableError
from mcbn.network import Network

MOSTLY_NARROW = 0.7  # share of convolutions that are narrow from which their kernel pays more than folding
V = TypeVar("V", Tensor, Tensor | None)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced forward pass in two parts: `shared(*inputs)` once, `each(*shared, *parameters)` for every draw."""

    shared: fx.GraphModule
    each: fx.GraphModule
    norms: tuple[Norm, ...]
    width: int  # values of the largest intermediate result, all inputs together
    convolutional: bool
    channels_last: bool
    clones_inputs: bool
    stackable: bool  # every operation takes one more axis in front as it is, so several draws need no `vmap`
    narrow: fx.GraphModule | None = None  # `each` with kernels for narrow convolutions, where most of them are

    def laid_out(self, *, channels_last: bool) -> "Program":
        """Return the pass for values and folded weights of this layout: a convolution copies weights of another."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        norms = tuple(replace(norm, folded_weight=_in_layout(norm.folded_weight, layout)) for norm in self.norms)
        return replace(self, norms=norms, channels_last=channels_last)

    def narrowed(self) -> "Program":
        """Return the pass with kernels for narrow convolutions."""
        return replace(self, each=self.narrow or self.each, narrow=None)

    @property
    def kernels(self) -> int:
        """How many convolutions are one kernel with what follows."""
        return sum(node.target is torch.ops.mcbn.narrow.default for node in self.each.graph.nodes)

    @property
    def folds(self) -> bool:
        """Whether batch norm is folded into weights."""
        return any(norm.folded_weight is not None for norm in self.norms)

    def run_shared(self, inputs: Any) -> tuple[Tensor, ...]:
        """Run what no draw changes."""
        tensors = batches.tensors_of(inputs)
        if self.clones_inputs:
            tensors = [t.clone() for t in tensors]
        if self.channels_last:
            tensors = [_in_layout(t, torch.channels_last) for t in tensors]
        return tuple(self.shared.forward(*tensors))

    def run_each(self, shared: tuple[Tensor, ...], omega: Tensor) -> Tensor:
        """Run one draw, given its scales and shifts in one row (S,)."""
        output: Tensor = self.each.forward(*shared, *self._parameters(omega))
        return output

    def run_together(self, shared: tuple[Tensor, ...], omega: Tensor) -> Tensor:
        """Run several draws in one pass, given their rows (t, S): (t, N, ...)."""
        if self.stackable:
            return self.run_each(shared, omega.unsqueeze(1))
        together: Tensor = torch.vmap(lambda row: self.run_each(shared, row))(omega)
        return together

    def scales_and_shifts(self, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Tensor:
        """Precompute scale and shift of every draw and channel from statistics (T, C): one row a draw, (T, S)."""
        parts: list[Tensor] = []
        for norm in self.norms:
            parts += scale_and_shift(means[norm.name], variances[norm.name], norm.weight, norm.bias, norm.eps)
        return torch.cat(parts, 1)

    def _parameters(self, omega: Tensor) -> list[Tensor]:
        """Cut a row into the parameters of `each`: scale and shift, or weight and bias they are folded into."""
        made: list[Tensor] = []
        rows = iter(torch.split(omega, [c for norm in self.norms for c in (norm.channels, norm.channels)], -1))
        for norm in self.norms:
            scale, shift = next(rows), next(rows)  # (C,)
            weight = norm.folded_weight
            if weight is not None:
                if norm.folded_bias is not None:
                    shift = torch.addcmul(shift, norm.folded_bias.to(scale.dtype), scale)
                scale = weight * scale.to(weight.dtype).view(-1, *(1,) * (weight.ndim - 1))
                shift = shift.to(weight.dtype)
            made += [scale, shift]
        return made


def _in_layout(value: V, layout: torch.memory_format) -> V:
    return value.contiguous(memory_format=layout) if value is not None and value.ndim == 4 else value


def trace(
    network: Network,
    mean: Mapping[str, Tensor],
    var: Mapping[str, Tensor],
    inputs: Any,
    *,
    fold: Callable[[int, bool], bool],
) -> tuple[Program, Tensor]:
    """Write the forward pass down for inputs of this shape; return it with the output of the draw it was traced on.

    `fold(width, convolutional)` decides whether batch norm is folded into the weights before it.
    """
    mode, changed, output = follow(network, mean, var, inputs)
    return _build(mode, changed, fold), output


def follow(
    network: Network, mean: Mapping[str, Tensor], var: Mapping[str, Tensor], inputs: Any
) -> tuple[Trace, bool, Tensor]:
    """Write down one draw on copies of the inputs: the trace, whether the network changes its inputs, its output."""
    if not batches.is_plain(inputs):
        raise UntraceableError(f"its inputs are {batches.describe(inputs)}, not tensors alone")
    copies = batches.copied(inputs)
    tensors = batches.tensors_of(copies)
    mode = Trace(network, mean, var, tensors)
    versions = [t._version for t in tensors]
    with mode:
        output = network(copies)
    changed = any(t._version != v for t, v in zip(tensors, versions, strict=True))
    mode.graph.output(mode._node(output))
    return mode, changed, output


def _build(mode: Trace, inputs_change: bool, fold: Callable[[int, bool], bool]) -> Program:
    convolutional = any(node.target is F.conv2d for node in mode.graph.nodes)
    depends = rewriting.depends_on_draw(mode.graph)
    narrow = fusing.narrow_share(mode, depends) if _runs_kernels(mode) else 0.0
    large = fold(mode.width, convolutional) and narrow < MOSTLY_NARROW
    norms = rewriting.fold(mode, depends) if large else mode.norms
    rewriting.work_in_place(mode.graph, depends)
    stackable = norms is mode.norms and all(rewriting.stackable(node, depends) for node in depends)
    shared, each, order = rewriting.split(mode, depends, None if stackable else normalize)
    if mode.on_gpu and norms is not mode.norms:
        fusing.fuse_activations(each)
    chosen = tuple(norms[name] for name in order)
    kernels = fusing.fuse_narrow(each) if narrow and not large else None
    program = Program(shared, each, chosen, mode.width, convolutional, False, inputs_change, stackable, kernels)
    return program.laid_out(channels_last=True) if convolutional else program


def _runs_kernels(mode: Trace) -> bool:
    return mode.on_gpu and batches.tf32()[0] and available()
