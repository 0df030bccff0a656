"""Scores of predictions with uncertainty: Teye et al. 2018, Sections 4.1 and 4.2, and for classification.

Symbols: T draws, N points, D outputs, K classes, tau the precision of the observation noise. Arguments are
tensors or what `torch.as_tensor` takes; the first one's device is used; shapes must match exactly. Of classes:
probs (N, K, ...) that sum to 1 over dimension 1, labels y (N, ...), or for several labels an input probs and y (N, K,
...) of 0 and 1; the score is one number, ().
"""

import math
from typing import Any, TypeAlias

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mcbn.errors import MCBNError

TensorLike: TypeAlias = Tensor | ArrayLike

_LOG_2PI = math.log(2 * math.pi)
_CRPS_OPTIMUM = math.erf(math.sqrt(math.log(2) / 2))  # 0.59493...
_SUM_TOLERANCE = 1e-2  # bfloat16 probabilities sum to 1 within 0.4 %; logits do not


def rmse(mean: TensorLike, y: TensorLike) -> Tensor:
    """Root mean squared error sqrt(mean (f - y)^2) over all points and outputs; lower is better.

    >>> rmse([1.0, 2.0], [1.0, 4.0])
    tensor(1.4142)
    """
    return _residual(mean, y).square().mean().sqrt()


def pll(samples: TensorLike, y: TensorLike, tau: TensorLike) -> Tensor:
    """Predictive log likelihood of every point under an equal mixture of T Gaussians; higher is better.

    PLL_i = logsumexp_j(-1/2 sum_d tau_d (y_id - f_jid)^2) - log T - D/2 log 2 pi + 1/2 sum_d log tau_d.
    Teye et al. 2018, Section 4.1 and Appendix 1.5. Differs: the paper prints the constants of D = 1.

    samples (T, N, ...), y (N, ...), tau a number or broadcastable to one output's shape; result (N,).

    >>> pll([[0.0], [2.0]], [1.0], tau=1.0)  # two draws of one point
    tensor([-1.4189])
    """
    samples = _tensor(samples, "samples")
    y = _tensor(y, "y", samples.device)
    if y.ndim < 1 or samples.shape[1:] != y.shape or samples.numel() == 0:
        there = f"got samples {tuple(samples.shape)} and y {tuple(y.shape)}; they are never broadcast: index or reshape"
        raise MCBNError(f"samples must be (T, N, ...) for y (N, ...), not empty; {there}")
    T, N = samples.shape[:2]
    residual = _floating(samples - y).reshape(T, N, -1)  # (T, N, D)
    tau = _tensor(tau, "tau", residual.device, residual.dtype)
    if not ((tau > 0) & tau.isfinite()).all():
        raise MCBNError(f"tau must be positive and finite; got {tau.tolist()}")
    try:
        tau = tau.broadcast_to(y.shape[1:]).reshape(-1)  # (D,)
    except RuntimeError as error:
        raise MCBNError(f"tau {tuple(tau.shape)} does not fit one output {tuple(y.shape[1:])}") from error
    log_mix = torch.logsumexp(-0.5 * (tau * residual.square()).sum(-1), 0)  # (N,)
    return log_mix - math.log(T) - 0.5 * len(tau) * _LOG_2PI + 0.5 * tau.log().sum()


def crps_gaussian(mean: TensorLike, variance: TensorLike, y: TensorLike) -> Tensor:
    """Continuous ranked probability score of N(mean, variance), elementwise, in units of y; lower is better.

    CRPS = integral (F(t) - 1[t >= y])^2 dt = e (2 Phi(z) - 1) + sigma (2 phi(z) - 1/sqrt(pi)),
    e = y - mean, z = e / sigma. Teye et al. 2018, Section 4.1; closed form: Gneiting and Raftery 2007, 4.2.

    mean, variance, y and the result have one shape. Zero variance gives |e|, with gradient 0 in the variance.

    >>> crps_gaussian([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])
    tensor([0.6024, 1.0000])
    """
    e = _residual(mean, y)
    variance, e = _pair(_tensor(variance, "variance", e.device), e, "variance", "y")
    if (variance < 0).any():
        raise MCBNError(f"variance must not be negative; its smallest value is {variance.min().item()}")
    sharp = variance == 0
    # Any positive stand-in for 0 keeps the unused branch, and with it the gradient, finite.
    sigma = _floating(torch.where(sharp, 1, variance)).sqrt()
    z = e / sigma
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    spread = e * torch.erf(z / math.sqrt(2)) + sigma * (2 * density - 1 / math.sqrt(math.pi))
    return torch.where(sharp, e.abs(), spread)


def pll_optimum(mean: TensorLike, y: TensorLike) -> Tensor:
    """Highest PLL any per-point noise could reach, tau_id = (f_id - y_id)^-2; upper bound of `pll` at T = 1.

    PLL*_i = sum_d (-1/2 log 2 pi - 1/2 - log|f_id - y_id|). Teye et al. 2018, Section 4.2.

    mean and y (N, ...); result (N,), +inf where a prediction is exact.

    >>> pll_optimum([0.0], [1.0])
    tensor([-1.4189])
    """
    e = _residual(mean, y)
    if e.ndim < 1:
        raise MCBNError("mean and y must be (N, ...); got two numbers: pass tensors of shape (1,)")
    return (-0.5 * _LOG_2PI - 0.5 - e.abs().log()).reshape(e.shape[0], -1).sum(-1)


def crps_optimum(mean: TensorLike, y: TensorLike) -> Tensor:
    """Lowest Gaussian CRPS any per-point variance could reach, elementwise; lower bound of `crps_gaussian`.

    CRPS* = |f - y| erf(sqrt(ln 2 / 2)), reached at sigma = |f - y| / sqrt(ln 2).
    Teye et al. 2018, Section 4.2. Differs: closed form, where the paper searches numerically.

    >>> crps_optimum([0.0], [1.0])
    tensor([0.5949])
    """
    return _residual(mean, y).abs() * _CRPS_OPTIMUM


def normalized(score: TensorLike, constant: TensorLike, optimum: TensorLike) -> Tensor:
    """Score in percent of the way from constant uncertainty (0) to the optimum (100); higher is better.

    100 (mean score - mean constant) / (mean optimum - mean constant), means over points.
    Teye et al. 2018, Section 4.2. Bounds that coincide or are not finite (an exact prediction has infinite
    `pll_optimum`) raise MCBNError, lest a NaN or a false 0 enter a table.

    Each argument (N,) or its mean as a number; the result is a scalar, float64 if all three are numbers.

    >>> normalized(score=[1.5], constant=[2.0], optimum=[1.0])
    tensor(50.)
    """
    scores = {"score": score, "constant": constant, "optimum": optimum}
    values = [v if isinstance(v, float | int) else _tensor(v, name) for name, v in scores.items()]
    shapes = {tuple(value.shape) for value in values if isinstance(value, Tensor) and value.ndim > 0}
    if len(shapes) > 1:
        raise MCBNError(f"score, constant, optimum must cover the same points; got shapes {sorted(shapes)}")
    s, c, o = (_floating(value).mean() if isinstance(value, Tensor) else float(value) for value in values)
    if not math.isfinite(o - c) or o == c:
        cure = "leave out points that are predicted exactly, or report the raw score"
        raise MCBNError(f"constant {float(c)} and optimum {float(o)} must be finite and differ to scale by; {cure}")
    percent = 100 * (s - c) / (o - c)
    return percent if isinstance(percent, Tensor) else torch.tensor(percent, dtype=torch.float64)


def nll(probs: TensorLike, y: TensorLike) -> Tensor:
    """Mean negative log likelihood -log p_y over points and pixels; lower is better, +inf if some p_y is 0.

    probs (N, K, ...), classes on dimension 1; y (N, ...) integers. Teye et al. 2018, Table 2, prints -NLL.

    >>> nll([[0.5, 0.5], [0.1, 0.9]], [0, 1])
    tensor(0.3993)
    """
    probs, y = _probs_and_labels(probs, y)
    return -probs.gather(1, y.unsqueeze(1)).log().mean()


def brier(probs: TensorLike, y: TensorLike) -> Tensor:
    """Brier score: mean of sum_k (p_k - 1[y = k])^2 over points and pixels, 0 to 2; lower is better.

    >>> brier([[0.5, 0.5], [0.1, 0.9]], [0, 1])
    tensor(0.2600)
    """
    probs, y = _probs_and_labels(probs, y)
    return (probs - torch.zeros_like(probs).scatter(1, y.unsqueeze(1), 1)).square().sum(1).mean()


def accuracy(probs: TensorLike, y: TensorLike) -> Tensor:
    """Share of points and pixels whose most probable class is y, 0 to 1; higher is better.

    >>> accuracy([[0.6, 0.4], [0.1, 0.9]], [0, 0])
    tensor(0.5000)
    """
    probs, y = _probs_and_labels(probs, y)
    return (probs.argmax(1) == y).to(probs.dtype).mean()


def ece(probs: TensorLike, y: TensorLike, n_bins: int = 15) -> Tensor:
    """Expected calibration error over equal-width bins of the top probability, 0 to 1; lower is better.

    ECE = sum_b n_b / N |accuracy_b - confidence_b|, bins (b / n_bins, (b + 1) / n_bins].
    Guo et al. 2017, Eq. (3).

    >>> ece([[0.6, 0.4], [0.1, 0.9]], [0, 1])  # right both times, 60 and 90 % sure
    tensor(0.2500)
    """
    probs, y = _probs_and_labels(probs, y)
    if n_bins < 1:
        raise MCBNError(f"n_bins must be at least 1; got {n_bins}")
    confidence, label = (t.flatten() for t in probs.max(1))  # (points,)
    edges = torch.linspace(0, 1, n_bins + 1, dtype=probs.dtype, device=probs.device)
    gap = (label == y.flatten()).to(probs.dtype) - confidence
    bins = torch.bucketize(confidence.detach(), edges[1:-1])
    return torch.zeros_like(edges[1:]).index_add(0, bins, gap).abs().sum() / gap.numel()


def auroc(score: TensorLike, positive: TensorLike) -> Tensor:
    """Probability that a positive outscores a negative, ties counting half; higher is better, chance is 0.5.

    (sum of the positives' average ranks - P (P + 1) / 2) / (P Q), for P positives and Q negatives.
    Mann and Whitney 1947. score of any shape without NaN, positive of the same shape, bool or 0/1.

    >>> auroc([0.1, 0.4, 0.8], [False, True, True])
    tensor(1.)
    """
    score, positive = _pair(score, positive, "score", "positive")
    if score.isnan().any() or not ((positive == 0) | (positive == 1)).all():
        raise MCBNError("score must hold no NaN and positive only False/True or 0/1")
    positive = positive.bool()
    P = int(positive.sum())
    Q = positive.numel() - P
    if P == 0 or Q == 0:
        raise MCBNError(f"positive must hold both classes; got {P} positives and {Q} negatives")
    _, place, count = torch.unique(score, return_inverse=True, return_counts=True)
    twice_rank = (2 * count.cumsum(0) - count + 1)[place]  # integers: exact however many points
    wins = (twice_rank[positive].sum() - P * (P + 1)).item()
    return torch.as_tensor(wins / (2 * P * Q), dtype=_floating(score).dtype, device=score.device)


def error_auroc(uncertainty: TensorLike, wrong: TensorLike) -> float | None:
    """AUROC of an uncertainty at finding the wrong answers; None where no answer, or every one, is wrong."""
    wrong = _tensor(wrong, "wrong")
    return auroc(uncertainty, wrong).item() if 0 < int(wrong.sum()) < wrong.numel() else None


def risk_coverage(uncertainty: TensorLike, loss: TensorLike) -> tuple[Tensor, Tensor]:
    """Mean loss over the most certain k of N points against k / N: (coverage, risk), (P,) each (El-Yaniv, Wiener 2010).

    Points of equal uncertainty are kept or left together, so that their order does not matter: one point of the curve
    for each of P different uncertainties. Both arguments (N,).

    >>> risk_coverage([0.1, 0.2, 0.3, 0.3], [0, 1, 0, 1])
    (tensor([0.2500, 0.5000, 1.0000], dtype=torch.float64), tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64))
    """
    size, total = _losses_by_rank(uncertainty, loss)
    kept = size.cumsum(0)
    return kept / kept[-1], total.cumsum(0) / kept


def aurc(uncertainty: TensorLike, loss: TensorLike) -> Tensor:
    """Area under the risk-coverage curve, 1/N sum_k risk of the k most certain points; lower is better, ().

    Points of equal uncertainty count as in random order: each with their mean loss (Geifman et al. 2019). Arguments as
    for `risk_coverage`.

    >>> aurc([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1])
    tensor(0.2083, dtype=torch.float64)
    """
    size, total = _losses_by_rank(uncertainty, loss)
    losses = torch.repeat_interleave(total / size, size.long())  # (N,)
    return (losses.cumsum(0) / torch.arange(1, len(losses) + 1, device=losses.device)).mean()


def _losses_by_rank(uncertainty: TensorLike, loss: TensorLike) -> tuple[Tensor, Tensor]:
    """Count points and add up losses of each different uncertainty, the least first, (P,) each in double precision."""
    uncertainty, loss = _pair(uncertainty, loss, "uncertainty", "loss", torch.float64)
    if uncertainty.ndim != 1 or uncertainty.isnan().any() or loss.isnan().any():
        raise MCBNError(f"uncertainty and loss must be (N,) without NaN; got {tuple(uncertainty.shape)}")
    _, place, size = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    return size.double(), torch.zeros(len(size), dtype=loss.dtype, device=loss.device).index_add(0, place, loss)


def worse_mean(drawn: TensorLike, plain: TensorLike, name: str) -> str:
    """Say that the mean over draws is worse than the plain network's by losses of both ("RMSE": their root), or ""."""
    ours, theirs = (_tensor(losses, "losses").double().flatten() for losses in (drawn, plain))
    difference = ours - theirs
    if not difference.mean() > 0:
        return ""
    chance = len(difference) < 2 or bool(difference.mean() < 2 * difference.std() / math.sqrt(len(difference)))
    means = [float(losses.mean()) ** (0.5 if name == "RMSE" else 1) for losses in (ours, theirs)]
    figures = f"{name} {means[0]:.4g} against {means[1]:.4g}{', which may be chance' if chance else ''}"
    cure = 'predict(x, mean="plain"), or --mean plain, keeps that of the network'
    return f"the mean over the draws is worse than the plain network's: {figures}; {cure}"


def worse_probs(drawn: Tensor, plain: Tensor, y: Tensor) -> str:
    """Say that averaged probabilities (N, K, ...) are worse than the plain network's, in labels or else likelihood."""
    pairs = [_probs_and_labels(probs, y) for probs in (drawn, plain)]
    wrong = [probs.argmax(1) != labels for probs, labels in pairs]
    losses = [-probs.gather(1, labels.unsqueeze(1)).log() for probs, labels in pairs]
    return worse_mean(wrong[0], wrong[1], "error rate") or worse_mean(losses[0], losses[1], "NLL")


def _tensor(value: TensorLike, name: str, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MCBNError(f"{name} must be a tensor or array of numbers; got {type(value)}: {error}") from error


def _floating(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def _pair(
    a: TensorLike, b: TensorLike, name_a: str, name_b: str, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return two arguments as tensors on the device of the first, if they have one shape; dtype: of the second."""
    a = _tensor(a, name_a)
    b = _tensor(b, name_b, a.device, dtype)
    if a.shape != b.shape or a.numel() == 0:
        there = f"got {tuple(a.shape)} and {tuple(b.shape)}; they are never broadcast: index or reshape one of them"
        raise MCBNError(f"{name_a} and {name_b} must have the same shape and hold something; {there}")
    return a, b


def _residual(mean: TensorLike, y: TensorLike) -> Tensor:
    mean, y = _pair(mean, y, "mean", "y")
    return _floating(y - mean)


def _probs_and_labels(probs: TensorLike, y: TensorLike) -> tuple[Tensor, Tensor]:
    probs = _tensor(probs, "probs")
    y = _tensor(y, "y", probs.device)
    if probs.shape == y.shape and probs.ndim > 1:  # of several labels each is a class of its own, 1 or 0
        probs = torch.stack([1 - probs, probs], 1)
    if probs.ndim < 2 or probs.shape[:1] + probs.shape[2:] != y.shape or probs.numel() == 0:
        there = f"got probs {tuple(probs.shape)} and y {tuple(y.shape)}"
        raise MCBNError(f"probs must be (N, K, ...) and y (N, ...), not empty; {there}")
    if y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        raise MCBNError(f"y must hold integer class labels; got {y.dtype}: convert with y.long()")
    low, high = y.long().aminmax()
    if low < 0 or high >= probs.shape[1]:
        raise MCBNError(f"y must hold labels 0 to {probs.shape[1] - 1}; got {low.item()} to {high.item()}")
    if not ((probs >= 0).all() and ((probs.sum(1) - 1).abs() <= _SUM_TOLERANCE).all()):
        raise MCBNError("probs must be >= 0 and sum to 1 over dimension 1; apply softmax(1) to logits")
    return _floating(probs), y.long()
