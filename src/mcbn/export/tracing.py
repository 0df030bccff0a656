"""A network's pass, and its gradient, as graphs for any number of inputs, with statistics of its own for every row.

The engine traces passes for inputs of one shape, to run them fast here; these are made to leave, by `torch.export`,
with the batch axis open. Draws, or outputs to differentiate, go on that axis: row c * N + n is input n in copy c. What
no statistics reach is computed once, for N rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, BatchNormMode, layer_of, statistics_dtype
from mcbn.engine.graph import as_code, reached, split
from mcbn.engine.jacobian import normalize_each
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.private_torch import decompositions, size_seen, trace_open_sizes, unguarded, works_in_place


class PerRow(BatchNormMode):
    """Normalise with a scale and a shift for every row, (B, C) each, of every call by turns."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.pairs = dict(zip(names, zip(parameters[::2], parameters[1::2], strict=True), strict=True))
        self.chosen = {layer_of(name) for name in names}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise; a layer that sees k rows an input uses the input's parameters k times."""
        if call.layer not in self.chosen:
            return call.unchanged()
        rows, dtype = call.x.shape[0], statistics_dtype(call.x)
        scale, shift = (p if p.dtype == dtype else p.to(dtype) for p in self.pairs[call.name])  # (B, C)
        B = scale.shape[0]
        if rows != B:
            scale, shift = spread_rows(scale, rows // B), spread_rows(shift, rows // B)
        return normalize_each(call.x, scale, shift)


def spread_rows(parameters: Tensor, N: int) -> Tensor:
    """Give every input of a batch the parameters (t, C) of each copy: (t * N, C)."""
    t, C = parameters.shape
    return parameters.unsqueeze(1).expand(t, N, C).reshape(t * N, C)


class Forward(nn.Module):
    """The network as a function of flat input tensors and of the parameters of every stochastic call."""

    def __init__(self, network: Network, inputs: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.network, self.inputs, self.names = network.module, network, inputs, names

    def forward(self, tensors: list[Tensor], parameters: list[Tensor]) -> Tensor:
        """Run the network's own code; it may change its inputs in place."""
        inputs = batches.filled(self.inputs, (tensor.clone() for tensor in tensors))
        with PerRow(self.names, parameters):
            return self.network.read(self.network.call_module(inputs))


class OpenProgram(nn.Module):
    """A program with an open batch axis: `shared(*inputs)` for N rows, `each(*shared, *parameters)` for all copies."""

    def __init__(self, shared: nn.Module, each: fx.GraphModule, axes: Sequence[int | None], width: int) -> None:
        super().__init__()
        self.shared, self.each = shared, each
        self.axes = tuple(axes)  # of the values that go from one part to the other: which is the batch
        self.width = width  # values of the largest result, for one input

    def tile(self, values: Sequence[Tensor], copies: int) -> list[Tensor]:
        """Repeat results of the shared part for each copy, along their batch axis."""
        times = [[copies if a == axis else 1 for a in range(v.ndim)] for v, axis in zip(values, self.axes, strict=True)]
        return [v.repeat(t) if max(t, default=1) > 1 else v for v, t in zip(values, times, strict=True)]


def trace_open(network: Network, inputs: Any, names: Sequence[str], parameters: Sequence[Tensor]) -> OpenProgram:
    """Trace the network for batches of any size, from inputs of at least two rows and one row (C,) a parameter."""
    N, batch = batches.size_of(inputs), torch.export.Dim("batch")
    tensors = batches.tensors_of(inputs)
    rows = [row.expand(N, -1).contiguous() for row in parameters]  # (N, C) each
    open_axes = tuple([{0: batch} if grows(t, N) else None for t in group] for group in (tensors, rows))
    forward = Forward(network, inputs, names)
    with torch.no_grad():
        program = torch.export.export(forward, (tensors, rows), dynamic_shapes=open_axes, strict=False)
        if any(works_in_place(node) for node in program.graph.nodes):  # the parts must not change each other's values
            program = program.run_decompositions({})
    return _halve(unguarded(program), len(tensors), N)


def grows(tensor: Tensor, N: int) -> bool:
    """Tell whether an input tensor has one row for each of N inputs."""
    return tensor.ndim > 0 and tensor.shape[0] == N


def _halve(whole: fx.GraphModule, n_inputs: int, N: int) -> OpenProgram:
    """Cut a pass into what no statistics reach and the rest; sizes that the rest reads are worked out there anew."""
    nodes = list(whole.graph.nodes)[:-1]
    parameters = [node for node in nodes if node.op == "placeholder"][n_inputs:]
    drawn = reached(whole.graph, lambda node: node in parameters)
    sizes = _sizes_read(drawn, nodes)
    ends = ("placeholder", "output")
    first, second, crossing = split(whole.graph, drawn, both=sizes, needed=lambda node: node.op in ends)
    for argument, node in zip(second.nodes, crossing, strict=False):
        argument.meta["val"] = node.meta["val"]
    results = [node.meta.get("val") for node in nodes if node.op != "get_attr"]
    width = max(math.prod(map(size_seen, value.shape)) for value in results if isinstance(value, Tensor)) // N
    axes = [_batch_axis(node) for node in crossing]
    return OpenProgram(as_code(whole, first), as_code(whole, second), axes, max(1, width))


def _sizes_read(drawn: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Find the whole numbers that drawn nodes are given: sizes of other tensors, and what is computed from them."""
    sizes: set[fx.Node] = set()
    for node in reversed(nodes):
        number = node.op == "call_function" and isinstance(node.meta.get("val"), int | torch.SymInt)
        if number and node not in drawn and any(user in drawn or user in sizes for user in node.users):
            sizes.add(node)
    return sizes


def _batch_axis(node: fx.Node) -> int | None:
    """Find the axis of a value that grows with the batch."""
    axes = [axis for axis, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt)]
    if len(axes) > 1:
        raise MCBNError("the network relates the inputs of a batch to each other, so it has no predictor for one input")
    return axes[0] if axes else None


def trace_gradient(program: OpenProgram, n_outputs: int) -> nn.Module:
    """Return (crossing, parameters, chosen) -> outputs (B, ...) and the gradient of their chosen sum, (B, S).

    `chosen` (B, D) picks which of a row's outputs is differentiated, by the scales and shifts of that row (autograd, as
    in `mcbn.engine.jacobian`). Traced without values: on what `torch.export` noted of every argument, its batch open.
    """

    def joint(crossing: list[Tensor], parameters: list[Tensor], chosen: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            outputs = program.each(*crossing, *leaves)
            total = (outputs.reshape(chosen.shape) * chosen).sum()
            gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
        return outputs.detach(), torch.cat(gradients, 1)

    arguments = [node.meta["val"] for node in program.each.graph.nodes if node.op == "placeholder"]
    crossing, parameters = arguments[: len(program.axes)], arguments[len(program.axes) :]
    chosen = parameters[0].new_ones(parameters[0].shape[0], n_outputs)
    return cast(nn.Module, trace_open_sizes(joint, _decompositions())(crossing, parameters, chosen))


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Name gradients that have no operator outside torch, as operators that have one."""
    table: dict[Any, Callable[..., Any]] = {**torch.export.default_decompositions()}
    aten = torch.ops.aten
    table |= decompositions([aten.max_pool2d_with_indices_backward, aten.slice_backward])
    table[aten.convolution_backward.default] = _convolution_backward
    table[aten.avg_pool2d_backward.default] = _average_backward
    return table


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, _: Any, *settings: Any) -> Any:
    """Differentiate a convolution by its input: the transposed one with the same weights, and the other way round."""
    stride, padding, dilation, transposed, _, groups, output_mask = settings
    if output_mask[1] or output_mask[2]:
        return NotImplemented
    extra = [0 for _ in stride] if transposed else _left_over(x, gradient, weight.shape[2:], stride, padding, dilation)
    arguments = stride, padding, dilation, not transposed, extra, groups
    return torch.ops.aten.convolution(gradient, weight, None, *arguments), None, None


def _average_backward(gradient: Tensor, x: Tensor, kernel_size: list[int], *settings: Any) -> Any:
    """Differentiate an average over windows: each window's share goes back to its values."""
    stride, padding, ceil_mode, count_include_pad, divisor_override = settings
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented  # windows of several sizes
    (height, width), stride, C = kernel_size, stride or kernel_size, x.shape[1]
    weight = gradient.new_full((C, 1, height, width), 1 / (divisor_override or height * width))
    extra = _left_over(x, gradient, kernel_size, stride, padding, [1, 1])
    return torch.ops.aten.convolution(gradient, weight, None, stride, padding, [1, 1], True, extra, C)


def _left_over(
    x: Tensor, gradient: Tensor, kernel: Sequence[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """Count what a transposed convolution of the gradient lacks of the input's size: rows the stride left out."""
    sizes = zip(x.shape[2:], gradient.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [whole - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for whole, out, k, s, p, d in sizes]
