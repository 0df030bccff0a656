"""Every batch norm of a network is intercepted at one function: seen, recorded or replayed while the network runs.

Whatever module normalises, it ends in `torch.nn.functional.batch_norm`. While a `BatchNormMode` is active in a thread
it sees each such call and answers it: `Survey` notes who calls, `Record` keeps the statistics of a batch, `Replay` puts
those of a draw in their place. No module is swapped, wrapped or switched to train mode, so activations fused into a
layer, dropout and everything else stay as they are.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator, suppress
from functools import partial
from typing import Any, NamedTuple, Self
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mcbn.errors import MCBNError
from mcbn.private_torch import AnyBatchNorm, AnyInstanceNorm, Dispatched, is_view, storage_of

NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {  # the function, and what it calls on; each with its positional arguments
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    **dict.fromkeys((torch.batch_norm, torch.ops.aten.batch_norm, torch.ops.aten.batch_norm.default), NATIVE),
}
STATISTICS = ("running_mean", "running_var")
OTHER_PATH = "the network takes another path for these inputs: fit and predict on inputs of one kind"
DEFAULTS = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
_running = threading.local()  # its `mode`: the one active in this thread
_unwatched: WeakSet[nn.Module] = WeakSet()  # modules that ran in a thread without a mode


class BatchNormCall(NamedTuple):
    """One call of batch norm: who makes it, on what, and how to run it unchanged."""

    layer: str  # the module that makes the call, as in named_modules(); "" is the network itself
    name: str  # the layer, with "#2", "#3", ... from its second call in one forward pass on
    x: Tensor  # (N, C, ...)
    running_mean: Tensor | None  # (C,)
    running_var: Tensor | None  # (C,)
    weight: Tensor | None  # (C,)
    bias: Tensor | None  # (C,)
    eps: float
    training: bool  # asked to use the statistics of x itself, though the network is in eval mode
    unchanged: partial[Tensor]
    piece: bool = False  # x is the next rows of the tensor whose earlier rows this layer was just called on


def layer_of(name: str) -> str:
    """Return the module name of a call name: "bn" of "bn#2"."""
    return name.rsplit("#", 1)[0]


class BatchNormMode(ContextDecorator, TorchFunctionMode):
    """Answer every batch-norm call made in this thread while active; a subclass says how in `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []  # the modules now running, outermost first
        self.entered: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.next_rows: dict[str, tuple[Any, ...] | None] = {}  # where those after a layer's last input would start

    def answer(self, call: BatchNormCall) -> Tensor:
        """Return the output of this call."""
        return call.unchanged()

    def __enter__(self) -> Self:
        self.calls.clear()  # a new pass
        self.next_rows.clear()
        self.outer, _running.mode = getattr(_running, "mode", None), self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _running.mode = self.outer

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in BATCH_NORMS:
            return func(*args, **kwargs)
        arguments = {**DEFAULTS, **dict(zip(BATCH_NORMS[func], args, strict=False)), **kwargs}
        layer = self.path[-1] if self.path else ""
        self.calls[layer] += 1
        name = layer if self.calls[layer] == 1 else f"{layer}#{self.calls[layer]}"
        start, following = _place(arguments["input"])
        piece = start is not None and self.next_rows.get(layer) == start
        self.next_rows[layer] = following
        kept = {key: arguments[key] for key in (*STATISTICS, "weight", "bias", "eps", "training")}
        unchanged = partial(func, *args, **kwargs)
        return self.answer(BatchNormCall(layer, name, arguments["input"], **kept, unchanged=unchanged, piece=piece))


def _place(x: Tensor) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """Say where in memory the rows of a view start, and where rows right after them would; None of other tensors."""
    storage = storage_of(x) if is_view(x) else 0
    if not storage:  # a tensor of torch.func has no memory of its own
        return None, None
    offset, stride = x.storage_offset(), x.stride()
    return (storage, offset, stride, x.shape[1:]), (storage, offset + len(x) * stride[0], stride, x.shape[1:])


def watch(module: nn.Module) -> None:
    """Let a private network tell the active mode which of its modules is running (hooks: never on a user's)."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            continue  # takes no hooks
        child.register_forward_pre_hook(partial(_enter, name), prepend=True)
        child.register_forward_hook(_leave, always_call=True)


def _enter(name: str, module: nn.Module, args: Any) -> None:
    if (mode := getattr(_running, "mode", None)) is None:
        _unwatched.add(module)
    else:
        mode.path.append(name)
        mode.entered.add(name)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if (mode := getattr(_running, "mode", None)) is not None:
        mode.path.pop()


class Survey(BatchNormMode):
    """Run the network as it is and note which modules call batch norm, in the order of their first call.

    The function also serves for instance norm and weight standardisation, on one row and with that row's statistics;
    such calls see no batch and are left alone.
    """

    def __init__(self, inputs: Sequence[Tensor], module: nn.Module) -> None:
        super().__init__()
        self.layers: dict[str, bool] = {}  # layer -> has running statistics
        self.rows = max((t.shape[0] for t in inputs if t.ndim > 0), default=0)
        self.pieces: dict[str, int] = {}  # layer -> rows of the pieces of the batch that it normalises one by one
        self.module, self.watched = module, False
        children = ((n, getattr(child, k, None)) for n, child in module.named_modules() for k in STATISTICS)
        self.statistics = {storage_of(value): name for name, value in children if isinstance(value, Tensor)}
        others = (AnyBatchNorm, AnyInstanceNorm)  # refused elsewhere, and no batch norm
        self.own = {n for n, m in module.named_modules() if n in self.statistics.values() and not isinstance(m, others)}

    def unseen(self, network: Callable[[Any], Any], inputs: Any) -> dict[str, str]:
        """Run a private network once more; return module -> how it normalises where this mode does not see it."""
        self.hidden: dict[str, str] = {}
        _unwatched.clear()
        with suppress(Exception), torch.no_grad(), self, Dispatched(self._see):
            network(inputs)
        norms = (pair for pair in self.module.named_modules() if isinstance(pair[1], AnyBatchNorm))
        return self.hidden | {name: "in another thread" for name, norm in norms if norm in _unwatched}

    def _see(self, operator: Any, arguments: dict[str, Any], result: Any) -> None:
        """Note batch norm, and running statistics in use, outside a call that was seen."""
        if self.watched:
            return
        layer, x = self.path[-1] if self.path else "", arguments.get("input")
        alone = isinstance(x, Tensor) and x.shape[0] == 1 < self.rows  # instance norm
        if "batch_norm" in operator.name() and not alone:
            self.hidden.setdefault(layer, f"by {operator}")
        used = {self.statistics.get(storage_of(t), layer) for t in arguments.values() if isinstance(t, Tensor)}
        for name in used if layer in self.own else used - {layer}:
            self.hidden.setdefault(name, f"by arithmetic in {layer or 'the network'!r}")

    def answer(self, call: BatchNormCall) -> Tensor:
        """Note the caller."""
        if call.piece and call.x.shape[0] < self.rows:
            self.pieces[call.layer] = max(call.x.shape[0], self.pieces.get(call.layer, 0))
        if not (self.rows > 1 and call.training and call.x.shape[0] == 1):
            self.layers.setdefault(call.layer, call.running_mean is not None)
        self.watched = True
        output = call.unchanged()
        self.watched = False
        return output


class Record(BatchNormMode):
    """Normalise chosen layers by the batch's own statistics, as in a training step, and keep those statistics.

    mu_B = mean_B(h), sigma^2_B = mean_B((h - mu_B)^2): biased, what training-mode BN divides by.
    """

    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__()
        self.chosen = layers
        self.mean: dict[str, Tensor] = {}  # call name -> (C,)
        self.var: dict[str, Tensor] = {}  # call name -> (C,), biased
        self.running: dict[str, tuple[Tensor, Tensor]] = {}
        self.values: dict[str, int] = {}  # call name -> values per channel in this batch

    def answer(self, call: BatchNormCall) -> Tensor:
        """Record this call's statistics and normalise by them."""
        if call.layer not in self.chosen:
            return call.unchanged()
        if not storage_of(call.x):
            what = f"layer {call.name!r} runs inside torch.func (vmap, grad), where a batch's statistics cannot be had"
            raise MCBNError(f"{what}; call it on whole batches, or leave it out with layers=")
        self.values[call.name] = call.x.numel() // max(call.x.shape[1], 1)
        if self.values[call.name] < 2:
            what = f"layer {call.name!r} sees one value a channel (input {tuple(call.x.shape)}), which has no variance"
            raise MCBNError(f"{what}; draw training batches of at least 2: batch_size=2 or more")
        if call.running_mean is not None and call.running_var is not None:
            self.running[call.name] = (call.running_mean, call.running_var)
        output, self.mean[call.name], self.var[call.name] = train_batch_norm(call.x, call.weight, call.bias, call.eps)
        return output


class Replay(BatchNormMode):
    """Normalise the layers that are named by the mean and biased variance of one draw, call name -> (C,) each."""

    def __init__(self, mean: Mapping[str, Tensor], var: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.mean, self.var = mean, var
        self.chosen = {layer_of(name) for name in mean}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise by the draw's statistics."""
        if call.layer not in self.chosen:
            return call.unchanged()
        x, name = call.x, self.drawn_name(call)
        mean, var = self.mean[name], self.var[name]
        weight, bias = (None if value is None else value.to(mean.dtype) for value in (call.weight, call.bias))
        if mean.dtype == statistics_dtype(x) and x.numel():  # what the kernel of eval mode takes
            return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, call.eps, torch.backends.cudnn.enabled)
        return normalize(x, *scale_and_shift(mean, var, weight, bias, call.eps))

    def drawn_name(self, call: BatchNormCall) -> str:
        """Return whose statistics a call gets: its own, or those of the layer where it normalises a further piece.

        Ghost batch norm (Hoffer et al. 2017, arXiv 1705.08741) calls a layer once for every piece of a large batch.
        A draw is that of one piece, and all pieces of the inputs meet it.
        """
        if call.name in self.mean:
            return call.name
        if call.piece and f"{call.layer}#2" not in self.mean:
            return call.layer
        what = f"layer {call.layer!r} is called more often than when the posterior was drawn"
        raise MCBNError(f"{what} ({call.name!r} was not recorded); {OTHER_PATH}")


def train_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """Normalise x (N, C, ...) by its own statistics; return it with their mean and biased variance, (C,) each."""
    if x.dtype == statistics_dtype(x) and (weight is None or weight.dtype == x.dtype):
        output, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)  # as in training
        return output, mean, (inverse.square().reciprocal() - eps).clamp(min=0)  # not in place: vmap has no rule for it
    var, mean = torch.var_mean(x.to(statistics_dtype(x)), [axis for axis in range(x.ndim) if axis != 1], correction=0)
    return normalize(x, *scale_and_shift(mean, var, weight, bias, eps)), mean, var


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Half precision keeps its statistics in float32, as training does; the rest in its own."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def scale_and_shift(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Turn statistics (..., C) into gamma / sqrt(sigma^2 + eps) and beta - mu * that, so BN is h * scale + shift."""
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def normalize(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply scale and shift (C,) along axis 1 of x (N, C, ...), in the dtype of the statistics; x's dtype returns."""
    dtype = statistics_dtype(x)
    in_half = x.is_cuda and scale.dtype == dtype != x.dtype and x.numel()
    if in_half and scale.ndim == 1 and storage_of(scale):  # none under `vmap`
        zero, one = torch.zeros_like(scale), torch.ones_like(scale)
        return torch.native_batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0)[0]
    if x.ndim > 2:
        scale, shift = (values.view(-1, *(1,) * (x.ndim - 2)) for values in (scale, shift))
    if scale.dtype == dtype == x.dtype:
        return torch.addcmul(shift, x, scale)
    return torch.addcmul(shift.to(dtype), x.to(dtype), scale.to(dtype)).to(x.dtype)
