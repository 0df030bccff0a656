"""How far a batch's statistics lie from the reference's: a Mahalanobis distance, and ranks that make p-values of it.

z holds mean and log variance of every batch-norm call, P = 2 sum C numbers. With u = (z - location) / scale,
c = the K leading directions of u in the reference and lambda their variance there,

    D = sum_k c_k^2 / (lambda_k + ridge) + (|u|^2 - |c|^2) / (rest + ridge),

rest the mean variance of the remaining directions. With R held-out batches that no number above was fitted on,

    p = (1 + #{D_r >= D}) / (1 + R),

which is at most alpha with probability at most alpha if the batch is exchangeable with the held-out ones, whatever the
distribution of D (Vovk, Gammerman and Shafer 2005, Algorithmic Learning in a Random World, section 2.2).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcbn.engine.record import Statistics
from mcbn.gaussian import principal

EPS = 1e-5  # of batch norm: it cannot tell variances below that apart
DIRECTIONS = 100  # whitened, of 400 reference batches
RIDGE = 1.0  # times their average variance; chosen on validation images under other corruptions (docs/field.md)


class Metric(NamedTuple):
    """What D is made of, in double precision."""

    location: Tensor  # (P,)
    scale: Tensor  # (P,)
    directions: Tensor  # (K, P), orthonormal
    spread: Tensor  # (K,), ridge included
    rest: Tensor  # (), ridge included; inf where no direction remains

    def standardize(self, z: Tensor) -> Tensor:
        """Return u (t, P)."""
        return (z - self.location) / self.scale

    def __call__(self, z: Tensor) -> Tensor:
        """Return D (t,) of coordinates z (t, P)."""
        u = self.standardize(z)
        c = u @ self.directions.T  # (t, K)
        remaining = (u.square().sum(1) - c.square().sum(1)).clamp(min=0)  # (t,)
        return (c.square() / self.spread).sum(1) + remaining / self.rest


def coordinates(statistics: Statistics) -> Tensor:
    """Lay the statistics of batches (t, C) side by side: each call's means, then its log variances, (t, P)."""
    means, variances = (torch.cat(kind, 1).double() for kind in zip(*statistics.values(), strict=True))
    widths = [mean.shape[1] for mean, _ in statistics.values()]
    pairs = zip(torch.split(means, widths, 1), torch.split((variances + EPS).log(), widths, 1), strict=True)
    return torch.cat([coordinate for pair in pairs for coordinate in pair], 1).cpu()  # one copy from a GPU


def fit_metric(z: Tensor, *, directions: int, ridge: float = 0.0) -> Metric:
    """Fit a distance to coordinates z (F, P) of the reference, one row a batch or an input.

    K is at most `directions` and a quarter of F, since variances of few rows are too uncertain to divide by; `ridge` is
    in units of the average variance of the K leading directions, and added to that of every one.
    """
    F, P = z.shape
    location = z.mean(0)
    scale = z.std(0).maximum(1e-6 * (1 + location.abs()))  # a constant number has no scale but its rounding
    variances, basis = principal((z - location) / scale / math.sqrt(F - 1))
    K = min(directions, max(1, F // 4), P)
    ridge = ridge * float(variances[:K].mean())
    rest = variances[K:].sum() / (P - K) + ridge if P > K else torch.tensor(math.inf, dtype=z.dtype)
    return Metric(location, scale, basis[:K], (variances[:K] + ridge).clamp(min=1e-12), rest.clamp(min=1e-12))


def rank_p_values(distances: Tensor, held_out: Tensor) -> Tensor:
    """p = (1 + #{D_r >= D}) / (1 + R) of distances (n,) among held-out ones (R,)."""
    larger = len(held_out) - torch.searchsorted(held_out.sort().values, distances.contiguous(), side="left")
    return (1 + larger).double() / (1 + len(held_out))


def layer_means(values: Tensor, widths: Sequence[int]) -> Tensor:
    """Average neighbouring columns of values (t, P), so many for each layer, (t, L)."""
    lengths = torch.tensor(widths).expand(len(values), -1).contiguous()
    return torch.segment_reduce(values, "mean", lengths=lengths, axis=1)


def layer_scores(u: Tensor, channels: Mapping[str, int]) -> Tensor:
    """Log of the mean square of each call's standardised statistics, (t, L), of u (t, P)."""
    return layer_means(u.square(), [2 * C for C in channels.values()]).clamp(min=1e-300).log()


class Null(NamedTuple):
    """The reference's batches of one size: a distance fitted on some, and the others' distances to rank among.

    A layer's standardised score is ranked among the LARGEST of each held-out batch, so that any layer at all is at most
    alpha with probability at most alpha under the null (Westfall and Young 1993).
    """

    metric: Metric
    held_out: Tensor  # D (R,)
    layer_location: Tensor  # (L,)
    layer_scale: Tensor  # (L,)
    largest: Tensor  # (R,) over layers

    def layers(self, z: Tensor, channels: Mapping[str, int]) -> Tensor:
        """Return the p-value of every layer, (t, L)."""
        scores = (layer_scores(self.metric.standardize(z), channels) - self.layer_location) / self.layer_scale
        return rank_p_values(scores.reshape(-1), self.largest).reshape(scores.shape)


def fit_null(fitting: Tensor, held_out: Tensor, channels: Mapping[str, int]) -> Null:
    """Make the null of coordinates (F, P) to fit with and held out, (R, P)."""
    metric = fit_metric(fitting, directions=DIRECTIONS, ridge=RIDGE)
    scores = layer_scores(metric.standardize(fitting), channels)  # (F, L)
    location, scale = scores.mean(0), scores.std(0).clamp(min=1e-6)
    of_held_out = (layer_scores(metric.standardize(held_out), channels) - location) / scale  # (R, L)
    return Null(metric, metric(held_out), location, scale, of_held_out.amax(1))


def pooled_p_value(distances: Tensor, held_out: Tensor, *, seed: int = 0, rounds: int = 999) -> float:
    """Test several batches at once: are their distances (k,) larger than the held-out ones (R,)? Exact by permutation.

    The sum over the k of -log rank, from above among all k + R, against that of `rounds` random choices of k.
    """
    k, everything = len(distances), torch.cat([distances, held_out])
    ranks = len(everything) - torch.searchsorted(everything.sort().values, everything, side="left")  # 1: the largest
    scores = -(ranks.double() / len(everything)).log()
    order = torch.rand(rounds, len(everything), generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k]
    return (1 + int((scores[order].sum(1) >= scores[:k].sum() - 1e-9).sum())) / (1 + rounds)
