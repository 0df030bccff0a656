"""Predictions on held-out data as vectors over points: one number a point, whatever the task and the size of the data.

A point is one output of one input: a row of a table, an image with its class, a pixel of a segmentation.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcbn.check.diagnosis import ENOUGH_EXAMPLES, Diagnosis
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.noise import constant_tau
from mcbn.outputs import match_shape, require_labels
from mcbn.prediction import central_interval, entropy, smallest_set
from mcbn.progress import bar, counting

Vector: TypeAlias = NDArray[np.float64]
LEVEL, LEAST = 0.95, 19  # of the intervals and sets on the page, and the held-out examples a calibration needs for it
ROWS = 512  # inputs predicted at a time, at most
VALUES = 2**23  # of these inputs: probabilities of a whole data set of images need not fit in memory
VALUES_CHECKED = 2**24  # of all training inputs that the checks run
MOST_SCORED = 2_000_000  # pixels that scores and curves count; more are drawn from at random


@dataclass(frozen=True, eq=False)
class Spread:
    """A regression network on N points, in target units; (N,) each."""

    mean: Vector
    std: Vector  # of the predictive distribution, noise included
    y: Vector
    epistemic: Vector | None  # variance over the draws; None where only their sum with the noise is known
    log_prob: Vector | None  # predictive log likelihood; None where tau was never tuned
    plain: Vector | None  # what the untouched network says; None where it was not asked
    constant_std: float  # of the twin with the same means and one variance
    constant_source: str  # where the constant comes from
    inputs: NDArray[np.int64]  # number of the input that each point belongs to
    inside: Vector  # 1 where the target is in the 95 % interval, calibrated where it is

    @cached_property
    def error(self) -> Vector:
        """Absolute error, (N,)."""
        return np.abs(self.mean - self.y)

    @cached_property
    def constant_stds(self) -> Vector:
        """The twin's std at every point, (N,)."""
        return np.full_like(self.std, self.constant_std)


@dataclass(frozen=True, eq=False)
class Votes:
    """Class probabilities on N points, reduced to what scores and curves need, (N,) each."""

    label: NDArray[np.int64]  # most probable class
    truth: NDArray[np.int64]
    confidence: Vector  # probability of the label
    entropy: Vector  # of the probabilities, in nats
    mutual_information: Vector | None  # part of the entropy on which the draws disagree; None for a single pass
    log_prob: Vector  # of the true class
    brier: Vector  # sum_k (p_k - 1[y = k])^2
    mass_above: Vector  # probability of the classes ranked above the true one
    inputs: NDArray[np.int64]  # number of the input that each point belongs to
    inside: Vector  # 1 where the true class is in the 95 % set, calibrated where it is
    population: int  # points there are; more than N where so many were drawn from them

    @cached_property
    def right(self) -> Vector:
        """1 where the label is the true class, (N,)."""
        return np.asarray(self.label == self.truth, dtype=np.float64)

    @cached_property
    def error(self) -> Vector:
        """1 where the label is wrong, (N,)."""
        return 1 - self.right


def spread(bayes: MCBN[Any], x: Any, y: Tensor, *, validation: Any = None, constant_std: float | None = None) -> Spread:
    """Predict held-out regression data block by block."""
    vectors = _join([_regress(bayes, x_block, y_block) for x_block, y_block in _blocks(x, y)])
    constant = _constant(constant_std, vectors["mean"], vectors["y"], bayes, validation)
    return Spread(**vectors, **constant, inputs=np.repeat(np.arange(len(y)), len(vectors["mean"]) // len(y)))


def _regress(bayes: MCBN[Any], x: Any, y: Tensor) -> dict[str, Tensor | None]:
    pred = bayes.predict(x)
    if pred.mean.ndim in (2, 4) and pred.mean.shape[1] > 1:
        raise MCBNError(
            f"the network has {pred.mean.shape[1]} outputs, each with units of its own; give MCBN an output= that"
            " returns one of them and write a page for each"
        )
    y, std = match_shape(y, pred.mean), pred.variance.sqrt()
    low, high = pred.interval(LEVEL) if _promises(pred) else central_interval(pred.mean, std, LEVEL)
    tuned, inside = bool(torch.isfinite(torch.as_tensor(bayes.tau)).all()), ((low <= y) & (y <= high)).to(y)
    moments = {"mean": pred.mean, "std": pred.variance.double().sqrt(), "epistemic": pred.epistemic}
    log_prob = pred.log_prob(y) if tuned else None
    return moments | {"y": y, "log_prob": log_prob, "plain": bayes.plain_mean(x), "inside": inside}


def _promises(pred: Any) -> bool:
    """Tell whether a prediction is calibrated for the level, whatever group an input belongs to."""
    calibration = pred.calibration
    return calibration is not None and calibration.by != "group" and min(calibration.counts.values()) >= LEAST


def _constant(
    std: float | None, mean: Vector, y: Vector, bayes: MCBN[Any] | None = None, validation: Any = None
) -> dict[str, Any]:
    """Return the twin's one std and its source: as given, or tuned by CRPS (Teye et al. 2018, Section 4.2)."""
    if std is not None:
        if not std > 0:
            raise MCBNError(f"constant_std must be positive, got {std!r}")
        return {"constant_std": std, "constant_source": "as given"}
    source = "tuned on the data shown, which favours the twin"
    if bayes is not None and validation is not None:
        if not isinstance(validation, tuple | list) or len(validation) != 2:
            raise MCBNError(f"validation must be a pair (x, y), got {type(validation).__name__}")
        mean, y = (_vector([values]) for values in (bayes.predict(validation[0]).mean, torch.as_tensor(validation[1])))
        source = "tuned on validation data"
    tau = constant_tau(torch.from_numpy(mean), torch.from_numpy(y))
    return {"constant_std": float(tau.rsqrt()), "constant_source": source}


def spread_of(mean: Tensor, std: Tensor, y: Tensor, constant_std: float | None = None) -> Spread:
    """Take predictions made elsewhere, (N,) each, as Gaussian."""
    if not bool((std > 0).all()):
        raise MCBNError(f"every std must be positive to report on; {int((~(std > 0)).sum())} of {len(std)} are not")
    mean, std, y = (values.double() for values in (mean, std, y))
    low, high = central_interval(mean, std, LEVEL)
    log_prob = -0.5 * ((y - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    inside = ((low <= y) & (y <= high)).double()
    vectors = _join([{"mean": mean, "std": std, "y": y, "log_prob": log_prob, "inside": inside}])
    constant = _constant(constant_std, vectors["mean"], vectors["y"])
    return Spread(**vectors, **constant, epistemic=None, plain=None, inputs=np.arange(len(y)))


def votes(bayes: MCBN[Any], x: Any, y: Tensor, *, ignore_index: int | None = None) -> tuple[Votes, Votes]:
    """Predict held-out classes block by block: MCBN's, and those of the plain network."""
    ours, plain, first = [], [], 0
    valid = torch.ones_like(y, dtype=torch.bool) if ignore_index is None else y != ignore_index  # (N, ...)
    population = int(valid.sum())
    lots = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))  # below 1
    kept = valid.cpu() & (lots < MOST_SCORED / max(1, population))
    for x_block, y_block in _blocks(x, y):
        block = slice(first, first + len(y_block))
        pred = bayes.predict(x_block)
        labels = torch.where(valid[block], y_block, 0)
        sets = pred.set(LEVEL, calibrated=_promises(pred))
        ours.append(_vote(pred.probs, labels, kept[block], first, pred.mutual_information, sets))
        plain.append(_vote(bayes.plain_mean(x_block), labels, kept[block], first))
        first += len(y_block)
    if not kept.any():
        raise MCBNError("every label is the one to ignore: nothing is left to report on")
    return Votes(**_join(ours), population=population), Votes(**_join(plain), population=population)


def votes_of(probs: Tensor, y: Tensor, information: Tensor | None = None) -> Votes:
    """Take class probabilities (N, K) made elsewhere, with their labels (N,)."""
    vectors = _join([_vote(probs, y, torch.ones(y.shape, dtype=torch.bool), 0, information)])
    return Votes(**vectors, population=len(y))


def _vote(
    probs: Tensor, y: Tensor, kept: Tensor, first: int, information: Tensor | None = None, sets: Tensor | None = None
) -> dict[str, Tensor | None]:
    sets = smallest_set(probs, LEVEL) if sets is None else sets
    y, K = require_labels(y, probs), probs.shape[1]
    kept = kept.reshape(y.shape)
    number = (first + torch.arange(len(y))).reshape(-1, *(1,) * (y.ndim - 1)).expand_as(y)[kept]
    flat = probs.movedim(1, -1)[kept.to(probs.device)].double().cpu()  # (points, K)
    inside = sets.gather(1, y.unsqueeze(1)).squeeze(1)[kept.to(probs.device)]  # (points,)
    y = y.cpu()[kept.cpu()]  # (points,)
    chosen = flat.gather(1, y[:, None])  # (points, 1)
    return {
        "label": flat.argmax(1),
        "truth": y,
        "confidence": flat.amax(1),
        "entropy": entropy(flat, 1),
        "mutual_information": None if information is None else information[kept.to(probs.device)],
        "log_prob": chosen[:, 0].log(),
        "brier": (flat - torch.nn.functional.one_hot(y, K)).square().sum(1),
        "mass_above": flat.where(flat > chosen, 0).sum(1),
        "inputs": number,
        "inside": inside.double(),
    }


def _join(blocks: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Any]:
    """Join blocks to vectors (N,) by name, whole numbers as they are; None where no block has any."""
    vectors: dict[str, Any] = {}
    for name in blocks[0]:
        values = [value for block in blocks if (value := block[name]) is not None]
        whole = bool(values) and not values[0].is_floating_point()
        vectors[name] = (torch.cat(values).cpu().numpy() if whole else _vector(values)) if values else None
    return vectors


def _blocks(x: Any, y: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield blocks of a few hundred rows; inputs that are no tensor are one block."""
    if len(y) == 0:
        raise MCBNError("the held-out data is empty")
    if not isinstance(x, Tensor):
        yield x, y
        return
    if len(x) != len(y):
        raise MCBNError(f"x has {len(x)} rows but y {len(y)}")
    rows = max(1, min(ROWS, VALUES // max(1, x[0].numel())))
    with bar("predicting", len(y), "input") as tick:
        for start in range(0, len(y), rows):
            yield x[start : start + rows], y[start : start + rows]
            tick(min(rows, len(y) - start))


def _vector(blocks: Sequence[Tensor]) -> Vector:
    """Join to one float64 vector."""
    joined: Vector = torch.cat([block.detach().reshape(-1) for block in blocks]).double().cpu().numpy()
    if np.isnan(joined).any() or np.isposinf(joined).any():  # -inf is an honest log likelihood
        raise MCBNError("the predictions or targets hold NaN or infinity; leave those rows out")
    return joined


def check_draws(bayes: MCBN[Any], x: Any, train: Any, seed: int) -> Diagnosis:
    """Examine the draws against examples of the training data, few where inputs are as large as those of `x`."""
    size = x[0].numel() if isinstance(x, Tensor) else 1
    n_examples = max(1, min(ENOUGH_EXAMPLES, VALUES_CHECKED // size))
    with warnings.catch_warnings(), bar("checking the draws", None, "batch") as tick, counting(bayes, tick):
        warnings.filterwarnings("ignore", message="mcbn:")  # what they say stands on the page
        return bayes.check(train, n_examples=n_examples, seed=seed)
