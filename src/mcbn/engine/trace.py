"""One forward pass written down as an `fx` graph, for inputs of one shape: every operation in the order it ran.

An own one: a ResNet-32 takes 0.04 s here (warm), 0.73 by `make_fx`, 6.8 by `torch.export`; `graph.md` says more.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from mcbn import batches
from mcbn.batch_norm import BATCH_NORMS, BatchNormCall, BatchNormMode, Record, Replay, train_batch_norm
from mcbn.engine.graph import KEY, UNKNOWN, Facts, as_code, facts, matters, reached
from mcbn.errors import MCBNError
from mcbn.layers import attributes_of, identify, settings_of
from mcbn.network import Network
from mcbn.private_torch import Dispatched, gives_tensors, storage_of, written_by
from mcbn.randomness import get_state

METADATA = (int, float, bool, str, torch.Size, torch.dtype, torch.device, torch.layout, type(None), tuple, list)
CONSTANTS = (*batches.PLAIN, complex, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
# What a tensor says of its memory without an operator: the dispatcher does not see it
BY_MEMORY = {"tolist", "__repr__", "__str__", "data_ptr", "_version", "__reduce_ex__", "storage_type", "__set__"}
BY_MEMORY |= {"as_strided", "as_strided_", "as_strided_scatter", "resize_", "resize_as_", "set_", "tensor_split"}
LEFT_ALIGNED = "_nested_tensor_from_mask_left_aligned"  # chooses a fast path of attention that any mode switches off
NAMESPACES = ("aten", "prims", "mcbn")  # whose operators' schemas say all that they do
INDEX, MASKS = torch.ops.aten.index.Tensor, (torch.bool, torch.uint8)
SIZED_BY_VALUES = ("aten::_pack_padded_sequence",)  # beside those that torch tags
BY_VALUES, RANDOM = "gives a size that depends on values", "draws random numbers"
OFF = {"dropout": 0, "dropout_p": 0, "p": 0, "train": False, "training": False}  # no random numbers are drawn then
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

    chosen: Any  # layers whose calls are stochastic
    write_norm: Callable[[BatchNormCall, Tensor], None]  # writes down such a call, which gave an output
    refusal: UntraceableError | None  # kept, since networks catch exceptions
    function: str | None = None  # the one that runs now

    def trace_once(self, network: Network, inputs: Any, *, watched: bool = True) -> Tensor:
        """Run the network on copies of the inputs and write its operations down; return its output."""
        if not batches.is_plain(inputs):
            raise UntraceableError(f"its inputs are {batches.describe(inputs)}, not tensors alone")
        if changing := settings_of(network).changing:
            raise UntraceableError(f"it uses {changing!r}, which may give something else each time")
        copies = batches.copied(inputs)
        tensors = batches.tensors_of(copies)
        module = network.module  # tensors may also be plain attributes of its modules
        attributes = batches.tensors_of([attributes_of(child) for child in module.modules()])
        self.constants = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *attributes)}
        self.graph, self.root, self.nodes = fx.Graph(), nn.Module(), WeakTensorKeyDictionary()
        self.width, self.on_gpu, self.refusal = 0, any(t.is_cuda for t in tensors), None  # width: of the largest result
        self.changes_inputs, self.changed, self.new = False, set[int](), set[int]()
        self.norms: dict[str, Norm] = {}  # by call name, of stochastic calls that are replayed
        self.results: dict[str, tuple[fx.Node, fx.Node]] = {}  # of those that are recorded, mean and variance
        self.inputs = [f"x{number}" for number in range(len(tensors))]
        for tensor, name in zip(tensors, self.inputs, strict=True):
            self._remember(tensor, self.graph.placeholder(name))
        generators = get_state()[:2]  # not torch's: its operators are seen
        try:
            with self, Dispatched(self._see) if watched else nullcontext():
                output = network(copies)
        except Exception as error:
            raise self.refusal or error from None
        if get_state()[:2] != generators:
            raise UntraceableError("it draws random numbers")
        if self.refusal is not None:
            raise self.refusal
        if self.changes_inputs and len({id(t) for t in tensors}) > len({storage_of(t) for t in tensors}):
            raise UntraceableError("it changes inputs that share memory")
        return output

    def steps(self) -> list[Any]:
        """Describe what was written down, so that two traces compare: operations, constants, sizes."""
        nodes = [node for node in self.graph.nodes if node.op != "output"]
        tensors = [id(getattr(self.root, node.target)) for node in nodes if node.op == "get_attr"]
        return [*((n.op, n.target, str(n.args), str(n.kwargs), facts(n).shape) for n in nodes), tensors]

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.function = getattr(func, "__name__", str(func))
        self.changed.clear()
        self.new.clear()
        try:
            if func in BATCH_NORMS:
                return super().__torch_function__(func, types, args, kwargs)
            result = func(*args, **kwargs)
            self._write(func, args, kwargs, result)
        except Exception as error:
            self.refusal = self.refusal or UntraceableError(f"{self.function} fails: {error}")
            raise
        finally:
            self.function = None
        return result

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = self.refusal or UntraceableError(reason)
        raise self.refusal

    def _see(self, operator: Any, arguments: dict[str, Any], result: Any) -> None:
        """Check an operator that ran, whoever called it, and note the memory that it changed or made."""
        if self.function is None:
            self._refuse(f"{operator} runs where it cannot be seen")
        reason = refusal_of(operator)
        if reason == RANDOM and any(arguments.get(name, True) == value for name, value in OFF.items()):
            reason = None
        if operator is INDEX and any(t.dtype in MASKS for t in tensors_in(arguments["indices"])):
            reason = BY_VALUES
        if reason is not None and self.function != LEFT_ALIGNED:
            self._refuse(f"{self.function} {reason}")
        if written := written_by(operator):
            self.changed |= {storage_of(t) for t in tensors_in([arguments[name] for name in written])}
        else:
            self.new |= {storage_of(t) for t in tensors_in(result)}

    def _write(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Append one operation that gave a result, and note its facts."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # of the property
        if name in BY_MEMORY:
            self._refuse(f"{name} looks at values, or at memory as it lies")
        if not tensors_in(result) and name != "__setitem__":
            if not isinstance(result, METADATA) or self.changed:
                self._refuse(f"{name} gives no tensor")
            return  # a size, a dtype: the same for every draw
        called, passed = NAMED.get(func, func), args
        if name != getattr(func, "__name__", ""):
            called, passed = getattr, (*args, name)
        node = self.graph.call_function(called, self._arguments(passed), self._arguments(kwargs))
        memory = {storage_of(t): facts(self._node(t)).memory for t in tensors_in((args, kwargs))}
        seen = Facts(changes=self._changes(memory))
        if isinstance(result, Tensor):
            self._remember(result, node, seen, memory)
            return
        node.meta[KEY] = seen
        if isinstance(result, tuple | list) and all(isinstance(value, Tensor | None) for value in result):
            for number, value in enumerate(result):
                if value is not None:  # attention hands back None for weights that nobody asked for
                    self._remember(value, self.graph.call_function(operator.getitem, (node, number)), memory=memory)
        elif name != "__setitem__":  # nothing to read: it changes what is known already
            self._refuse(f"{name} gives {type(result).__name__}")

    def _changes(self, memory: Mapping[int, str]) -> frozenset[str]:
        """Name the memory that the operation just run has changed, of its operands' storage -> name."""
        if self.changed - memory.keys() - self.new:
            self._refuse(f"{self.function} changes what it was not given")
        changes = frozenset(memory[storage] for storage in self.changed & memory.keys())
        if any(name.startswith("constant") for name in changes):
            self._refuse(f"{self.function} changes a tensor of the network")
        self.changes_inputs |= any(name in self.inputs for name in changes)
        return changes

    def _remember(
        self, tensor: Tensor, node: fx.Node, seen: Facts = UNKNOWN, memory: Mapping[int, str] | None = None
    ) -> None:
        """Tie a value to its node, weakly: no result stays alive by it; memory: the operands', storage -> name."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            self._refuse("a value is sparse, nested or quantised")
        name = (memory or {}).get(storage_of(tensor), node.name)
        node.meta[KEY] = replace(seen, shape=tensor.shape, dtype=tensor.dtype, memory=name)
        self.nodes[tensor] = node
        if node.op != "get_attr":  # weights are not results
            self.width = max(self.width, tensor.numel())

    def _node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor, a constant of the network where no operation made it."""
        node: fx.Node | None = self.nodes.get(tensor)  # type: ignore[no-untyped-call]
        if node is None:
            if id(tensor) not in self.constants:
                self._refuse("a value comes from an operation that cannot be seen")
            name = f"constant{len(self.graph.nodes)}"
            self.root.register_buffer(name, tensor)
            node = self.graph.get_attr(name)
            self._remember(tensor, node)
        return node

    def _arguments(self, values: Any) -> Any:
        """Put nodes in the place of the tensors of a nest."""

        def argument(value: Any) -> Any:
            value = value.item() if isinstance(value, np.generic) else value
            if not isinstance(value, (Tensor, *CONSTANTS)):
                self._refuse(f"an argument is {type(value).__name__}")
            return self._node(value) if isinstance(value, Tensor) else value

        return map_aggregate(values, argument)

    def answer(self, call: BatchNormCall) -> Tensor:
        """Answer as a mode that records or replays, and write the call down; one not chosen as the operation it is."""
        output = super().answer(call)
        if call.layer in self.chosen:
            self.write_norm(call, output)
        else:
            self._write(call.unchanged.func, call.unchanged.args, call.unchanged.keywords, output)
        return output


class ReplayTracer(Tracer, Replay):
    """Replay one draw and write it down; stochastic calls are nodes `batch_norm(x, name)`, constants in `norms`."""

    def trace(self, network: Network, inputs: Any) -> Tensor:
        """Write the operations down, see that other values take the same steps, and return the output for these."""
        for _ in range(2):  # a network that fills a cache has a second chance
            output = self.trace_once(network, inputs)
            state, twin = state_of(network), ReplayTracer(self.mean, self.var)
            try:
                twin.trace_once(network, other_values(inputs), watched=False)
            except MCBNError:  # the network takes no such values
                twin.trace_once(network, inputs, watched=False)
            if twin.steps() == self.steps() and state_of(network) == state:  # nothing was computed out of sight
                self.graph.output(self._node(output))
                return output
        raise UntraceableError("two runs of it take different steps, or it keeps a state from run to run")

    def write_norm(self, call: BatchNormCall, output: Tensor) -> None:
        """Write down a node of its own."""
        if computed := [t for t in (call.weight, call.bias) if t is not None and id(t) not in self.constants]:
            varying = reached(self.graph, lambda node: node.op == "placeholder" or node.target is batch_norm)
            if any(self._node(tensor) in varying for tensor in computed):
                self._refuse("a batch norm's weights depend on the inputs")
        name = self.drawn_name(call)
        self.norms[name] = Norm(name, call.weight, call.bias, call.eps, call.x.shape[1])
        self._remember(output, self.graph.call_function(batch_norm, (self._node(call.x), name)))


class RecordTracer(Tracer, Record):
    """Record one training batch and write the pass down; `results` are the mean and variance of every call."""

    forward: Callable[..., dict[str, tuple[Tensor, Tensor]]] | None = None  # the program, once it is proven

    def write_norm(self, call: BatchNormCall, output: Tensor) -> None:
        """Write down what training does."""
        operands = (self._node(call.x), self._arguments(call.weight), self._arguments(call.bias), call.eps)
        node = self.graph.call_function(train_batch_norm, operands)
        normalized, mean, var = (self.graph.call_function(operator.getitem, (node, number)) for number in range(3))
        self._remember(output, normalized)
        self.results[call.name] = mean, var  # not the node: it would keep every layer's output until the end

    def program(self) -> Callable[..., dict[str, tuple[Tensor, Tensor]]]:
        """Return the pass as a function: input tensors -> name of every stochastic call -> mean and variance, (C,)."""
        self.graph.output(self.results)
        self.graph.eliminate_dead_code(matters)
        return as_code(self.root, self.graph).forward


def tensors_in(values: Any) -> list[Tensor]:
    """List the tensors of what operations take and give; faster than `batches.tensors_of`, which knows all nests."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = tuple(values.values())
    return [t for value in values for t in tensors_in(value)] if isinstance(values, tuple | list) else []


@cache
def refusal_of(operator: Any) -> str | None:
    """Say why an operator of the dispatcher is no plain function of its operands, None where it is."""
    if operator.namespace not in NAMESPACES:
        return f"calls {operator}, which is not known"
    if torch.Tag.data_dependent_output in operator.tags or not gives_tensors(operator):
        return "looks at values"
    by_values = torch.Tag.dynamic_output_shape in operator.tags and operator is not INDEX
    if by_values or operator.name() in SIZED_BY_VALUES:
        return BY_VALUES
    return RANDOM if torch.Tag.nondeterministic_seeded in operator.tags else None


def other_values(inputs: Any) -> Any:
    """Return inputs of this shape: rows in reverse, and on a CPU, where a bad index is an error, values moved."""
    rows = {t.shape[0] if t.ndim else None for t in batches.tensors_of(inputs)}

    def other(tensor: Tensor) -> Tensor:
        turned = tensor.flip(0) if len(rows) == 1 and tensor.ndim else tensor
        return 0.3 - 0.7 * turned if tensor.is_floating_point() and not tensor.is_cuda else turned

    return batches.map_tensors(other, inputs)


def state_of(network: Network) -> list[Any]:
    """List what modules, and objects they hold, keep as attributes, tensors apart, and what they read elsewhere."""
    held = [identify(value) for child in network.module.modules() for value in attributes_of(child)]
    return [*held, settings_of(network).values]


def batch_norm(x: Tensor, name: str) -> Tensor:
    """Stand for a stochastic call until its scale and shift are put in."""
    raise AssertionError(name)
