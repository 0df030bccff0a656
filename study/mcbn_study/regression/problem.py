"""What the networks of a study train on, and their random numbers: R streams, standardised, padded and stacked.

A stream is one (dataset, split, fold, seed). Its random numbers depend on it and on a position alone, not on what else
runs or on which device. Networks of a stream that differ in configuration share its row orders, initial weights,
dropout uniforms and batches of statistics: common random numbers.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mcbn.data import Regression
from mcbn.networks import Standardized

Purpose = Literal["rows", "weights", "training dropout", "dropout draws", "batch draws"]
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as signed 64-bit numbers
_FEW_BITS = 24  # a float32 holds these exactly
_LAST = 2**63 - 1


class Part(NamedTuple):
    """Row indices of one stream's training part and of the rows it is judged on, and the stream's key."""

    train: Tensor
    query: Tensor
    stream: int


@dataclass(frozen=True)
class Rows:
    """Rows of R streams in standardised units; rows beyond a stream's own are zero."""

    x: Tensor  # (R, N, Q)
    y: Tensor  # (R, N)
    n: Tensor  # (R,): how many are a stream's own

    @property
    def mask(self) -> Tensor:
        """Tell own rows from padding: (R, N)."""
        return torch.arange(self.x.shape[1], device=self.n.device) < self.n[:, None]


@dataclass(frozen=True)
class Problem:
    """R streams: what they train on, what they are judged on, and the units of the target."""

    train: Rows
    query: Rows
    y_mean: Tensor  # (R,) float64
    y_std: Tensor
    streams: tuple[int, ...]  # the key of each

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.train.x.device

    @property
    def targets(self) -> Tensor:
        """Return what the networks are judged by in original units, (R, n) float64; NaN beyond a stream's own rows."""
        y = self.query.y.double() * self.y_std[:, None] + self.y_mean[:, None]
        return y.masked_fill(~self.query.mask, torch.nan)

    def keys(self, purpose: Purpose) -> Tensor:
        """Return the key of every stream for one use, (R,)."""
        return torch.tensor([purpose_key(stream, purpose) for stream in self.streams], device=self.device)


def make_problem(
    data: Regression, parts: Sequence[Part], device: str | torch.device = "cpu", *, dtype: torch.dtype = torch.float32
) -> Problem:
    """Standardise each part by its own training rows (population std) and stack them on the device."""
    units = [Standardized(nn.Identity(), data.x[part.train], data.y[part.train]) for part in parts]
    train = [unit.standardize(data.x[part.train], data.y[part.train]) for unit, part in zip(units, parts, strict=True)]
    query = [unit.standardize(data.x[part.query], data.y[part.query]) for unit, part in zip(units, parts, strict=True)]
    y_mean, y_std = torch.stack([unit.y_mean for unit in units]), torch.stack([unit.y_std for unit in units])
    rows = _stack(train, device, dtype), _stack(query, device, dtype)
    return Problem(*rows, y_mean.double().to(device), y_std.double().to(device), tuple(part.stream for part in parts))


def _stack(rows: Sequence[tuple[Tensor, Tensor]], device: str | torch.device, dtype: torch.dtype) -> Rows:
    x = nn.utils.rnn.pad_sequence([x.to(dtype) for x, _ in rows], batch_first=True)  # (R, N, Q)
    y = nn.utils.rnn.pad_sequence([y.to(dtype) for _, y in rows], batch_first=True)  # (R, N)
    return Rows(x.to(device), y.to(device), torch.tensor([len(y) for _, y in rows]).to(device))


def stream_key(dataset: str, split: int, fold: int | None, seed: int) -> int:
    """Name the stream of one training part by 63 bits; fold None is the whole of train+CV."""
    return _digest(f"{dataset}/{split}/{'all' if fold is None else fold}/{seed}")


def purpose_key(stream: int, purpose: Purpose) -> int:
    """Derive the key of one use, so that a stream's orders, weights and masks are unrelated."""
    return _digest(f"{stream}/{purpose}")


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """Hash keys (R,) and counters (n,), int64, to independent 64-bit numbers (R, n).

    z = key + (counter + 1) golden, then two rounds of xor-shift and multiply: SplitMix64 (Steele et al. 2014)
    at any position without the ones before.
    """
    z = keys[:, None] + (counters + 1) * _GOLDEN  # wraps, as the generator does
    z = (z ^ _shift(z, 30)).mul_(_MIX_1)
    z = (z ^ _shift(z, 27)).mul_(_MIX_2)
    return z ^ _shift(z, 31)


def uniforms(keys: Tensor, outer: Tensor, n_rows: int, n_units: int) -> Tensor:
    """Draw float32 numbers in [0, 1) by (stream, outer position (A,), row, unit) alone: (R, A, n_rows, n_units)."""
    rows, units = (torch.arange(count, device=keys.device) for count in (n_rows, n_units))
    counters = (outer[:, None, None] << 32) + (rows[:, None] << 10) + units  # (A, rows, units)
    bits = _shift(random_bits(keys, counters.flatten()), 64 - _FEW_BITS)
    return bits.float().mul_(2.0**-_FEW_BITS).view(len(keys), *counters.shape)


def row_orders(keys: Tensor, n_rows: Tensor, epochs: Tensor) -> Tensor:
    """Permute rows of streams, keys and n_rows (R,), for epochs (E,): (R, E, N), N the most; padding rows come last."""
    rows = torch.arange(int(n_rows.max()), device=keys.device)  # (N,)
    counters = (epochs[:, None] << 32) + rows  # (E, N)
    bits = random_bits(keys, counters.flatten()).view(len(keys), *counters.shape)
    return bits.masked_fill_(rows >= n_rows[:, None, None], _LAST).argsort(-1)


def batch_draws(stream: int, n_rows: int, n_samples: int, batch_size: int) -> np.ndarray[tuple[int, int], np.dtype]:
    """Draw T batches of M distinct rows, independently of each other: (T, M)."""
    generator = np.random.default_rng(purpose_key(stream, "batch draws"))
    return np.stack([generator.choice(n_rows, batch_size, replace=False, shuffle=False) for _ in range(n_samples)])


def _shift(z: Tensor, places: int) -> Tensor:
    """Shift right without copying the sign."""
    return (z >> places).bitwise_and_((1 << (64 - places)) - 1)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
