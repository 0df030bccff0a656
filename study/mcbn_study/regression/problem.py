"""The training and held-out rows of many streams, standardised, padded and stacked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcbn.data import Regression
from mcbn.networks import Standardized


class Part(NamedTuple):
    """Row indices of one stream's training part and of the rows it is judged on, and the stream's key."""

    train: Tensor
    query: Tensor
    stream: int


@dataclass(frozen=True)
class Rows:
    """Rows of R streams in standardised units; rows beyond a stream's own are zero.

    x (R, N, Q), y (R, N), n (R,) rows of each stream, mask (R, N) which rows are its own.
    """

    x: Tensor
    y: Tensor
    n: Tensor

    @property
    def mask(self) -> Tensor:
        """Tell own rows from padding: (R, N)."""
        return torch.arange(self.x.shape[1], device=self.n.device) < self.n[:, None]


@dataclass(frozen=True)
class Problem:
    """R streams: what they train on, what they are judged on, and the units of the target.

    y_mean, y_std (R,) float64; streams: the key of each.
    """

    train: Rows
    query: Rows
    y_mean: Tensor
    y_std: Tensor
    streams: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.train.x.device


def make_problem(
    data: Regression,
    parts: Sequence[Part],
    device: str | torch.device = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Standardise each part by its own training rows (population std) and stack them on the device."""
    units = [Standardized(nn.Identity(), data.x[part.train], data.y[part.train]) for part in parts]
    train = [unit.standardize(data.x[part.train], data.y[part.train]) for unit, part in zip(units, parts, strict=True)]
    query = [unit.standardize(data.x[part.query], data.y[part.query]) for unit, part in zip(units, parts, strict=True)]
    return Problem(
        _stack(train, device, dtype),
        _stack(query, device, dtype),
        torch.stack([unit.y_mean for unit in units]).double().to(device),
        torch.stack([unit.y_std for unit in units]).double().to(device),
        tuple(part.stream for part in parts),
    )


def _stack(rows: Sequence[tuple[Tensor, Tensor]], device: str | torch.device, dtype: torch.dtype) -> Rows:
    x = nn.utils.rnn.pad_sequence([x.to(dtype) for x, _ in rows], batch_first=True)  # (R, N, Q)
    y = nn.utils.rnn.pad_sequence([y.to(dtype) for _, y in rows], batch_first=True)  # (R, N)
    n = torch.tensor([len(y) for _, y in rows])
    return Rows(x.to(device), y.to(device), n.to(device))
