"""A written-down pass made faster: batch norm into weights, work in place, what all draws share split off."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mcbn import workspace
from mcbn.graphs import as_code, free_source, matters
from mcbn.narrow import packed, suits
from mcbn.statistics import normalize
from mcbn.tracing import Norm, Trace, UntraceableError, batch_norm

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
        weight, bias = _weights(mode.root, source)
        if weight is None or (source.target is F.linear and len(source.meta["shape"]) != 2):
            continue
        norms[name] = replace(norms[name], folded_weight=weight, folded_bias=bias)
        source.meta["folded"] = name
        node.replace_all_uses_with(source)
        mode.graph.erase_node(node)
    return norms


def _weights(root: nn.Module, node: fx.Node) -> tuple[Tensor | None, Tensor | None]:
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


def fuse_activations(each: fx.GraphModule) -> None:
    """Let cuDNN add bias, residual and ReLU inside the convolution: one pass over memory instead of three."""
    for node in list(each.graph.nodes):
        if node.target is not F.conv2d or node.kwargs or len(node.args) != 7 or node.args[2] is None:
            continue
        x, weight, bias, stride, padding, dilation, groups = node.args
        after = next(iter(node.users)) if len(node.users) == 1 else None
        if isinstance(padding, str) or after is None:
            continue
        fused: Callable[..., Tensor] = torch.cudnn_convolution_relu
        arguments: tuple[Any, ...] = (x, weight, bias, stride, padding, dilation, groups)
        if after.target in IN_PLACE_ADDITIONS and after.args[0] is node and not after.kwargs:
            relu, other = next(iter(after.users)) if len(after.users) == 1 else None, after.args[1]
            if relu is None or relu.target is not torch.relu_ or not isinstance(other, fx.Node):
                continue
            after, fused = relu, torch.cudnn_convolution_add_relu
            bias = _with_bias_of(other, bias, each.graph, before=after)
            arguments = (x, weight, other, 1.0, bias, stride, padding, dilation, groups)
            relu.args[0].meta["changed"] = []
        elif after.target is not torch.relu_:
            continue
        with each.graph.inserting_before(after):
            after.replace_all_uses_with(each.graph.call_function(fused, arguments))
        after.meta["changed"] = []  # nor does what it changed matter any more
    each.graph.eliminate_dead_code(matters)
    each.recompile()
    free_source(each)


def narrow_share(mode: Trace, depends: set[fx.Node]) -> float:
    """Return the share of stochastic calls whose convolution one kernel can do with them (`mcbn.narrow`)."""
    calls = [node for node in mode.graph.nodes if node.target is batch_norm]
    return sum(node.args[0] in depends and _is_narrow(mode.root, node.args[0]) for node in calls) / max(1, len(calls))


def fuse_narrow(each: fx.GraphModule) -> fx.GraphModule:
    """Return a pass whose narrow convolutions are one kernel with batch norm, shortcut and rectifier behind them."""
    graph = fx.Graph()
    graph.output(cast(fx.Node, graph.graph_copy(each.graph, {})))
    for node in list(graph.nodes):
        if node.target is not normalize or not _is_narrow(each, node.args[0]):
            continue
        conv, scale, shift = node.args
        end, shortcut, slope = _behind(node, conv.meta["shape"])
        x, weight, bias, stride, padding = conv.args[:5]
        name = f"{weight.target}_packed".replace(".", "_")
        each.register_buffer(name, packed(getattr(each, str(weight.target))), persistent=False)
        first = [part if isinstance(part, int) else part[0] for part in (stride, padding)]
        with graph.inserting_before(end):
            own = graph.get_attr(name)
            arguments = (x, own, bias, scale, shift, shortcut, slope, *first)
            end.replace_all_uses_with(graph.call_function(torch.ops.mcbn.narrow.default, arguments))
        for gone in (end, *end.all_input_nodes[:1]):  # nor does what they changed matter any more
            gone.meta["changed"] = []
    graph.eliminate_dead_code(matters)
    return as_code(each, graph)


def _is_narrow(root: nn.Module, node: Any) -> bool:
    """Tell whether a node is a convolution for `mcbn.narrow`, read by one other alone."""
    if not isinstance(node, fx.Node) or node.target is not F.conv2d or len(node.users) > 1:
        return False
    if node.kwargs or len(node.args) != 7 or node.meta["dtype"] != torch.float32:
        return False
    weight, _ = _weights(root, node)
    shape = node.meta["shape"]
    return weight is not None and len(shape) == 4 and suits(weight, shape, *node.args[3:])


def _behind(node: fx.Node, shape: torch.Size) -> tuple[fx.Node, fx.Node | None, float]:
    """Find what follows a batch norm call: the last node of shortcut and rectifier, the shortcut, f's slope below 0."""
    end, shortcut, after = node, None, _only_user(node)
    if after is not None and after.target in IN_PLACE_ADDITIONS and after.args[0] is node and not after.kwargs:
        other = after.args[1]
        if isinstance(other, fx.Node) and other is not node and other.meta.get("shape") == shape:
            end, shortcut, after = after, other, _only_user(after)
    if after is not None and after.target is torch.relu_:
        return after, shortcut, 0.0
    if after is not None and after.target is F.leaky_relu and after.kwargs.get("inplace"):
        slope = after.args[1] if len(after.args) > 1 else after.kwargs.get("negative_slope", 0.01)
        return after, shortcut, float(cast(float, slope))
    return end, shortcut, 1.0


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _with_bias_of(shortcut: fx.Node, bias: Any, graph: fx.Graph, *, before: fx.Node) -> Any:
    """Add the bias of a convolution that is itself added: added there, it costs a pass over all its values."""
    plain = shortcut.target is F.conv2d and not shortcut.kwargs and len(shortcut.args) == 7 and len(shortcut.users) == 1
    if not plain or shortcut.args[2] is None:
        return bias
    own = shortcut.args[2]
    shortcut.update_arg(2, None)
    with graph.inserting_before(before):
        return graph.call_function(torch.add, (bias, own))


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
