"""A written-down pass made faster: batch norm into weights, work in place, what all draws share split off."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mcbn.engine import workspace
from mcbn.engine.graphs import as_code, matters
from mcbn.engine.trace import Norm, Trace, UntraceableError, batch_norm

FOLDABLE = (F.linear, F.conv1d, F.conv2d, F.conv3d)
ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__)
IN_PLACE_ADDITIONS = (torch.Tensor.add_, torch.Tensor.__iadd__)  # += is seen as the former
RELUS = (F.relu, torch.relu, torch.Tensor.relu)
IN_PLACE_OPTION = (F.silu, F.relu6, F.hardswish, F.mish)
NEW_MEMORY: tuple[Any, ...] = (*FOLDABLE, *ADDITIONS, *RELUS, *IN_PLACE_OPTION, F.leaky_relu)
ELEMENTWISE: tuple[Any, ...] = (torch.tanh, torch.sigmoid, F.tanh, F.sigmoid, F.gelu, F.softplus, F.elu, F.hardtanh)
ARITHMETIC: tuple[Any, ...] = (
    *ADDITIONS,
    *IN_PLACE_ADDITIONS,
    *(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.sub),
    *(torch.Tensor.sub, torch.Tensor.__sub__, torch.div, torch.Tensor.div, torch.Tensor.__truediv__),
)


def stackable(node: fx.Node, depends: set[fx.Node]) -> bool:
    """Tell whether an operation on values (N, C) does the same on (t, N, C)."""
    first = node.args[0] if node.args else None
    if node.target is batch_norm or node.target is F.linear:
        return isinstance(first, fx.Node) and _is_flat(first) and (node.target is batch_norm or first in depends)
    if node.target in (*RELUS, torch.relu_, *IN_PLACE_OPTION, F.leaky_relu, *ELEMENTWISE):
        return True
    if node.target in ARITHMETIC:
        return len({len(source.meta["shape"]) for source in node.all_input_nodes if source in depends}) == 1
    return node.target in (torch.squeeze, torch.Tensor.squeeze) and node.args[1:] == (-1,)


def _is_flat(node: fx.Node) -> bool:
    """Tell whether a value is (N, C) in a precision that batch norm computes in."""
    return len(node.meta["shape"]) == 2 and node.meta["dtype"] in (torch.float32, torch.float64)


def depends_on_draw(graph: fx.Graph) -> set[fx.Node]:
    """Find the nodes that differ from draw to draw: stochastic calls and all that reads them.

    The others will run before them, so no memory may be changed by one kind and used by the other.
    """
    found: set[fx.Node] = set()
    own, read = set[str](), set[str]()  # memory that such nodes made, and other memory that they read
    for node in graph.nodes:
        if node.op == "output":
            break
        changed = _memory(source for source in node.meta.get("changed", []) if source is not None)
        if node.target is batch_norm or any(source in found for source in node.all_input_nodes):
            found.add(node)
            own.add(node.name)
            read |= _memory(node.all_input_nodes) - own
            if changed - own:
                raise UntraceableError("a value that all draws share is changed in place")
        elif changed & read:
            raise UntraceableError("a value that draws read is changed in place behind them")
    return found


def _memory(nodes: Iterable[fx.Node]) -> set[str]:
    return {node.meta["memory"] for node in nodes if "memory" in node.meta}


def fold(mode: Trace, depends: set[fx.Node]) -> dict[str, Norm]:
    """Let a stochastic call disappear into the Linear or convolution before it, where nothing else reads between."""
    norms = dict(mode.norms)
    for node in list(mode.graph.nodes):
        if node.target is not batch_norm:
            continue
        source, name = node.args
        if source not in depends or len(source.users) > 1 or source.target not in FOLDABLE:
            continue
        weight, bias = weights_of(mode.root, source)
        if weight is None or (source.target is F.linear and len(source.meta["shape"]) != 2):
            continue
        norms[name] = replace(norms[name], folded_weight=weight, folded_bias=bias)
        source.meta["folded"] = name
        node.replace_all_uses_with(source)
        mode.graph.erase_node(node)
    return norms


def weights_of(root: nn.Module, node: fx.Node) -> tuple[Tensor | None, Tensor | None]:
    """Return the constant weight and bias of a Linear or convolution node, None where it is not that simple."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    for part in (weight, bias):
        if part is not None and (not isinstance(part, fx.Node) or part.op != "get_attr"):
            return None, None
    if not isinstance(weight, fx.Node):
        return None, None
    return getattr(root, str(weight.target)), getattr(root, str(bias.target)) if isinstance(bias, fx.Node) else None


def work_in_place(graph: fx.Graph, depends: set[fx.Node]) -> None:
    """Overwrite values that only the next activation or addition reads, and whose memory no other value shares."""
    own: set[fx.Node] = set()  # nodes whose result has memory of its own
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        usable = isinstance(first, fx.Node) and first in own and len(first.users) == 1
        alone = usable or node.meta.get("memory") == node.name  # not an alias: activations may be in place already
        if node in depends and (
            (alone and node.target in (batch_norm, *NEW_MEMORY)) or (usable and node.target in IN_PLACE_ADDITIONS)
        ):
            own.add(node)
        if not usable or node not in depends:
            continue
        if node.target in RELUS:
            node.target, node.args, node.kwargs = torch.relu_, (first,), {}
        elif node.target is F.leaky_relu:
            node.args, node.kwargs = node.args[:2], {**node.kwargs, "inplace": True}
        elif node.target in IN_PLACE_OPTION:
            node.args, node.kwargs = (first,), {**node.kwargs, "inplace": True}
        elif node.target in ADDITIONS and not node.kwargs and _same_kind(cast(fx.Node, first), node):
            node.target = torch.Tensor.add_


def _same_kind(source: fx.Node, node: fx.Node) -> bool:
    return bool(source.meta["shape"] == node.meta["shape"] and source.meta["dtype"] == node.meta["dtype"])


def split(
    mode: Trace, depends: set[fx.Node], apply: Callable[..., Tensor] | None
) -> tuple[fx.GraphModule, fx.GraphModule, list[str]]:
    """Cut the graph into the part all draws share and the part that runs for each, with its order of norms.

    Stochastic calls become `apply(x, scale, shift)`; None: stacked, of several draws at once in a workspace.
    """
    shared, each = fx.Graph(), fx.Graph()
    in_shared: dict[fx.Node, fx.Node] = {}
    in_each: dict[fx.Node, fx.Node] = {}
    *nodes, last = mode.graph.nodes
    result = cast(fx.Node, last.args[0])
    crossing = [n for n in nodes if n not in depends and (n is result or any(user in depends for user in n.users))]
    for node in crossing:
        if node.op != "get_attr":
            in_each[node] = each.placeholder(f"shared{len(in_each)}")
    drawn = list(dict.fromkeys(name for node in nodes if (name := _norm_of(node)) is not None))
    parameters = {name: (each.placeholder(f"scale{i}"), each.placeholder(f"shift{i}")) for i, name in enumerate(drawn)}
    for node in nodes:
        if node in depends:
            in_each[node] = _copy_drawn(each, node, in_each, parameters, apply)
            continue
        in_shared[node] = shared.node_copy(node, lambda source: in_shared[source])
        if node.op == "get_attr" and node in crossing:
            in_each[node] = each.node_copy(node)
    shared.output(tuple(in_shared[node] for node in crossing if node.op != "get_attr"))
    each.output(in_each[result])
    for graph in (shared, each):
        graph.eliminate_dead_code(matters)
    return as_code(mode.root, shared), as_code(mode.root, each), drawn


def _norm_of(node: fx.Node) -> str | None:
    """Name the stochastic call that a node is, or that was folded into it."""
    return cast(str, node.args[1]) if node.target is batch_norm else node.meta.get("folded")


def _copy_drawn(
    each: fx.Graph,
    node: fx.Node,
    made: dict[fx.Node, fx.Node],
    parameters: Mapping[str, tuple[fx.Node, fx.Node]],
    apply: Callable[..., Tensor] | None,
) -> fx.Node:
    if node.target is batch_norm:
        x, (scale, shift) = cast(fx.Node, node.args[0]), parameters[str(node.args[1])]
        before = made[x]
        if apply is not None:
            applied = each.call_function(apply, (before, scale, shift))
            applied.meta |= {key: node.meta[key] for key in ("shape", "dtype")}
            return applied
        if before.target is workspace.linear and len(x.users) == 1:
            return each.call_function(workspace.normed_linear, (*before.args[:3], scale, shift, before.args[3]))
        return each.call_function(workspace.addcmul, (shift, before, scale, len(each.nodes)))
    if "folded" in node.meta:
        source, target = node.args[0] if node.args else node.kwargs["input"], cast(Callable[..., Any], node.target)
        kwargs = {key: value for key, value in node.kwargs.items() if key not in ("input", "weight", "bias")}
        arguments = (made[cast(fx.Node, source)], *parameters[node.meta["folded"]], *node.args[3:])
        return each.call_function(target, arguments, kwargs)
    if apply is None and node.target is F.linear and not node.kwargs:
        operands = [made[part] if isinstance(part, fx.Node) else None for part in (*node.args, None)[:3]]
        return each.call_function(workspace.linear, (*operands, len(each.nodes)))
    return each.node_copy(node, lambda source: made[source])
