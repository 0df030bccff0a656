"""Raw outputs and targets: read as values or logits, brought to one shape, refused where they do not fit."""

import torch
from torch import Tensor

from mcbn.errors import MCBNError

ENOUGH_VALUES = 2**18  # to tell probabilities from logits


def flatten(x: Tensor, start: int) -> Tensor:
    """Flatten the axes of one output into D: (..., D), D = 1 where there are none."""
    return x.flatten(start) if x.ndim > start else x.unsqueeze(-1)


def as_float(output: Tensor) -> Tensor:
    """Give outputs at least single precision: moments of half-precision numbers lose their digits."""
    return (
        output.float() if output.dtype in (torch.float16, torch.bfloat16) or not output.is_floating_point() else output
    )


def as_logits(chunk: Tensor) -> Tensor:
    """Read raw outputs (t, N, K, ...) as logits; a single output (t, N) or (t, N, 1, ...) is a binary logit, K = 2."""
    chunk = as_float(chunk)
    if chunk.ndim == 2:
        chunk = chunk.unsqueeze(2)
    if chunk.shape[2] == 1:
        chunk = torch.cat([torch.zeros_like(chunk), chunk], 2)
    return chunk


def are_probabilities(chunk: Tensor) -> Tensor:
    """Tell whether raw outputs (t, N, K, ...) already are probabilities: a truth value that may still be on its way."""
    if chunk.ndim < 3 or chunk.shape[2] < 2 or not chunk.numel():
        return torch.tensor(False)
    some = as_float(chunk[: max(1, ENOUGH_VALUES // chunk[0].numel())])
    return (some >= 0).all() & ((some.sum(2) - 1).abs() < 1e-3).all()


def refuse_probabilities(suspect: Tensor) -> None:
    """Refuse outputs that `are_probabilities`: a softmax of them would be nearly uniform."""
    if bool(suspect):
        raise MCBNError(
            "the network returns probabilities, but classification expects logits; "
            "pass output=lambda p: p.log(), or leave the softmax out of the network"
        )


def spread(tau: Tensor, mean: Tensor) -> Tensor:
    """Shape one tau, or one for each output along axis 1, so that it broadcasts over predictions (N, D, ...)."""
    if tau.ndim == 0:
        return tau.to(mean)
    if mean.ndim < 2 or len(tau) != mean.shape[1]:
        raise MCBNError(f"tau holds {len(tau)} values, one an output, but predictions have shape {tuple(mean.shape)}")
    return tau.to(mean).reshape(-1, *(1,) * (mean.ndim - 2))


def match_shape(y: Tensor, mean: Tensor) -> Tensor:
    """Bring regression targets to the outputs' shape; (N,) and (N, 1) stand for each other, nothing else does."""
    if y.shape[:1] == mean.shape[:1] and _without_ones(y) == _without_ones(mean):
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        hint = "; axes are in another order" if sorted(y.shape) == sorted(mean.shape) else ""
        raise MCBNError(f"targets of shape {tuple(y.shape)} do not fit predictions of shape {tuple(mean.shape)}{hint}")
    return y.to(mean)


def _without_ones(values: Tensor) -> list[int]:
    return [size for size in values.shape[1:] if size != 1]


def require_labels(y: Tensor, probs: Tensor) -> Tensor:
    """Check class labels (N, ...) against probabilities (N, K, ...)."""
    y = torch.as_tensor(y).to(probs.device)
    expected = probs.shape[:1] + probs.shape[2:]
    if y.is_floating_point() and bool((y == y.round()).all()):
        y = y.long()
    if y.shape == (*expected, 1):
        y = y.squeeze(-1)
    if y.is_floating_point() or y.shape != expected:
        raise MCBNError(
            f"labels must be whole numbers of shape {tuple(expected)}; got {tuple(y.shape)}, {str(y.dtype)[6:]}"
        )
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        raise MCBNError(
            f"labels must lie in 0..{probs.shape[1] - 1} ({probs.shape[1]} classes); got {int(y.min())}..{int(y.max())}"
        )
    return y.long()
