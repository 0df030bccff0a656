"""The noise level tau, tuned on held-out data by a bounded scalar minimiser, and the batch size M beside it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.metrics import crps_gaussian
from mcbn.network import as_loader, is_stream
from mcbn.outputs import are_probabilities, as_float, as_logits, match_shape, refuse_probabilities, require_labels
from mcbn.prediction import RegressionPrediction
from mcbn.randomness import isolated_random

TASKS = ("regression", "classification")
SCORES = ("crps", "pll")
BUDGET = 2**27  # numbers kept while tuning by samples: 1 GB in double precision
Loss = Callable[[Tensor], Tensor]  # of log tau


class Tuned(NamedTuple):
    """The best tau, and what it reaches: mean CRPS, or mean negative log density up to a constant; lower is better."""

    tau: Tensor  # () or (D,)
    loss: Tensor  # of each output, (D,)


def require_task(task: str) -> str:
    """Refuse a task that does not exist."""
    if task not in TASKS:
        raise MCBNError(f"task must be one of {list(TASKS)}, got {task!r}; segmentation is classification")
    return task


def initial_tau(task: str) -> Tensor:
    """Return tau before it is tuned: no observation noise, or the network's own probabilities."""
    return torch.tensor(math.inf if task == "regression" else 1.0, dtype=torch.float64)


def require_tau(value: float | Tensor) -> Tensor:
    """Check a tau that was set, and keep it as a tensor, () or (D,)."""
    tau = torch.as_tensor(value, dtype=torch.float64).detach().cpu().clone()
    if tau.ndim > 1 or not bool((tau > 0).all()):
        raise MCBNError(f"tau must be a positive number, or one for each output; got {value!r}")
    return tau


def plain(value: Tensor) -> float | Tensor:
    """Show a tensor () as a number, one of several values as a copy."""
    return value.item() if value.ndim == 0 else value.clone()


def require_score(task: str, score: str | None) -> str:
    """Check what tau is tuned by: CRPS for regression and PLL for classification where nothing is asked."""
    score = score or ("crps" if task == "regression" else "pll")
    if score not in SCORES or (task == "classification" and score != "pll"):
        raise MCBNError(f"score must be {'crps or pll' if task == 'regression' else 'pll'}, got {score!r}")
    return score


def tune(
    predictor: Any,
    data: Any,
    *,
    score: str,
    targets: batches.Picker = None,
    n_samples: int | None = None,
    ignore_index: int | None = None,
) -> Tuned:
    """Find the best tau of a predictor's draws on held-out data: of an `mcbn.MCBN`, or of a baseline."""
    pairs = labelled(predictor, data, targets)
    if score == "crps":
        moments = _gather(_moments_and_targets(predictor.predict(x, n_samples=n_samples), y) for x, y in pairs)
        return _tuned(tau_by_crps(*moments), _crps(*moments))
    classify, n_batches = predictor.task == "classification", _count_batches(data)

    def read(x: Any, y: Tensor) -> list[Tensor]:
        with torch.no_grad():
            samples = as_float(predictor.sample(x, n_samples=n_samples))  # (T, N, ...)
        rows = _logits_and_labels(samples, y, ignore_index) if classify else _outputs_and_targets(samples, y)
        return _within_budget(*rows, n_batches)

    samples, y = _gather(read(x, y) for x, y in pairs)
    samples = samples.transpose(0, 1)  # (T, n, D) or (T, n, K)
    if classify:
        return _tuned(inverse_temperature(samples, y), _softmax(samples, y))
    return _tuned(tau_by_pll(samples, y), _mixture(samples, y))


def _tuned(tau: Tensor, loss: Loss) -> Tuned:
    """Give one output a plain number for its tau."""
    losses = loss(tau.log()).reshape(-1)  # (D,)
    return Tuned((tau.reshape(()) if tau.numel() == 1 else tau).double().cpu(), losses.double().cpu())


def labelled(predictor: Any, data: Any, targets: batches.Picker) -> Iterator[tuple[Any, Tensor]]:
    """Yield inputs and targets of every batch of held-out data."""
    keys = predictor.network.accepted_keys()
    with isolated_random():
        for batch in as_loader(data) if is_stream(data) else [data]:
            yield batches.pick_inputs(batch, predictor.inputs, keys), batches.pick_targets(batch, targets)


def _count_batches(data: Any) -> int:
    """Count the batches of validation data, or assume many."""
    if not is_stream(data):
        return 1
    loader = as_loader(data)
    return 1000 if isinstance(loader.dataset, IterableDataset) else len(loader)


def minimize_bounded(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, *, steps: int = 80) -> Tensor:
    """Minimise a function of one variable between bounds by golden sections, elementwise for many at once.

    Each step keeps 61.8 % of the bracket and costs one evaluation; it finds the minimum of a unimodal function.
    """
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    f_left, f_right = function(left), function(right)
    for _ in range(steps):
        lower = f_left < f_right  # the minimum lies in [low, right]
        low, high = torch.where(lower, low, left), torch.where(lower, right, high)
        probe = torch.where(lower, high - ratio * (high - low), low + ratio * (high - low))
        f_probe = function(probe)
        left, right = torch.where(lower, probe, right), torch.where(lower, left, probe)
        f_left, f_right = torch.where(lower, f_probe, f_right), torch.where(lower, f_left, f_probe)
    return (low + high) / 2


def tau_by_crps(mean: Tensor, epistemic: Tensor, y: Tensor) -> Tensor:
    """Find the tau of each output, (D,), that minimises the mean CRPS of N(mean, epistemic + 1/tau) (section 4.2).

    All arguments (n, D).
    """
    return minimize_bounded(_crps(mean, epistemic, y), *_log_tau_bounds(mean.double() - y.double())).exp()


def constant_tau(mean: Tensor, y: Tensor) -> Tensor:
    """Find the tau of the constant twin, the same mean with one variance for all inputs, by CRPS (section 4.2).

    mean and y (N,) or (N, D, ...); one tau an output, (D,).
    """
    rows = _by_output(mean)  # (n, D)
    return tau_by_crps(rows, torch.zeros_like(rows), _by_output(y))


def _crps(mean: Tensor, epistemic: Tensor, y: Tensor) -> Loss:
    """Mean CRPS of each output, (D,), as a function of log tau."""
    mean, epistemic, y = mean.double(), epistemic.double(), y.double()
    return lambda log_tau: crps_gaussian(mean, epistemic + torch.exp(-log_tau), y).mean(0)


def tau_by_pll(samples: Tensor, y: Tensor) -> Tensor:
    """Find the tau of each output, (D,), that maximises the mean mixture log density of that output (appendix 1.5).

    samples (T, n, D), y (n, D); -log p = -logsumexp_j(-tau/2 (y - f_j)^2) - 1/2 log tau + constant.
    """
    return minimize_bounded(_mixture(samples, y), *_log_tau_bounds(samples.double().mean(0) - y.double())).exp()


def _mixture(samples: Tensor, y: Tensor) -> Loss:
    """Mean negative log density of each output, (D,), up to a constant, as a function of log tau."""
    squares = (samples.double() - y.double()).square()  # (T, n, D)
    return lambda log_tau: -(torch.logsumexp(-0.5 * log_tau.exp() * squares, 0) + 0.5 * log_tau).mean(0)


def _log_tau_bounds(residual: Tensor) -> tuple[Tensor, Tensor]:
    """Bound log tau of each output by its residuals (n, D): targets of any scale do.

    The noise variance lies between a thousandth of the squared median error and 100 times the mean squared error. The
    lower end is reached where the draws alone already spread wider than the errors; the paper bounds tau likewise.
    """
    square = residual.square().mean(0)  # (D,)
    if not bool((square > 0).all()):
        raise MCBNError(
            "the predictions equal every validation target exactly, so there is no noise to measure; "
            "tune on data the network was not made from"
        )
    typical = residual.abs().median(0).values.square()  # (D,)
    return -torch.log(100 * square), -torch.log(1e-3 * torch.where(typical > 0, typical, square))


def inverse_temperature(logits: Tensor, y: Tensor) -> Tensor:
    """Find the tau, (), that maximises the mean log of the averaged softmax(tau * logits).

    logits (T, n, K), labels y (n,). The paper has tau = 1 for classification (section 3.2).
    """
    bound = torch.tensor(math.log(100.0), dtype=logits.dtype, device=logits.device)
    return minimize_bounded(_softmax(logits, y), -bound, bound, steps=40).exp()


def _softmax(logits: Tensor, y: Tensor) -> Loss:
    """Mean negative log of the averaged probabilities, (), up to a constant, as a function of log tau."""
    index = y.expand(logits.shape[:2]).unsqueeze(2)  # (T, n, 1)

    def loss(log_tau: Tensor) -> Tensor:
        log_p = torch.log_softmax(log_tau.exp() * logits, 2).gather(2, index).squeeze(2)  # (T, n)
        return -torch.logsumexp(log_p, 0).mean()

    return loss


def _moments_and_targets(pred: RegressionPrediction, y: Tensor) -> list[Tensor]:
    """Return mean, epistemic variance and targets of a batch, (n, D) each."""
    y = require_finite_targets(match_shape(y, pred.mean))
    return [_by_output(values) for values in (pred.mean, pred.epistemic, y)]


def _outputs_and_targets(samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the samples (T, N, ...) of a batch to (n, T, D), its targets to (n, D)."""
    y = _by_output(require_finite_targets(match_shape(y, samples[0])))
    return torch.stack([_by_output(sample) for sample in samples], 1), y


def _logits_and_labels(samples: Tensor, y: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Bring the samples (T, N, ...) of a batch to (n, T, K), its labels to (n,), less those that are to be ignored."""
    refuse_probabilities(are_probabilities(samples))
    logits = as_logits(samples)  # (T, N, K, ...)
    T, _, K = logits.shape[:3]
    ignored = torch.zeros_like(y, dtype=torch.bool) if ignore_index is None else y == ignore_index
    labels = require_labels(y.masked_fill(ignored, 0), logits[0]).flatten()
    valid = ~ignored.flatten().to(labels.device)
    return logits.movedim(2, -1).reshape(T, -1, K).transpose(0, 1)[valid], labels[valid]


def candidates(batch_sizes: str | Sequence[int], fitted: int) -> list[int]:
    """List the batch sizes to try, the fitted one first; "auto" takes it times 1/16, 1/8, ... 16."""
    if batch_sizes == "auto":
        tried = [M for power in range(-4, 5) if (M := round(fitted * 2.0**power)) >= 2]
    elif isinstance(batch_sizes, str) or not isinstance(batch_sizes, Sequence) or len(batch_sizes) == 0:
        raise MCBNError(f"batch_sizes must be 'auto' or a list of at least one whole number, got {batch_sizes!r}")
    else:
        tried = [batches.require_int("each of batch_sizes", M, 2) for M in batch_sizes]
    return list(dict.fromkeys([fitted, *tried]))


def best(tuned: Mapping[int, Tuned], score: str) -> int:
    """Choose the batch size of least loss; the first is kept where none is better.

    Outputs of several units count alike: CRPS relative to that of the first batch size, log densities as they are.
    """
    reference = next(iter(tuned.values())).loss  # (D,)

    def loss(M: int) -> float:
        each = tuned[M].loss  # (D,)
        return (each / reference if score == "crps" else each - reference).mean().item()

    return min(tuned, key=loss)


def _by_output(values: Tensor) -> Tensor:
    """Bring (N, D, ...) to rows of outputs, (n, D); (N,) has D = 1."""
    return values.unsqueeze(1) if values.ndim == 1 else values.movedim(1, -1).reshape(-1, values.shape[1])


def require_finite_targets(y: Tensor) -> Tensor:
    """Refuse targets that are NaN or infinite."""
    if not bool(torch.isfinite(y).all()):
        raise MCBNError(f"{int((~torch.isfinite(y)).sum())} validation targets are not finite; leave them out")
    return y


def _gather(rows: Iterable[list[Tensor]]) -> list[Tensor]:
    """Join the tensors of all batches, each along its first axis; targets come last."""
    columns = [torch.cat(column) for column in zip(*rows, strict=True)]
    if not columns or len(columns[-1]) < 2:
        raise MCBNError("tune needs at least 2 held-out targets")
    return columns


def _within_budget(samples: Tensor, y: Tensor, n_batches: int) -> list[Tensor]:
    """Keep so many rows of a batch, samples (n, T, ...) and y (n, ...), that all batches stay within the budget."""
    most = max(2, BUDGET // (math.prod(samples.shape[1:]) * n_batches))
    if len(y) <= most:
        return [samples, y]
    chosen = np.random.default_rng(0).choice(len(y), most, replace=False)
    kept = torch.as_tensor(np.sort(chosen), device=y.device)
    return [samples[kept], y[kept]]
