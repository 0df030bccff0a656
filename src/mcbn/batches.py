"""Batches of any structure: pick what goes to the network, move it, describe it in errors."""

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mcbn.copying import private_copy, shared
from mcbn.errors import MCBNError
from mcbn.private_torch import storage_of

Picker = str | int | Sequence[str | int] | Callable[[Any], Any] | None
PLAIN = (int, float, str, bool, type(None))
SPREAD = 4  # times its numbers that the memory of a tensor may span for a copy to lie as it does
TARGET_KEYS = ("y", "label", "labels", "target", "targets")


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to all that a nest of tuples, lists and dicts holds; keep the nest."""
    if type(tree) is Tensor:  # most often, and asked for at every call
        return function(tree)
    if isinstance(tree, Mapping):
        twin: Any = copy.copy(tree) if type(tree) is not dict and isinstance(tree, dict | UserDict) else {}
        twin.update({key: map_leaves(function, value) for key, value in tree.items()})
        return twin  # of its own kind
    if isinstance(tree, tuple | list):
        values = [map_leaves(function, value) for value in tree]
        kind: Any = tuple if isinstance(tree, torch.Size) else type(tree)  # a size holds nothing but numbers
        return kind(*values) if hasattr(tree, "_fields") else kind(values)
    return function(tree)


def as_tensor(leaf: Any) -> Any:
    """Read an array or a table (anything with `to_numpy`, as pandas and polars have it) as a tensor; leave the rest."""
    values = leaf.to_numpy() if type(leaf) is not Tensor and hasattr(leaf, "to_numpy") else leaf
    if not isinstance(values, np.ndarray):
        return leaf
    if isinstance(values, np.ma.MaskedArray) and values.mask.any():
        raise MCBNError(f"{int(values.mask.sum())} values of an array are masked; fill them, or leave these rows out")
    if values.dtype.kind not in "biuf":
        kinds = dict(getattr(leaf, "dtypes", {})) if getattr(leaf, "ndim", 0) == 2 else {}
        text = [str(name) for name, kind in kinds.items() if getattr(kind, "kind", "O") not in "biuf"]
        if kinds and not text:  # several kinds of numbers
            return torch.as_tensor(leaf.to_numpy(dtype=np.float64, na_value=np.nan))
        raise MCBNError(f"encode text as numbers first: {f'columns {text}' if text else 'values'} are {values.dtype}")
    native = values.dtype.newbyteorder("=") if values.itemsize <= 8 else np.float64
    plain = values.flags.writeable and values.dtype == native and min(values.strides, default=0) >= 0
    return torch.as_tensor(values if plain else np.array(values, native, order="C"))


def is_table(data: Any) -> bool:
    """Tell whether data are one array or table of numbers."""
    return isinstance(data, Tensor | np.ndarray) or hasattr(data, "to_numpy")


def columns_of(data: Any) -> list[Any]:
    """List the columns of a table, of one with targets, or of the first of several; none of other data."""
    return columns_of(data[0]) if isinstance(data, tuple | list) and data else list(getattr(data, "columns", []))


def by_name(data: Any, names: list[Any]) -> Any:
    """Take the columns of a table by their names in the fit, whatever their order; leave alone what has none."""
    if isinstance(data, tuple) and data and hasattr(data[0], "columns"):  # and targets
        return (by_name(data[0], names), *data[1:])
    if names and isinstance(data, list):
        return [by_name(part, names) for part in data]
    there = list(getattr(data, "columns", []))
    if lacking := [name for name in names if there and name not in there]:
        raise MCBNError(f"give the columns of the fit: the table lacks {lacking[:8]}, it has {there[:8]}")
    return data[names] if names and there else data


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor (array, table) of a nest; keep the nest and what else it holds."""

    def apply(leaf: Any) -> Any:
        tensor = as_tensor(leaf)
        return function(tensor) if isinstance(tensor, Tensor) else leaf

    return map_leaves(apply, tree)


def copied(tree: Any) -> Any:
    """Copy inputs for a network that may change them: every tensor, and every object that could hold one, once."""
    if type(tree) is Tensor:
        return _copied_leaf(tree)
    twins = _copied_memory(tensors_of(tree))
    return map_leaves(_once(lambda leaf: twins[id(leaf)] if id(leaf) in twins else _copied_leaf(leaf)), tree)


def _copied_memory(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copy tensors that overlap in memory so that their copies do, by id: networks change one and see it in the other.

    Those that gradients are wanted of are left out.
    """
    groups: dict[Any, dict[int, Tensor]] = {}
    for t in tensors:
        if t.layout is torch.strided and t.numel() and not (t.is_conj() or t.is_neg() or t.requires_grad):
            groups.setdefault((storage_of(t), t.dtype), {})[id(t)] = t
    twins = dict[int, Tensor]()
    for (storage, _), group in groups.items():
        parts = sorted(group.values(), key=lambda t: t.storage_offset())
        starts, steps = [t.storage_offset() for t in parts], [zip(t.shape, t.stride(), strict=True) for t in parts]
        ends = [start + 1 + sum((n - 1) * step for n, step in each) for start, each in zip(starts, steps, strict=True)]
        if storage and any(start < max(ends[:i]) for i, start in enumerate(starts) if i):
            whole = torch.as_strided(parts[0], (max(ends) - starts[0],), (1,), starts[0]).detach().clone()
            for t in parts:
                twins[id(t)] = torch.as_strided(whole, t.shape, t.stride(), t.storage_offset() - starts[0])
                vars(twins[id(t)]).update(copy.deepcopy(vars(t)))
    return twins


def _once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let what is given twice become one and the same again: networks ask `a is b`, and change a to see it in b."""
    results = dict[int, tuple[Any, Any]]()  # by id, with the leaf, so that no other gets its id

    def of(leaf: Any) -> Any:
        if id(leaf) not in results:
            results[id(leaf)] = leaf, function(leaf)
        return results[id(leaf)][1]

    return of


def _cloned(tensor: Tensor) -> Tensor:
    """Copy a tensor as it is: its strides, where memory allows, and that gradients are wanted."""
    twin, size = tensor.clone(), tensor.numel()
    if tensor.layout is torch.strided and twin.stride() != tensor.stride() and size and not tensor.is_nested:
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if span <= SPREAD * size and not (tensor.is_conj() or tensor.is_neg()):
            covered = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).clone()
            twin = torch.as_strided(covered, tensor.shape, tensor.stride(), 0)
    if vars(tensor):
        vars(twin).update(copy.deepcopy(vars(tensor)))
    return twin.requires_grad_() if tensor.requires_grad and not twin.is_inference() else twin


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, (Tensor, np.ndarray, *PLAIN)):
        return map_tensors(_cloned, leaf)
    kind = f"an input of type {type(leaf).__name__}"
    cure = "and networks may change what they are given: pass its tensors, or give it a __deepcopy__ that copies"
    try:
        twin = private_copy(leaf)
    except Exception as error:
        raise MCBNError(f"{kind} cannot be copied ({type(error).__name__}: {error}), {cure}") from error
    if any(isinstance(common, Tensor) for _, common in shared(leaf, twin)):
        raise MCBNError(f"a copy of {kind} shares tensors with the original, {cure}")
    return twin


def tensors_of(tree: Any) -> list[Tensor]:
    """List every tensor of a nest, in order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, tree)
    return tensors


def same(one: Any, other: Any) -> bool:
    """Tell whether two nests hold the same tensors in the same order."""
    pairs = zip(tensors_of(one), tensors_of(other), strict=False)
    return describe(one) == describe(other) and all(torch.equal(a, b) for a, b in pairs)


def outline(tree: Any) -> Any:
    """Describe the nest without its tensors, as a value that compares and hashes."""
    if isinstance(tree, Tensor | np.ndarray):
        return "tensor" if _is_plain_leaf(tree) else type(tree)
    if isinstance(tree, Mapping):
        notes = outline(vars(tree)) if hasattr(tree, "__dict__") else None  # attributes of a user's kind of dict
        return (type(tree), notes, *((key, outline(value)) for key, value in tree.items()))
    if isinstance(tree, tuple | list):
        return (type(tree), *(outline(value) for value in tree))
    return (type(tree), repr(tree) if isinstance(tree, PLAIN) else None)  # 1, 1.0 and True compare equal, 0.0 and -0.0


def key_of(inputs: Any) -> Any:
    """Identify what a trace depends on: structure, shapes, layouts, dtypes, device, autocast and TF32."""
    tensors = [inputs] if type(inputs) is Tensor else tensors_of(inputs)
    strides = [t.stride() if t.layout is torch.strided else None for t in tensors]
    kinds = tuple([(t.shape, s, t.dtype, t.device, t.requires_grad) for t, s in zip(tensors, strides, strict=True)])
    device = tensors[0].device.type if tensors else "cpu"
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    ids = [id(t) for t in tensors] if len(tensors) > 1 else []
    memory = [storage_of(t) for t in tensors] if ids else []
    starts = [t.storage_offset() if m else 0 for t, m in zip(tensors, memory, strict=False)]
    apart = [start - starts[memory.index(m)] for start, m in zip(starts, memory, strict=True)]  # in one memory
    cudnn = torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark
    switches = autocast, tf32(), cudnn, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return outline(inputs), kinds, tuple(map(ids.index, ids)), tuple(map(memory.index, memory)), tuple(apart), switches


def tf32() -> tuple[bool, bool]:
    """Tell whether a GPU rounds single precision to TF32 in convolutions, and in matrix products."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    try:
        return cudnn.allow_tf32, matmul.allow_tf32
    except RuntimeError:  # cannot be read where somebody used the newer switches
        return cudnn.conv.fp32_precision == "tf32", matmul.fp32_precision == "tf32"


def is_plain(tree: Any) -> bool:
    """Tell whether a nest holds tensors and plain constants only, no objects with tensors of their own inside."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return all(map(_is_plain_leaf, leaves))


def _is_plain_leaf(leaf: Any) -> bool:
    bare = type(leaf) in (Tensor, nn.Parameter) and not vars(leaf)  # of other tensors code may ask more than numbers
    return bare or isinstance(leaf, (np.ndarray, *PLAIN))


def move(tree: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Move every tensor to a device, floating ones to a dtype; objects with a `.to` of their own too."""
    if not isinstance(tree, Tensor | np.ndarray | Mapping | tuple | list) and hasattr(tree, "to"):
        return tree.to(device)
    return map_tensors(_once(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None)), tree)


def cut(inputs: Any, count: int) -> list[Any]:
    """Cut every tensor of the inputs along its first axis into as many nearly equal blocks."""
    return [filled(inputs, piece) for piece in zip(*(t.tensor_split(count) for t in tensors_of(inputs)), strict=True)]


def concatenate(blocks: Sequence[Any]) -> Any:
    """Join batches of one structure along the first axis of every tensor, those of dicts by their keys."""
    blocks = [{key: block[key] for key in blocks[0]} if isinstance(block, Mapping) else block for block in blocks]
    nests = [str(map_leaves(lambda leaf: isinstance(leaf, Tensor | np.ndarray), block)) for block in blocks]
    if other := [block for block, nest in zip(blocks, nests, strict=True) if nest != nests[0]]:
        raise MCBNError(f"batches of one list must be alike; got {describe(blocks[0])} and {describe(other[0])}")
    return filled(blocks[0], [torch.cat(column) for column in zip(*map(tensors_of, blocks), strict=True)])


def filled(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """Put other tensors in the places of those of a nest."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), tree)


def require_finite(tree: Any) -> None:
    """Refuse NaN and infinity: one such value makes every statistic of its batch useless."""
    for tensor in tensors_of(tree):
        if tensor.is_nested:
            raise MCBNError("the inputs hold a nested tensor; pad it and give a mask, or give inputs of one size")
        suspect = tensor.is_floating_point() and not math.isfinite(tensor.sum().item())  # which may also be too large
        if suspect and (count := int((~torch.isfinite(tensor)).sum())):
            what = f"{count} non-finite values (NaN or infinity) in a tensor of shape {tuple(tensor.shape)}"
            raise MCBNError(f"the inputs hold {what}; clean or impute them")


def size_of(tree: Any) -> int:
    """Count the examples of a batch: the first axis of its first tensor."""
    for tensor in tensors_of(tree):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise MCBNError(f"no tensor to count examples by in {describe(tree)}")


def pick_inputs(batch: Any, inputs: Picker, keys: tuple[list[str], list[str]]) -> Any:
    """Pick what goes to the network from a training or prediction batch.

    `inputs` is a key, an index, a list of them or a function; without it a tensor goes as it is, a tuple gives its
    first element, a dict the entries that `forward` names (`keys`: all names it takes, those it must have).
    """
    if inputs is not None:
        return pick(batch, inputs, "inputs")
    if isinstance(batch, Mapping):
        accepted, required = keys
        named = {key: batch[key] for key in batch if key in accepted}
        return named if named and set(required) <= set(named) else batch
    if isinstance(batch, tuple | list):
        if not batch:
            raise MCBNError(f"a batch is an empty {type(batch).__name__}; the loader must give at least the inputs")
        return batch[0]
    return batch


def pick_targets(batch: Any, targets: Picker) -> Tensor:
    """Pick the targets of a validation batch: by `targets`, else the second element or a usual key."""
    if targets is None and isinstance(batch, Mapping):
        targets = next((key for key in TARGET_KEYS if key in batch), None)
    elif targets is None and isinstance(batch, tuple | list) and len(batch) > 1:
        targets = 1
    if targets is None:
        raise MCBNError(f"no targets in {describe(batch)}; give batches (x, y), or pass targets=")
    picked = as_tensor(pick(batch, targets, "targets"))
    try:
        return torch.as_tensor(picked)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"targets={targets!r} picks {describe(picked)} from {describe(batch)}, not a tensor"
        raise MCBNError(f"give targets as numbers, such as sorted(set(y)).index of each label: {what}") from error


def pick(batch: Any, picker: Picker, argument: str) -> Any:
    """Apply one picker: a function of the batch, a key or index, or a list of those (giving a dict or tuple)."""
    if callable(picker):
        return picker(batch)
    if isinstance(picker, Sequence) and not isinstance(picker, str):
        picked = [pick(batch, one, argument) for one in picker]
        return dict(zip(picker, picked, strict=True)) if all(isinstance(one, str) for one in picker) else tuple(picked)
    try:
        return batch[picker]
    except (KeyError, IndexError, TypeError) as error:
        raise MCBNError(f"{argument}={picker!r} is not in {describe(batch)}") from error


def describe(tree: Any) -> str:
    """Say in a few words what a batch is made of, for error messages."""
    if isinstance(tree, Tensor | np.ndarray):
        return f"a {type(tree).__name__} of shape {tuple(tree.shape)} ({str(tree.dtype).removeprefix('torch.')})"
    if isinstance(tree, Mapping):
        return "a dict {" + ", ".join(f"{key!r}: {describe(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        shown = ", ".join(describe(value) for value in tree[:4]) + (", ..." if len(tree) > 4 else "")
        return f"a {type(tree).__name__} ({shown})"
    return f"a {type(tree).__name__}"


def require_int(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """Check a whole-number argument (bool is not one)."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        bound = "" if most == math.inf else f", at most {most}"
        raise MCBNError(f"{name} must be a whole number, at least {least}{bound}; got {value!r}")
    return int(value)
