"""tau by validation CRPS, and the scores of one test run."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mcbn import metrics
from mcbn.errors import MCBNError
from mcbn.noise import minimize_bounded

GRID = 60  # points of log tau looked at before the fine search


def tune_tau(mean: Tensor, variance: Tensor, y: Tensor, bounds: tuple[float, float]) -> float:
    """Find the tau within bounds that minimises CRPS of N(mean, variance + 1/tau), averaged within, then over folds.

    mean, variance, y (F, n), NaN beyond a fold's own rows. Teye et al. 2018, Section 4.2; bounds: published code.
    The minimum of a grid of log tau, refined by golden sections between its neighbours.
    """
    score = validation_crps(mean, variance, y)
    grid = torch.linspace(math.log(bounds[0]), math.log(bounds[1]), GRID, dtype=torch.float64)
    best = int(torch.stack([score(point) for point in grid]).argmin())
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    return float(minimize_bounded(score, low, high, steps=30).exp())


def validation_crps(mean: Tensor, variance: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the CRPS that `tune_tau` minimises, as a function of log tau."""
    own = ~y.isnan()
    weight = own / (own.sum(1, keepdim=True) * len(y))  # (F, n): mean over rows, then over folds
    mean, variance, y, weight = (part[own].double() for part in (mean, variance, y, weight))
    return lambda log_tau: (weight * metrics.crps_gaussian(mean, variance + torch.exp(-log_tau), y)).sum()


def score_run(samples: Tensor, y: Tensor, tau: float, tau_constant: float) -> dict[str, float | None]:
    """Score T draws (T, n) of one network at y (n,), original units, as the paper does.

    crps of N(mean, variance + 1/tau); pll of the T-component mixture; *_constant of the same mean with variance
    1/tau_constant; *_optimum bounds; *_normalized in percent between them. Means over the points.
    """
    samples, y = samples.double(), y.double()
    mean, variance = samples.mean(0), samples.var(0, correction=0)
    return _scores(mean, variance + 1 / tau, metrics.pll(samples, y, tau), y, tau_constant)


def score_gaussian(
    mean: Tensor, variance: Tensor, y: Tensor, tau: float, tau_constant: float
) -> dict[str, float | None]:
    """Score a Gaussian epistemic distribution, mean and variance (n,), as `score_run` does draws.

    Its mixture over infinitely many draws is the Gaussian N(mean, variance + 1/tau) itself: pll is that log density.
    """
    mean, total, y = mean.double(), variance.double() + 1 / tau, y.double()
    log_density = -0.5 * ((y - mean).square() / total + torch.log(2 * math.pi * total))  # (n,)
    return _scores(mean, total, log_density, y, tau_constant)


def _scores(mean: Tensor, variance: Tensor, pll: Tensor, y: Tensor, tau_constant: float) -> dict[str, float | None]:
    """Average the scores of a prediction with this total variance and log density, each (n,)."""
    constant = torch.full_like(mean, 1 / tau_constant)
    scores = {
        "rmse": metrics.rmse(mean, y),
        "crps": metrics.crps_gaussian(mean, variance, y).mean(),
        "pll": pll.mean(),
        "crps_constant": metrics.crps_gaussian(mean, constant, y).mean(),
        "pll_constant": metrics.pll(mean[None], y, tau_constant).mean(),
        "crps_optimum": metrics.crps_optimum(mean, y).mean(),
        "pll_optimum": metrics.pll_optimum(mean, y).mean(),
    }
    found = {name: _finite(value) for name, value in scores.items()}
    return with_bounds(found, found)


def with_bounds(scores: Mapping[str, float | None], bounds: Mapping[str, float | None]) -> dict[str, float | None]:
    """Normalise scores between the constant and the optimum of a prediction, their own or another's."""
    names = [f"{name}_{bound}" for bound in ("constant", "optimum") for name in ("crps", "pll")]
    found = {**scores, **{name: bounds[name] for name in names}}
    return found | {f"{name}_normalized": _normalized(found, name) for name in ("crps", "pll")}


def _finite(value: Tensor) -> float | None:
    """JSON has no infinity: the optimum of an exact prediction becomes null."""
    number = float(value)
    return number if math.isfinite(number) else None


def _normalized(scores: Mapping[str, float | None], name: str) -> float | None:
    score, constant, optimum = (scores[key] for key in (name, f"{name}_constant", f"{name}_optimum"))
    if score is None or constant is None or optimum is None:
        return None
    try:
        return float(metrics.normalized(score, constant, optimum))
    except MCBNError:  # the bounds coincide
        return None
