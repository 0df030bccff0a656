"""Every batch-norm call of a network, seen and answered while it runs.

Every kind of batch norm ends in one function, `torch.nn.functional.batch_norm`. While a `BatchNormMode` is active in
a thread it sees each such call, whatever module makes it, and answers it. No module is swapped, wrapped or switched
to train mode, so activations fused into a layer, dropout and everything else stay as they are.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


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


class BatchNormMode(TorchFunctionMode):
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
        self.outer = getattr(_running, "mode", None)
        _running.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _running.mode = self.outer

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        read = READERS.get(func)
        if read is None:
            return func(*args, **kwargs)
        layer = self.path[-1] if self.path else ""
        self.calls[layer] += 1
        number = self.calls[layer]
        name = layer if number == 1 else f"{layer}#{number}"
        unchanged = partial(func, *args, **kwargs)
        x, running_mean, running_var, weight, bias, eps, training = read(*args, **kwargs)
        here, following = _place(x)
        piece = here is not None and self.next_rows.get(layer) == here
        self.next_rows[layer] = following
        call = BatchNormCall(layer, name, x, running_mean, running_var, weight, bias, eps, training, unchanged, piece)
        return self.answer(call)


_running = threading.local()  # the mode active in this thread, for the hooks below


def _read_functional(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    return input, running_mean, running_var, weight, bias, eps, training


def _read_native(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Any, ...]:
    return input, running_mean, running_var, weight, bias, eps, training


READERS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    F.batch_norm: _read_functional,
    torch.batch_norm: _read_native,
}


def _place(x: Tensor) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """Say where in memory the rows of a view start, and where rows right after them would; None of other tensors."""
    if not x._is_view():
        return None, None
    try:
        storage, offset, stride = x.untyped_storage()._cdata, x.storage_offset(), x.stride()
    except (RuntimeError, NotImplementedError):  # a tensor of torch.func has no memory of its own
        return None, None
    return (storage, offset, stride, x.shape[1:]), (storage, offset + len(x) * stride[0], stride, x.shape[1:])


def _enter(name: str, module: nn.Module, args: Any) -> None:
    mode: BatchNormMode | None = getattr(_running, "mode", None)
    if mode is not None:
        mode.path.append(name)
        mode.entered.add(name)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    mode: BatchNormMode | None = getattr(_running, "mode", None)
    if mode is not None:
        mode.path.pop()


def watch(module: nn.Module) -> None:
    """Let a private network tell the active mode which of its modules is running (hooks: never on a user's)."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            continue  # takes no hooks
        child.register_forward_pre_hook(partial(_enter, name), prepend=True)
        child.register_forward_hook(_leave, always_call=True)


def layer_of(name: str) -> str:
    """Return the module name of a call name: "bn" for "bn#2"."""
    return name.rsplit("#", 1)[0]
