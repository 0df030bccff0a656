"""Predictions on held-out data as vectors over points: one number a point, whatever the task and the size of the data.

A point is one output of one input: a row of a table, an image with its class, a pixel of a segmentation.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcbn.check.diagnosis import ENOUGH_EXAMPLES, Diagnosis
from mcbn.conformal import inside, promised
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.noise import constant_tau
from mcbn.outputs import match_shape, require_labels
from mcbn.prediction import central_interval, entropy, smallest_set
from mcbn.progress import bar, counting

Vector: TypeAlias = NDArray[np.float64]
Names: TypeAlias = Sequence[str] | None  # of columns, classes or groups, where they are given
Block: TypeAlias = dict[str, Tensor | None]  # some points by the names of `Spread` or `Votes`
LEVEL = 0.95  # of the intervals and sets on the page
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
    constant_std: float  # of the twin with the same means and one variance
    constant_source: str  # where the constant comes from
    inputs: NDArray[np.int64]  # number of the input that each point belongs to
    inside: Vector  # 1 where the target is in the 95 % interval
    epistemic: Vector | None = None  # variance over the draws, where it is known apart from the noise
    log_prob: Vector | None = None  # predictive log likelihood; None where tau was never tuned
    plain: Vector | None = None  # what the untouched network says, where it was asked
    kind: str = "Gaussian"  # of the intervals; or calibrated

    @cached_property
    def error(self) -> Vector:
        """Absolute error, (N,)."""
        return np.abs(self.mean - self.y)


@dataclass(frozen=True, eq=False)
class Votes:
    """Class probabilities on N points, reduced to what scores and curves need, (N,) each."""

    label: NDArray[np.int64]  # most probable class
    truth: NDArray[np.int64]
    confidence: Vector  # probability of the label
    entropy: Vector  # of the probabilities, in nats
    log_prob: Vector  # of the true class
    brier: Vector  # sum_k (p_k - 1[y = k])^2
    mass_above: Vector  # probability of the classes ranked above the true one
    inputs: NDArray[np.int64]  # number of the input that each point belongs to
    inside: Vector  # 1 where the true class is in the 95 % set
    population: int  # points there are; more than N where so many were drawn from them
    mutual_information: Vector | None = None  # part of the entropy on which the draws disagree; None for a single pass
    kind: str = "smallest"  # of the sets; or calibrated

    @cached_property
    def right(self) -> Vector:
        """1 where the label is the true class, (N,)."""
        return np.asarray(self.label == self.truth, dtype=np.float64)

    @cached_property
    def error(self) -> Vector:
        """1 where the label is wrong, (N,)."""
        return 1 - self.right


def spread(bayes: MCBN[Any], x: Any, y: Tensor, *, constant_std: float | None = None) -> Spread:
    """Predict held-out regression data block by block."""
    tuned, points = bool(torch.isfinite(torch.as_tensor(bayes.tau)).all()), []
    for rows, block in _blocks(x, len(y)):
        pred = bayes.predict(block)
        if pred.mean.ndim in (2, 4) and pred.mean.shape[1] > 1:
            cure = "write a page for each, with an output= of MCBN that returns it"
            raise MCBNError(f"the network has {pred.mean.shape[1]} outputs; {cure}")
        target = match_shape(y[rows], pred.mean)
        moments = {"mean": pred.mean, "std": pred.variance.double().sqrt(), "epistemic": pred.epistemic}
        moments |= {"log_prob": pred.log_prob(target) if tuned else None, "plain": bayes.plain_mean(block)}
        points.append(moments | {"y": target, "inside": inside(pred, target, LEVEL).to(target)})
    kind = "calibrated" if promised(pred, LEVEL) else "Gaussian"
    return replace(_with_twin(points, len(y), constant_std), kind=kind)


def spread_of(mean: Tensor, std: Tensor, y: Tensor, constant_std: float | None = None) -> Spread:
    """Take predictions made elsewhere, (N,) each, as Gaussian."""
    if not bool((std > 0).all()):
        raise MCBNError(f"every std must be positive to report on; {int((~(std > 0)).sum())} of {len(std)} are not")
    mean, std, y = (values.double() for values in (mean, std, y))
    low, high = central_interval(mean, std, LEVEL)
    block: Block = {"mean": mean, "std": std, "y": y, "inside": ((low <= y) & (y <= high)).double()}
    block["log_prob"] = torch.distributions.Normal(mean, std, validate_args=False).log_prob(y)  # type: ignore[no-untyped-call]
    return _with_twin([block], len(y), constant_std)


def _with_twin(blocks: Sequence[Block], n_inputs: int, constant_std: float | None) -> Spread:
    """Join blocks and add the twin's one std, given or tuned by CRPS (Teye et al. 2018, Section 4.2)."""
    vectors, source = _join(blocks), "as given"
    if constant_std is None:
        tau = constant_tau(torch.from_numpy(vectors["mean"]), torch.from_numpy(vectors["y"]))
        constant_std, source = float(tau.rsqrt()), "tuned on the data shown, which favours the twin"
    if not constant_std > 0:
        raise MCBNError(f"constant_std must be positive, got {constant_std!r}")
    inputs = np.repeat(np.arange(n_inputs), len(vectors["mean"]) // n_inputs)
    return Spread(**vectors, constant_std=constant_std, constant_source=source, inputs=inputs)


def votes(bayes: MCBN[Any], x: Any, y: Tensor, *, ignore_index: int | None = None) -> tuple[Votes, Votes]:
    """Predict held-out classes block by block: MCBN's, and those of the plain network."""
    valid = torch.ones_like(y, dtype=torch.bool) if ignore_index is None else y != ignore_index  # (N, ...)
    population = int(valid.sum())
    lots = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))  # below 1
    kept = valid.cpu() & (lots < MOST_SCORED / max(1, population))
    labels, ours, plain = torch.where(valid, y, 0), [], []
    for rows, block in _blocks(x, len(y)):
        pred = bayes.predict(block)
        sets = pred.set(LEVEL, calibrated=promised(pred, LEVEL))
        ours.append(_vote(pred.probs, labels[rows], kept[rows], sets, pred.mutual_information))
        probs = bayes.plain_mean(block)
        plain.append(_vote(probs, labels[rows], kept[rows], smallest_set(probs, LEVEL)))
    if not kept.any():
        raise MCBNError("every label is the one to ignore: nothing is left to report on")
    points: dict[str, Any] = {"inputs": kept.nonzero()[:, 0].numpy(), "population": population}
    kind = "calibrated" if promised(pred, LEVEL) else "smallest"
    return Votes(**_join(ours), kind=kind, **points), Votes(**_join(plain), **points)


def votes_of(probs: Tensor, y: Tensor, information: Tensor | None = None) -> Votes:
    """Take class probabilities (N, K) made elsewhere, with their labels (N,)."""
    block = _vote(probs, y, torch.ones_like(y, dtype=torch.bool), smallest_set(probs, LEVEL), information)
    return Votes(**_join([block]), inputs=np.arange(len(y)), population=len(y))


def _vote(probs: Tensor, y: Tensor, kept: Tensor, sets: Tensor, information: Tensor | None = None) -> Block:
    y, K = require_labels(y, probs), probs.shape[1]
    kept = kept.reshape(y.shape).to(probs.device)
    inside = sets.gather(1, y.unsqueeze(1)).squeeze(1)[kept]  # (points,)
    flat, y = probs.movedim(1, -1)[kept].cpu().double(), y[kept].cpu()  # (points, K), (points,)
    chosen = flat.gather(1, y[:, None])  # (points, 1)
    return {
        "label": flat.argmax(1),
        "truth": y,
        "confidence": flat.amax(1),
        "entropy": entropy(flat, 1),
        "mutual_information": None if information is None else information[kept],
        "log_prob": chosen[:, 0].log(),
        "brier": (flat - torch.nn.functional.one_hot(y, K)).square().sum(1),
        "mass_above": flat.where(flat > chosen, 0).sum(1),
        "inside": inside.double(),
    }


def _join(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join blocks to vectors (N,) by name, fractions in double precision; None is left out."""
    known = [name for name, value in blocks[0].items() if value is not None]
    joined = {name: torch.cat([block[name].detach().flatten().cpu() for block in blocks]) for name in known}
    if any(bool((values.isnan() | values.isposinf()).any()) for values in joined.values()):  # -inf: a likelihood of 0
        raise MCBNError("the predictions or targets hold NaN or infinity; leave those rows out")
    return {name: (v.double() if v.is_floating_point() else v).numpy() for name, v in joined.items()}


def _blocks(x: Any, n_inputs: int) -> Iterator[tuple[slice, Any]]:
    """Yield which inputs, a few hundred, and these; inputs that are no tensor are one block."""
    if n_inputs == 0:
        raise MCBNError("the held-out data is empty")
    if not isinstance(x, Tensor):
        yield slice(None), x
        return
    if len(x) != n_inputs:
        raise MCBNError(f"x has {len(x)} rows but y {n_inputs}")
    size = max(1, min(ROWS, VALUES // max(1, x[0].numel())))
    with bar("predicting", n_inputs, "input") as tick:
        for start in range(0, n_inputs, size):
            rows = slice(start, start + size)
            yield rows, x[rows]
            tick(len(x[rows]))


def check_draws(bayes: MCBN[Any], x: Any, train: Any, seed: int) -> Diagnosis:
    """Examine the draws against examples of the training data, few where inputs are as large as those of `x`."""
    n_examples = max(1, min(ENOUGH_EXAMPLES, VALUES_CHECKED // (x[0].numel() if isinstance(x, Tensor) else 1)))
    with warnings.catch_warnings(), bar("checking the draws", None, "batch") as tick, counting(bayes, tick):
        warnings.filterwarnings("ignore", message="mcbn:")  # what they say stands on the page
        return bayes.check(train, n_examples=n_examples, seed=seed)
