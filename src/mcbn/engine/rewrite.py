"""A traced pass made faster: batch norm in weights, work in place, draws stacked, what all draws share split off.

Why each change is safe stands in `graph.md`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mcbn.batch_norm import normalize
from mcbn.engine import constants
from mcbn.engine.graph import UNKNOWN, as_code, facts, reached, split
from mcbn.engine.trace import ReplayTracer, UntraceableError, batch_norm

FOLDABLE = (F.linear, F.conv1d, F.conv2d, F.conv3d)
ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__)
IN_PLACE_ADDITIONS = (torch.Tensor.add_, torch.Tensor.__iadd__)  # += is seen as the former
RELUS = (F.relu, torch.relu, torch.Tensor.relu)
IN_PLACE_OPTION = (F.silu, F.relu6, F.hardswish, F.mish)
NEW_MEMORY: tuple[Any, ...] = (*FOLDABLE, *ADDITIONS, *RELUS, *IN_PLACE_OPTION, F.leaky_relu)
ELEMENTWISE: tuple[Any, ...] = (torch.tanh, torch.sigmoid, F.tanh, F.sigmoid, F.gelu, F.softplus, F.elu, F.hardtanh)
DIFFERENCES = (torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)
SCALINGS: tuple[Any, ...] = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
DIVISIONS = (torch.div, torch.Tensor.div, torch.Tensor.__truediv__)
ARITHMETIC: tuple[Any, ...] = (*ADDITIONS, *IN_PLACE_ADDITIONS, *DIFFERENCES, *SCALINGS, *DIVISIONS)
Buffers = dict[int, Tensor]  # by slot, of one call: fresh megabytes cost a CPU more in page faults than the arithmetic


def depends_on_draw(graph: fx.Graph) -> set[fx.Node]:
    """Find the nodes that differ from draw to draw; refuse memory that one kind of node changes and the other uses."""
    depends = reached(graph, lambda node: node.target is batch_norm)
    made, read = {node.name for node in depends}, set[str]()  # memory that dependent nodes made, and other they read
    for node in graph.nodes:
        changes = facts(node).changes
        if node in depends:
            read |= {facts(source).memory for source in node.all_input_nodes} - made
            if changes - made:
                raise UntraceableError("a value that all draws share is changed in place")
        elif changes & read:
            raise UntraceableError("a value that draws read is changed in place behind them")
    return depends


def fold(tracer: ReplayTracer, depends: set[fx.Node]) -> dict[fx.Node, str]:
    """Let calls disappear into the Linear or convolution that they alone read; return operation -> call it took in."""
    folded: dict[fx.Node, str] = {}
    for node in tracer.graph.find_nodes(op="call_function", target=batch_norm):
        source, name = cast(fx.Node, node.args[0]), str(node.args[1])
        if source not in depends or len(source.users) > 1 or source.target not in FOLDABLE:
            continue
        weight, bias = weights_of(tracer.root, source)
        if weight is None or (source.target is F.linear and len(facts(source).shape) != 2):
            continue
        folded[source] = name
        tracer.norms[name] = replace(tracer.norms[name], folded_weight=weight, folded_bias=bias)
        node.replace_all_uses_with(source)
        tracer.graph.erase_node(node)
    return folded


def weights_of(root: nn.Module, node: fx.Node) -> tuple[Tensor | None, Tensor | None]:
    """Return the constant weight and bias of a Linear or convolution node, None where it is not that simple."""
    operands = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
    weight, bias = (
        getattr(root, str(operand.target)) if isinstance(operand, fx.Node) and operand.op == "get_attr" else None
        for operand in (operands.get("weight"), operands.get("bias"))
    )
    return (weight, bias) if bias is not None or operands.get("bias") is None else (None, None)


def work_in_place(graph: fx.Graph, depends: set[fx.Node]) -> None:
    """Overwrite values that only the next activation or addition reads, and whose memory no other value shares."""
    owners: set[fx.Node] = set()  # nodes whose result has memory of its own
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        usable = isinstance(first, fx.Node) and first in owners and len(first.users) == 1
        alone = usable or facts(node).memory == node.name  # not an alias: activations may be in place already
        fresh = alone and node.target in (batch_norm, *NEW_MEMORY)
        if node in depends and (fresh or (usable and node.target in IN_PLACE_ADDITIONS)):
            owners.add(node)
        if usable and node in depends:
            _overwrite(cast(fx.Node, first), node)


def _overwrite(first: fx.Node, node: fx.Node) -> None:
    """Let an activation or addition write its result over its first operand."""
    if node.target in RELUS:
        node.target, node.args, node.kwargs = torch.relu_, (first,), {}
    elif node.target is F.leaky_relu:
        node.args, node.kwargs = node.args[:2], {**node.kwargs, "inplace": True}
    elif node.target in IN_PLACE_OPTION:
        node.args, node.kwargs = (first,), {**node.kwargs, "inplace": True}
    elif node.target in ADDITIONS and not node.kwargs:
        over, known = facts(first), facts(node)
        if (over.shape, over.dtype) == (known.shape, known.dtype):
            node.target = torch.Tensor.add_


def is_stackable(node: fx.Node, depends: set[fx.Node]) -> bool:
    """Tell whether an operation on values (N, C) does the same on (t, N, C)."""
    first = node.args[0] if node.args else None
    if node.target is batch_norm or node.target is F.linear:
        x = facts(first) if isinstance(first, fx.Node) else UNKNOWN
        flat = len(x.shape) == 2 and x.dtype in (torch.float32, torch.float64)  # what batch norm computes in
        return flat and (node.target is batch_norm or first in depends)
    if node.target in (*RELUS, torch.relu_, *IN_PLACE_OPTION, F.leaky_relu, *ELEMENTWISE):
        return True
    if node.target in ARITHMETIC:
        return len({len(facts(source).shape) for source in node.all_input_nodes if source in depends}) == 1
    return node.target in (torch.squeeze, torch.Tensor.squeeze) and node.args[1:] == (-1,)


def split_by_draw(
    tracer: ReplayTracer, depends: set[fx.Node], folded: Mapping[fx.Node, str], *, stacked: bool
) -> tuple[fx.GraphModule, fx.GraphModule, list[str]]:
    """Cut a pass into `shared(*inputs)` for all draws and `each(*shared, scale, shift, ...)`; return its calls too.

    Operations that are folded take weight and bias of a draw instead. Stacked draws go through at once, and `each`
    takes buffers, or None, before the scales.
    """
    names, parameters = _take_parameters(tracer.graph, folded)
    if stacked:
        parameters.add(_use_buffers(tracer.graph, depends))
    shared, each, _ = split(tracer.graph, depends | parameters)
    return as_code(tracer.root, shared), as_code(tracer.root, each), names


def _take_parameters(graph: fx.Graph, folded: Mapping[fx.Node, str]) -> tuple[list[str], set[fx.Node]]:
    """Give the graph a scale and a shift for every stochastic call as arguments; return the calls and those."""
    calls = {**folded, **{node: str(node.args[1]) for node in graph.nodes if node.target is batch_norm}}
    names = list(dict.fromkeys(calls.values()))
    with graph.inserting_before(next(iter(graph.nodes))):
        pairs = {n: (graph.placeholder(f"scale{i}"), graph.placeholder(f"shift{i}")) for i, n in enumerate(names)}
    for node, name in calls.items():
        x = node.args[0] if node.args else node.kwargs["input"]
        if node in folded:
            node.args = (x, *pairs[name], *node.args[3:])
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("input", "weight", "bias")}
        else:
            node.target, node.args = normalize, (x, *pairs[name])
    return names, {parameter for pair in pairs.values() for parameter in pair}


def _use_buffers(graph: fx.Graph, depends: set[fx.Node]) -> fx.Node:
    """Let products and batch norms of stacked draws write into buffers, each into one of its own; return these."""
    with graph.inserting_before(next(iter(graph.nodes))):
        buffers = graph.placeholder("buffers")
    for slot, node in enumerate(graph.nodes):
        if node not in depends:
            continue
        if node.target is F.linear and not node.kwargs:
            x, weight, bias = (*node.args, None)[:3]
            node.target, node.args = linear, (x, weight, bias, buffers, slot)
        elif node.target is normalize:
            x, scale, shift = cast(tuple[fx.Node, ...], node.args)
            if x.target is linear and len(x.users) == 1:
                node.target, node.args = normed_linear, (*x.args[:3], scale, shift, *x.args[3:])
            else:
                node.target, node.args = normed, (x, scale, shift, buffers, slot)
    return buffers


def _buffer(buffers: Buffers, slot: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the buffer of a slot in this shape; what it held is gone."""
    size, held = math.prod(shape), buffers.get(slot)
    if held is None or held.numel() < size or held.dtype != like.dtype:
        held = buffers[slot] = torch.empty(size, dtype=like.dtype, device=like.device)
    return held[:size].view(shape)


def normed(x: Tensor, scale: Tensor, shift: Tensor, buffers: Buffers | None, slot: int) -> Tensor:
    """x * scale + shift, into the buffer of its slot where there are any."""
    shape = (len(scale), *x.shape) if scale.ndim > x.ndim else x.shape  # (t, N, C)
    return torch.addcmul(shift, x, scale, out=None if buffers is None else _buffer(buffers, slot, shape, x))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, buffers: Buffers | None, slot: int) -> Tensor:
    """x W^T + b, into the buffer of its slot where there are any."""
    if buffers is None:
        return F.linear(x, weight, bias)
    out = _buffer(buffers, slot, (*x.shape[:-1], weight.shape[0]), x)
    flat, rows = out.view(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
    if bias is None:
        torch.mm(rows, weight.t(), out=flat)
    else:
        torch.addmm(bias, rows, weight.t(), out=flat)
    return out


def normed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, buffers: Buffers | None, slot: int
) -> Tensor:
    """(x W^T + b) * scale + shift, x (t, N, I), scale and shift (t, 1, O), into the buffer of its slot."""
    if buffers is None or x.ndim < 3 or x.shape[1] < constants.FOLD_FROM:
        out = linear(x, weight, bias, buffers, slot)
        return torch.addcmul(shift, out, scale, out=out)
    if bias is not None:
        shift = torch.addcmul(shift, bias, scale)
    out = _buffer(buffers, slot, (*x.shape[:2], weight.shape[0]), x)
    return torch.baddbmm(shift, x, weight.t() * scale, out=out)
