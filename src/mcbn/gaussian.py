"""Gaussian families of q(omega): batch statistics modelled by moments, so that any number of draws come without data.

Let s hold mean mu_B and standard deviation sigma_B of every stochastic batch-norm call, P = 2 sum C numbers. A
family is

    s ~ N(location, C),    C = blockdiag(F_1^T F_1, F_2^T F_2, ...) + diag(d),

with one block over all layers ("gaussian"), one a layer ("layerwise"), or none ("diagonal", the factorised q of Teye et
al. 2018, appendix 1.3). F has at most as many rows as there were draws, and C is never built.

A standard deviation is positive, so its Gaussian is bent into the log-normal of the same mean m and variance v:

    sigma_B = m exp(sqrt(w) z - w / 2),    z = (s - m) / sqrt(v),    w = log(1 + v / m^2).

Why, and which m and v are taken from draws, stands in `gaussian.md` beside this file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mcbn.errors import MCBNError

BLOCKS: dict[str, Callable[[list[int]], list[int]]] = {  # of the families fitted to draws, by the C of every call
    "gaussian": lambda channels: [2 * sum(channels)],
    "layerwise": lambda channels: [2 * C for C in channels],
}
DRAWS_AT_ONCE = 16  # always as many, so that rounding does not depend on how many are asked for
INTENSITIES = torch.logspace(-5, -0.05, 60, dtype=torch.float64)  # shrinkage tried


def join(mean: Mapping[str, Tensor], var: Mapping[str, Tensor]) -> Tensor:
    """Lay draws (T, C) side by side: each call's means, then its standard deviations, (T, P)."""
    return torch.cat([statistic for name in mean for statistic in (mean[name], var[name].sqrt())], 1)


def split(statistics: Tensor, channels: Mapping[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Undo `join`: cut (..., P) into the mean and standard deviation of every call, each (..., C)."""
    columns = torch.split(statistics, [C for C in channels.values() for _ in range(2)], -1)
    return dict(zip(channels, zip(columns[::2], columns[1::2], strict=True), strict=True))


def block_sizes(family: str, channels: Mapping[str, int]) -> list[int]:
    """Return how many successive statistics each block of a family's covariance spans; none of one without blocks."""
    return BLOCKS[family](list(channels.values())) if family in BLOCKS else []


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Moments of all statistics: each call's means, then its standard deviations, in the order of `channels`.

    >>> model = Gaussian("diagonal", {"bn": 2}, torch.ones(4), (), torch.full((4,), 0.01))
    >>> mean, var = model.statistics(3, seed=0)
    >>> mean["bn"].shape, var["bn"].shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    family: str
    channels: Mapping[str, int]  # call name -> C
    location: Tensor  # (P,)
    factors: tuple[Tensor, ...]  # one a block of successive statistics, (R, P_block); none: no block
    diagonal: Tensor  # (P,)

    @property
    def variance(self) -> Tensor:
        """Diagonal of C, (P,)."""
        low_rank = [factor.square().sum(0) for factor in self.factors]
        return self.diagonal + torch.cat(low_rank) if low_rank else self.diagonal

    def scaled(self, factor: float) -> "Gaussian":
        """Multiply the covariance by a number; the location stays."""
        factors = tuple(block * math.sqrt(factor) for block in self.factors)
        return replace(self, factors=factors, diagonal=self.diagonal * factor)

    def moved(self, shift: Tensor, scale: Tensor) -> "Gaussian":
        """Return the Gaussian of shift + scale s, both (P,), scale not negative; log-normal parts stay log-normal."""
        spans = torch.split(scale, block_sizes(self.family, self.channels)) if self.factors else ()
        factors = tuple(factor * span for factor, span in zip(self.factors, spans, strict=True))
        location, diagonal = shift + scale * self.location, self.diagonal * scale.square()
        return replace(self, location=location, factors=factors, diagonal=diagonal)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> "Gaussian":
        """Move all moments to a device and a dtype."""
        location, diagonal, *factors = (t.to(device, dtype) for t in (self.location, self.diagonal, *self.factors))
        return replace(self, location=location, factors=tuple(factors), diagonal=diagonal)

    def deviations(self, n_samples: int, seed: int) -> Tensor:
        """Draw s - location ~ N(0, C), (n, P), in double precision; row t depends on (seed, t) alone."""
        factors = [factor.detach().cpu().double() for factor in self.factors]
        std = self.diagonal.detach().cpu().double().sqrt()  # (P,)
        widths, chunks = [*(len(factor) for factor in factors), len(std)], []
        for start in range(0, n_samples, DRAWS_AT_ONCE):
            draws = range(start, start + DRAWS_AT_ONCE)
            streams = (np.random.Philox(key=[seed, t], counter=[0, 0, 0, 1]) for t in draws)  # not those of the rows
            normal = [np.random.Generator(stream).standard_normal(sum(widths)) for stream in streams]
            *low_rank, alone = torch.split(torch.from_numpy(np.stack(normal)), widths, 1)  # (t, R), ..., (t, P)
            rows = alone * std  # (t, P)
            if factors:
                rows += torch.cat([z @ factor for z, factor in zip(low_rank, factors, strict=True)], 1)
            chunks.append(rows)
        return torch.cat(chunks)[:n_samples]

    def statistics(self, n_samples: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw the mean and variance of every call, each (n, C)."""
        moments = (self.deviations(n_samples, seed), self.location, self.variance)
        deviations, location, variance = (split(t.detach().cpu().double(), self.channels) for t in moments)
        mean, var = {}, {}
        for name, (of_mean, of_std) in deviations.items():
            m, v = location[name][1], variance[name][1]  # (C,) each
            w = torch.log1p(v / m.square()).where(v > 0, v.new_zeros(()))
            z = (of_std / v.sqrt()).where(v > 0, v.new_zeros(()))  # (n, C)
            mean[name] = (location[name][0] + of_mean).to(self.location)
            var[name] = (m * torch.exp(w.sqrt() * z - w / 2)).square().to(self.location)
        return mean, var


def from_draws(mean: Mapping[str, Tensor], var: Mapping[str, Tensor], family: str) -> Gaussian:
    """Fit a Gaussian with full covariance to joint draws of the mean and biased variance of each call, (T, C) each.

    C = (1 - lambda) S + lambda diag(S), S the unbiased covariance of the draws' deviations (of standard deviations as
    `_log_moments` has them): variances stay, lambda (`shrinkage`) settles the directions that T < P draws leave empty.
    The family says whether C reaches across layers ("gaussian") or stays within each ("layerwise").
    """
    channels, like = {name: value.shape[1] for name, value in mean.items()}, next(iter(mean.values()))
    if len(like) < 2:
        what = f"posterior={family!r} needs a covariance, so at least 2 draws"
        raise MCBNError(f"{what}; got {len(like)}: raise n_samples")
    fitted = [fit for name in mean for fit in (_moments(mean[name]), _log_moments(var[name].sqrt()))]
    location, deviations = torch.cat([m for m, _ in fitted]), torch.cat([d for _, d in fitted], 1)  # (P,), (T, P)
    blocks = [_block(columns) for columns in torch.split(deviations, block_sizes(family, channels), 1)]
    diagonal = torch.cat([alone for _, alone in blocks]).to(like)
    return Gaussian(family, channels, location.to(like), tuple(factor.to(like) for factor, _ in blocks), diagonal)


def _moments(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of draws (T, C) and their deviations from it."""
    first = drawn[0].cpu().double()
    shifted = drawn.cpu().double() - first  # about a draw: equal draws have a variance of exactly zero
    return first + shifted.mean(0), shifted - shifted.mean(0)


def _log_moments(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (C,) and deviations (T, C) of the log-normal fitted to positive draws, as `_moments`.

    With a and w the mean and variance of log sigma_B it has mean m = exp(a + w / 2) and variance v = m^2 (e^w - 1);
    deviations are those of the logarithm, times sqrt(v / w). Where that is wider than the log-normal of the draws' own
    mean and variance, as for a unit that some batches leave dead, the latter is taken.
    """
    m, deviations = _moments(drawn)
    log_m, logs = _moments(drawn.log())  # NaN where a draw is zero
    w, unfitted = logs.var(0), torch.log1p(deviations.var(0) / m.square())
    mean = (log_m + w / 2).exp()
    narrow = w < unfitted  # never where NaN
    scaled = logs * mean * (w.expm1() / w).sqrt()
    return torch.where(narrow, mean, m), torch.where(narrow, scaled, deviations)


def _block(deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Return factor (R, P) and diagonal (P,) of the shrunk covariance of deviations (T, P), R the smaller of T, P."""
    T, P = deviations.shape
    intensity = shrinkage(deviations)
    factor = deviations * math.sqrt((1 - intensity) / (T - 1))
    if T > P:
        factor = torch.linalg.qr(factor, mode="r").R  # the same product in fewer rows
    return factor, intensity * deviations.square().sum(0) / (T - 1)


def shrinkage(deviations: Tensor) -> float:
    """Choose lambda for draws with these deviations (T, P) from their mean: the likeliest, at most 2 / (T + 2).

    Along any one direction the covariance of T draws has a squared relative error of 2 / T, however large P; where
    diag(S) is off by a factor r there, shrinking gives lambda^2 (r - 1)^2 + (1 - lambda)^2 2 / T, least at 2 / (T + 2)
    for r = 2. More would help the likelihood when T << P and harm predictions, whose correlated statistics cancel.
    """
    return min(likeliest_intensity(deviations), 2 / (len(deviations) + 2))


def likeliest_intensity(deviations: Tensor) -> float:
    """Choose lambda by the likelihood of every draw under the Gaussian of the others; deviations (T, P) about the mean.

    With d_t a deviation in units of its statistics' standard deviations and A = lambda I + b sum_t d_t d_t^T,
    b = (1 - lambda) / (T - 2), leaving draw t out gives A - a d_t d_t^T, a = b T / (T - 1), and the residual
    d_t T / (T - 1). With q_t = d_t^T A^-1 d_t its log density is, up to a constant, -1/2 of

        log det A + log(1 - a q_t) + (T / (T - 1))^2 q_t / (1 - a q_t),

    all of it from one eigendecomposition of the smaller side. Directions in which draws never vary, as the means of a
    first layer with fewer inputs than units, drive lambda towards zero; so do more draws.
    """
    T = len(deviations)
    scale = deviations.square().sum(0).div(T - 1).sqrt()  # (P,)
    d = deviations[:, scale > 0] / scale[scale > 0]
    if T < 3 or not d.numel():
        return 1.0  # nothing to leave out
    e, directions = principal(d)  # (R,), (R, P)
    intensity = INTENSITIES.to(d)[:, None]  # (L, 1)
    b = (1 - intensity) / (T - 2)
    eigenvalues = intensity + b * e  # (L, R)
    log_det = eigenvalues.log().sum(1) + (d.shape[1] - len(e)) * intensity[:, 0].log()  # (L,)
    q = (1 / eigenvalues) @ (directions @ d.T).square()  # (L, T)
    left = (1 - b * T / (T - 1) * q).clamp(min=1e-300)
    loss = log_det + (left.log() + (T / (T - 1)) ** 2 * q / left).mean(1)  # (L,)
    return float(INTENSITIES[int(loss.argmin())])


def principal(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of u^T u, largest first, and their directions, (min(T, P), P), of rows u (T, P)."""
    T, P = u.shape
    eigenvalues, vectors = torch.linalg.eigh(u @ u.T if T < P else u.T @ u)
    eigenvalues, vectors = eigenvalues.flip(0).clamp(min=0), vectors.flip(1)
    if T < P:  # u = V S W^T, so that W = u^T V / S; a direction without variance has no length to divide by
        vectors = u.T @ vectors / eigenvalues.sqrt().clamp(min=1e-9)
    return eigenvalues, vectors.T


def stretch(drawn: Tensor, factor: float) -> Tensor:
    """Stretch draws (T, C) about their mean: s_bar + factor (s - s_bar)."""
    centre = drawn.double().mean(0)
    return (centre + factor * (drawn.double() - centre)).to(drawn)


def stretch_positive(drawn: Tensor, factor: float) -> Tensor:
    """Stretch positive draws (T, C) in their logarithm, keeping their mean: s_bar s^factor / mean(s^factor)."""
    values = drawn.double()
    weights = torch.softmax(factor * values.log(), 0)  # (T, C), s^factor / sum(s^factor)
    return (values.mean(0) * len(values) * weights).where(values.amax(0) > 0, values.new_zeros(())).to(drawn)
