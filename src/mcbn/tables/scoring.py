"""Scores on held-out data beside those of a twin that knows less, and their sheet.

Regression has the constant twin (same mean, one variance; Teye et al. 2018, Section 4.2), classes the plain network.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jinja2 import Environment, PackageLoader
from torch import Tensor

from mcbn import metrics, noise
from mcbn.conformal import inside, promised
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.outputs import flatten, match_shape, require_labels

LEVELS = (0.5, 0.9, 0.95)
Pairs = Iterable[tuple[Any, Tensor]]  # inputs and targets, block by block
Scores = dict[str, float | None]
Report = dict[str, Any]  # scores and what they were made with, as JSON has them
ITSELF = "the scored data itself, so it is the best constant there"


def _gather(rows: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join the rows of all blocks."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        raise MCBNError("the data to score gives no batch at all; give it afresh, with one example or more")
    return [torch.cat(column) for column in columns]


def _inside(pred: Any, y: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the share of each input inside its interval or set of every level, (N, L), and which are calibrated."""
    shares = [flatten(inside(pred, y, level), 1).double().mean(1) for level in levels]
    return torch.stack(shares, 1), torch.tensor([[promised(pred, level) for level in levels]])


def _coverage(levels: Sequence[float], shares: Tensor, calibrated: Tensor) -> Report:
    """Average what `_inside` counted over inputs, by level; which levels were promised."""
    coverage = dict(zip([f"{level:g}" for level in levels], shares.mean(0).tolist(), strict=True))
    kept = [level for level, each in zip(coverage, calibrated[0], strict=True) if each]
    return {"coverage": coverage, "calibrated": kept}


def evaluate_regression(
    bayes: MCBN[Any], pairs: Pairs, levels: Sequence[float] = LEVELS, *, constant: Tensor | None = None, **options: Any
) -> Report:
    """Score a fitted and tuned MCBN on targets, streaming: a few numbers are kept for each point.

    constant: tau of the constant twin, (D,); None: the best for these very targets, which favours the twin. levels: of
    the intervals whose coverage is measured. Normalised: how far MCBN is on the way from the twin to the optimum.
    """

    def judge(x: Any, y: Tensor) -> tuple[Tensor, ...]:
        pred = bayes.predict(x, **options)
        y = match_shape(y, pred.mean)
        return pred.mean, pred.variance, pred.log_prob(y), y, bayes.plain_mean(x), *_inside(pred, y, levels)

    mean, variance, pll, y, plain, *counted = _gather(judge(x, y) for x, y in pairs)  # (N, ...), pll (N,)
    tau = (noise.constant_tau(mean, y) if constant is None else constant).to(mean)  # (D,)
    spread = tau.reshape(-1, *(1,) * (mean.ndim - 2)) if mean.ndim > 1 else tau.reshape(())
    crps = metrics.crps_gaussian(mean, variance, y)
    constant_crps = metrics.crps_gaussian(mean, (1 / spread).expand_as(mean), y)
    constant_pll, rmse = metrics.pll(mean.unsqueeze(0), y, spread), metrics.rmse(mean, y).item()

    return {
        "n_points": len(y),
        "worse_mean": metrics.worse_mean((mean - y).square(), (plain - y).square(), "RMSE") or None,
        "mcbn": {"rmse": rmse, "crps": crps.mean().item(), "pll": pll.mean().item()},
        "constant": {"rmse": rmse, "crps": constant_crps.mean().item(), "pll": constant_pll.mean().item()},
        "normalized_percent": {
            "crps": _normalized(crps, constant_crps, metrics.crps_optimum(mean, y)),
            "pll": _normalized(pll, constant_pll, metrics.pll_optimum(mean, y)),
        },
        **_coverage(levels, *counted),
        "constant_tau": tau.tolist() if len(tau) > 1 else tau.item(),
    }


def _normalized(score: Tensor, constant: Tensor, optimum: Tensor) -> float | None:
    try:
        return metrics.normalized(score, constant, optimum).item()
    except MCBNError:  # a point predicted exactly has no finite optimum
        return None


def evaluate_classification(bayes: MCBN[Any], pairs: Pairs, levels: Sequence[float] = LEVELS, **options: Any) -> Report:
    """Score class probabilities beside those of the plain network; the AUROC asks whether entropy finds the errors."""

    def judge(x: Any, y: Tensor) -> tuple[Tensor, ...]:
        pred, plain = bayes.predict(x, **options), bayes.plain_mean(x)
        if bayes.task != "multilabel":
            return pred.probs, plain, require_labels(y, pred.probs), *_inside(pred, y, levels)
        probs, plain = (torch.stack([1 - p, p], 1) for p in (pred.probs, plain))  # each label is a class of its own
        return probs, plain, require_labels(y, probs)

    probs, plain, y, *counted = _gather(judge(x, y) for x, y in pairs)
    scores = {"mcbn": _class_scores(probs, y), "plain": _class_scores(plain, y)}
    scores |= _coverage(levels, *counted) if counted else {}
    return {"n_points": len(y), "worse_mean": metrics.worse_probs(probs, plain, y) or None, **scores}


def _class_scores(probs: Tensor, y: Tensor) -> Scores:
    scores: Scores = {name: getattr(metrics, name)(probs, y).item() for name in ("accuracy", "nll", "brier", "ece")}
    return scores | {"error_auroc": metrics.error_auroc(torch.special.entr(probs).sum(1), probs.argmax(1) != y)}


def gather(bayes: MCBN[Any], scores: Report, *, data: str, n_samples: int | None, tuned_on: str | None) -> Report:
    """Put scores and what they were made with into one nest of plain values; what does not exist is None."""
    noise = {"noise_std": bayes.noise_std} if bayes.task == "regression" else {"temperature": 1 / bayes.tau}
    report = {
        "data": data,
        "task": bayes.task,
        "n_samples": n_samples or bayes.posterior.n_samples,
        "batch_size": bayes.posterior.batch_size,
        "tau": bayes.noise_precision.tolist(),
        **{name: torch.as_tensor(value).tolist() for name, value in noise.items()},
        **scores,
    }
    return report | {"constant_tau_tuned_on": tuned_on or ITSELF} if "constant" in scores else report


def as_text(report: Report) -> str:
    """Lay the scores out as a table."""
    page = Environment(loader=PackageLoader(__package__, ""), trim_blocks=True, lstrip_blocks=True)
    page.filters["number"] = number
    return page.get_template("scores.txt.j2").render({"coverage": {}, **report}).rstrip()


def number(value: float | list[float] | None) -> str:
    """Write with four digits; a dash stands for what does not exist."""
    if isinstance(value, list):
        return ", ".join(map(number, value))
    return "-" if value is None else f"{value:.4g}"
