"""The paper's scores as torchmetrics: `update` batch by batch, `compute` once, summed over processes.

Each keeps sums and a count alone, O(1) memory, in double precision, and equals the mean of the function of
`mcbn.metrics` it names over all points seen. Teye et al. 2018, Sections 4.1 and 4.2.
"""

from typing import Any

import torch
from torch import Tensor

from mcbn import metrics
from mcbn.errors import MCBNError, extra

with extra("torchmetrics", "mcbn.torchmetrics needs torchmetrics"):
    from torchmetrics import Metric

__all__ = ["PLL", "GaussianCRPS", "NormalizedCRPS", "NormalizedPLL"]


class _Means(Metric):
    """Means over points of one or several scores, as sums and a count."""

    is_differentiable = False
    full_state_update = False
    n_scores = 1
    sums: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(self.n_scores, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, *scores: Tensor) -> None:
        """Take in scores of the same points."""
        self.sums += torch.stack([score.detach().double().sum() for score in scores]).to(self.sums.device)
        self.count += scores[0].numel()

    def compute(self) -> Tensor:
        """Return the mean over points and outputs, normalised where the bounds have been taken in too."""
        if not self.count:
            raise MCBNError(f"{type(self).__name__} has seen no points; call update first")
        means = self.sums / self.count
        return metrics.normalized(*means) if self.n_scores == 3 else means[0]


class PLL(_Means):
    """Mean predictive log likelihood, `mcbn.metrics.pll`; higher is better.

    tau: precision of the noise, a number or broadcastable to one output's shape.
    """

    higher_is_better = True

    def __init__(self, tau: metrics.TensorLike, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tau = tau

    def update(self, samples: Tensor, y: Tensor) -> None:
        """Take in samples (T, N, ...), as of `MCBN.sample`, and targets (N, ...)."""
        self._add(metrics.pll(samples, y, self.tau))


class GaussianCRPS(_Means):
    """Mean CRPS of N(mean, variance), `mcbn.metrics.crps_gaussian`, in units of y; lower is better."""

    higher_is_better = False

    def update(self, mean: Tensor, variance: Tensor, y: Tensor) -> None:
        """Take in predictive moments and targets of one shape."""
        self._add(metrics.crps_gaussian(mean, variance, y))


class NormalizedCRPS(_Means):
    """CRPS from constant uncertainty (0) to the optimum (100 percent), `mcbn.metrics.normalized`; higher is better.

    constant_tau: precision of the constant twin, the same mean with one variance, tuned on validation data.
    """

    higher_is_better = True
    n_scores = 3  # ours, the constant twin's, the optimum

    def __init__(self, constant_tau: metrics.TensorLike, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.constant_tau = constant_tau

    def update(self, mean: Tensor, variance: Tensor, y: Tensor) -> None:
        """Take in predictive moments and targets of one shape, (N, ...)."""
        constant = (1 / torch.as_tensor(self.constant_tau, dtype=mean.dtype, device=mean.device)).expand_as(mean)
        ours, theirs = (metrics.crps_gaussian(mean, spread, y) for spread in (variance, constant))
        self._add(ours, theirs, metrics.crps_optimum(mean, y))


class NormalizedPLL(PLL):
    """PLL from constant uncertainty (0) to the optimum (100 percent), `mcbn.metrics.normalized`; higher is better.

    tau: precision of the noise; constant_tau: that of the constant twin, the mean of the samples with one variance.
    """

    n_scores = 3

    def __init__(self, tau: metrics.TensorLike, constant_tau: metrics.TensorLike, **kwargs: Any) -> None:
        super().__init__(tau, **kwargs)
        self.constant_tau = constant_tau

    def update(self, samples: Tensor, y: Tensor) -> None:
        """Take in samples (T, N, ...) and targets (N, ...)."""
        mean = samples.mean(0)  # (N, ...)
        constant = metrics.pll(mean.unsqueeze(0), y, self.constant_tau)
        self._add(metrics.pll(samples, y, self.tau), constant, metrics.pll_optimum(mean, y))
