"""A network's forward pass as a straight list of operations, so that hundreds of draws can share one run of it.

One pass under a tracing mode gives the operations for inputs of one shape. What does not depend on the draw is split
off and runs once; a batch norm right behind a Linear or convolution goes into its weights; activations and additions on
values nobody else reads work in place. A program is only ever used after its first draw agreed with the plain pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mcbn import batches, workspace
from mcbn.network import Network
from mcbn.statistics import (
    READERS,
    BatchNormCall,
    BatchNormMode,
    Record,
    Replay,
    normalize,
    scale_and_shift,
    train_batch_norm,
)

FOLDABLE = (F.linear, F.conv1d, F.conv2d, F.conv3d)
ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__)
RELUS = (F.relu, torch.relu, torch.Tensor.relu)
IN_PLACE_OPTION = (F.silu, F.relu6, F.hardswish, F.mish)
METADATA = (int, float, bool, str, torch.Size, torch.dtype, torch.device, torch.layout, type(None), tuple, list)
CONSTANTS = (int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
NEW_MEMORY: tuple[Any, ...] = (*FOLDABLE, *ADDITIONS, *RELUS, *IN_PLACE_OPTION, F.leaky_relu)
ELEMENTWISE: tuple[Any, ...] = (torch.tanh, torch.sigmoid, F.tanh, F.sigmoid, F.gelu, F.softplus, F.elu, F.hardtanh)
ARITHMETIC: tuple[Any, ...] = (
    *ADDITIONS,
    *(torch.Tensor.add_, torch.Tensor.__iadd__, torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.sub),
    *(torch.Tensor.sub, torch.Tensor.__sub__, torch.div, torch.Tensor.div, torch.Tensor.__truediv__),
)
READS_VALUES = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__", "is_nonzero"}
READS_VALUES |= {"equal", "allclose", "__contains__", "unique", "nonzero", "masked_select"}


class UntraceableError(Exception):
    """The pass cannot be written down as a list of operations; it is run as it is instead."""


@dataclass(frozen=True, eq=False)
class Norm:
    """One stochastic batch-norm call of a program: its constants, and the operation it was folded into."""

    name: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    channels: int
    folded_weight: Tensor | None = None  # of the Linear or convolution before it
    folded_bias: Tensor | None = None


class Writer(BatchNormMode):
    """A mode that also writes down every operation as an `fx` node."""

    def begin(self, network: Network, inputs: list[Tensor]) -> None:
        """Start the list with the tensors that go into the network; its own tensors are the only constants."""
        self.constants = {id(tensor) for tensor in _tensors_held(network.module)}
        self.graph, self.root = fx.Graph(), nn.Module()
        self.nodes = WeakTensorKeyDictionary()
        self.width = 0  # largest number of values of one intermediate result
        self.on_gpu = any(t.is_cuda for t in inputs)
        for number, tensor in enumerate(inputs):
            self._remember(tensor, self.graph.placeholder(f"x{number}"))

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READERS:
            return super().__torch_function__(func, types, args, kwargs)
        tensors = batches.tensors_of((args, kwargs))
        versions = [t._version for t in tensors]
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, result, [t for t, v in zip(tensors, versions, strict=True) if t._version != v])
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, result: Any, changed: list[Tensor]) -> None:
        name = getattr(func, "__name__", "")
        outputs = batches.tensors_of(result)
        if name in READS_VALUES:
            raise UntraceableError(f"{name} looks at values")
        if not outputs:
            if isinstance(result, METADATA) and not changed:
                return  # a size, a dtype: the same for every draw
            raise UntraceableError(f"{name} gives no tensor")
        node = self.graph.call_function(func, self._arguments(args), self._arguments(kwargs))
        node.meta["changed"] = [self._known(t) for t in changed]
        if isinstance(result, Tensor):
            self._remember(result, node)
        elif isinstance(result, tuple | list) and all(isinstance(part, Tensor) for part in result):
            for number, part in enumerate(result):
                self._remember(part, self.graph.call_function(_item, (node, number)))
        else:
            raise UntraceableError(f"{name} gives {type(result).__name__}")

    def _remember(self, tensor: Tensor, node: fx.Node) -> None:
        """Tie a value to its node, weakly: the trace must not keep every intermediate result alive."""
        node.meta["shape"], node.meta["dtype"] = tensor.shape, tensor.dtype
        self.nodes[tensor] = node
        self.width = max(self.width, tensor.numel())

    def _known(self, tensor: Tensor) -> fx.Node | None:
        node: fx.Node | None = self.nodes.get(tensor)  # type: ignore[no-untyped-call]
        return node

    def _node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor, a constant of the network where no operation made it."""
        node = self._known(tensor)
        if node is None:
            if id(tensor) not in self.constants:
                raise UntraceableError("a value comes from an operation that cannot be seen")
            name = f"constant{len(self.graph.nodes)}"
            self.root.register_buffer(name, tensor)
            node = self.graph.get_attr(name)
            width = self.width
            self._remember(tensor, node)
            self.width = width  # weights are not results
        return node

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, torch.Size | tuple | list):
            parts = [self._arguments(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {key: self._arguments(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*(self._arguments(part) for part in (value.start, value.stop, value.step)))
        if isinstance(value, CONSTANTS):
            return value
        raise UntraceableError(f"an argument is {type(value).__name__}")

    def write_unchanged(self, call: BatchNormCall) -> Tensor:
        """Run a call that is not stochastic as the operation it is."""
        output = call.unchanged()
        self._write(call.unchanged.func, call.unchanged.args, call.unchanged.keywords, output, [])
        return output


class Trace(Writer, Replay):
    """Replay one draw and write it down."""

    def __init__(
        self, network: Network, mean: Mapping[str, Tensor], var: Mapping[str, Tensor], inputs: list[Tensor]
    ) -> None:
        super().__init__(mean, var)
        self.norms: dict[str, Norm] = {}
        self.begin(network, inputs)

    def answer(self, call: BatchNormCall) -> Tensor:
        """Write down a stochastic call as a node of its own."""
        if call.layer not in self.chosen:
            return self.write_unchanged(call)
        output = super().answer(call)
        self.norms[call.name] = Norm(call.name, call.weight, call.bias, call.eps, call.x.shape[1])
        self._remember(output, self.graph.call_function(batch_norm, (self._node(call.x), call.name)))
        return output


class TraceRecord(Writer, Record):
    """Record one training batch and write the pass down, its statistics as its results."""

    def __init__(self, network: Network, layers: frozenset[str], inputs: list[Tensor]) -> None:
        super().__init__(layers)
        self.results: dict[str, fx.Node] = {}
        self.begin(network, inputs)

    def answer(self, call: BatchNormCall) -> Tensor:
        """Write down a stochastic call as what training does."""
        if call.layer not in self.chosen:
            return self.write_unchanged(call)
        output = super().answer(call)
        arguments = (self._node(call.x), self._arguments(call.weight), self._arguments(call.bias), call.eps)
        self.results[call.name] = self.graph.call_function(train_batch_norm, arguments)
        self._remember(output, self.graph.call_function(_item, (self.results[call.name], 0)))
        return output

    def program(self) -> Callable[..., list[tuple[str, Tensor, Tensor]]]:
        """Return a function of the input tensors that gives name, mean and variance of every call, in order."""
        self.graph.output(list(self.results.values()))
        self.graph.eliminate_dead_code()
        forward, names = fx.GraphModule(self.root, self.graph).forward, list(self.results)

        def run(*tensors: Tensor) -> list[tuple[str, Tensor, Tensor]]:
            return [(name, mean, var) for name, (_, mean, var) in zip(names, forward(*tensors), strict=True)]

        return run


def _tensors_held(module: nn.Module) -> list[Tensor]:
    """List parameters, buffers and tensors kept as plain attributes of the network's modules."""
    attributes = [list(vars(child).values()) for child in module.modules()]
    return [*module.parameters(), *module.buffers(), *batches.tensors_of(attributes)]


def _item(values: Any, number: int) -> Any:
    return values[number]


def batch_norm(x: Tensor, name: str) -> Tensor:
    """Stand for a stochastic call until its scale and shift are put in."""
    raise AssertionError(name)


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
            tensors = [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors]
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
    if not batches.is_plain(inputs):
        raise UntraceableError(f"its inputs are {batches.describe(inputs)}, not tensors alone")
    copies = batches.map_tensors(torch.clone, inputs)
    tensors = batches.tensors_of(copies)
    mode = Trace(network, mean, var, tensors)
    versions = [t._version for t in tensors]
    with mode:
        output = network(copies)
    changed = any(t._version != v for t, v in zip(tensors, versions, strict=True))
    mode.graph.output(mode._node(output))
    return _build(mode, changed, fold), output


def _build(mode: Trace, inputs_change: bool, fold: Callable[[int, bool], bool]) -> Program:
    convolutional = any(node.target is F.conv2d for node in mode.graph.nodes)
    depends = _depends_on_draw(mode.graph)
    norms = _fold(mode, depends) if fold(mode.width, convolutional) else mode.norms
    _work_in_place(mode.graph, depends)
    stackable = norms is mode.norms and all(_stackable(node, depends) for node in depends)
    shared, each, order = _split(mode, depends, stackable)
    if mode.on_gpu and norms is not mode.norms:
        _fuse_activations(each)
    chosen = tuple(norms[name] for name in order)
    return Program(shared, each, chosen, mode.width, convolutional, convolutional, inputs_change, stackable)


def _stackable(node: fx.Node, depends: set[fx.Node]) -> bool:
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


def _depends_on_draw(graph: fx.Graph) -> set[fx.Node]:
    """Find the nodes that differ from draw to draw: stochastic calls and all that reads them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.target is batch_norm or any(source in found for source in node.all_input_nodes):
            found.add(node)
            if any(source is not None and source not in found for source in node.meta.get("changed", [])):
                raise UntraceableError("a value that all draws share is changed in place")
    return found


def _fold(mode: Trace, depends: set[fx.Node]) -> dict[str, Norm]:
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


def _work_in_place(graph: fx.Graph, depends: set[fx.Node]) -> None:
    """Overwrite values that only the next activation or addition reads, and whose memory no other value shares."""
    own: set[fx.Node] = set()  # nodes whose result has memory of its own
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        usable = isinstance(first, fx.Node) and first in own and len(first.users) == 1
        if node in depends and (
            node.target in (batch_norm, *NEW_MEMORY) or (usable and node.target is torch.Tensor.__iadd__)
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


def _fuse_activations(each: fx.GraphModule) -> None:
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
        if after.target in (torch.Tensor.add_, torch.Tensor.__iadd__) and after.args[0] is node:
            relu, other = next(iter(after.users)) if len(after.users) == 1 else None, after.args[1]
            if relu is None or relu.target is not torch.relu_ or not isinstance(other, fx.Node):
                continue
            after, fused = relu, torch.cudnn_convolution_add_relu
            arguments = (x, weight, other, 1.0, bias, stride, padding, dilation, groups)
        elif after.target is not torch.relu_:
            continue
        with each.graph.inserting_before(after):
            after.replace_all_uses_with(each.graph.call_function(fused, arguments))
    each.graph.eliminate_dead_code()
    each.recompile()


def _same_kind(source: fx.Node, node: fx.Node) -> bool:
    return bool(source.meta["shape"] == node.meta["shape"] and source.meta["dtype"] == node.meta["dtype"])


def _split(mode: Trace, depends: set[fx.Node], stackable: bool) -> tuple[fx.GraphModule, fx.GraphModule, list[str]]:
    """Cut the graph into the part all draws share and the part that runs for each, with its order of norms."""
    shared, each = fx.Graph(), fx.Graph()
    in_shared: dict[fx.Node, fx.Node] = {}
    in_each: dict[fx.Node, fx.Node] = {}
    *nodes, last = mode.graph.nodes
    result = cast(fx.Node, last.args[0])
    crossing = [n for n in nodes if n not in depends and (n is result or any(user in depends for user in n.users))]
    for node in crossing:
        if node.op != "get_attr":
            in_each[node] = each.placeholder(f"shared{len(in_each)}")
    drawn = {node: name for node in nodes if (name := _norm_of(node)) is not None}
    parameters = {
        name: (each.placeholder(f"scale{i}"), each.placeholder(f"shift{i}")) for i, name in enumerate(drawn.values())
    }
    for node in nodes:
        if node in depends:
            in_each[node] = _copy_drawn(each, node, in_each, parameters, stackable)
            continue
        in_shared[node] = shared.node_copy(node, lambda source: in_shared[source])
        if node.op == "get_attr" and node in crossing:
            in_each[node] = each.node_copy(node)
    shared.output(tuple(in_shared[node] for node in crossing if node.op != "get_attr"))
    each.output(in_each[result])
    for graph in (shared, each):
        graph.eliminate_dead_code()
    return fx.GraphModule(mode.root, shared), fx.GraphModule(mode.root, each), list(drawn.values())


def _norm_of(node: fx.Node) -> str | None:
    """Name the stochastic call that a node is, or that was folded into it."""
    return cast(str, node.args[1]) if node.target is batch_norm else node.meta.get("folded")


def _copy_drawn(
    each: fx.Graph,
    node: fx.Node,
    made: dict[fx.Node, fx.Node],
    parameters: Mapping[str, tuple[fx.Node, fx.Node]],
    stackable: bool,
) -> fx.Node:
    if node.target is batch_norm:
        x, (scale, shift) = cast(fx.Node, node.args[0]), parameters[str(node.args[1])]
        if stackable:
            own = made[x].target is workspace.linear and len(x.users) == 1
            slot = workspace.IN_PLACE if own else len(each.nodes)
            return each.call_function(workspace.addcmul, (shift, made[x], scale, slot))
        return each.call_function(normalize, (made[x], scale, shift))
    if "folded" in node.meta:
        source, target = node.args[0] if node.args else node.kwargs["input"], cast(Callable[..., Any], node.target)
        kwargs = {key: value for key, value in node.kwargs.items() if key not in ("input", "weight", "bias")}
        arguments = (made[cast(fx.Node, source)], *parameters[node.meta["folded"]], *node.args[3:])
        return each.call_function(target, arguments, kwargs)
    if stackable and node.target is F.linear and not node.kwargs:
        operands = [made[part] if isinstance(part, fx.Node) else None for part in (*node.args, None)[:3]]
        return each.call_function(workspace.linear, (*operands, len(each.nodes)))
    return each.node_copy(node, lambda source: made[source])
