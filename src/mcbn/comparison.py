"""What each alternative gives on your data: one table, and one sentence that says which to take."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import metrics, noise
from mcbn.baselines import ConstantUncertainty, DeepEnsemble
from mcbn.batches import by_name
from mcbn.conformal import inside
from mcbn.errors import MCBNError, require_choice
from mcbn.members import Members
from mcbn.model import MCBN
from mcbn.outputs import flatten, match_shape, require_labels
from mcbn.prediction import SMALLEST, require_level

RESAMPLES = 2000


class Row(NamedTuple):
    """Scores of one method: the lower the better, but for coverage, the share in intervals or sets of the level."""

    method: str
    loss: float  # CRPS or NLL
    ece: float | None  # of classes
    coverage: float
    aurc: float
    milliseconds: float  # an input


class Comparison(NamedTuple):
    """A row a method, from the simplest on, the loss of every test point (methods, N), and the advice."""

    titles: Sequence[str]
    rows: Sequence[Row]
    losses: Tensor
    advice: str

    def __str__(self) -> str:
        lines = [f"{'':32}" + "".join(f"{title:>13}" for title in self.titles)]
        for method, *values in self.rows:
            lines.append(f"{method:32}" + "".join(f"{'-' if v is None else format(v, '.4g'):>13}" for v in values))
        return "\n".join([*lines, "", self.advice])


def compare(
    bayes: "MCBN[Any] | Members",
    validation: Any,
    test: Any,
    *,
    others: Mapping[str, Any] | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Score the plain network, temperature or constant variance, and MCBN in three ways, on the same test data.

    What can be tuned is tuned on the validation data, in copies. The advice is the plain network, or where methods beat
    it beyond chance, the simplest of these that their best does not beat so: the 95 % bootstrap interval of the mean
    difference in loss holds 0.

    Args:
        bayes: a fitted `mcbn.MCBN`, of one network or several; it is left as it is.
        validation, test: (x, y) or a loader of such batches; the test data serve for scores alone.
        others: further predictors by name, such as `mcbn.baselines.MCDropout` and `DeepEnsemble`.
        level: of the intervals (regression) or sets (classification) whose coverage is counted, uncalibrated.
        seed: of the bootstrap.

    >>> mcbn.compare(bayes, (x[:40], y[:40]), (x[40:], y[40:])).advice[:4]
    'Take'
    """
    require_choice("task", bayes.task, ("regression", "classification"))
    require_choice("noise", bayes.noise, noise.NOISES[::2], " to compare")
    level, columns = require_level(level), bayes.engine.network.columns
    validation, test = (by_name(data, columns) for data in (validation, test))
    methods = _methods(bayes, validation)
    for name, other in (others or {}).items():
        if other.task != bayes.task:
            raise MCBNError(f"{name!r} does {other.task}, but the others {bayes.task}; compare like with like")
        methods[name] = _fresh(other).tune(validation).predict
    pairs = list(noise.labelled(bayes, test, None))
    scored = [_score(name, predict, pairs, level) for name, predict in methods.items()]
    rows, losses = [row for row, _ in scored], torch.stack([each for _, each in scored])
    loss = "CRPS" if bayes.task == "regression" else "NLL"
    titles = (loss, "ECE", f"in {100 * level:g} %", "AURC", "ms an input")
    return Comparison(titles, rows, losses, _advise(loss, rows, losses, seed))


def _fresh(predictor: Any) -> Any:
    """Copy a predictor, to be tuned; the user's own keeps its tau and its calibration."""
    twin = copy.copy(predictor)
    twin.calibration = None
    return twin


def _methods(bayes: Any, validation: Any) -> dict[str, Callable[[Any], Any]]:
    """Name the ways to predict with this network, the simplest first."""
    options: Any = {"inputs": bayes.inputs, "output": bayes.output, "outputs": bayes.outputs}
    plain = DeepEnsemble([member.model for member in getattr(bayes, "members", [bayes])], bayes.task, **options)
    tuned, wider = _fresh(bayes).tune(validation), _fresh(bayes).tune(validation, batch_sizes="auto")
    named: dict[str, Callable[[Any], Any]] = {}
    if bayes.task == "classification":
        named["plain"] = plain.predict
        named["temperature"] = copy.copy(plain).tune(validation).predict
    else:
        named["plain, constant variance"] = plain.tune(validation).predict
        named["MCBN mean, constant variance"] = ConstantUncertainty(tuned).tune(validation).predict
    named["MCBN, linear"] = lambda x: tuned.predict(x, method="linear")
    named["MCBN, sampled"] = tuned.predict
    named[f"MCBN, tuned M = {wider.posterior.batch_size}"] = wider.predict
    return named


def _score(
    name: str, predict: Callable[[Any], Any], pairs: Sequence[tuple[Any, Tensor]], level: float
) -> tuple[Row, Tensor]:
    """Score one method; return its row and its loss of every point, (N,)."""
    columns, seconds = [], 0.0
    for x, y in pairs:
        started = time.perf_counter()
        pred = predict(x)
        seconds += time.perf_counter() - started
        columns.append(_judge_labels(pred, y, level) if hasattr(pred, "probs") else _judge_values(pred, y, level))
    loss, covered, uncertainty, error, *classes = (torch.cat(column).cpu() for column in zip(*columns, strict=True))
    ece = metrics.ece(classes[0], classes[1]).item() if classes else None
    aurc = metrics.aurc(uncertainty, error).item()
    return Row(name, loss.mean().item(), ece, covered.double().mean().item(), aurc, 1e3 * seconds / len(loss)), loss


def _judge_values(pred: Any, y: Tensor, level: float) -> tuple[Tensor, ...]:
    """Return CRPS (N,), whether the interval holds, the std and the absolute error, averaged over outputs."""
    y = match_shape(y, pred.mean)
    crps, error = metrics.crps_gaussian(pred.mean, pred.variance, y), (y - pred.mean).abs()
    return tuple(flatten(v, 1).double().mean(1) for v in (crps, inside(pred, y, level), pred.std, error))


def _judge_labels(pred: Any, y: Tensor, level: float) -> tuple[Tensor, ...]:
    """Return NLL, whether the set holds the label, 1 - top probability, error, probabilities and labels."""
    y = require_labels(y, pred.probs)
    probs = pred.probs.movedim(1, -1).flatten(0, -2)  # (points, K)
    covered, labels = inside(pred, y, level).flatten(), y.flatten()
    top, label = probs.max(1)
    loss = -pred.log_prob(y).flatten().double().clamp(min=math.log(SMALLEST))  # where single precision rounds to 0
    return loss, covered, 1 - top, (label != labels).double(), probs, labels


def difference(losses: Tensor, other: Tensor, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of mean(other - losses) over points resampled together, (N,) each."""
    generator, gaps = torch.Generator().manual_seed(seed), (other - losses).double()
    means = [gaps[torch.randint(len(gaps), (len(gaps),), generator=generator)].mean() for _ in range(RESAMPLES)]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _advise(score: str, rows: Sequence[Row], losses: Tensor, seed: int) -> str:
    """Say which method to take: the first, or the simplest as good as the best of those that beat it beyond chance."""
    gains = [difference(each, losses[0], seed) for each in losses]
    better, first = [i for i, (low, _) in enumerate(gains) if low > 0], rows[0]
    if not better:
        return f"Take {first.method!r}: its {score} is {first.loss:.4g}, and nothing here beats it beyond chance."
    best = min(better, key=lambda i: rows[i].loss)
    taken = next(i for i in better if difference(losses[best], losses[i], seed)[0] <= 0)
    (name, loss, *_), (low, high) = rows[taken], gains[taken]
    sure = f"a difference beyond chance (95 % bootstrap interval {low:.4g} to {high:.4g})"
    return f"Take {name!r}: its {score} is {loss:.4g}, {first.loss - loss:.4g} below that of {first.method!r}, {sure}."
