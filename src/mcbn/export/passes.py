"""A network's forward pass written down for any number of inputs, with statistics of its own for every row.

`tracing` writes passes down for inputs of one shape, to run them fast here; these are made to leave, by `torch.export`,
with the batch axis open. Draws, or outputs to differentiate, go on that axis: row c * N + n is input n in copy c. What
no statistics reach is computed once, for N rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, BatchNormMode, layer_of, statistics_dtype
from mcbn.engine.graph import reached, split
from mcbn.errors import MCBNError
from mcbn.network import Network, pick_output
from mcbn.private_torch import size_seen, works_in_place


class Given(BatchNormMode):
    """Normalise with a scale and a shift for every row, (B, C) each."""

    def __init__(self, names: Sequence[str], parts: Sequence[Tensor]) -> None:
        super().__init__()
        self.pairs = dict(zip(names, zip(parts[::2], parts[1::2], strict=True), strict=True))
        self.chosen = {layer_of(name) for name in names}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise; a layer that sees k rows an input uses the input's parameters k times."""
        if call.layer not in self.chosen:
            return call.unchanged()
        dtype, rows = statistics_dtype(call.x), call.x.shape[0]
        first, second = (_cast(part, dtype) for part in self.pairs[call.name])  # (B, C)
        B, C = first.shape
        if rows != B:
            first, second = (p.unsqueeze(1).expand(B, rows // B, C).reshape(rows, C) for p in (first, second))
        scale, shift = (part.reshape(rows, C, *(1,) * (call.x.ndim - 2)) for part in (first, second))
        return _cast(torch.addcmul(shift, _cast(call.x, dtype), scale), call.x.dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert where there is something to convert: `to` alone leaves an assertion in a written-down pass."""
    return x if x.dtype == dtype else x.to(dtype)


class Forward(nn.Module):
    """The network as a function of flat input tensors and of the parameters of every stochastic call."""

    def __init__(self, network: Network, inputs: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.network, self.inputs, self.names = network.module, network, inputs, names

    def forward(self, tensors: list[Tensor], parts: list[Tensor]) -> Tensor:
        """Run the network's own code; it may change its inputs in place."""
        remaining = iter(tensors)
        inputs = batches.map_tensors(lambda _: next(remaining).clone(), self.inputs)
        with Given(self.names, parts):
            return pick_output(self.network._forward(inputs), self.network.output)


class Pass(nn.Module):
    """A written-down pass in two parts: `shared(*inputs)` for N rows, `each(*shared, *parts)` for all copies."""

    def __init__(self, shared: nn.Module, each: nn.Module, axes: Sequence[int | None], width: int) -> None:
        super().__init__()
        self.shared, self.each = shared, each
        self.axes = tuple(axes)  # of the values that go from one part to the other: which is the batch
        self.width = width  # values of the largest result, for one input

    def cross(self, tensors: Sequence[Tensor], copies: int) -> list[Tensor]:
        """Run the shared part and repeat its results for each copy."""
        return self.tile(self.shared(*tensors), copies)

    def tile(self, values: Sequence[Tensor], copies: int) -> list[Tensor]:
        """Repeat results of the shared part for each copy."""
        return [_tile(value, axis, copies) for value, axis in zip(values, self.axes, strict=True)]


def _tile(value: Tensor, axis: int | None, copies: int) -> Tensor:
    if axis is None or copies == 1:
        return value
    shape = list(value.shape)
    wide = value.unsqueeze(axis).expand(*shape[:axis], copies, *shape[axis:])
    return wide.reshape(*shape[:axis], copies * shape[axis], *shape[axis + 1 :])


def spread_rows(part: Tensor, N: int) -> Tensor:
    """Give every input of a batch the parameters (t, C) of each copy: (t * N, C)."""
    t, C = part.shape
    return part.unsqueeze(1).expand(t, N, C).reshape(t * N, C)


def write_down(network: Network, inputs: Any, names: Sequence[str], parts: Sequence[Tensor]) -> Pass:
    """Write the network down for batches of any size, from inputs of at least two rows and one row (C,) a part."""
    N, batch = batches.size_of(inputs), torch.export.Dim("batch")
    tensors = batches.tensors_of(inputs)
    rows = [part.expand(N, -1).contiguous() for part in parts]  # (N, C) each
    open_axes = tuple([{0: batch} if grows(t, N) else None for t in group] for group in (tensors, rows))
    forward = Forward(network, inputs, names)
    with torch.no_grad():
        written = torch.export.export(forward, (tensors, rows), dynamic_shapes=open_axes, strict=False)
        if any(map(works_in_place, written.graph.nodes)):  # two parts of a pass must not change each other's values
            written = written.run_decompositions({})
    return _split(written.module(check_guards=False), len(tensors), N)


def grows(tensor: Tensor, N: int) -> bool:
    """Tell whether an input tensor has one row for each of N inputs."""
    return tensor.ndim > 0 and tensor.shape[0] == N


def _split(written: fx.GraphModule, n_inputs: int, N: int) -> Pass:
    """Cut a pass into what no statistics reach and the rest; sizes that the rest reads are worked out there anew."""
    *nodes, _ = written.graph.nodes
    parameters = [node for node in nodes if node.op == "placeholder"][n_inputs:]
    drawn = reached(written.graph, lambda node: node in parameters)
    halves = split(written.graph, drawn, both=_sizes_read(drawn, nodes), needed=_is_impure)
    shared, each = (fx.GraphModule(written, graph) for graph in halves[:2])
    width = max(_numel(node) for node in nodes) // N
    return Pass(shared, each, [_batch_axis(node) for node in halves.crossing], max(1, width))


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _sizes_read(drawn: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Find the whole numbers that drawn nodes are given: sizes of other tensors, and what is computed from them."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        number = node.op == "call_function" and isinstance(node.meta.get("val"), int | torch.SymInt)
        if number and node not in drawn and any(user in drawn or user in found for user in node.users):
            found.add(node)
    return found


def _batch_axis(node: fx.Node) -> int | None:
    """Find the axis of a value that grows with the batch."""
    axes = [axis for axis, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt)]
    if len(axes) > 1:
        raise MCBNError("the network relates the inputs of a batch to each other, so it has no predictor for one input")
    return axes[0] if axes else None


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or node.op == "get_attr":
        return 0
    return math.prod([size_seen(size) for size in value.shape])
