"""Raw outputs and targets: read as values or logits, brought to one shape, refused where they do not fit."""

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcbn.batches import as_tensor
from mcbn.errors import MCBNError, require_choice

OUTPUTS = ("auto", "logits", "probs", "log_probs")
ENOUGH_VALUES = 2**18  # to tell probabilities from logits
ENOUGH_UNITS = 16  # outputs of one unit in [0, 1] that are no accident
SQUASHES = dict.fromkeys(("sigmoid", "sigmoid_", "special_expit", "hardsigmoid"), "sigmoid")
SQUASHES |= {"softmax": "softmax", "log_softmax": "log_softmax", "log_sigmoid": "log_sigmoid"}
COPIES = ("contiguous", "reshape", "flatten", "to", "float", "double", "clone", "clamp")  # leave a squash what it is


def require_outputs(outputs: str, task: str) -> str:
    """Refuse a kind of output that does not exist; a regression's are what they are."""
    return require_choice("outputs", outputs, OUTPUTS[:1] if task == "regression" else OUTPUTS, f" for {task}")


class OutputReading(NamedTuple):
    """How the output (N, K, ...) of a classifier is read; all that follows works on its logits."""

    kind: str = "logits"  # of OUTPUTS; "auto": not known yet
    several: bool = False  # labels of an input, each with a unit of its own

    def logits(self, output: Tensor) -> Tensor:
        """Turn outputs into logits of the same shape; probabilities of exactly 0 and 1 stay finite."""
        if self.kind in ("auto", "logits"):
            return output
        single, limits = self.several or output.ndim == 1 or output.shape[1] == 1, torch.finfo(as_float(output).dtype)
        log_p = output if self.kind == "log_probs" else as_float(output).clamp(min=limits.tiny).log()
        return log_p - (-torch.expm1(log_p)).clamp(min=limits.eps / 2).log() if single else log_p

    def restore(self, samples: Tensor) -> Tensor:
        """Turn logits of draws (T, N, K, ...) into what the network itself gives."""
        if self.kind in ("auto", "logits"):
            return samples
        single = self.several or samples.ndim == 2 or samples.shape[2] == 1
        log_p = F.logsigmoid(samples) if single else samples
        return log_p.exp() if self.kind == "probs" else log_p


class Ending(TorchFunctionMode):
    """Note results of softmax and sigmoid while a network runs: is one of them what it returns?"""

    def __init__(self) -> None:
        super().__init__()
        self.squashed: deque[tuple[str, Tensor]] = deque(maxlen=8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **kwargs or {}), getattr(func, "__name__", "")
        kind = self.of(args[0]) if name in COPIES and args else SQUASHES.get(name)
        if kind and isinstance(result, Tensor):
            self.squashed.append((kind, result))
        return result

    def of(self, output: Any) -> str | None:
        """Name the function that gave this tensor, or one that it is a view of."""
        if not isinstance(output, Tensor) or output.layout is not torch.strided:
            return None
        place = output.untyped_storage().data_ptr()
        return next((kind for kind, seen in self.squashed if seen.untyped_storage().data_ptr() == place), None)


def recognise(output: Tensor, ending: str | None, several: bool) -> str:
    """Tell from values and structure what outputs (N, K, ...) are: logits, probs or log_probs.

    A softmax shows in the values: classes sum to one. Of single units values in [0, 1] are no proof, and the last
    function decides; where it was not seen (TorchScript, a sigmoid written by hand) the user must.
    """
    some = as_float(output[: max(1, ENOUGH_VALUES // max(1, output[0].numel()))])
    tolerance = 1e-3 if output.dtype in (torch.float32, torch.float64) else 2e-2
    unit, single = bool(((some >= 0) & (some <= 1)).all()), output.ndim == 1 or output.shape[1] == 1
    if ending in ("softmax", "log_softmax") and (several or single):
        cure = 'take task="classification"' if several else "end the network in a sigmoid"
        raise MCBNError(f"{cure}: it ends in a {ending}, whose outputs {tuple(output.shape)} exclude each other")
    if several or single:
        if ending not in ("sigmoid", "log_sigmoid") and unit and some.numel() >= ENOUGH_UNITS:
            what = f"values of its output {tuple(output.shape)} lie in [0, 1], yet no sigmoid was seen"
            cure = 'pass outputs="probs" if the network gives probabilities, outputs="logits" if not'
            raise MCBNError(f"{cure}: all {some.numel()} {what}")
        return {"sigmoid": "probs" if unit else "logits", "log_sigmoid": "log_probs"}.get(ending or "", "logits")
    if unit and bool(((some.sum(1) - 1).abs() < tolerance).all()):
        return "probs"
    if ending == "sigmoid" and unit:
        what = f"the network ends in a sigmoid of {output.shape[1]} units that do not sum to one"
        cure = 'for classes that exclude each other give logits, or outputs="probs" to scale them to one'
        raise MCBNError(f'take task="multilabel": {what}; {cure}')
    if ending == "softmax" and unit:
        raise MCBNError(f"put classes on axis 1: its softmax sums another axis of {tuple(output.shape)} to one")
    return "log_probs" if ending == "log_softmax" else "logits"


def flatten(x: Tensor, start: int) -> Tensor:
    """Flatten the axes of one output into D: (..., D), D = 1 where there are none."""
    return x.flatten(start) if x.ndim > start else x.unsqueeze(-1)


def as_float(output: Tensor) -> Tensor:
    """Give outputs at least single precision: moments of half-precision numbers lose their digits."""
    precise = output.is_floating_point() and output.dtype not in (torch.float16, torch.bfloat16)
    return output if precise else output.float()


def as_logits(chunk: Tensor, several: bool = False) -> Tensor:
    """Give logits (t, N, K, ...) a class axis 2, K = 2 for a single unit, (t, N, 2, K, ...) for several labels."""
    chunk = as_float(chunk)
    if several or chunk.ndim == 2:
        chunk = chunk.unsqueeze(2)
    if chunk.shape[2] == 1:
        chunk = torch.cat([torch.zeros_like(chunk), chunk], 2)
    return chunk


def probabilities(logits: Tensor, several: bool = False) -> Tensor:
    """Turn logits (N, K, ...) into class probabilities (N, K, ...), K = 2 for one unit; of labels each its own."""
    probs = as_logits(logits.unsqueeze(0), several)[0].softmax(1)
    return probs[:, 1] if several else probs


def split_head(outputs: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Split a head (..., 2 D, ...) into means and log variances, the halves of an axis."""
    if outputs.ndim <= axis or outputs.shape[axis] % 2:
        needs = 'noise="head" needs 2 D outputs on axis 1, D means and then D log variances, or a pair of them'
        raise MCBNError(f"{needs}; one input gives shape {tuple(outputs.shape[axis:])}")
    mean, log_variance = as_float(outputs).chunk(2, axis)
    return mean, log_variance


def join_head(result: Any) -> Any:
    """Join a pair (means, log variances) that a network returns along axis 1."""
    pair = isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(t, Tensor) for t in result)
    return torch.cat([flatten(t, 1) if t.ndim < 2 else t for t in result], 1) if pair else result


def spread(tau: Tensor, mean: Tensor) -> Tensor:
    """Shape tau so that it goes with predictions (N, D, ...): one number, one an output, or a matrix (D, D)."""
    if tau.ndim == 0:
        return tau.to(mean)
    if mean.ndim < 2 or len(tau) != mean.shape[1] or (tau.ndim == 2 and mean.ndim > 2):
        raise MCBNError(f"tau holds {len(tau)} values, one an output, but predictions have shape {tuple(mean.shape)}")
    return tau.to(mean) if tau.ndim == 2 else tau.to(mean).reshape(-1, *(1,) * (mean.ndim - 2))


def is_matrix(tau: Tensor, mean: Tensor) -> bool:
    """Tell whether a tau shaped by `spread` is the precision matrix of several outputs (N, D)."""
    return tau.ndim == 2 and mean.ndim == 2


def noise_variance(tau: Tensor, mean: Tensor) -> Tensor:
    """Return the variance of the noise, broadcastable to predictions (N, D, ...): 1/tau."""
    return torch.linalg.inv(tau).diagonal() if is_matrix(tau, mean) else 1 / tau


def match_shape(y: Tensor, mean: Tensor, what: str = "targets") -> Tensor:
    """Bring regression targets to the outputs' shape; (N,) and (N, 1) stand for each other, nothing else does."""
    y = torch.as_tensor(as_tensor(y))
    sizes = [[size for size in values.shape[1:] if size != 1] for values in (y, mean)]
    if y.shape[:1] == mean.shape[:1] and sizes[0] == sizes[1]:
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        hint = "; axes are in another order" if sorted(y.shape) == sorted(mean.shape) else "; give one an output"
        raise MCBNError(f"{what} of shape {tuple(y.shape)} do not fit predictions of shape {tuple(mean.shape)}{hint}")
    return y.to(mean)


def require_labels(y: Tensor, probs: Tensor) -> Tensor:
    """Check class labels (N, ...) against probabilities (N, K, ...)."""
    y, K = torch.as_tensor(as_tensor(y)).to(probs.device), probs.shape[1]
    expected = probs.shape[:1] + probs.shape[2:]
    if y.is_floating_point() and bool((y == y.round()).all()):
        y = y.long()
    if y.shape == (*expected, 1):
        y = y.squeeze(-1)
    if y.is_floating_point() or y.shape != expected:
        one = y.shape == probs.shape and bool((y.sum(1) == 1).all())
        cure = "pass y.argmax(1): " if one else 'take task="multilabel": ' if y.shape == probs.shape else ""
        there = f"{tuple(y.shape)}, {str(y.dtype).removeprefix('torch.')}"
        raise MCBNError(f"{cure}labels must be whole numbers of shape {tuple(expected)}; got {there}")
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < K:
        raise MCBNError(f"labels must lie in 0..{K - 1} ({K} classes); got {int(y.min())}..{int(y.max())}")
    return y.long()
