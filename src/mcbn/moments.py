"""From draws to a prediction: moments streamed over chunks of draws, so that memory does not grow with T."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from mcbn.outputs import are_probabilities, as_float, as_logits, flatten, refuse_probabilities, spread
from mcbn.prediction import Chunks, ClassificationPrediction, RegressionPrediction, entropy, standard_error

LEAST_DRAWS = 8  # a spread estimated from fewer is not trusted to stop


class Moments:
    """Mean and variance over draws, streamed: memory does not grow with T.

    Sums are taken about the first draw, so equal draws give a variance of exactly zero and large means cost no digits.
    """

    def __init__(self, *, covariance: bool = False) -> None:
        self.count = 0
        self.pivot = torch.zeros(())  # the first draw, (N, ...)
        self.sum = torch.zeros(())
        self.squares = torch.zeros(())
        self.products: Tensor | None = torch.zeros(()) if covariance else None  # (N, D, D)

    def add(self, chunk: Tensor) -> None:
        """Take in a chunk of draws, (t, N, ...)."""
        if self.count == 0:
            self.pivot = chunk[0].clone()
            self.sum, self.squares = torch.zeros_like(self.pivot), torch.zeros_like(self.pivot)
        difference = chunk - self.pivot  # (t, N, ...)
        self.count += len(chunk)
        self.sum += difference.sum(0)
        if self.products is not None:
            flat = flatten(difference, 2)  # (t, N, D)
            self.products = self.products.to(flat) + torch.einsum("tni,tnj->nij", flat, flat)
        self.squares += difference.square_().sum(0)

    @property
    def mean(self) -> Tensor:
        """1/T sum_t f_t, (N, ...)."""
        return self.pivot + self.sum / self.count

    @property
    def variance(self) -> Tensor:
        """1/T sum_t f_t^2 - (1/T sum_t f_t)^2, (N, ...)."""
        return (self.squares / self.count - (self.sum / self.count).square()).clamp_(min=0)

    def settled(self, tolerance: float | None) -> bool:
        """Tell whether the standard error of every mean is below the tolerance."""
        if tolerance is None or self.count < LEAST_DRAWS:
            return False
        return bool((standard_error(self.variance, self.count) < tolerance).all())

    @property
    def covariance(self) -> Tensor | None:
        """1/T sum_t f_t^T f_t - mean^T mean over the flattened outputs, (N, D, D)."""
        if self.products is None:
            return None
        shift = flatten(self.sum / self.count, 1)  # (N, D)
        return self.products / self.count - shift.unsqueeze(2) * shift.unsqueeze(1)


def regression(
    chunks: Iterable[Tensor],
    tau: Tensor,
    *,
    covariance: bool = False,
    keep: bool = False,
    tolerance: float | None = None,
    draws: Chunks | None = None,
) -> RegressionPrediction:
    """Stream draws into a regression prediction, all of them or until the mean is known to the tolerance."""
    moments = Moments(covariance=covariance)
    samples = _feed(chunks, lambda chunk: moments.add(as_float(chunk)), moments, keep, tolerance)
    return RegressionPrediction(
        n_samples=moments.count,
        mean=moments.mean,
        epistemic=moments.variance,
        tau=spread(tau, moments.mean),
        epistemic_covariance=moments.covariance,
        samples=samples,
        draws=_first(draws, moments.count),
    )


def _feed(
    chunks: Iterable[Tensor], add: Callable[[Tensor], None], moments: Moments, keep: bool, tolerance: float | None
) -> Tensor | None:
    """Hand on chunks until the moments are known to the tolerance; return what was used, (T, N, ...), if it is kept."""
    kept = []
    for chunk in chunks:
        add(chunk)
        if keep:
            kept.append(chunk)
        if moments.settled(tolerance):
            break
    return torch.cat(kept) if keep else None


def _first(draws: Chunks | None, count: int) -> Chunks | None:
    """Limit what can be run again to the draws that were used."""
    if draws is None:
        return None

    def limited() -> Iterator[Tensor]:
        left = count
        for chunk in draws():
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                return

    return limited


def gaussian(
    mean: Tensor, projected: Tensor, tau: Tensor, n_samples: int, *, covariance: bool, draws: Chunks | None
) -> RegressionPrediction:
    """Make a regression prediction from its mean (N, ...) and a factor (N, D, S') of its epistemic covariance."""
    return RegressionPrediction(
        n_samples=n_samples,
        mean=mean,
        epistemic=projected.square().sum(2).reshape(mean.shape),
        tau=spread(tau, mean),
        epistemic_covariance=projected @ projected.transpose(1, 2) if covariance else None,
        draws=draws,
    )


def classification(
    chunks: Iterable[Tensor], tau: Tensor, *, keep: bool = False, tolerance: float | None = None
) -> ClassificationPrediction:
    """Stream draws into a classification prediction: probabilities are averaged, never logits."""
    moments = Probabilities(tau)
    samples = _feed(chunks, moments.add_outputs, moments, keep, tolerance)
    refuse_probabilities(moments.suspect)
    return ClassificationPrediction(
        n_samples=moments.count,
        probs=moments.mean,
        expected_entropy=moments.entropies / moments.count,
        variance=moments.variance,
        samples=samples,
    )


class Probabilities(Moments):
    """Moments of class probabilities over draws, and the sum of their entropies (N, ...)."""

    def __init__(self, tau: Tensor) -> None:
        super().__init__()
        self.tau, self.entropies = tau, torch.zeros(())
        self.suspect = torch.tensor(False)  # whether outputs are probabilities themselves

    def add_outputs(self, chunk: Tensor) -> None:
        """Take in raw outputs (t, N, K, ...)."""
        if self.count == 0:
            self.suspect = are_probabilities(chunk)
            if not chunk.is_cuda:  # of a GPU that would wait for it: at the end
                refuse_probabilities(self.suspect)
        logits = as_logits(chunk)
        if suits_kernel(logits, self.tau):
            self._add_by_kernel(logits)
            return
        probs = torch.softmax(logits * self.tau.to(logits), 2)  # (t, N, K, ...)
        self.add(probs)
        self.entropies = self.entropies.to(probs) + entropy(probs, 2).sum(0)

    def _add_by_kernel(self, logits: Tensor) -> None:
        """Take in logits (t, N, K, ...) by one kernel of a GPU."""
        from mcbn.engine import kernels

        sums = kernels.Sums(self.pivot, self.sum, self.squares, self.entropies) if self.count else None
        self.pivot, self.sum, self.squares, self.entropies = kernels.add_probabilities(logits, self.tau, sums)
        self.count += len(logits)


def suits_kernel(logits: Tensor, tau: Tensor) -> bool:
    """Tell whether a GPU has a kernel for logits (t, N, K, ...)."""
    if not logits.is_cuda:
        return False
    from mcbn.engine import kernels

    return kernels.suits_probabilities(logits, tau)
