"""Do inputs influence each other? Found out operator by operator, whatever the values of the inputs.

One look at the structure of a pass holds for all values; why stands in `graph.md`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mcbn import batches
from mcbn.batch_norm import Replay
from mcbn.engine.agree import half_agree
from mcbn.engine.trace import ReplayTracer, tensors_in
from mcbn.network import Network
from mcbn.private_torch import Dispatched, written_by

FEW = 5  # inputs that are followed: few usual sizes of other axes are multiples of it
SIZED = {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "repeat", "native_group_norm", "arange"}
SIZED |= {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}  # told how many there are
Draw = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # means and variances


class Place(NamedTuple):
    """Where inputs lie in a value: of p N k places along an axis, place (i N + n) k + j is input n's."""

    axis: int
    p: int = 1
    k: int = 1


MIXED = Place(-1)


def are_independent(network: Network, draw: Draw, inputs: Any, *blocks: Any) -> bool:
    """Tell whether each output is a function of one input alone, in blocks too, and no step depends on values."""
    N = batches.size_of(inputs)
    few = batches.map_tensors(lambda t: t[torch.arange(FEW) % N] if N and t.ndim and len(t) == N else t, inputs)
    watches = [Follower(some, follow=some is few) for some in (few, inputs, *blocks)]
    try:
        with torch.no_grad():
            ReplayTracer(*draw).trace(network, few)
            for watch, some in zip(watches, (few, inputs, *blocks), strict=True):
                with Replay(*draw), Dispatched(watch.see):
                    output = network.run_copy(some)
                watch.apart &= watch.places.get(output) == Place(0)
    except Exception:  # values are looked at, or there is no memory: nothing is proven
        return False
    return watches[0].apart and all(watch.steps == watches[0].steps for watch in watches)


class Follower:
    """Notes the operators of one pass, and follows its inputs through them."""

    def __init__(self, inputs: Any, *, follow: bool) -> None:
        self.follow, self.apart = follow, True
        self.steps: list[Any] = []  # operators with their settings, sizes apart
        rows = (tensor for tensor in batches.tensors_of(inputs) if tensor.ndim and len(tensor) == FEW)
        self.places: Any = WeakTensorKeyDictionary(dict.fromkeys(rows, Place(0)))  # of values made of inputs

    def see(self, operator: Any, arguments: dict[str, Any], result: Any) -> None:
        """Take a step; find out where the inputs lie in the results."""
        name = operator.name().split("::")[1].split(".")[0]
        settings = [] if name in SIZED else [value for value in arguments.values() if not tensors_in(value)]
        if name == "lift_fresh" and result.numel() <= 64:  # made of numbers just now; larger ones are tables
            settings.append(result.tolist())
        self.steps.append((operator, str(settings)))
        known = {id(t): (t, self.places[t]) for t in tensors_in(arguments) if t in self.places} if self.follow else {}
        if not known:
            return
        written = [id(t) for key in written_by(operator) for t in tensors_in(arguments[key])]
        clear = not any(place == MIXED for _, place in known.values()) and known.keys() >= {*written}
        clear = clear and name.removesuffix("_") != "renorm"  # it mixes inputs where their values are large
        found = self._tried(operator, arguments, known) if clear else [MIXED]
        for tensor, place in zip(results := tensors_in(result), found * (len(results) // len(found)), strict=True):
            self.places[tensor] = place
        self.apart &= not written or (clear and all(known[key][1] == found[0] for key in written))  # views are not told

    def _tried(self, operator: Any, arguments: dict[str, Any], known: dict[int, tuple[Tensor, Place]]) -> list[Place]:
        """Run an operator on made-up operands and on others; return where the inputs lie in each result."""
        made_up = {key: values_like(t) for key, (t, _) in known.items()}
        others = {key: reversed_half(made_up[key], place) for key, (_, place) in known.items()}
        try:  # with these operands in the place of its own
            swaps = (lambda leaf, values=values: values.get(id(leaf), leaf) for values in (made_up, others))
            first, second = (tensors_in(operator(**batches.map_leaves(swap, arguments))) for swap in swaps)
        except Exception:  # made-up values are nothing that it takes
            return [MIXED]
        places = dict.fromkeys(place for _, place in known.values())
        alike = [place for t, place in known.values() if t.shape == first[0].shape] if first else []
        return [_place(a, b, alike, places) for a, b in zip(first, second, strict=True)] or [MIXED]


def values_like(tensor: Tensor, seed: int = 0) -> Tensor:
    """Make up floating values, positive ones; whole numbers may be indices, and stay as they are."""
    if not tensor.is_floating_point():
        return tensor.clone()
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator)


def reversed_half(tensor: Tensor, place: Place) -> Tensor:
    """Put inputs in reverse and replace the first half of them then."""
    turned = _by_input(tensor, place).flip(place.axis + 1)
    half = turned.narrow(place.axis + 1, 0, FEW // 2)
    other = ~half if half.dtype == torch.bool else turned.narrow(place.axis + 1, FEW - FEW // 2, FEW // 2)
    half.copy_(values_like(half, 1) if half.is_floating_point() else other.clone())
    return turned.reshape(tensor.shape)


def _by_input(tensor: Tensor, place: Place) -> Tensor:
    """Give the inputs an axis of their own, behind one for p and before one for k."""
    return tensor.reshape(*tensor.shape[: place.axis], place.p, FEW, place.k, *tensor.shape[place.axis + 1 :])


def _place(first: Tensor, second: Tensor, alike: list[Place], likely: Iterable[Place]) -> Place:
    """Find the axis along which the inputs that stayed have the same results, in reverse, and the others have not."""
    axes = [(axis, size) for axis, size in enumerate(first.shape) if size % FEW == 0]
    divided = (Place(axis, p, size // (p * FEW)) for axis, size in axes for p in range(1, size // FEW + 1))
    for place in (*likely, *divided):
        if place.axis < first.ndim and place.p * FEW * place.k == first.shape[place.axis]:
            results = _by_input(first, place), _by_input(second, place).flip(place.axis + 1)
            pairs = zip(*(t.tensor_split([FEW - FEW // 2], place.axis + 1) for t in results), strict=True)
            stayed, replaced = (half_agree(*pair) for pair in pairs)
            if stayed and not replaced:
                return place
    return alike[0] if alike and half_agree(first, second) else MIXED  # a comparison, zeros of some shape
