"""Training data as distinct rows with weights: a row of weight 2 is that row twice, one of weight 0 is absent.

All that follows depends on these alone: neither on the order of rows nor on whether repetition is spelled out.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST_EPOCH = 10**6  # whole-number weights above this sum count relative to their mean, like all others
RESOLUTION = 10  # copies of a row of average weight, where weights are not whole numbers


class Rows(NamedTuple):
    """n distinct rows in lexicographic order."""

    x: Tensor  # (n, Q), float64
    y: Tensor  # (n,) or (n, D) float64, or (n,) class numbers
    weights: Tensor  # (n,) positive, float64

    def take(self, index: Tensor) -> "Rows":
        """Choose rows."""
        return Rows(*(values[index] for values in self))

    @property
    def size(self) -> int:
        """W, the rows of one epoch: sum of the weights where they are whole numbers, else n."""
        total, whole = self.weights.sum().item(), bool((self.weights == self.weights.round()).all())
        return int(total) if whole and total <= max(LARGEST_EPOCH, len(self.x)) else len(self.x)

    def order(self, generator: torch.Generator) -> Tensor:
        """Draw the rows of one epoch, (W,), shuffled: row i about W w_i / sum w times, exactly so if that is whole."""
        chosen = systematic(self.weights, self.size, torch.rand((), generator=generator, dtype=torch.float64))
        return chosen[torch.randperm(len(chosen), generator=generator)]

    def repeated(self) -> Tensor:
        """Return indices that repeat each row as its weight says, to within 1 / RESOLUTION of the mean weight."""
        whole = self.size == self.weights.sum().item()
        return systematic(self.weights, self.size if whole else RESOLUTION * len(self.x), torch.tensor(0.5))


def systematic(weights: Tensor, size: int, offset: Tensor) -> Tensor:
    """Choose row i where (k + offset) sum w / size, k < size, falls into its stretch of weights (Madow 1949)."""
    edges = weights.cumsum(0)  # (n,)
    points = (torch.arange(size, dtype=torch.float64) + offset) * (edges[-1] / size)  # (size,)
    return torch.searchsorted(edges, points, right=True).clamp_(max=len(weights) - 1)


def distinct(x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]) -> Rows:
    """Leave out rows of weight 0 and merge equal rows (x, y), adding up their weights."""
    kept = weights > 0
    rows, place = np.unique(np.column_stack([x, y])[kept] + 0.0, axis=0, return_inverse=True)  # -0.0 equals 0.0
    totals = np.bincount(place.reshape(-1), weights[kept])
    inputs, targets = np.split(rows, [x.shape[1]], axis=1)
    return Rows(*map(torch.from_numpy, (inputs, targets.reshape(len(rows), *y.shape[1:]), totals)))


def folds(rows: Rows, k: int, seed: int) -> list[tuple[Rows, Rows]]:
    """Cut rows into at most k held-out parts, class by class, each after the rest of it; equal rows are on one side.

    Below four rows there is nothing to spare: both sides are all of them.
    """
    n = len(rows.x)
    k = min(k, n // 2)
    if k < 2:
        return [(rows, rows)]
    classes = np.zeros(n) if rows.y.is_floating_point() else rows.y.numpy()
    shuffled = np.lexsort((np.random.default_rng(seed).random(n), classes))
    number = torch.empty(n, dtype=torch.int64)
    number[shuffled] = torch.arange(n) % k
    return [(rows.take(number != i), rows.take(number == i)) for i in range(k)]
