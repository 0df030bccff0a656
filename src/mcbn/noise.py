"""The noise level tau, tuned on held-out data by a bounded scalar minimiser, and the batch size M beside it."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mcbn import batches
from mcbn.engine.agree import agree
from mcbn.errors import MCBNError, require_choice
from mcbn.metrics import crps_gaussian
from mcbn.network import as_loader
from mcbn.outputs import as_float, as_logits, match_shape, require_labels, split_head
from mcbn.prediction import RegressionPrediction
from mcbn.randomness import iterate

TASKS = ("regression", "classification", "multilabel")
NOISES = ("constant", "head", "full")
SCORES = ("crps", "pll")
BUDGET = 2**23  # numbers kept while tuning, of a random choice of points where there are more
MOST_TEMPERATURE = math.log(100.0)  # of a classifier, either way


class Tuned(NamedTuple):
    """The best tau, and what it reaches: mean CRPS, or mean negative log density up to a constant; lower is better."""

    tau: Tensor  # (), (D,), or the precision matrix (D, D) of noise="full"
    loss: Tensor  # of each output, (D,)
    at_bound: bool = False  # whether tau of an output would go beyond what is tried


def drop_calibration(predictor: Any, stacklevel: int = 3) -> None:
    """Forget the calibration of a predictor that gets other draws or another tau; say so if there was one."""
    if predictor.calibration is not None:
        message = "mcbn: what is predicted changes, so the calibration is dropped; call calibrate(held_out_data) again"
        warnings.warn(message, stacklevel=stacklevel)
    predictor.calibration = None


def require_task(task: str) -> str:
    """Refuse a task that does not exist."""
    return require_choice("task", task, TASKS, " (segmentation is classification)")


def initial_tau(task: str, noise: str = "constant") -> Tensor:
    """Return tau before it is tuned: no observation noise, or the network's own probabilities or variances."""
    return torch.tensor(math.inf if task == "regression" and noise != "head" else 1.0, dtype=torch.float64)


def require_tau(value: float | Tensor, task: str = TASKS[0]) -> Tensor:
    """Check a tau that was set, and keep it as a tensor, (), (D,), or (D, D) for a precision matrix; () of classes."""
    number = not isinstance(value, str | None)
    tau = torch.as_tensor(value if number else 0, dtype=torch.float64).detach().cpu().clone()
    if tau.ndim == 2 and tau.shape[0] == tau.shape[1] and bool(torch.isfinite(tau).all()):
        valid = agree(tau, tau.T) and bool((torch.linalg.eigvalsh(tau) > 0).all())
    else:
        valid = tau.ndim < 2 and bool((tau > 0).all())
    if not valid or (task != "regression" and (tau.ndim > 0 or bool(tau.isinf()))):
        kind = "one for each output, or their precision matrix" if task == "regression" else "1 / temperature"
        raise MCBNError(f"tau must be a positive number, {kind}; got {value!r}")
    return tau


def plain(value: Tensor) -> float | Tensor:
    """Show a tensor () as a number, one of several values as a copy."""
    return value.item() if value.ndim == 0 else value.clone()


def require_score(task: str, score: str | None, noise: str = "constant") -> str:
    """Check what tau is tuned by: CRPS for regression and PLL else where nothing is asked."""
    known = SCORES if task == "regression" and noise != "full" else SCORES[1:]
    return require_choice("score", score or known[0], known)


def warn_if_bound(tuned: Tuned, task: str, batch_size: int | None = None) -> None:
    """Warn whoever called the caller of a tau that stopped at its bound, and say what that means."""
    if tuned.at_bound:
        warnings.warn(f"mcbn: {explain_bound(task, batch_size)}", stacklevel=3)


def explain_bound(task: str, batch_size: int | None = None) -> str:
    """Say what a tau at its bound means and what to do."""
    if task != "regression":
        what = "every label of the validation data is right, so probabilities become 0 and 1"
        return f"the temperature stopped at its lower bound: {what}; tune on more unseen data, or set tau = 1"
    what = "the draws alone spread wider than the errors on the validation data, so intervals are too wide"
    cure = f"fit with a larger batch_size{'' if batch_size is None else f' (now {batch_size})'}"
    return f'the noise stopped at its lower bound: {what}; {cure}, or let tune(data, batch_sizes="auto") choose one'


def tune(
    predictor: Any, data: Any, *, score: str, n_samples: int, targets: Any = None, ignore_index: int | None = None
) -> Tuned:
    """Find the best tau of a predictor's draws on held-out data: of an `mcbn.MCBN`, or of a baseline."""
    pairs, head, full = labelled(predictor, data, targets), predictor.noise == "head", predictor.noise == "full"
    if full or score == "crps":
        options: dict[str, Any] = {"n_samples": n_samples} | ({"covariance": True} if full else {})
        columns = _gather(_moments_and_targets(predictor.predict(x, **options), y, full) for x, y in pairs)
        return _tune_full(*columns) if full else _tune_crps(*columns)
    loader = as_loader(data)
    n_batches = 1000 if isinstance(getattr(loader, "dataset", None), IterableDataset) else len(loader)
    read = partial(_samples_and_targets, predictor, n_samples, max(2, BUDGET // n_batches), ignore_index)
    samples, y = _gather(read(x, y) for x, y in pairs)
    samples = samples.transpose(0, 1)  # (T, n, D), (T, n, 2 D) of a head, or (T, n, K)
    if predictor.task != "regression":
        return _tune_classes(samples, y)
    return _tune_mixture(*(split_head(samples, 2) if head else (samples, torch.zeros_like(samples))), y)


def _tuned(loss: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, *, steps: int = 80) -> Tuned:
    """Minimise a loss of log tau between bounds; one output gets a plain number for its tau."""
    log_tau = minimize_bounded(loss, low, high, steps=steps)
    tau, losses = log_tau.exp(), loss(log_tau).reshape(-1)  # (D,)
    at_bound = bool((high - log_tau < 1e-3).any())
    return Tuned((tau.reshape(()) if tau.numel() == 1 else tau).double().cpu(), losses.double().cpu(), at_bound)


def labelled(predictor: Any, data: Any, targets: batches.Picker) -> Iterator[tuple[Any, Tensor]]:
    """Yield inputs and targets of every batch of held-out data."""
    keys = getattr(predictor, "engine", predictor).network.accepted_keys  # an error until fitted
    for batch in iterate(as_loader(data)):
        yield batches.pick_inputs(batch, predictor.inputs, keys), batches.pick_targets(batch, targets).clone()  # kept


def minimize_bounded(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, *, steps: int = 80) -> Tensor:
    """Minimise a unimodal function between bounds, elementwise: golden sections, each 61.8 % of the last bracket."""
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
    """Find the tau of each output, (D,), of least mean CRPS of N(mean, epistemic + 1/tau) (section 4.2); all (n, D)."""
    return _tune_crps(mean, epistemic, torch.ones_like(mean), y).tau.to(mean.device).reshape(-1)


def constant_tau(mean: Tensor, y: Tensor) -> Tensor:
    """Find the tau of the constant twin by CRPS, one an output, (D,); mean and y (N,) or (N, D, ...) (section 4.2)."""
    rows = _by_output(mean)  # (n, D)
    return tau_by_crps(rows, torch.zeros_like(rows), _by_output(y))


def _tune_crps(mean: Tensor, epistemic: Tensor, scale: Tensor, y: Tensor) -> Tuned:
    """Minimise the mean CRPS of each output; `scale` is the variance of the noise at tau = 1; all (n, D)."""
    mean, epistemic, scale, y = (values.double() for values in (mean, epistemic, scale, y))
    bounds = _log_tau_bounds((mean - y) / scale.sqrt())
    return _tuned(lambda log_tau: crps_gaussian(mean, epistemic + scale * torch.exp(-log_tau), y).mean(0), *bounds)


def _tune_mixture(samples: Tensor, log_variance: Tensor, y: Tensor) -> Tuned:
    """Minimise the mean negative log density of each output, up to a constant (appendix 1.5).

    samples and the log variances s of their noise at tau = 1 (T, n, D), y (n, D);
    -log p = -logsumexp_j(-tau/2 exp(-s_j) (y - f_j)^2 - s_j/2) - 1/2 log tau + constant.
    """
    samples, s, y = samples.double(), log_variance.double(), y.double()
    squares, half = (samples - y).square() * torch.exp(-s), 0.5 * s  # (T, n, D)

    def loss(log_tau: Tensor) -> Tensor:
        return -(torch.logsumexp(-0.5 * log_tau.exp() * squares - half, 0) + 0.5 * log_tau).mean(0)

    return _tuned(loss, *_log_tau_bounds((samples.mean(0) - y) / s.exp().mean(0).sqrt()))


def _tune_full(epistemic: Tensor, residual: Tensor) -> Tuned:
    """Take as covariance of the noise that of residuals r (n, D) less the draws' own E (n, D, D), on average.

    S = 1/n sum_i (r_i r_i^T - E_i), its eigenvalues in units of the residuals kept above the bound of tau.
    """
    low, high = _log_tau_bounds(residual)
    scale = torch.exp(-0.5 * low) / 10  # (D,), root mean squares of the residuals
    difference = (residual.T @ residual / len(residual) - epistemic.mean(0)) / torch.outer(scale, scale)
    values, vectors = torch.linalg.eigh(difference)
    least = float((torch.exp(-high) / scale.square()).min())
    covariance = (vectors * values.clamp(min=least)) @ vectors.T * torch.outer(scale, scale)
    total: Any = torch.distributions.MultivariateNormal(torch.zeros_like(residual), epistemic + covariance)
    loss = -total.log_prob(residual).mean().reshape(1)
    return Tuned(torch.linalg.inv(covariance).cpu(), loss.cpu(), bool((values < least).any()))


def _log_tau_bounds(residual: Tensor) -> tuple[Tensor, Tensor]:
    """Bound log tau by residuals (n, D): noise from 1e-3 squared median errors to 100 mean squares, as in the paper.

    The lower end is reached where the draws alone already spread wider than the errors.
    """
    square = residual.square().mean(0)  # (D,)
    if not bool((square > 0).all()):
        raise MCBNError("the predictions equal every validation target exactly; tune on data it was not made from")
    typical = residual.abs().median(0).values.square()  # (D,)
    return -torch.log(100 * square), -torch.log(1e-3 * torch.where(typical > 0, typical, square))


def inverse_temperature(logits: Tensor, y: Tensor) -> Tensor:
    """Find the tau, (), of largest mean log of the averaged softmax(tau * logits), (T, n, K), for labels y (n,)."""
    return _tune_classes(logits, y).tau.to(logits)


def _tune_classes(logits: Tensor, y: Tensor) -> Tuned:
    """Minimise the mean negative log of the averaged probabilities, up to a constant."""
    index = y.expand(logits.shape[:2]).unsqueeze(2)  # (T, n, 1)
    bound = torch.tensor(MOST_TEMPERATURE, dtype=logits.dtype, device=logits.device)

    def loss(log_tau: Tensor) -> Tensor:
        return -torch.logsumexp(torch.log_softmax(log_tau.exp() * logits, 2).gather(2, index).squeeze(2), 0).mean()

    return _tuned(loss, -bound, bound, steps=40)


def _moments_and_targets(pred: RegressionPrediction, y: Tensor, full: bool) -> list[Tensor]:
    """Return mean, epistemic variance, noise at tau = 1, targets (n, D); full: epistemic (n, D, D) and residuals."""
    y = require_finite_targets(match_shape(y, pred.mean))
    if not full:
        scale = torch.ones_like(pred.mean) if pred.head_variance is None else pred.head_variance
        return [_by_output(values) for values in (pred.mean, pred.epistemic, scale, y)]
    if pred.mean.ndim != 2 or pred.epistemic_covariance is None:
        raise MCBNError(f'noise="full" is for outputs (N, D); the network gives {tuple(pred.mean.shape)}')
    return [pred.epistemic_covariance.double(), y.double() - pred.mean.double()]


def _samples_and_targets(
    predictor: Any, T: int, share: int, ignore_index: int | None, x: Any, y: Tensor
) -> list[Tensor]:
    """Run a batch and keep of its points so many that T samples of each, (n, T, ...), stay within a share."""
    kept, targets, task = None, y, predictor.task

    def run(inputs: Any) -> Tensor:
        nonlocal kept, targets
        columns = []
        for chunk in predictor.draws(inputs, T):  # (t, N, ...)
            rows = as_float(chunk) if task == "regression" else as_logits(chunk, task == "multilabel")
            if kept is None:
                kept, targets = _choose(predictor, rows[0], y, share // T, ignore_index)
            columns.append(torch.stack([_by_output(row)[kept] for row in rows], 1))  # (n, t, ...)
        return torch.cat(columns, 1)

    with torch.no_grad():
        samples = predictor.network.over(x, run, torch.cat)
    return [samples, targets.to(samples.device)]


def _choose(predictor: Any, output: Tensor, y: Tensor, values: int, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Choose points of a batch's output (N, D, ...), at random where all are too many values; and their targets."""
    y = y.to(output.device)
    if predictor.task == "regression":
        mean = split_head(output, 1)[0] if predictor.noise == "head" else output
        targets = _by_output(require_finite_targets(match_shape(y, mean)))  # (n, D)
        valid = torch.arange(len(targets), device=y.device)
    else:
        ignored = torch.zeros_like(y, dtype=torch.bool) if ignore_index is None else y == ignore_index
        targets = require_labels(y.masked_fill(ignored, 0), output).flatten()  # (n,)
        valid = (~ignored).flatten().nonzero()[:, 0]
    most = max(2, values // max(1, output.numel() // max(1, len(targets))))
    if len(valid) > most:
        some = np.sort(np.random.default_rng(0).choice(len(valid), most, replace=False))
        valid = valid[torch.as_tensor(some, device=y.device)]
    return valid, targets[valid]


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
    """Choose the batch size of least loss, the first of equals; CRPS counts relative to that of the first."""
    first = next(iter(tuned.values())).loss  # (D,)
    losses = {M: (t.loss / first if score == "crps" else t.loss - first).mean().item() for M, t in tuned.items()}
    return min(losses, key=losses.__getitem__)


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
