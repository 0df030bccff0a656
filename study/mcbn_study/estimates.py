"""Scores of class probabilities; means over runs, ours or the paper's: errors, differences, how a table shows them."""

import math
from collections.abc import Collection, Iterable
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]
from torch import Tensor

from mcbn import metrics
from mcbn_study.tables import MISSING

_SIGNIFICANCE = (0.05, 0.01, 0.001, 0.0001)


class Estimate(NamedTuple):
    """A mean over n runs."""

    mean: float
    standard_error: float | None  # of the mean; a single run has none
    n: int
    p_value: float | None = None  # of the one-sample t-test of mean 0, where that was asked for
    decimals: int | None = None  # as printed; where None, two digits of the error show, in 2 to 4 decimals
    search: float | None = None  # standard deviation of the mean from search to search, where those were repeated
    searches: int = 1  # that the mean is over

    @property
    def apart(self) -> float:
        """Standard error of the mean against that of one other search: sqrt(e^2 + (1 + 1/S) search^2)."""
        return math.hypot(self.standard_error or 0.0, (self.search or 0.0) * math.sqrt(1 + 1 / self.searches))

    @property
    def searched(self) -> "Estimate":
        """The same mean with one error, of runs and search; its degrees of freedom are the searches less one."""
        error = math.hypot(self.standard_error or 0.0, self.search or 0.0)
        tested = self.p_value if self.search is None else p_value(self.mean, error, self.searches)
        return self._replace(standard_error=error, p_value=tested, search=None)

    @property
    def half_unit(self) -> float:
        """Half a unit of the last printed digit: a mean before rounding is that near."""
        return 0.5 * 10.0 ** -(self.decimals or 0)


def estimate(values: Iterable[float], *, scale: float = 1, decimals: int | None = None) -> Estimate:
    """Mean and standard error sqrt(sum (v - mean)^2 / (n - 1) / n) of scaled values, at least one."""
    scaled = [scale * value for value in values]
    n = len(scaled)
    return Estimate(fmean(scaled), stdev(scaled) / math.sqrt(n) if n > 1 else None, n, None, decimals)


def p_value(mean: float, standard_error: float | None, n: int) -> float | None:
    """Two-sided one-sample t-test of mean 0: t = mean / error with n - 1 degrees of freedom.

    Two-sided because the paper gives stars to scores below 0 too, and its p-values follow so from its means and errors.
    None where nothing can be said: a single run, or only zeros.
    """
    if standard_error is None or (standard_error == 0 and mean == 0):
        return None
    return 2 * float(stdtr(n - 1, -abs(mean) / standard_error)) if standard_error else 0.0


def welch(ours: Estimate, theirs: Estimate) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the difference of two means, from their standard errors.

    d = mean - mean_2, s^2 = e^2 + e_2^2, d +- t s with df = s^4 / (e^4 / (n - 1) + e_2^4 / (n_2 - 1)). Welch 1947.
    Where searches were repeated, e holds their spread and n counts them.
    """
    difference = ours.mean - theirs.mean
    a, b = (e.apart**2 for e in (ours, theirs))
    if a + b == 0:
        return difference, difference
    n, m = (e.n if e.search is None else e.searches for e in (ours, theirs))
    df = 1 / ((a / (a + b)) ** 2 / (n - 1) + (b / (a + b)) ** 2 / (m - 1))
    half = float(stdtrit(df, 0.975)) * math.sqrt(a + b)
    return difference - half, difference + half


def stars(p_value: float | None) -> str:
    """Significance as the paper marks it: * < .05, ** < .01, *** < .001, **** < .0001, else ns."""
    if p_value is None:
        return ""
    return "*" * sum(p_value < level for level in _SIGNIFICANCE) or "ns"


def cell(estimate: Estimate | None, show: str = "error", *, sign: str = "") -> str:
    """Show the mean with its "error" or its "stars", or the "p" value; a dash for no estimate; sign "+" for gains."""
    if estimate is None:
        return MISSING
    if show == "p":
        return MISSING if estimate.p_value is None else f"{estimate.p_value:.2E}"
    if show == "stars":
        return f"{estimate.mean:z.2f} {stars(estimate.p_value)}".rstrip()
    decimals = _decimals(estimate)
    errors = [estimate.standard_error, estimate.searched.standard_error]
    shown = [f"{error:.{decimals}f}" for error in errors[: 1 if estimate.search is None else 2] if error is not None]
    return " ± ".join([f"{estimate.mean:{sign}z.{decimals}f}", *([" / ".join(shown)] if shown else [])])


def mean_cell(values: Collection[float], *, scale: float = 1, decimals: int | None = None, sign: str = "") -> str:
    """Show the mean of scaled values with its standard error; a dash for no value."""
    return cell(estimate(values, scale=scale, decimals=decimals) if values else None, sign=sign)


class Score(NamedTuple):
    """How tables show the mean of a score: its heading, the factor and the decimals."""

    title: str
    scale: float = 1
    decimals: int = 4

    def cell(self, values: Collection[float], *, sign: str = "") -> str:
        """Show the mean of values with its standard error; a dash for no value."""
        return mean_cell(values, scale=self.scale, decimals=self.decimals, sign=sign)


def difference(ours: Estimate | None, theirs: Estimate | None) -> str:
    """Ours minus theirs, with the 95 % interval where both have a standard error; a dash where one is missing."""
    if ours is None or theirs is None:
        return MISSING
    shown = f"{ours.mean - theirs.mean:+z.{_decimals(ours)}f}"
    if ours.standard_error is None or theirs.standard_error is None:
        return shown
    low, high = (f"{end:z.{_decimals(ours)}f}" for end in welch(ours, theirs))
    return f"{shown} ({low} to {high})"


def _decimals(estimate: Estimate) -> int:
    if estimate.decimals is not None:
        return estimate.decimals
    error = estimate.standard_error
    return min(4, max(2, 1 - math.floor(math.log10(error)))) if error else 2


def class_scores(probs: Tensor, y: Tensor, *names: str) -> dict[str, Any]:
    """Score class probabilities (N, K), in double precision; return all scores but nll, or those named.

    pll: mean_n log p_n(y_n) (Teye et al. 2018, section 4.4), nll is -pll, pll_error the standard error over the images;
    error_auroc: how well 1 - max_k p_k finds the wrong labels, None where no label, or every one, is wrong.
    """
    probs, y = probs.double(), y.to(probs.device)
    log_p = log_likelihood(probs, y)
    scores: dict[str, Any] = {
        "pll": float(log_p.mean()),
        "pll_error": standard_error(log_p),
        "accuracy": float(metrics.accuracy(probs, y)),
        "ece": float(metrics.ece(probs, y)),
        "brier": float(metrics.brier(probs, y)),
        "error_auroc": metrics.error_auroc(1 - probs.amax(1), probs.argmax(1) != y),
    }
    return {name: (scores | {"nll": -scores["pll"]})[name] for name in names or scores}


def log_likelihood(probs: Tensor, y: Tensor) -> Tensor:
    """Log probability of the labels: probs (..., N, K), y (N,) give (..., N); finite where a probability is 0."""
    return probs.gather(-1, y.expand(probs.shape[:-1]).unsqueeze(-1)).squeeze(-1).clamp(min=1e-300).log()


def standard_error(values: Tensor) -> float:
    """s / sqrt(n)."""
    return float(values.double().std() / len(values) ** 0.5)
