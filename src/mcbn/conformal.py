"""Promises that hold: intervals and sets calibrated on held-out data, by split conformal prediction.

C(x) holds every y that scores at most the k-th smallest of n held-out scores, k = ceil((n + 1) level). Then for any n

    level <= P(y in C(x)) < level + 1 / (n + 1)    (the upper end where no scores are equal)

over held-out examples and new one together, PROVIDED THAT they are exchangeable: drawn alike, and unseen by training
and `tune` (Vovk et al. 2005; Lei et al. 2018, arXiv 1604.04173). Where the data shift, the promise ends.

Scores: "std" |y - mean| / std; "absolute" |y - mean|; "quantile" -log min(F(y), 1 - F(y)), F that of the T-component
mixture (Chernozhukov et al. 2021, arXiv 1909.07889, in logarithms); "aps": probability of the classes down to y, the
most probable first, less 1 (Romano et al. 2020, arXiv 2006.02544); "raps" adds weight (rank - free)+ (arXiv
2009.14193). The most probable class scores least in both, so that no set is empty. "lac" is -p_y: the smallest sets on
average, which may be empty (Sadinle et al. 2019, arXiv 1609.00451).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from mcbn import batches, noise
from mcbn.errors import MCBNError, require_choice
from mcbn.outputs import flatten, match_shape, require_labels
from mcbn.prediction import central_interval, require_level

SCORES = {"regression": ("std", "absolute", "quantile"), "classification": ("aps", "raps", "lac")}
PIXELS = 256  # drawn from every image: they stand for all of it
ROUNDING = 32  # units in the last place that equal scores may differ by, computed in other batches
BISECTIONS = 60
TENSORS = ("scores", "uncertainty", "loss")
Rows = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # scores (N, P, D), group, and what `reject` needs, (N,)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Held-out scores, sorted: whatever level is asked, its threshold is among them."""

    score: str
    scores: Mapping[int, Tensor]  # of each group, (m, D); D = 1 where outputs are taken together
    counts: Mapping[int, int]  # independent examples behind them
    by: str = "all"  # or "class", or "group": given with the data
    level: float | None = None  # where `interval` and `set` name none
    method: str = "sample"
    n_samples: int | None = None
    randomized: bool = False
    penalty: tuple[float, int] = (0.0, 0)
    uncertainty: Tensor | None = None  # (n,), of one output an input: what `reject` ranks by
    loss: Tensor | None = None  # (n,): absolute error, or 1 where the label is wrong
    mismatch: str = ""  # why the promise does not hold of a prediction

    def threshold(self, level: float, group: int = 0) -> Tensor:
        """Return the score that `level` of new examples stay below, (D,).

        Of m = n P scores, P pixels of each of n images, the k-th with k = ceil((n + 1) level P): then the expected
        share of pixels inside is at least the level (risk control, Angelopoulos et al. 2022, arXiv 2208.02814).
        """
        if group not in self.scores:
            kind = "class" if self.by == "class" else "group"
            raise MCBNError(f"no held-out example was of {kind} {group}; there are {sorted(self.scores)}")
        scores, n = self.scores[group], self.counts[group]
        require_enough(level, n, "" if self.by == "all" else f" of {self.by} {group}")
        return scores[math.ceil(round((n + 1) * level * len(scores) / n, 6)) - 1]

    def thresholds(self, level: float | None, like: Tensor, groups: Any = None) -> Tensor:
        """Return the thresholds of predictions (N, D, ...) in a shape that broadcasts to theirs."""
        level = require_level(self.level if level is None else level)
        if self.mismatch:
            raise MCBNError(f"{self.mismatch}; calibrate for that, or ask for calibrated=False")
        if (groups is not None) != (self.by == "group"):
            raise MCBNError("groups= goes with a calibration by groups: give it to both of them, or to neither")
        if self.by == "class":
            table = torch.stack([self.threshold(level, k) for k in range(like.shape[1])], 1)  # (1, K)
        elif self.by == "group":
            numbers, place = torch.unique(require_groups(groups, len(like)), return_inverse=True)
            table = torch.stack([self.threshold(level, int(group)) for group in numbers])[place]  # (N, D)
        else:
            table = self.threshold(level).unsqueeze(0)  # (1, D)
        return outward(table.reshape(*table.shape, *(1,) * (like.ndim - 2)) if like.ndim > 1 else table[:, 0], like)

    def interval(self, pred: Any, level: float | None, groups: Any = None) -> tuple[Tensor, Tensor]:
        """Return (low, high) of a regression prediction, each shaped as its mean."""
        threshold = self.thresholds(level, pred.mean, groups)
        if self.score == "quantile":
            return mixture_interval(pred.all_samples(), pred.tau, threshold)
        half = threshold * (pred.variance.sqrt() if self.score == "std" else torch.ones_like(pred.mean))
        return pred.mean - half, pred.mean + half

    def set(self, probs: Tensor, level: float | None, groups: Any = None, seed: int = 0) -> Tensor:
        """Return which classes belong to the set, boolean, shaped as the probabilities (N, K, ...)."""
        return (self.score_classes(probs, seed) <= self.thresholds(level, probs, groups)) | probs.isnan()  # then all

    def score_classes(self, probs: Tensor, seed: int) -> Tensor:
        """Score every class (N, K, ...); random shares are drawn by the seed, one an input and pixel."""
        if self.score == "lac":
            return -probs
        if self.randomized:
            generator = torch.Generator().manual_seed(seed)
            share = torch.rand(len(probs), 1, *probs.shape[2:], generator=generator).to(probs)
        return set_scores(probs, self.penalty, share if self.randomized else None)

    def for_prediction(self, method: str, n_samples: int, mean: str = "drawn") -> "Calibration":
        """Return itself, or a copy that refuses: scores of one way to predict promise nothing of another."""
        there = f"method={self.method!r}, n_samples={self.n_samples}, mean='drawn'"
        here = f"method={method!r}, n_samples={n_samples}, mean={mean!r}"
        return self if here == there else replace(self, mismatch=f"calibrated with {there}, but predicted with {here}")

    def pack(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Describe it by tensors and text, as `MCBN.save` keeps it."""
        tensors = {f"calibration.scores.{group}": scores for group, scores in self.scores.items()}
        tensors |= {f"calibration.{n}": getattr(self, n) for n in TENSORS[1:] if getattr(self, n) is not None}
        text = {name: value for name, value in asdict(self).items() if name not in TENSORS} | {"less": 1}
        return tensors, {"calibration": json.dumps(text)}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> "Calibration":
        """Put together what `pack` described."""
        settings: dict[str, Any] = json.loads(metadata["calibration"])
        settings |= {"counts": {int(g): n for g, n in settings["counts"].items()}, "penalty": (*settings["penalty"],)}
        settings |= {name: tensors.get(f"calibration.{name}") for name in TENSORS[1:]}
        more = (1 - settings.pop("less", 0)) * (settings["score"] in SCORES["classification"])  # in files of before
        return cls(scores={g: tensors[f"calibration.scores.{g}"] - more for g in settings["counts"]}, **settings)


def calibrate(
    predictor: Any,
    data: Any,
    *,
    level: float | None = None,
    score: str | None = None,
    joint: bool = False,
    groups: Any = None,
    method: str = "sample",
    n_samples: int | None = None,
    targets: Any = None,
    ignore_index: int | None = None,
    randomize: bool = False,
    penalty: tuple[float, int] = (0.01, 2),
    seed: int = 0,
) -> Calibration:
    """Score held-out data under a fitted predictor; `MCBN.calibrate` documents the arguments."""
    by = "all" if groups is None else "class" if isinstance(groups, str) and groups == "class" else "group"
    known = SCORES[require_choice("the task to calibrate", predictor.task, tuple(SCORES))]
    score = require_choice("score", score or known[0], known)
    if by == "class" and predictor.task != "classification":
        raise MCBNError('groups="class" is for classification; give one group number an example')
    if randomize and score == "lac":
        raise MCBNError('randomize=True is for score="aps" and "raps"; sets of "lac" hold the level without')
    penalty, level = penalty if score == "raps" else (0.0, 0), None if level is None else require_level(level)
    if score == "quantile" and predictor.noise != "constant":
        raise MCBNError(f'score="quantile" is for noise="constant", not {predictor.noise!r}; take score="std"')
    if not isinstance(penalty, Sequence) or [isinstance(p, int | float) and p >= 0 for p in penalty] != [True, True]:
        raise MCBNError(f"penalty must be (cost of a class, how many are free), got {penalty!r}")
    settings = Calibration(score, {}, {}, by, level, method, randomized=randomize, penalty=penalty)
    numbers = require_groups(groups, None, data) if by == "group" else None
    options: dict[str, Any] = {"n_samples": n_samples, "return_samples": score == "quantile"}
    options |= {} if method == "sample" else {"method": method}
    rows, first = [], 0
    for x, y in noise.labelled(predictor, data, targets):
        pred = predictor.predict(x, **options)
        none = torch.zeros(first + len(y), dtype=torch.long)
        group = (none if numbers is None else torch.cat([numbers, none]))[first : first + len(y)]  # too few: told below
        read = _score_labels if predictor.task == "classification" else _score_values
        rows.append(read(pred, y, settings, group, (joint, seed + first, ignore_index)))
        first, n_samples = first + len(y), pred.n_samples
    if numbers is not None and len(numbers) != first:
        raise MCBNError(f"groups holds {len(numbers)} numbers for {first} held-out examples; give one an example")
    calibration = replace(settings, n_samples=n_samples, **_gather(rows))
    for number in calibration.scores if level is not None else ():
        calibration.threshold(require_level(level), number)  # refuse now what would be refused later
    return calibration


def _gather(rows: Sequence[Rows]) -> dict[str, Any]:
    if not sum(len(scores) for scores, *_ in rows):
        raise MCBNError("calibrate needs held-out examples with targets, got none")
    joined: Any = (None if column[0] is None else torch.cat(column).cpu() for column in zip(*rows, strict=True))
    scores, group, uncertainty, loss = joined
    if count := int(scores.isnan().flatten(1).any(1).sum()):
        raise MCBNError(f"predictions of {count} held-out examples are NaN: look at these inputs, and at the weights")
    by_group = {int(g): scores[group == g] for g in group.unique()}
    counts = {g: len(some) for g, some in by_group.items()}
    ordered = {g: some.flatten(0, 1).sort(0).values for g, some in by_group.items()}
    return {"scores": ordered, "counts": counts, "uncertainty": uncertainty, "loss": loss}


def _score_values(pred: Any, y: Tensor, settings: Calibration, group: Tensor, how: tuple[Any, ...]) -> Rows:
    y = noise.require_finite_targets(match_shape(y, pred.mean))
    scores = error = (y - pred.mean).abs()
    std = pred.variance.sqrt()
    if settings.score == "quantile":
        scores = mixture_scores(pred.all_samples(), pred.tau, y)
    elif settings.score == "std":
        if bool((std == 0).any()):
            fault = f"the predictive std is 0 for {int((std == 0).sum())} of {std.numel()} predictions, so no scale"
            raise MCBNError(f'{fault}: tune(validation_data) first, which adds the noise, or take score="absolute"')
        scores = error / std
    ranked = (std.flatten(), error.flatten()) if pred.mean[:1].numel() == 1 else (None, None)
    return _lay_out(scores, None, *how[:2]), group, *ranked


def _score_labels(pred: Any, y: Tensor, settings: Calibration, group: Tensor, how: tuple[Any, ...]) -> Rows:
    (joint, seed, ignore_index), probs, dense = how, pred.probs, pred.probs.ndim > 2
    if settings.by == "class" and dense:
        raise MCBNError('groups="class" is for one label an input: pixels of an image are not independent')
    ignored = torch.zeros_like(y, dtype=torch.bool) if ignore_index is None else y == ignore_index
    labels = require_labels(y.masked_fill(ignored, 0), probs)
    valid = ~ignored.reshape(labels.shape).to(labels.device)
    kept = flatten(valid, 1).any(1)  # (N,)
    scores = settings.score_classes(probs, ~seed).gather(1, labels.unsqueeze(1))[kept]  # (N, 1, ...)
    group = labels[kept] if settings.by == "class" else group.to(kept.device)[kept]
    top, label = probs.max(1)
    ranked = (None, None) if dense else (1 - top[kept], (label != labels)[kept].to(probs.dtype))
    return _lay_out(scores, None if ignore_index is None else valid[kept], joint, seed), group, *ranked


def _lay_out(scores: Tensor, valid: Tensor | None, joint: bool, seed: int) -> Tensor:
    """Lay scores (N, D, ...) out as (N, P, D): all pixels or some of them, or (N, 1, 1) where they count together."""
    N, D, P = len(scores), scores.shape[1] if scores.ndim > 1 else 1, math.prod(scores.shape[2:])
    scores = scores.reshape(N, D, P).double()
    mask = torch.ones_like(scores[:, 0]) if valid is None else flatten(valid, 1).to(scores)  # (N, P)
    if joint:
        return scores.masked_fill(mask.unsqueeze(1) == 0, -math.inf).flatten(1).amax(1).reshape(N, 1, 1)
    if P > PIXELS or (P > 1 and valid is not None):  # also where a batch has no void: as many as of the others
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.multinomial(mask.cpu(), PIXELS, replacement=True, generator=generator)  # (N, P)
        scores = scores.gather(2, chosen.to(scores.device).unsqueeze(1).expand(-1, D, -1))
    return scores.transpose(1, 2)


def promised(pred: Any, level: float) -> bool:
    """Tell whether a prediction is calibrated for this level, whatever group an input belongs to."""
    kept = pred.calibration
    if kept is None or kept.mismatch or kept.by == "group":
        return False
    n = min(kept.counts.get(k, 0) for k in (range(pred.probs.shape[1]) if kept.by == "class" else kept.counts))
    return bool(n * (1 - level) > level - 1e-6)  # enough examples, as `require_enough` asks


def inside(pred: Any, y: Tensor, level: float) -> Tensor:
    """Tell whether the interval or set holds the target, (N, ...): the calibrated one, where it is promised."""
    calibrated = promised(pred, level)
    if hasattr(pred, "probs"):
        held: Tensor = pred.set(level, calibrated=calibrated).gather(1, require_labels(y, pred.probs).unsqueeze(1))
        return held.squeeze(1)
    y = match_shape(y, pred.mean)
    low, high = pred.interval(level) if calibrated else central_interval(pred.mean, pred.variance.sqrt(), level)
    return (low <= y) & (y <= high)


def set_scores(probs: Tensor, penalty: tuple[float, int] = (0.0, 0), share: Tensor | None = None) -> Tensor:
    """Score every class k: -sum_{j: p_j < p_k} p_j - u p_k + weight (rank_k - free)+, shaped as probs (N, K, ...).

    u is the random share (N, 1, ...) that makes coverage exact. Without it u is 0 and the most probable class scores
    -1. That differs from the papers: no set is empty, and sure inputs do not use up the share that may be missed. So
    does the 1 missing everywhere: beside it what is left to the classes below is rounded away, and sets hold them all.
    """
    ordered, order = probs.topk(probs.shape[1], 1)  # all, sorted: ONNX knows no stable sort
    below = torch.cat([ordered[:, 1:].flip(1).cumsum(1).flip(1), torch.zeros_like(ordered[:, :1])], 1)
    weight, free = penalty
    rank = torch.arange(1, probs.shape[1] + 1, device=probs.device).reshape(1, -1, *(1,) * (probs.ndim - 2))
    scores = weight * (rank - free).clamp(min=0).to(probs) - below
    scores = torch.zeros_like(probs).scatter(1, order, scores if share is None else scores - share * ordered)
    return scores if share is not None else scores.scatter(1, probs.argmax(1, keepdim=True), -1.0)


def mixture_scores(samples: Tensor, tau: Tensor, y: Tensor) -> Tensor:
    """-log min(F(y), 1 - F(y)), F(y) = 1/T sum_t Phi(sqrt(tau) (y - f_t)); samples (T, N, ...), y (N, ...)."""
    if bool(torch.isinf(tau).any()):
        raise MCBNError('score="quantile" needs the noise of the targets; call tune(validation_data) before')
    z = tau.double().sqrt() * (y.double() - samples.double())  # (T, N, ...)
    return torch.maximum(_minus_log_tail(z), _minus_log_tail(-z))


def _minus_log_tail(z: Tensor) -> Tensor:
    """-log 1/T sum_t Phi(z_t)."""
    return math.log(len(z)) - torch.logsumexp(torch.special.log_ndtr(z), 0)


def mixture_interval(samples: Tensor, tau: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Find where `mixture_scores` equals the threshold on both sides of the median, by bisection."""
    samples, root = samples.double(), tau.double().sqrt()
    reach = (2 * threshold.double()).sqrt() / root  # Phi(-sqrt(2 s)) < exp(-s)
    least, most = samples.amin(0), samples.amax(0)  # (N, ...)

    def edge(sign: int, inside: Tensor, outside: Tensor) -> Tensor:
        for _ in range(BISECTIONS):
            middle = (inside + outside) / 2
            within = _minus_log_tail(sign * root * (samples - middle)) < threshold
            inside, outside = torch.where(within, middle, inside), torch.where(within, outside, middle)
        return outside.to(threshold.dtype)

    return edge(-1, most, least - reach), edge(1, least, most + reach)


def cross_interval(predictions: Sequence[Any], level: float) -> tuple[Tensor, Tensor]:
    """Return (low, high) by CV+ of predictions of the same inputs, each by a network calibrated on a fold unseen by it.

    low: the floor(alpha (n + 1))-th smallest of mean_k - s_i std_k over all n scores s_i, k the fold of i, alpha = 1 -
    level; high is its mirror. P(y inside) >= 1 - 2 alpha, in practice about 1 - alpha (Barber et al. 2021, 1905.02928).
    """
    N = len(predictions[0].mean)
    scores = [outward(pred.calibration.scores[0].T, pred.mean) for pred in predictions]  # (D, n_k) each
    centres, stds = ([getattr(p, name).reshape(N, -1, 1) for p in predictions] for name in ("mean", "std"))
    edges = [[c + sign * s * std for c, s, std in zip(centres, scores, stds, strict=True)] for sign in (-1, 1)]
    low, high = (torch.cat(edge, 2) for edge in edges)  # (N, D, n)
    n, shape, level = low.shape[2], predictions[0].mean.shape, require_level(level)
    require_enough(level, n)
    k = math.floor(round((1 - level) * (n + 1), 6))
    return low.kthvalue(k, 2).values.reshape(shape), high.kthvalue(n + 1 - k, 2).values.reshape(shape)


def cross_set(predictions: Sequence[Any], level: float) -> Tensor:
    """Return which classes (N, K) score among the lowest of all held-out scores, as `cross_interval` does."""
    below, n = torch.zeros_like(predictions[0].probs), 0
    for pred in predictions:
        scores = outward(pred.calibration.scores[0][:, 0], pred.probs)  # (n_k,)
        below += torch.searchsorted(scores, set_scores(pred.probs))
        n += len(scores)
    return below < require_level(level) * (n + 1)


def outward(scores: Tensor, like: Tensor) -> Tensor:
    """Raise scores a little, as numbers of this dtype: rounding shall not put what equals a threshold outside of it."""
    return (scores + ROUNDING * torch.finfo(like.dtype).eps * scores.abs()).to(like)


def require_enough(level: float, n: int, whose: str = "") -> None:
    """Refuse a level for which ceil((n + 1) level) exceeds n."""
    least = math.ceil(round(level / (1 - level), 6))
    if n < least:
        fault = f"level {level:g} needs at least {least} held-out examples{whose}, calibrate was given {n}"
        raise MCBNError(f"{fault}: give it more, or ask for {n / (n + 1):.3g} at most")


def require_groups(groups: Any, count: int | None, data: Any = None) -> Tensor:
    """Check one whole number an example, (N,); a loader that shuffles would mix them up."""
    numbers: Tensor = batches.as_tensor(groups if isinstance(groups, Tensor) else np.asarray(groups)).cpu()
    if numbers.ndim != 1 or numbers.is_floating_point() or (count is not None and len(numbers) != count):
        given = f"{tuple(numbers.shape)} {numbers.dtype}"
        raise MCBNError(f'groups must be "class" or {count or "n"} whole numbers, one an example; got {given}')
    order = getattr(data.batch_sampler or data, "sampler", None) if isinstance(data, DataLoader) else None
    if isinstance(data, DataLoader) and not isinstance(order, SequentialSampler):
        raise MCBNError("groups are in the order of the data, but this DataLoader shuffles: pass shuffle=False")
    return numbers.long()
