"""Outputs and gradients of networks with one output as one written-down pass: in small ones autograd costs most.

Rules are there for what multilayer perceptrons are made of; anything else raises `UntraceableError`, and autograd does
it. With g the gradient by the result of a batch norm h * scale + shift (`mcbn.engine.jacobian`),

    df/dmu = -scale g,    df/dsigma = slope (h - mu) g,    df/dh = scale g.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mcbn.batch_norm import BatchNormCall, scale_and_shift, statistics_dtype
from mcbn.engine.graphs import as_code
from mcbn.engine.rewrite import ADDITIONS, RELUS, depends_on_draw
from mcbn.engine.trace import Trace, UntraceableError, batch_norm

SCALINGS: tuple[Any, ...] = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
RESHAPES: tuple[Any, ...] = (torch.squeeze, torch.Tensor.squeeze, torch.flatten, torch.Tensor.flatten)


class Point(NamedTuple):
    """One batch-norm call at given statistics, each (C,)."""

    scale: Tensor
    shift: Tensor
    slope: Tensor  # -gamma sigma (sigma^2 + eps)^-3/2
    minus_mean: Tensor
    minus_scale: Tensor

    @classmethod
    def of(cls, call: BatchNormCall, mean: Tensor, std: Tensor) -> "Point":
        """Work out a call at a mean and a standard deviation."""
        var, dtype = std.square(), statistics_dtype(call.x)
        scale, shift = scale_and_shift(mean, var, call.weight, call.bias, call.eps)
        slope = -scale * std / (var + call.eps)
        return cls(*(part.detach().to(dtype) for part in (scale, shift, slope, -mean, -scale)))

    def leaves(self, N: int) -> tuple[Tensor, Tensor]:
        """Return scale and shift for each of N inputs, (N, C), that gradients can be taken for."""
        return self.scale.expand(N, -1).requires_grad_(), self.shift.expand(N, -1).requires_grad_()

    def by_statistics(self, by_scale: Tensor, by_shift: Tensor) -> tuple[Tensor, Tensor]:
        """Turn gradients (..., C) by scale and shift into those by mean and standard deviation."""
        return by_shift * self.minus_scale, torch.addcmul(by_scale, by_shift, self.minus_mean).mul_(self.slope)


def write_down(mode: Trace, points: Mapping[str, Point]) -> fx.GraphModule:
    """Return inputs -> outputs (N, ...), gradient (N, S), S running over mean, then std, of the points."""
    return _Reversal(mode, points).written()


class _Reversal:
    """A copy of a pass, and its operations backwards behind it."""

    def __init__(self, mode: Trace, points: Mapping[str, Point]) -> None:
        self.mode, self.points, self.graph = mode, points, fx.Graph()
        self.depends = depends_on_draw(mode.graph)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.gradients: dict[fx.Node, fx.Node] = {}  # of the output, by the result of each operation
        self.parts: dict[str, tuple[fx.Node, fx.Node]] = {}

    def written(self) -> fx.GraphModule:
        """Write both directions down."""
        *nodes, last = self.mode.graph.nodes
        result = last.all_input_nodes[0]
        if result.meta["shape"].numel() != result.meta["shape"][0]:
            raise UntraceableError("more than one output")
        for node in nodes:
            if node.meta.get("changed") and (node.target not in RELUS or len(node.all_input_nodes[0].users) > 1):
                raise UntraceableError("a value that others may read is changed in place")
            self.copies[node] = self._forward(node)
        like = next(iter(self.points.values())).scale
        self.gradients[result] = self._constant(torch.ones(result.meta["shape"], dtype=like.dtype, device=like.device))
        for node in reversed(nodes):
            if node in self.gradients:
                self._backward(node, self.gradients[node])
        if set(self.parts) != set(self.points):
            raise UntraceableError("a call is not reached")
        columns = [part for name in self.points for part in self.parts[name]]
        self.graph.output((self.copies[result], self._call(torch.cat, columns, 1)))
        return as_code(self.mode.root, self.graph)

    def _forward(self, node: fx.Node) -> fx.Node:
        if node.target is not batch_norm:
            return self.graph.node_copy(node, lambda source: self.copies[source])
        x, name = node.args
        if len(node.meta["shape"]) != 2:
            raise UntraceableError("channels are not the last axis")
        point = self.points[str(name)]
        return self._call(torch.addcmul, self._constant(point.shift), self._of(x), self._constant(point.scale))

    def _backward(self, node: fx.Node, g: fx.Node) -> None:
        """Hand the gradient of a node on to what it was computed from."""
        x, shapes = node.args[0], [source.meta["shape"] for source in node.all_input_nodes if source in self.depends]
        if node.target is batch_norm:
            self._send(x, lambda: self._call(torch.mul, g, self._constant(self.points[str(node.args[1])].scale)))
            self._keep(str(node.args[1]), self._of(x), g)
        elif node.target is F.linear and len(node.meta["shape"]) == 2:
            self._send(x, lambda: self._call(torch.mm, g, self._of(node.args[1])))
        elif node.target in RELUS:
            self._send(x, lambda: self._call(torch.ops.aten.threshold_backward.default, g, self.copies[node], 0))
        elif node.target in RESHAPES:
            self._send(x, lambda: self._call(torch.reshape, g, tuple(shapes[0])))
        elif node.target in ADDITIONS and not node.kwargs and all(shape == node.meta["shape"] for shape in shapes):
            for source in node.args:
                self._send(source, lambda: g)
        elif node.target in SCALINGS and shapes == [node.meta["shape"]]:
            for source, other in (node.args, node.args[::-1]):
                self._send(source, lambda other=other: self._call(torch.mul, g, self._of(other)))
        else:
            raise UntraceableError(f"no rule for {node.target}")

    def _keep(self, name: str, x: Any, g: fx.Node) -> None:
        point = self.points[name]
        offset, slope = self._constant(point.minus_mean * point.slope), self._constant(point.slope)
        by_std = self._call(torch.mul, g, self._call(torch.addcmul, offset, x, slope))
        self.parts[name] = self._call(torch.mul, g, self._constant(point.minus_scale)), by_std

    def _send(self, source: Any, make: Any) -> None:
        if isinstance(source, fx.Node) and source in self.depends:
            known, new = self.gradients.get(source), make()
            self.gradients[source] = new if known is None else self._call(torch.add, known, new)

    def _of(self, value: Any) -> Any:
        return self.copies[value] if isinstance(value, fx.Node) else value

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self.graph.call_function(function, arguments)

    def _constant(self, value: Tensor) -> fx.Node:
        name = f"reverse{len(self.graph.nodes)}"
        self.mode.root.register_buffer(name, value)
        return self.graph.get_attr(name)
