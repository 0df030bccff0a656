"""One forward pass written down as an `fx` graph, for inputs of one shape: every operation in the order it ran.

Why an own tracer. A pass under a mode sees each operation with its operands, so values, aliases and changes in place
can be noted as they happen (`mcbn.engine.graph`), and what the mode cannot see is refused instead of frozen in.
`torch.fx.symbolic_trace` has no values to look at; `make_fx` and `torch.export` take operations apart into smaller
ones and prove far more than is needed. A ResNet-32 takes 0.04 s here (warm), 0.73 by `make_fx`, 6.8 by `torch.export`;
a program must pay for itself within one call of `predict`.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from mcbn import batches
from mcbn.batch_norm import BATCH_NORMS, BatchNormCall, BatchNormMode, Record, Replay, train_batch_norm
from mcbn.engine.graph import UNKNOWN, Facts, as_code, declare, facts, matters, reached
from mcbn.network import Network
from mcbn.private_torch import storage_of, version_of

METADATA = (int, float, bool, str, torch.Size, torch.dtype, torch.device, torch.layout, type(None), tuple, list)
CONSTANTS = (int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
READS_VALUES = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__", "is_nonzero"}
READS_VALUES |= {"equal", "allclose", "__contains__", "unique", "nonzero", "masked_select"}
# Values among the arguments of these say how large the result is; of the latter, the first is what it is made from
FACTORIES = {"arange", "linspace", "logspace", "zeros", "ones", "empty", "full", "rand", "randn", "eye"}
RESIZING = {"new_zeros", "new_ones", "new_empty", "new_full", "view", "reshape", "expand", "repeat", "tile", "narrow"}
RESIZING |= {"pad", "interpolate", "split", "tensor_split", "unflatten", "repeat_interleave"}
SIZES = {"size", "numel", "nelement", "__len__"}  # functions that read a size
# Tensor.__pow__ calls itself torch._tensor.pow, where the code that fx writes does not find it
NAMED: dict[Any, Callable[..., Any]] = {torch.Tensor.__pow__: operator.pow, torch.Tensor.__ipow__: operator.ipow}


class UntraceableError(Exception):
    """The pass cannot be written down as a graph; the network's own code runs instead."""


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


class Tracer(BatchNormMode):
    """A mode that also writes down every operation as an `fx` node."""

    graph: fx.Graph
    root: nn.Module  # holds the constants of the graph
    width: int  # largest number of values of one intermediate result
    on_gpu: bool
    changes_inputs: bool  # the network works on its inputs in place

    def trace(self, network: Network, inputs: Any) -> Tensor:
        """Run the network on copies of the inputs and write its operations down; return its output."""
        if not batches.is_plain(inputs):
            raise UntraceableError(f"its inputs are {batches.describe(inputs)}, not tensors alone")
        copies = batches.copied(inputs)
        tensors = batches.tensors_of(copies)
        module = network.module  # tensors may also be plain attributes of its modules
        attributes = batches.tensors_of([list(vars(child).values()) for child in module.modules()])
        self.constants = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *attributes)}
        self.graph, self.root = fx.Graph(), nn.Module()
        self.nodes = WeakTensorKeyDictionary()
        self.width, self.on_gpu = 0, any(t.is_cuda for t in tensors)
        for number, tensor in enumerate(tensors):
            self._remember(tensor, self.graph.placeholder(f"x{number}"))
        versions = [version_of(t) for t in tensors]
        with self:
            output = network(copies)
        self.changes_inputs = versions != [version_of(t) for t in tensors]
        return output

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BATCH_NORMS:
            return super().__torch_function__(func, types, args, kwargs)
        tensors = batches.tensors_of((args, kwargs))
        versions = [version_of(t) for t in tensors]
        result = func(*args, **kwargs)
        changed = [t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version]
        self._write(func, args, kwargs, result, changed)
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, result: Any, changed: list[Tensor]) -> None:
        """Append one operation that gave a result, and note its facts."""
        name = getattr(func, "__name__", "")
        if name in READS_VALUES:
            raise UntraceableError(f"{name} looks at values")
        if not batches.tensors_of(result) and name != "__setitem__":
            self._require_metadata(name, args, result, changed)
            return  # a size, a dtype: the same for every draw
        called, passed = NAMED.get(func, func), args
        if name == "__get__":
            called, passed = getattr, (*args, func.__self__.__name__)
        node = self.graph.call_function(called, self._arguments(passed), self._arguments(kwargs))
        operands = batches.tensors_of((args, kwargs))
        memory = {storage_of(t): facts(self._node(t)).memory for t in operands}
        changes = frozenset(facts(self._node(t)).memory for t in changed)
        seen = Facts(changes=changes, loose=_sized_by_values(name, args, kwargs) or self._is_loose(operands))
        if isinstance(result, Tensor):
            self._remember(result, node, seen, memory)
            return
        declare(node, seen)
        if isinstance(result, tuple | list) and all(isinstance(value, Tensor | None) for value in result):
            self._remember_items(result, node, memory)
        elif name != "__setitem__":  # nothing to read: it changes what is known already
            raise UntraceableError(f"{name} gives {type(result).__name__}")

    def _remember_items(self, values: Sequence[Tensor | None], node: fx.Node, memory: Mapping[int, str]) -> None:
        """Give each of several results a node."""
        if facts(node).loose:
            raise UntraceableError("a number of values depends on values")
        for number, value in enumerate(values):
            if value is not None:  # attention hands back None for weights that nobody asked for
                self._remember(value, self.graph.call_function(operator.getitem, (node, number)), memory=memory)

    def _require_metadata(self, name: str, args: Any, result: Any, changed: list[Tensor]) -> None:
        """Refuse an operation without a tensor as its result, unless it tells what no draw changes."""
        if not isinstance(result, METADATA) or changed or name == "__set__":
            raise UntraceableError(f"{name} gives no tensor")
        if (isinstance(result, torch.Size) or name in SIZES) and self._is_loose(args):
            raise UntraceableError("a size depends on values")

    def _remember(
        self, tensor: Tensor, node: fx.Node, seen: Facts = UNKNOWN, memory: Mapping[int, str] | None = None
    ) -> None:
        """Tie a value to its node, weakly: the trace must not keep every intermediate result alive.

        memory: that of the operands, storage -> name; a value in none of them has memory of its own.
        """
        name = (memory or {}).get(storage_of(tensor), node.name)
        declare(node, replace(seen, shape=tensor.shape, dtype=tensor.dtype, memory=name))
        self.nodes[tensor] = node
        self.width = max(self.width, tensor.numel())

    def _known(self, tensor: Tensor) -> fx.Node | None:
        node: fx.Node | None = self.nodes.get(tensor)  # type: ignore[no-untyped-call]
        return node

    def _is_loose(self, values: Any) -> bool:
        """Tell whether the size of one of these tensors may be another for other values."""
        nodes = (self._known(tensor) for tensor in batches.tensors_of(values))
        return any(node is not None and facts(node).loose for node in nodes)

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

    def _arguments(self, values: Any) -> Any:
        """Put nodes in the place of the tensors of a nest."""

        def argument(value: Any) -> Any:
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise UntraceableError(f"an argument is {type(value).__name__}")
            return self._node(value) if isinstance(value, Tensor) else value

        return map_aggregate(values, argument)

    def write_unchanged(self, call: BatchNormCall) -> Tensor:
        """Run a call that is not stochastic as the operation it is."""
        output = call.unchanged()
        self._write(call.unchanged.func, call.unchanged.args, call.unchanged.keywords, output, [])
        return output


class ReplayTracer(Tracer, Replay):
    """Replay one draw and write it down; stochastic calls are nodes `batch_norm(x, name)`."""

    def __init__(self, mean: Mapping[str, Tensor], var: Mapping[str, Tensor]) -> None:
        super().__init__(mean, var)
        self.norms: dict[str, Norm] = {}

    def trace(self, network: Network, inputs: Any) -> Tensor:
        """Write the pass down, the network's output as its result."""
        output = super().trace(network, inputs)
        self.graph.output(self._node(output))
        return output

    def answer(self, call: BatchNormCall) -> Tensor:
        """Write down a stochastic call as a node of its own."""
        if call.layer not in self.chosen:
            return self.write_unchanged(call)
        computed = [t for t in (call.weight, call.bias) if t is not None and id(t) not in self.constants]
        if computed:
            varying = reached(self.graph, lambda node: node.op == "placeholder" or node.target is batch_norm)
            if any(self._node(tensor) in varying for tensor in computed):
                raise UntraceableError("a batch norm's weights depend on the inputs")
        output, name = super().answer(call), self.drawn_name(call)
        self.norms[name] = Norm(name, call.weight, call.bias, call.eps, call.x.shape[1])
        node = self.graph.call_function(batch_norm, (self._node(call.x), name))
        self._remember(output, node, Facts(loose=self._is_loose(call.x)))
        return output


class RecordTracer(Tracer, Record):
    """Record one training batch and write the pass down, its statistics as its results."""

    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__(layers)
        self.results: dict[str, tuple[fx.Node, fx.Node]] = {}  # call name -> its mean and variance

    def answer(self, call: BatchNormCall) -> Tensor:
        """Write down a stochastic call as what training does."""
        if call.layer not in self.chosen:
            return self.write_unchanged(call)
        output = super().answer(call)
        operands = (self._node(call.x), self._arguments(call.weight), self._arguments(call.bias), call.eps)
        node = self.graph.call_function(train_batch_norm, operands)
        normalized, mean, var = (self.graph.call_function(operator.getitem, (node, number)) for number in range(3))
        self._remember(output, normalized, Facts(loose=self._is_loose(call.x)))
        self.results[call.name] = mean, var  # not the node: it would keep every layer's output until the end
        return output

    def program(self) -> "RecordProgram":
        """Return the pass as a function of the input tensors."""
        self.graph.output(list(self.results.values()))
        self.graph.eliminate_dead_code(matters)
        return RecordProgram(as_code(self.root, self.graph).forward, tuple(self.results), self.width)


@dataclass(frozen=True, eq=False)
class RecordProgram:
    """A traced training pass: input tensors -> mean and variance of every stochastic call."""

    forward: Callable[..., Sequence[tuple[Tensor, Tensor]]]
    names: tuple[str, ...]
    width: int

    def __call__(self, *tensors: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> mean and variance, (C,) each, in the order of the calls."""
        return dict(zip(self.names, self.forward(*tensors), strict=True))


def _sized_by_values(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether the result of an operation has another size for other values of its operands."""
    if name == "__getitem__":
        return any(_selects(index) for index in (args[1] if isinstance(args[1], tuple) else args[1:]))
    if name in ("argwhere", "bincount", "unique_consecutive"):
        return True
    if name == "one_hot":
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return not isinstance(classes, int) or classes < 0
    if name in ("where", "repeat_interleave") and len(args) + len(kwargs) == 1:
        return True
    first = 0 if name in FACTORIES else 1
    return name in FACTORIES | RESIZING and bool(batches.tensors_of((args[first:], kwargs)))


def _selects(index: Any) -> bool:
    """Tell whether an index takes as many values as a mask or a number computed from values says."""
    if isinstance(index, slice):
        return any(isinstance(bound, Tensor) for bound in (index.start, index.stop, index.step))
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def batch_norm(x: Tensor, name: str) -> Tensor:
    """Stand for a stochastic call until its scale and shift are put in."""
    raise AssertionError(name)
