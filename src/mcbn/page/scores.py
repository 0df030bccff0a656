"""A report in words and in one table: MCBN beside its twin and the bounds no uncertainty can pass."""

import math
from typing import NamedTuple

import numpy as np
import torch

from mcbn import metrics
from mcbn.errors import MCBNError
from mcbn.page import curves
from mcbn.page.curves import Vector
from mcbn.page.evidence import Spread, Votes
from mcbn.page.html import number


class Score(NamedTuple):
    """One row: ours, the twin's, the bound, and percent of the way from twin to bound; NaN where there is none."""

    name: str
    better: str
    ours: float
    twin: float
    bound: float
    normalized: float


class Headline(NamedTuple):
    """A sentence with the main number, and the facts that belong to it."""

    sentence: str
    facts: tuple[str, ...]


def regression_scores(found: Spread) -> list[Score]:
    """RMSE, CRPS, PLL and the coverage of 95 % intervals (Teye et al. 2018, Sections 4.1 and 4.2)."""
    mean, y = torch.from_numpy(found.mean), torch.from_numpy(found.y)
    crps, constant = _crps(found)
    rows = [
        Score("RMSE", "lower", float(metrics.rmse(mean, y)), float(metrics.rmse(mean, y)), 0.0, math.nan),
        *_plain_rmse(found),
        _score("CRPS", "lower", crps, constant, metrics.crps_optimum(mean, y).numpy()),
    ]
    if found.log_prob is not None:
        twin = metrics.pll(mean[None], y, found.constant_std**-2).numpy()
        ours, best = _per_point(found.log_prob, len(twin)), metrics.pll_optimum(mean, y).numpy()
        rows.append(_score("PLL", "higher", ours, twin, best))
    inside = [_coverage(found.error, std) for std in (found.std, np.full_like(found.std, found.constant_std))]
    rows.append(Score("Share inside the 95 % interval", "near 0.95", inside[0], inside[1], 0.95, math.nan))
    return rows


def _plain_rmse(found: Spread) -> list[Score]:
    if found.plain is None:
        return []
    return [Score("RMSE of the plain network", "lower", _rmse(found.plain, found.y), math.nan, 0.0, math.nan)]


def _per_point(log_prob: Vector, points: int) -> Vector:
    """Share the joint log likelihood of an input evenly among its points, where it has several (maps)."""
    repeat = points // len(log_prob)
    return np.repeat(log_prob / repeat, repeat)


def class_scores(ours: Votes, plain: Votes | None) -> list[Score]:
    """Accuracy, NLL, Brier score, calibration error, and AUROC of entropy at finding the wrong ones."""
    mine = _class_values(ours)
    theirs = _class_values(plain) if plain else dict.fromkeys(mine, math.nan)
    shown = (
        ("accuracy", "Accuracy", "higher", 1.0),
        ("nll", "Negative log likelihood", "lower", 0.0),
        ("brier", "Brier score", "lower", 0.0),
        ("ece", "Calibration error (ECE)", "lower", 0.0),
        ("entropy", "AUROC of entropy at finding the wrong ones", "higher", 1.0),
        ("information", "AUROC of mutual information at it", "higher", 1.0),
    )
    return [Score(n, better, mine[k], theirs[k], b, _percent(mine[k], theirs[k], b)) for k, n, better, b in shown]


def _class_values(found: Votes) -> dict[str, float]:
    return {
        "accuracy": float(found.right.mean()),
        "nll": float(-found.log_prob.mean()),
        "brier": float(found.brier.mean()),
        "ece": calibration_error(found),
        "entropy": _auroc(found.entropy, found.error),
        "information": _auroc(found.mutual_information, found.error),
    }


def _auroc(uncertainty: Vector | None, wrong: Vector) -> float:
    """Area under the curve; NaN for a single pass, which has no such uncertainty, and where all are right or wrong."""
    if uncertainty is None or not 0 < wrong.sum() < len(wrong):
        return math.nan
    return float(metrics.auroc(torch.from_numpy(uncertainty), torch.from_numpy(wrong)))


def calibration_error(found: Votes) -> float:
    """sum_b count_b |accuracy_b - confidence_b| / N (Guo et al. 2017, Eq. (3))."""
    bins = curves.reliability(found.confidence, found.right)
    return float(np.abs(bins.observed - bins.predicted) @ bins.size / bins.size.sum())


def regression_headline(found: Spread) -> Headline:
    """Say by how much errors differ between the most and the least uncertain points."""
    low, high = curves.tenths(found.std, found.error)
    crps, constant = _crps(found)
    gain = constant - crps
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.nan
    facts = [
        f"Mean absolute error: {number(low, 3)} in the most certain tenth, {number(high, 3)} in the least certain, "
        f"{number(float(found.error.mean()), 3)} over all {len(found.error):,} points.",
        f"The 95 % intervals hold {_coverage(found.error, found.std):.1%} of the points; those of constant uncertainty "
        f"{_coverage(found.error, np.full_like(found.std, found.constant_std)):.1%}.",
        _compare(float(gain.mean()), error),
    ]
    if found.epistemic is not None:
        share = np.mean(found.epistemic) / np.mean(found.std**2)
        own = f"{share:.0%} of the predicted variance is the network's own (epistemic)"
        facts.append(f"{own}; the rest is the noise of the targets.")
    return Headline(_ratio(low, high, "Errors"), tuple(facts))


def _compare(gain: float, error: float) -> str:
    way = "lower (better)" if gain > 0 else "higher (worse)"
    doubt = "" if abs(gain) > 2 * error else ", which cannot be told from chance"
    shown = f"{number(abs(gain), 3)} ± {number(error, 2)} (standard error over points)"
    return f"The CRPS is {way} than that of constant uncertainty by {shown}{doubt}."


def _ratio(low: float, high: float, what: str) -> str:
    if low == 0 and high == 0:
        return f"Neither the most nor the least uncertain tenth has any {what.lower()}."
    if low == 0:
        return f"The least uncertain tenth has no {what.lower()} at all; those in the most uncertain are not 0."
    ratio = high / low
    if ratio >= 1:
        return f"{what} in the most uncertain tenth are {_times(ratio)} those in the least uncertain."
    return f"{what} in the most uncertain tenth are no larger: only {_times(ratio)} those in the least uncertain."


def _times(ratio: float) -> str:
    return f"{ratio:,.1f} times" if ratio >= 0.95 else f"{ratio:.2f} times"


def class_headline(ours: Votes, plain: Votes | None) -> Headline:
    """Say how much more often the most uncertain predictions are wrong than the least uncertain ones."""
    low, high = curves.tenths(ours.entropy, ours.error)
    if low == 0:
        sentence = f"{high:.1%} of the most uncertain tenth are wrong, none of the least uncertain."
    else:
        sentence = _ratio(low, high, "Wrong answers")
    wrong = (
        f"{1 - ours.right.mean():.1%} of all {len(ours.right):,} points are wrong; {low:.1%} of the most certain tenth "
        f"and {high:.1%} of the least certain."
    )
    confidence = f"Mean confidence {ours.confidence.mean():.1%} at an accuracy of {ours.right.mean():.1%}"
    if plain is None:
        return Headline(sentence, (wrong, f"{confidence}."))
    confidence += f"; the plain network: {plain.confidence.mean():.1%} at {plain.right.mean():.1%}."
    return Headline(sentence, (wrong, confidence, _likelihood(ours, plain)))


def _likelihood(ours: Votes, plain: Votes) -> str:
    difference = plain.log_prob - ours.log_prob
    gain = float(-difference.mean())
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return (
        f"The log likelihood is {'higher' if gain >= 0 else 'lower'} than the plain network's by "
        f"{number(abs(gain), 3)} ± {number(error, 2)} nats (standard error over points)."
    )


def _crps(found: Spread) -> tuple[Vector, Vector]:
    """CRPS of MCBN and of its constant twin, (N,) each."""
    mean, y = torch.from_numpy(found.mean), torch.from_numpy(found.y)
    variances = (found.std**2, np.full_like(found.std, found.constant_std**2))
    ours, twin = (metrics.crps_gaussian(mean, torch.from_numpy(v), y).numpy() for v in variances)
    return ours, twin


def _score(name: str, better: str, ours: Vector, twin: Vector, bound: Vector) -> Score:
    means = float(ours.mean()), float(twin.mean()), float(bound.mean())
    return Score(name, better, *means, _percent(*means))


def _percent(ours: float, twin: float, bound: float) -> float:
    try:
        return float(metrics.normalized(ours, twin, bound))
    except MCBNError:  # the bounds coincide or one is infinite: no scale to place the score on
        return math.nan


def _rmse(mean: Vector, y: Vector) -> float:
    return float(np.sqrt(np.mean((mean - y) ** 2)))


def _coverage(error: Vector, std: Vector) -> float:
    return float(curves.interval_coverage(error, std).y[95])
