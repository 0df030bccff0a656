"""What a GPU does in one kernel: convolution with bias or batch norm, shortcut and rectifier.

Imported on a GPU alone. Why it is safe stands in `graph.md`.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mcbn.batch_norm import normalize
from mcbn.engine import constants, kernels
from mcbn.engine.graph import KEY, as_code, facts, matters
from mcbn.engine.rewrite import IN_PLACE_ADDITIONS, weights_of
from mcbn.engine.trace import ReplayTracer


def fuse_activations(each: fx.GraphModule) -> fx.GraphModule:
    """Let cuDNN add bias, residual and ReLU inside the convolution: one pass over memory instead of three."""
    for node in list(each.graph.nodes):
        if _is_plain_convolution(node) and node.args[2] is not None and not isinstance(node.args[4], str):
            _fuse_with_cudnn(each.graph, node)
    each.graph.eliminate_dead_code(matters)
    return as_code(each, each.graph)


def _is_plain_convolution(node: fx.Node) -> bool:
    """Tell whether a node is a convolution (x, weight, bias, stride, padding, dilation, groups)."""
    return node.target is F.conv2d and not node.kwargs and len(node.args) == 7


def _fuse_with_cudnn(graph: fx.Graph, conv: fx.Node) -> None:
    """Put one operation of cuDNN in the place of a convolution and its rectifier, and of a sum between them."""
    (x, weight, bias, *where), (end, other, _) = conv.args, _behind(conv, facts(conv).shape)
    if end.target is not torch.relu_ or _changes_between(conv, end):
        return
    with graph.inserting_before(end):
        if other is None:
            fused = graph.call_function(torch.cudnn_convolution_relu, (x, weight, bias, *where))
        else:
            added = other.args[2] if _is_plain_convolution(other) and len(other.users) == 1 else None
            if added is not None:  # a bias that costs a pass over all values where it is added
                other.update_arg(2, None)
                bias = graph.call_function(torch.add, (bias, added))
            fused = graph.call_function(torch.cudnn_convolution_add_relu, (x, weight, other, 1.0, bias, *where))
    _replace(graph, conv, end, fused)


def _replace(graph: fx.Graph, first: fx.Node, last: fx.Node, new: fx.Node) -> None:
    """Put a node in the place of a chain, which goes by name: what it changed in place nobody else reads."""
    new.meta[KEY] = facts(first)
    chain = _chain(first, last)
    last.replace_all_uses_with(new)
    for node in reversed(chain):
        graph.erase_node(node)


def narrow_share(tracer: ReplayTracer, depends: set[fx.Node]) -> float:
    """Return the share of convolutions that one kernel can do with what follows them (`kernels.narrow`)."""
    convolutions = [node for node in tracer.graph.nodes if node in depends and node.target is F.conv2d]
    return sum(_is_narrow(tracer.root, node) for node in convolutions) / max(1, len(convolutions))


def fuse_kernels(each: fx.GraphModule, *, narrow: bool = True) -> fx.GraphModule:
    """Return a pass by kernels of ours: narrow convolutions where asked for, batch norm, with what follows them."""
    graph = fx.Graph()
    graph.output(cast(fx.Node, graph.graph_copy(each.graph, {})))
    for node in list(graph.nodes) if narrow else []:
        if _is_halving(node):
            node.target, node.args, node.kwargs = torch.ops.mcbn.halved.default, node.args[:1], {}
        elif _is_narrow(each, node):
            _fuse_with_kernel(each, graph, node)
    for norm in graph.find_nodes(op="call_function", target=normalize):
        if kernels.suits_scaled(facts(norm).shape, facts(norm).dtype):
            _fuse_scaled(graph, norm)
    graph.eliminate_dead_code(matters)
    return as_code(each, graph)


def _fuse_scaled(graph: fx.Graph, norm: fx.Node) -> None:
    """Put a kernel in the place of a batch norm and what follows it."""
    end, shortcut, slope = _behind(norm, facts(norm).shape)
    if _changes_between(norm, end) or (shortcut is not None and facts(shortcut).dtype != facts(norm).dtype):
        end, shortcut, slope = norm, None, 1.0
    with graph.inserting_before(end):
        fused = graph.call_function(torch.ops.mcbn.scaled.default, (*norm.args, shortcut, slope, facts(norm).shape[0]))
    _replace(graph, norm, end, fused)


def compiled(each: fx.GraphModule, device: torch.device) -> bool:
    """Begin to compile the kernels of a pass, all beside each other; tell whether they are there already."""
    ready = True
    for node in each.graph.find_nodes(op="call_function", target=torch.ops.mcbn.narrow.default):
        x, _, doubled, weight, _, _, _, shortcut, _, stride, padding = cast(Any, node.args)
        packed, shape = getattr(each, weight.target), facts(x).shape
        if shape:  # what the pass is given has none on record: its kernel is compiled when it is launched
            sizes = packed.shape, facts(node).shape[1], doubled, shortcut is not None, stride, padding
            ready &= kernels.prefetch("narrow", kernels.narrow_sizes(shape, *sizes), device)
    scaled = each.graph.find_nodes(op="call_function", target=torch.ops.mcbn.scaled.default)
    for kind in {kernels.KINDS[cast(torch.dtype, facts(node).dtype)] for node in scaled}:
        ready &= kernels.prefetch("scaled", {"KIND": kind}, device)
    return ready


def _fuse_with_kernel(each: fx.GraphModule, graph: fx.Graph, conv: fx.Node) -> None:
    """Put the kernel in the place of a convolution and what follows it."""
    norm = next(iter(conv.users))
    is_norm = norm.target is normalize and norm.args[0] is conv
    end, shortcut, slope = _behind(norm if is_norm else conv, facts(conv).shape)
    outputs = facts(conv).shape[1]
    better_alone = outputs <= constants.NARROW_ALONE or outputs % 4 != 0  # than cuDNN: few, or no TF32 there
    if (end is conv and not better_alone) or _changes_between(conv, end):
        return
    _, weight, bias, stride, padding = conv.args[:5]
    stride, padding = (size if isinstance(size, int) else cast(Any, size)[0] for size in (stride, padding))
    with graph.inserting_before(end):
        target = str(cast(fx.Node, weight).target)
        values = kernels.packed(cast(Tensor, getattr(each, target)))
        packed = _constant(each, graph, f"{target}_packed", values)
        scale, shift = norm.args[1:] if is_norm else (None, None)
        if scale is None:
            scale = _constant(each, graph, f"ones_{outputs}", values.new_ones(outputs))
            shift = _constant(each, graph, f"zeros_{outputs}", values.new_zeros(outputs))
        shift, bias = (bias, None) if bias is not None and not is_norm else (shift, bias)
        operands = (*_sources(conv), packed, bias, scale, shift, shortcut, slope, stride, padding)
        fused = graph.call_function(torch.ops.mcbn.narrow.default, operands)
    _replace(graph, conv, end, fused)


def _is_halving(node: fx.Node) -> bool:
    """Tell whether a node takes the largest of 2 x 2 pixels, in a way that `kernels.halved` does."""
    if node.target is not F.max_pool2d or not node.args or facts(node).dtype != torch.float32:
        return False
    names = ("size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    options = dict(zip(names, node.args[1:], strict=False)) | {**node.kwargs}
    if "kernel_size" in options or options.pop("return_indices", False):
        return False
    options = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False} | options
    return kernels.suits_halved(facts(cast(fx.Node, node.args[0])).shape, **options)


def _sources(conv: fx.Node) -> tuple[fx.Node, fx.Node | None, int]:
    """Find what a convolution reads, as `narrow` takes it: of two values concatenated both, without doubling them."""
    joined = cast(fx.Node, conv.args[0])
    axis = joined.args[1] if len(joined.args) > 1 else joined.kwargs.get("dim", 0)
    joins = joined.target in (torch.cat, torch.concat, torch.concatenate) and len(joined.users) == 1 and axis in (1, -3)
    values = [*cast(Any, joined.args[0] if joined.args else joined.kwargs["tensors"])] if joins else []
    known = [facts(value) for value in values]  # the kernel reads 16 channels at a time, of one value
    whole_groups = all(len(v.shape) == 4 and v.shape[1] % 16 == 0 and v.dtype == torch.float32 for v in known)
    if len(values) != 2 or not whole_groups or _changes_between(joined, conv):
        return joined, None, 0
    doubled = [value for value in values if _is_doubled(value) and not _changes_between(value, conv)]
    x, beside = (cast(fx.Node, value.args[0]) if value in doubled else value for value in values)
    return x, beside, sum(2**place for place, value in enumerate(values) if value in doubled)


def _is_doubled(node: fx.Node) -> bool:
    """Tell whether every pixel of a node is one of 2 x 2 equal ones, and nobody else reads it."""
    if node.target is not F.interpolate or len(node.users) > 1:
        return False
    source = node.args[0] if node.args else None
    mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("mode", "nearest")
    if not isinstance(source, fx.Node) or mode not in ("nearest", "nearest-exact"):
        return False
    return [*facts(node).shape[2:]] == [2 * size for size in facts(source).shape[2:]]


def _constant(each: fx.GraphModule, graph: fx.Graph, name: str, values: Tensor) -> fx.Node:
    name = name.replace(".", "_")
    each.register_buffer(name, values, persistent=False)
    return graph.get_attr(name)


def _is_narrow(root: nn.Module, node: fx.Node) -> bool:
    """Tell whether a node is a convolution for `kernels.narrow`, read by one other alone."""
    if not _is_plain_convolution(node) or len(node.users) != 1 or facts(node).dtype != torch.float32:
        return False
    weight, shape = weights_of(root, node)[0], facts(node).shape
    return weight is not None and len(shape) == 4 and kernels.suits_narrow(weight, shape, *node.args[3:])


def _behind(node: fx.Node, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node | None, float]:
    """Find what follows a node: the last one of shortcut and rectifier, the shortcut, the rectifier's slope below 0."""
    end, shortcut, after = node, None, _only_user(node)
    if after is not None and after.target in IN_PLACE_ADDITIONS and after.args[0] is node and not after.kwargs:
        other = after.args[1]
        if isinstance(other, fx.Node) and other is not node and facts(other).shape == shape:
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
    chain, node = {*_chain(first, last)}, first
    while node is not last:
        if node not in chain and facts(node).changes:
            return True
        node = node.next
    return False


def _chain(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """List nodes from the first to the last, each of which the next one reads."""
    return [last] if first is last else [first, *_chain(next(iter(first.users)), last)]
