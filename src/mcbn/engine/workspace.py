"""Memory used again from pass to pass: fresh megabytes cost the CPU more in page faults than the arithmetic in them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

FOLD_FROM = 1000  # inputs from which on batch norm in the weights of every draw is faster than behind one product
_current = threading.local()


class Workspace:
    """Buffers by slot, for passes that follow one another in one thread."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let `addcmul` and `linear` below write into these buffers."""
        outer = getattr(_current, "workspace", None)
        _current.workspace = self
        try:
            yield
        finally:
            _current.workspace = outer

    def take(self, slot: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the buffer of a slot in this shape; what it held is gone."""
        size = torch.Size(shape).numel()
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype:
            buffer = self._buffers[slot] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(shape)


def addcmul(shift: Tensor, x: Tensor, scale: Tensor, slot: int) -> Tensor:
    """x * scale + shift, into the buffer of its slot where a workspace is active."""
    workspace: Workspace | None = getattr(_current, "workspace", None)
    if workspace is None:
        return torch.addcmul(shift, x, scale)
    shape = (len(scale), *x.shape) if scale.ndim > x.ndim else x.shape  # (t, N, C)
    return torch.addcmul(shift, x, scale, out=workspace.take(slot, shape, x))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, slot: int) -> Tensor:
    """x W^T + b, into the buffer of its slot where a workspace is active."""
    workspace: Workspace | None = getattr(_current, "workspace", None)
    if workspace is None:
        return F.linear(x, weight, bias)
    out = workspace.take(slot, (*x.shape[:-1], weight.shape[0]), x)
    flat, rows = out.view(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
    if bias is None:
        torch.mm(rows, weight.t(), out=flat)
    else:
        torch.addmm(bias, rows, weight.t(), out=flat)
    return out


def normed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, slot: int) -> Tensor:
    """(x W^T + b) * scale + shift, x (t, N, I), scale and shift (t, 1, O), into the buffer of its slot."""
    workspace: Workspace | None = getattr(_current, "workspace", None)
    if workspace is None or x.ndim < 3 or x.shape[1] < FOLD_FROM:
        out = linear(x, weight, bias, slot)
        return torch.addcmul(shift, out, scale, out=out)
    if bias is not None:
        shift = torch.addcmul(shift, bias, scale)
    out = workspace.take(slot, (*x.shape[:2], weight.shape[0]), x)
    return torch.baddbmm(shift, x, weight.t() * scale, out=out)
