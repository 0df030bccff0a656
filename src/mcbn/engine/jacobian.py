"""Outputs and their gradients by batch-norm statistics, input by input.

Batch norm with statistics (mu, sigma) is y = h * scale + shift, with scale = gamma / sqrt(sigma^2 + eps) and
shift = beta - mu scale. Every input gets a scale and a shift of its own, all equal, so that one backward pass an output
gives the gradients of all inputs. With g = df/dy, summed over the positions of a channel,

    df/dshift = sum g,    df/dscale = sum g h,    slope = dscale/dsigma = -gamma sigma (sigma^2 + eps)^-3/2,
    df/dmu = -scale df/dshift,    df/dsigma = slope (df/dscale - mu df/dshift).

g comes from autograd, or from a program of both directions (`_Reversal`) for multilayer perceptrons with one output:
480 and 54 us for two layers of 50 units and one input. `mcbn.export` takes the derivatives (`Point`) of its own graph.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, BatchNormMode, scale_and_shift, statistics_dtype
from mcbn.engine import constants, rewrite
from mcbn.engine.agree import GRADIENTS, agree
from mcbn.engine.graph import as_code, facts
from mcbn.engine.rows import are_independent
from mcbn.engine.run import keep
from mcbn.engine.trace import ReplayTracer, UntraceableError, batch_norm
from mcbn.errors import MCBNError
from mcbn.layers import settings_of
from mcbn.network import Network, ProcessLock

MOST_OUTPUTS = 4096  # of one example: each costs a backward pass
RESHAPES: tuple[Any, ...] = (torch.squeeze, torch.Tensor.squeeze, torch.flatten, torch.Tensor.flatten)
Centres = Mapping[str, tuple[Tensor, Tensor]]  # call name -> mean and standard deviation, each (C,)
Leaves = dict[str, tuple[Tensor, Tensor]]  # call name -> scale and shift of every input, each (N, C)
Method = Callable[[Any], tuple[Tensor, Tensor]]  # inputs -> output (N, ...), Jacobian (N, D, S)


class Point(NamedTuple):
    """One batch-norm call at given statistics, each (C,)."""

    scale: Tensor
    shift: Tensor
    slope: Tensor  # dscale/dsigma
    minus_mean: Tensor
    minus_scale: Tensor

    @classmethod
    def of(cls, call: BatchNormCall, mean: Tensor, std: Tensor) -> "Point":
        """Work out a call at a mean and a standard deviation."""
        var, dtype = std.square(), statistics_dtype(call.x)
        scale, shift = scale_and_shift(mean, var, call.weight, call.bias, call.eps)
        slope = -scale * std / (var + call.eps)
        return cls(*(value.detach().to(dtype) for value in (scale, shift, slope, -mean, -scale)))

    def by_statistics(self, by_scale: Tensor, by_shift: Tensor) -> tuple[Tensor, Tensor]:
        """Turn gradients (..., C) by scale and shift into those by mean and standard deviation."""
        return by_shift * self.minus_scale, torch.addcmul(by_scale, by_shift, self.minus_mean).mul_(self.slope)


class Differentiator:
    """Differentiates one network at one set of statistics; for a shape that comes again it finds the fastest method."""

    def __init__(self, network: Network, centres: Centres) -> None:
        self.network, self.centres = network, centres
        means = {name: mean for name, (mean, _) in centres.items()}
        self.draw = means, {name: std**2 for name, (_, std) in centres.items()}
        self.points: dict[str, Point] = {}
        self.methods: dict[Any, Method | None] = {}  # by shape of the inputs; None: seen once
        self._lock = ProcessLock()
        self._one_by_one = False  # inputs never reach each other's outputs

    def __call__(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (N, ...) and Jacobian (N, D, S); S runs over mean, then std, of every call."""
        key = batches.key_of(inputs), settings_of(self.network).values
        with self._lock:
            method = self.methods.get(key, self.plain) or self.fastest(inputs)  # the fastest for what was seen before
            keep(self.methods, key, method if key in self.methods else None, constants.PLANS_KEPT)
        return method(inputs)

    def plain(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Differentiate the network's own code, one backward pass an output."""
        N = batches.size_of(inputs)
        with torch.enable_grad():
            with PerExample(self.centres, N) as mode:
                output = self.network.run_copy(inputs)  # (N, ...)
            self.points |= mode.points
            flat = _outputs(output, N)  # (N, D)
            try:
                self._require_one_by_one(inputs, flat, mode.leaves)
                rows = [self._gradient(flat, d, mode.leaves) for d in range(flat.shape[1])]  # (N, S) each
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a value that the gradient needs was changed in place
                raise MCBNError(f"the network cannot be differentiated ({error}); use method='sample'") from error
        return output.detach().to(rows[0].dtype), torch.stack(rows, 1)

    def fastest(self, inputs: Any) -> Method:
        """Choose the program of both directions if it can be had for this shape and gives the numbers of `plain`."""
        expected = self.plain(inputs)
        try:
            method = self.reversal(inputs)
            same = all(agree(values, plain, GRADIENTS) for values, plain in zip(method(inputs), expected, strict=True))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a foreign network does while watched, it can still be run as it is
            return self.plain
        return method if same else self.plain

    def reversal(self, inputs: Any) -> Method:
        """Trace the pass at the centre and write its gradient down behind it."""
        tracer = ReplayTracer(*self.draw)
        with torch.no_grad():
            tracer.trace(self.network, inputs)
        both = _Reversal(tracer, {name: self.points[name] for name in self.centres}).program()

        def differentiate(inputs: Any) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                output, gradient = both.forward(*batches.tensors_of(inputs))
            return output, gradient.unsqueeze(1)

        return differentiate

    def _require_one_by_one(self, inputs: Any, flat: Tensor, leaves: Leaves) -> None:
        """Refuse a network whose outputs (N, D) depend on the statistics of other inputs; once where that is proven."""
        N, D = flat.shape
        if self._one_by_one or N < 2 or not leaves:
            return
        weights = torch.arange(1, D + 1, dtype=flat.dtype, device=flat.device).expand(N // 2, D)  # so that none cancel
        sources = [leaf for pair in leaves.values() for leaf in pair]
        gradients = torch.autograd.grad(flat[: N // 2], sources, weights, retain_graph=True, materialize_grads=True)
        if any(bool((gradient[N // 2 :].abs() > 1e-6 * gradient.abs().max()).any()) for gradient in gradients):
            raise MCBNError("an output depends on inputs beside its own: no gradient per input; use method='sample'")
        self._one_by_one = are_independent(self.network, self.draw, inputs)

    def _gradient(self, flat: Tensor, d: int, leaves: Leaves) -> Tensor:
        """Differentiate output d of every input, (N, S)."""
        N, D = flat.shape
        chosen = torch.eye(D, dtype=flat.dtype, device=flat.device)[d].expand(N, D)
        sources = [leaf for pair in leaves.values() for leaf in pair]
        gradients = iter(torch.autograd.grad(flat, sources, chosen, retain_graph=d < D - 1, materialize_grads=True))
        by_call = {name: self.points[name].by_statistics(next(gradients), next(gradients)) for name in leaves}
        columns: list[Tensor] = []
        for name, (mean, _) in self.centres.items():
            columns += by_call.get(name) or (flat.new_zeros(N, len(mean)),) * 2  # zero: these inputs do not reach it
        return torch.cat(columns, 1)


def _outputs(output: Tensor, N: int) -> Tensor:
    """Lay the outputs of each input side by side, (N, D)."""
    if output.shape[:1] != (N,):
        raise MCBNError(f"the network gives {tuple(output.shape)} for {N} inputs, not a row each; use method='sample'")
    flat = output.flatten(1) if output.ndim > 1 else output.unsqueeze(1)
    if flat.shape[1] > MOST_OUTPUTS:
        raise MCBNError(f"{flat.shape[1]} outputs an input need as many backward passes; use method='sample'")
    return flat


class PerExample(BatchNormMode):
    """Give every example a scale and a shift of its own, all at the centre, so that gradients come apart."""

    def __init__(self, centres: Centres, n_examples: int) -> None:
        super().__init__()
        self.centres, self.N = centres, n_examples
        self.points: dict[str, Point] = {}
        self.leaves: Leaves = {}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise with per-example parameters that require grad."""
        if call.name not in self.centres:
            return call.unchanged()
        if call.x.shape[0] != self.N:
            what = f"layer {call.name!r} sees {len(call.x)} rows for {self.N} inputs, not one each"
            raise MCBNError(f"{what}; use method='sample'")
        self.points[call.name] = point = Point.of(call, *self.centres[call.name])
        each = (value.expand(self.N, -1).requires_grad_() for value in (point.scale, point.shift))
        self.leaves[call.name] = next(each), next(each)
        return normalize_each(call.x, *self.leaves[call.name])


def normalize_each(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply scales and shifts (N, C) to x (N, C, ...), in their dtype; x's dtype returns."""
    if x.ndim > 2:
        scale, shift = (values.reshape(*values.shape, *(1,) * (x.ndim - 2)) for values in (scale, shift))
    if x.dtype == scale.dtype:
        return torch.addcmul(shift, x, scale)  # `to` alone would leave an assertion in an exported graph
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)


class _Reversal:
    """A copy of a traced chain of operations with the same backwards behind it; `UntraceableError` for anything else.

    A batch norm hands df/dh = scale g on to what it normalised; df/dmu = -scale g, df/dsigma = (slope h - slope mu) g.
    """

    def __init__(self, tracer: ReplayTracer, points: Mapping[str, Point]) -> None:
        self.tracer, self.points, self.graph = tracer, points, fx.Graph()
        self.copies: dict[Any, fx.Node] = {}
        self.columns: dict[str, tuple[fx.Node, fx.Node]] = {}  # call name -> gradient by its mean and by its std

    def program(self) -> fx.GraphModule:
        """Return inputs -> outputs (N, ...), gradient (N, S), S running over mean, then std, of the points."""
        *nodes, last = self.tracer.graph.nodes
        node, depends = last.all_input_nodes[0], rewrite.depends_on_draw(self.tracer.graph)
        if math.prod(facts(node).shape) != facts(node).shape[0]:
            raise UntraceableError("more than one output")
        if any(facts(n).changes and (n.target not in rewrite.RELUS or n.args[0] not in depends) for n in nodes):
            raise UntraceableError("a value that others may read is changed in place")
        for each in nodes:
            self.copies[each] = self._forward(each)
        output, like = self.copies[node], next(iter(self.points.values())).scale
        g = self._constant(torch.ones(facts(node).shape, dtype=like.dtype, device=like.device))
        while node in depends:
            sources = [operand for operand in node.args if isinstance(operand, fx.Node) and operand in depends]
            if len(sources) > 1 or len(node.users) > 1:
                raise UntraceableError("values do not follow each other in one chain")
            source = sources[0] if sources else node.all_input_nodes[0]
            node, g = source, self._backward(node, source, g)
        if set(self.columns) != set(self.points):
            raise UntraceableError("a call is not reached")
        columns = [column for name in self.points for column in self.columns[name]]
        self.graph.output((output, self._call(torch.cat, columns, 1)))
        return as_code(self.tracer.root, self.graph)

    def _forward(self, node: fx.Node) -> fx.Node:
        if node.target is not batch_norm:
            return self.graph.node_copy(node, self.copies.__getitem__)
        if len(facts(node).shape) != 2:
            raise UntraceableError("channels are not the last axis")
        point, h = self.points[str(node.args[1])], self.copies[node.args[0]]
        return self._call(torch.addcmul, self._constant(point.shift), h, self._constant(point.scale))

    def _backward(self, node: fx.Node, source: fx.Node, g: fx.Node) -> fx.Node:
        """Turn the gradient by a node into that by the one it was computed from."""
        alike = facts(source).shape == facts(node).shape
        if node.target is batch_norm:
            name, point = str(node.args[1]), self.points[str(node.args[1])]
            offset, slope = self._constant(point.minus_mean * point.slope), self._constant(point.slope)
            by_std = self._call(torch.mul, g, self._call(torch.addcmul, offset, self.copies[source], slope))
            self.columns[name] = self._call(torch.mul, g, self._constant(point.minus_scale)), by_std
            return self._call(torch.mul, g, self._constant(point.scale))
        if node.target is F.linear and len(facts(node).shape) == 2 and node.args[0] is source:
            return self._call(torch.mm, g, self.copies[node.args[1]])
        if node.target in rewrite.RELUS:
            return self._call(torch.ops.aten.threshold_backward.default, g, self.copies[node], 0)
        if node.target in RESHAPES:
            return self._call(torch.reshape, g, tuple(facts(source).shape))
        if node.target in rewrite.ADDITIONS and not node.kwargs and alike:
            return g
        if node.target in rewrite.SCALINGS and alike:
            other = node.args[node.args[0] is source]
            return self._call(torch.mul, g, self.copies.get(other, other))
        raise UntraceableError(f"no rule for {node.target}")

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self.graph.call_function(function, arguments)

    def _constant(self, value: Tensor) -> fx.Node:
        name = f"reverse{len(self.graph.nodes)}"
        self.tracer.root.register_buffer(name, value)
        return self.graph.get_attr(name)
