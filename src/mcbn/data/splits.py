"""The paper's train/test splits and cross-validation folds, as index tensors."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn.errors import MCBNError

TEST_FRACTION = 0.2  # Teye et al. 2018, Section 4.3
FOLD_SEED = 1  # the published code shuffles every training part with this seed


class Split(NamedTuple):
    """Row indices (int64) of the train+validation part and of the test part."""

    train: Tensor
    test: Tensor


class Fold(NamedTuple):
    """Row indices (int64) of one fold's training part and of its validation part."""

    train: Tensor
    validation: Tensor


def split(n: int, number: int) -> Split:
    """Split `number` (the paper uses 1 to 5) of n rows: a shuffle by NumPy's legacy generator.

    The first round(0.2 n) shuffled indices are the test part, the rest train. Python's round() breaks
    ties to even and Python 2's, which the authors ran, away from zero; n / 5 is never half an integer,
    so both give the same size. Teye et al. 2018, Section 4.3; the seeds are those of the published code.

    Arguments:
        n: number of rows, at least 3 so that neither part is empty.
        number: seed of the shuffle, 1 or more.

    >>> split(10, 1)
    Split(train=tensor([6, 4, 0, 3, 1, 7, 8, 5]), test=tensor([2, 9]))
    """
    _require_integer("n", n, least=3)
    _require_integer("number", number, least=1, most=2**32 - 1)
    order = np.arange(n, dtype=np.int64)
    np.random.RandomState(number).shuffle(order)
    n_test = round(TEST_FRACTION * int(n))
    return Split(train=torch.from_numpy(order[n_test:]), test=torch.from_numpy(order[:n_test]))


def folds(train: Tensor, k: int = 5) -> list[Fold]:
    """Cut the indices `train` (n,) into k validation folds of nearly equal size.

    Seed 1 shuffles `train`, `np.array_split` cuts it; each fold's training part is the rest, sorted and
    shuffled by the same generator, so that its order too is that of the published code.

    Arguments:
        train: distinct row indices, such as `Split.train`.
        k: number of folds, 2 up to n.

    >>> [len(fold.validation) for fold in folds(split(506, 1).train)]
    [81, 81, 81, 81, 81]
    """
    if train.ndim != 1 or train.dtype != torch.int64:
        raise MCBNError(
            f"train must be a 1-D int64 tensor of row indices, got {train.dtype} of shape "
            f"{tuple(train.shape)}; pass the train part of mcbn.data.split"
        )
    _require_integer("k", k, least=2, most=len(train))
    generator = np.random.RandomState(FOLD_SEED)
    order = train.cpu().numpy().copy()
    generator.shuffle(order)
    validations, cut = np.array_split(order, k), []
    for i, validation in enumerate(validations):
        rest = np.sort(np.concatenate(validations[:i] + validations[i + 1 :]))
        generator.shuffle(rest)
        cut.append(Fold(*(torch.from_numpy(indices.copy()).to(train.device) for indices in (rest, validation))))
    return cut


def _require_integer(argument: str, value: int, *, least: int, most: int | None = None) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"from {least} to {most}"
        raise MCBNError(f"{argument} must be a whole number {allowed}, got {value!r}")
