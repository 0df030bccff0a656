"""What a GPU does in one kernel: convolution with bias or batch norm, shortcut and rectifier."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mcbn.batch_norm import normalize
from mcbn.engine.graphs import as_code, free_source, matters
from mcbn.engine.kernels.narrow import packed, suits
from mcbn.engine.kernels.pooling import suits as suits_pooling
from mcbn.engine.rewrite import IN_PLACE_ADDITIONS, weights_of
from mcbn.engine.trace import Trace


def fuse_activations(each: fx.GraphModule) -> None:
    """Let cuDNN add bias, residual and ReLU inside the convolution: one pass over memory instead of three."""
    for node in list(each.graph.nodes):
        if node.target is not F.conv2d or node.kwargs or len(node.args) != 7 or node.args[2] is None:
            continue
        x, weight, bias, stride, padding, dilation, groups = node.args
        after = _only_user(node)
        if isinstance(padding, str) or after is None:
            continue
        fused: Callable[..., Tensor] = torch.cudnn_convolution_relu
        arguments: tuple[Any, ...] = (x, weight, bias, stride, padding, dilation, groups)
        is_sum = after.target in IN_PLACE_ADDITIONS and after.args[0] is node and not after.kwargs
        if is_sum:
            relu, other = _only_user(after), after.args[1]
            if relu is None or relu.target is not torch.relu_ or not isinstance(other, fx.Node):
                continue
            if _changes_between(node, relu):
                continue
            after.meta["changed"] = []
            after, fused = relu, torch.cudnn_convolution_add_relu
            bias = _with_bias_of(other, bias, each.graph, before=after)
            arguments = (x, weight, other, 1.0, bias, stride, padding, dilation, groups)
        elif after.target is not torch.relu_ or _changes_between(node, after):
            continue
        with each.graph.inserting_before(after):
            after.replace_all_uses_with(each.graph.call_function(fused, arguments))
        after.meta["changed"] = []  # nor does what it changed matter any more
    each.graph.eliminate_dead_code(matters)
    each.recompile()
    free_source(each)


def narrow_share(mode: Trace, depends: set[fx.Node]) -> float:
    """Return the share of convolutions that one kernel can do with what follows them (`mcbn.engine.kernels.narrow`)."""
    found = [node for node in mode.graph.nodes if node in depends and node.target is F.conv2d]
    return sum(_is_narrow(mode.root, node) for node in found) / max(1, len(found))


def fuse_narrow(each: fx.GraphModule) -> fx.GraphModule:
    """Return a pass whose narrow convolutions are one kernel with batch norm, shortcut and rectifier behind them."""
    graph = fx.Graph()
    graph.output(cast(fx.Node, graph.graph_copy(each.graph, {})))
    for node in graph.nodes:
        if _is_halving(node):
            node.target, node.args, node.kwargs = torch.ops.mcbn.halved.default, node.args[:1], {}
    for conv in list(graph.nodes):
        if not _is_narrow(each, conv):
            continue
        norm = next(iter(conv.users))
        is_norm = norm.target is normalize and norm.args[0] is conv
        end, shortcut, slope = _behind(norm if is_norm else conv, conv.meta["shape"])
        if (end is conv and not _is_better_alone(conv)) or _changes_between(conv, end):
            continue
        _, weight, bias, stride, padding = conv.args[:5]
        first = [part if isinstance(part, int) else part[0] for part in (stride, padding)]
        with graph.inserting_before(end):
            values = packed(cast(Tensor, getattr(each, str(weight.target))))
            own = _constant(each, graph, f"{weight.target}_packed", values)
            scale, shift = norm.args[1:] if is_norm else _unchanged(each, graph, conv.meta["shape"][1], values.device)
            shift, bias = (bias, None) if bias is not None and not is_norm else (shift, bias)
            arguments = (*_sources(conv), own, bias, scale, shift, shortcut, slope, *first)
            made = graph.call_function(torch.ops.mcbn.narrow.default, arguments)
        made.meta |= {key: conv.meta[key] for key in ("shape", "dtype")}
        end.replace_all_uses_with(made)
        for gone in (end, *(end.all_input_nodes[:1] if end is not conv else [])):  # nor does what they changed matter
            gone.meta["changed"] = []
    graph.eliminate_dead_code(matters)
    return as_code(each, graph)


def _is_halving(node: fx.Node) -> bool:
    """Tell whether a node takes the largest of 2 x 2 pixels, in a way that `mcbn.engine.kernels.pooling` does."""
    if node.target is not F.max_pool2d or not node.args or node.meta.get("dtype") != torch.float32:
        return False
    names = ("size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given = dict(zip(names, node.args[1:], strict=False)) | {**node.kwargs}
    if "kernel_size" in given or given.pop("return_indices", False):
        return False
    chosen = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False} | given
    return suits_pooling(cast(fx.Node, node.args[0]).meta.get("shape", ()), **chosen)


def _is_better_alone(conv: fx.Node) -> bool:
    """Tell whether the kernel is faster than cuDNN with nothing behind: few outputs, or no multiple of 4 (no TF32)."""
    outputs = conv.meta["shape"][1]
    return bool(outputs <= 16 or outputs % 4)


def _sources(conv: fx.Node) -> tuple[fx.Node, fx.Node | None, int]:
    """Find what a convolution reads, as `narrow` takes it: of two values concatenated both, without doubling them."""
    joined = cast(fx.Node, conv.args[0])
    parts = _concatenated(joined)
    if len(parts) != 2 or not all(map(_has_whole_groups, parts)) or _changes_between(joined, conv):
        return joined, None, 0
    small = [part for part in parts if _is_doubled(part) and not _changes_between(part, conv)]
    x, beside = (cast(fx.Node, part.args[0]) if part in small else part for part in parts)
    return x, beside, sum(2**place for place, part in enumerate(parts) if part in small)


def _concatenated(node: fx.Node) -> list[fx.Node]:
    """List what a node puts together along the channels, if nobody else reads it."""
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if node.target not in (torch.cat, torch.concat, torch.concatenate) or len(node.users) > 1 or axis not in (1, -3):
        return []
    parts = node.args[0] if node.args else node.kwargs.get("tensors")
    return list(parts) if isinstance(parts, list | tuple) else []


def _has_whole_groups(part: fx.Node) -> bool:
    """Tell whether the kernel can read a value by itself: it takes 16 channels at a time."""
    shape = part.meta.get("shape", ())
    return len(shape) == 4 and shape[1] % 16 == 0 and part.meta["dtype"] == torch.float32


def _is_doubled(node: fx.Node) -> bool:
    """Tell whether every pixel of a node is one of 2 x 2 equal ones, and nobody else reads it."""
    if node.target is not F.interpolate or len(node.users) > 1:
        return False
    source = node.args[0] if node.args else None
    mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("mode", "nearest")
    if not isinstance(source, fx.Node) or mode not in ("nearest", "nearest-exact"):
        return False
    return [*node.meta["shape"][2:]] == [2 * size for size in source.meta.get("shape", ())[2:]]


def _unchanged(each: fx.GraphModule, graph: fx.Graph, outputs: int, device: torch.device) -> tuple[fx.Node, fx.Node]:
    """Return a scale of ones and a shift of zeros."""
    ones = _constant(each, graph, f"ones_{outputs}", torch.ones(outputs, device=device))
    return ones, _constant(each, graph, f"zeros_{outputs}", torch.zeros(outputs, device=device))


def _constant(each: fx.GraphModule, graph: fx.Graph, name: str, values: Tensor) -> fx.Node:
    name = name.replace(".", "_")
    each.register_buffer(name, values, persistent=False)
    return graph.get_attr(name)


def _is_narrow(root: nn.Module, node: fx.Node) -> bool:
    """Tell whether a node is a convolution for `mcbn.engine.kernels.narrow`, read by one other alone."""
    if node.target is not F.conv2d or len(node.users) != 1:
        return False
    if node.kwargs or len(node.args) != 7 or node.meta["dtype"] != torch.float32:
        return False
    weight, _ = weights_of(root, node)
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


def _changes_between(first: fx.Node, last: fx.Node) -> bool:
    """Tell whether the network changes a value in place after `first` ran and before `last`, but on the way there."""
    own, node = {first, *_way(first, last)}, first
    while node is not last:
        if node not in own and node.meta.get("changed"):
            return True
        node = node.next
    return False


def _way(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    return [] if first is last else [first, *_way(next(iter(first.users)), last)]


def _with_bias_of(shortcut: fx.Node, bias: Any, graph: fx.Graph, *, before: fx.Node) -> Any:
    """Add the bias of a convolution that is itself added: added there, it costs a pass over all its values."""
    plain = shortcut.target is F.conv2d and not shortcut.kwargs and len(shortcut.args) == 7 and len(shortcut.users) == 1
    if not plain or shortcut.args[2] is None:
        return bias
    own = shortcut.args[2]
    shortcut.update_arg(2, None)
    with graph.inserting_before(before):
        return graph.call_function(torch.add, (bias, own))
