"""Which operations give a result of another size for other values: masks, lengths, numbers of classes."""

from typing import Any

import torch
from torch import Tensor

from mcbn import batches

# Values among the arguments of these say how large the result is; of the latter, the first is what it is made from
FACTORIES = {"arange", "linspace", "logspace", "zeros", "ones", "empty", "full", "rand", "randn", "eye"}
RESIZING = {"new_zeros", "new_ones", "new_empty", "new_full", "view", "reshape", "expand", "repeat", "tile", "narrow"}
RESIZING |= {"pad", "interpolate", "split", "tensor_split", "unflatten", "repeat_interleave"}
SIZES = {"size", "numel", "nelement", "__len__"}  # functions that read a size


def sized_by_values(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether the result of an operation has another size for other values of its operands."""
    if name == "__getitem__":
        return any(_selects(part) for part in (args[1] if isinstance(args[1], tuple) else args[1:]))
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
        return any(isinstance(part, Tensor) for part in (index.start, index.stop, index.step))
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
