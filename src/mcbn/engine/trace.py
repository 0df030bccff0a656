"""One forward pass written down as a straight list of `fx` operations, for inputs of one shape."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mcbn import batches
from mcbn.batch_norm import BATCH_NORMS, BatchNormCall, BatchNormMode, Record, Replay, train_batch_norm
from mcbn.engine.graphs import as_code, matters
from mcbn.engine.sizes import SIZES, sized_by_values
from mcbn.network import Network

METADATA = (int, float, bool, str, torch.Size, torch.dtype, torch.device, torch.layout, type(None), tuple, list)
CONSTANTS = (int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
READS_VALUES = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__", "is_nonzero"}
READS_VALUES |= {"equal", "allclose", "__contains__", "unique", "nonzero", "masked_select"}
# Tensor.__pow__ calls itself torch._tensor.pow, where the code that fx writes does not find it
NAMED: dict[Any, Callable[..., Any]] = {torch.Tensor.__pow__: operator.pow, torch.Tensor.__ipow__: operator.ipow}


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
        if func in BATCH_NORMS:
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
        if not outputs and name != "__setitem__":
            if not isinstance(result, METADATA) or changed or name == "__set__":
                raise UntraceableError(f"{name} gives no tensor")
            if (isinstance(result, torch.Size) or name in SIZES) and self._is_loose(args):
                raise UntraceableError("a size depends on values")
            return  # a size, a dtype: the same for every draw
        called, given = (
            (getattr, (*args, func.__self__.__name__)) if name == "__get__" else (NAMED.get(func, func), args)
        )
        node = self.graph.call_function(called, self._arguments(given), self._arguments(kwargs))
        node.meta["changed"] = [self._known(t) for t in changed]
        node.meta["loose"] = sized_by_values(name, args, kwargs) or self._is_loose((args, kwargs))
        memory = {_storage(t): self._node(t).meta["memory"] for t in batches.tensors_of((args, kwargs))}
        if isinstance(result, Tensor):
            self._remember(result, node, memory)
        elif name == "__setitem__":
            return  # nothing to read: it changes what is known already
        elif isinstance(result, tuple | list) and all(isinstance(part, Tensor | None) for part in result):
            if node.meta["loose"]:
                raise UntraceableError("a number of values depends on values")
            for number, part in enumerate(result):
                if part is not None:  # attention hands back None for weights that nobody asked for
                    self._remember(part, self.graph.call_function(_item, (node, number)), memory)
        else:
            raise UntraceableError(f"{name} gives {type(result).__name__}")

    def _remember(self, tensor: Tensor, node: fx.Node, memory: Mapping[int, str] | None = None) -> None:
        """Tie a value to its node, weakly: the trace must not keep every intermediate result alive.

        Its memory is named by the node that made it: one of the operands' (storage -> name), or its own.
        """
        node.meta["shape"], node.meta["dtype"] = tensor.shape, tensor.dtype
        node.meta["memory"] = memory.get(_storage(tensor), node.name) if memory else node.name
        node.meta.setdefault("loose", any(source.meta.get("loose") for source in node.all_input_nodes))
        self.nodes[tensor] = node
        self.width = max(self.width, tensor.numel())

    def _known(self, tensor: Tensor) -> fx.Node | None:
        node: fx.Node | None = self.nodes.get(tensor)  # type: ignore[no-untyped-call]
        return node

    def _is_loose(self, values: Any) -> bool:
        """Tell whether the size of one of these tensors may be another for other values."""
        nodes = (self._known(tensor) for tensor in batches.tensors_of(values))
        return any(node is not None and node.meta["loose"] for node in nodes)

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
        for part in (call.weight, call.bias):
            if part is not None and id(part) not in self.constants and _comes_from_inputs(self._node(part)):
                raise UntraceableError("a batch norm's weights depend on the inputs")
        output, name = super().answer(call), self.drawn_name(call)
        self.norms[name] = Norm(name, call.weight, call.bias, call.eps, call.x.shape[1])
        self._remember(output, self.graph.call_function(batch_norm, (self._node(call.x), name)))
        return output


class TraceRecord(Writer, Record):
    """Record one training batch and write the pass down, its statistics as its results."""

    def __init__(self, network: Network, layers: frozenset[str], inputs: list[Tensor]) -> None:
        super().__init__(layers)
        self.results: dict[str, tuple[fx.Node, fx.Node]] = {}  # call name -> its mean and variance
        self.begin(network, inputs)

    def answer(self, call: BatchNormCall) -> Tensor:
        """Write down a stochastic call as what training does."""
        if call.layer not in self.chosen:
            return self.write_unchanged(call)
        output = super().answer(call)
        arguments = (self._node(call.x), self._arguments(call.weight), self._arguments(call.bias), call.eps)
        node = self.graph.call_function(train_batch_norm, arguments)
        node.meta["loose"] = self._is_loose(call.x)
        normalized, mean, var = (self.graph.call_function(_item, (node, number)) for number in range(3))
        self._remember(output, normalized)
        self.results[call.name] = mean, var  # not the node: it would keep every layer's output until the end
        return output

    def program(self) -> "Recording":
        """Return the pass as a function of the input tensors."""
        self.graph.output(list(self.results.values()))
        self.graph.eliminate_dead_code(matters)
        return Recording(as_code(self.root, self.graph).forward, tuple(self.results), self.width)


@dataclass(frozen=True, eq=False)
class Recording:
    """A written-down training pass: input tensors -> mean and variance of every stochastic call."""

    forward: Callable[..., Sequence[tuple[Tensor, Tensor]]]
    names: tuple[str, ...]
    width: int

    def __call__(self, *tensors: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> mean and variance, (C,) each, in the order of the calls."""
        return dict(zip(self.names, self.forward(*tensors), strict=True))


def _tensors_held(module: nn.Module) -> list[Tensor]:
    """List parameters, buffers and tensors kept as plain attributes of the network's modules."""
    attributes = [list(vars(child).values()) for child in module.modules()]
    return [*module.parameters(), *module.buffers(), *batches.tensors_of(attributes)]


def _comes_from_inputs(node: fx.Node) -> bool:
    """Tell whether a value is computed from the inputs, or differs from draw to draw."""
    waiting, seen = [node], {node}
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder" or one.target is batch_norm:
            return True
        waiting += [source for source in one.all_input_nodes if source not in seen]
        seen.update(waiting)
    return False


def _storage(tensor: Tensor) -> int:
    """Identify the memory of a value, while it lives; 0 where it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _item(values: Any, number: int) -> Any:
    return values[number]


def batch_norm(x: Tensor, name: str) -> Tensor:
    """Stand for a stochastic call until its scale and shift are put in."""
    raise AssertionError(name)
