"""From draws to a prediction: moments streamed over chunks of draws, so that memory does not grow with T."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcbn import prediction
from mcbn.outputs import as_float, as_logits, flatten, probabilities, split_head, spread
from mcbn.prediction import ClassificationPrediction, MultilabelPrediction, RegressionPrediction

if TYPE_CHECKING:
    from mcbn.linear import Linearised
    from mcbn.network import Network

MEANS = ("drawn", "plain")
LEAST_DRAWS = 8  # a spread estimated from fewer is not trusted to stop
LEAST_PIVOT = 1e-6  # probability that draws are compared with: below it a ratio would cost digits
Draws = Callable[[int], Iterator[Tensor]] | None


class Moments:
    """Mean and variance over draws, streamed as sums about the first: equal draws give a variance of exactly zero."""

    def __init__(self, *, covariance: bool = False) -> None:
        self.count = 0
        self.pivot = self.sum = self.squares = torch.zeros(())  # pivot: the first draw, (N, ...)
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

    @property
    def covariance(self) -> Tensor | None:
        """1/T sum_t f_t^T f_t - mean^T mean over the flattened outputs, (N, D, D)."""
        if self.products is None:
            return None
        shift = flatten(self.sum / self.count, 1)  # (N, D)
        return self.products / self.count - shift.unsqueeze(2) * shift.unsqueeze(1)


def summarise(
    predictor: Any, chunks: Iterable[Tensor], *, draws: Draws, covariance: bool, **options: Any
) -> RegressionPrediction | ClassificationPrediction:
    """Stream the draws of a predictor into a prediction as its task asks for; `draws`: the first so many again."""
    head, tau = predictor.noise == "head", predictor.noise_precision
    if predictor.task != "regression":
        return classification(chunks, tau, several=predictor.task == "multilabel", **options)
    moments, variances = Moments(covariance=covariance), Moments()

    def add(chunk: Tensor) -> None:
        outputs = as_float(chunk)
        if head:
            outputs, log_variance = split_head(outputs, 2)
            variances.add(log_variance.exp())
        moments.add(outputs)

    samples = _feed(chunks, add, moments, **options)
    values, own = (moments.mean, moments.variance, moments.covariance), variances.mean if head else None
    return _regression(tau, *values, moments.count, draws, samples=samples, head_variance=own)


def _regression(
    tau: Tensor, mean: Tensor, variance: Tensor, covariance: Tensor | None, T: int, draws: Draws, **more: Any
) -> RegressionPrediction:
    """Put moments over T draws and the noise together."""
    values: dict[str, Any] = {"mean": mean, "epistemic": variance, "epistemic_covariance": covariance}
    return RegressionPrediction(n_samples=T, tau=spread(tau, mean), draws=draws and partial(draws, T), **values, **more)


def _feed(
    chunks: Iterable[Tensor], add: Any, moments: Moments, *, keep: bool = False, tolerance: float | None = None
) -> Tensor | None:
    """Hand on chunks until the moments are known to the tolerance; return what was used, (T, N, ...), if it is kept."""
    kept = []
    for chunk in chunks:
        add(chunk)
        kept += [chunk] if keep else []
        if tolerance is not None and moments.count >= LEAST_DRAWS:
            errors = prediction.standard_error(moments.variance, moments.count)
            if bool((errors < tolerance).all()):
                break
    return torch.cat(kept) if keep else None


def gaussian(predictor: Any, linear: "Linearised", *, draws: Draws, covariance: bool) -> RegressionPrediction:
    """Predict by a linearised network; a log variance s is Gaussian as well: E[exp(s)] = exp(E[s] + Var[s] / 2)."""
    mean, projected, T = linear.mean, linear.projected, linear.deviations.shape[0]  # (N, ...), (N, D, S')
    variance, head_variance = projected.square().sum(2).reshape(mean.shape), None
    if predictor.noise == "head":
        (mean, log_mean), (variance, log_variance) = split_head(mean, 1), split_head(variance, 1)
        head_variance, projected = torch.exp(log_mean + log_variance / 2), projected[:, : projected.shape[1] // 2]
    full = projected @ projected.transpose(1, 2) if covariance else None
    return _regression(predictor.noise_precision, mean, variance, full, T, draws, head_variance=head_variance)


def classification(
    chunks: Iterable[Tensor], tau: Tensor, *, several: bool = False, **options: Any
) -> ClassificationPrediction:
    """Stream logits of draws into averaged class probabilities; several: an input has a logit for each label."""
    moments = Probabilities(tau, several)
    samples = _feed(chunks, moments.add_outputs, moments, **options)
    mean, variance = (value[:, 1] if several else value for value in (moments.mean, moments.variance))
    information, kind = moments.mutual_information, MultilabelPrediction if several else ClassificationPrediction
    return kind(n_samples=moments.count, probs=mean, mutual_information=information, variance=variance, samples=samples)


def finish(pred: Any, predictor: Any, network: "Network", inputs: Any, *, mean: str, method: str = "sample") -> Any:
    """Give samples as the network gives outputs, its own mean for that of the draws if asked, and the calibration."""
    if network.reading is not None and pred.samples is not None:
        pred = replace(pred, samples=network.reading.restore(pred.samples))
    if mean == "plain":
        pred = pred.about(plain_mean(network, inputs, head=predictor.noise == "head"))
    kept = predictor.calibration
    return pred if kept is None else replace(pred, calibration=kept.for_prediction(method, pred.n_samples, mean))


def plain_mean(network: "Network", inputs: Any, *, head: bool = False) -> Tensor:
    """Return the network's own mean (N, ...) or class probabilities (N, K, ...) for prepared inputs."""
    with torch.no_grad():
        output = network.run_copy(inputs)
    if network.reading is not None:
        return probabilities(output, network.reading.several)
    return split_head(output, 1)[0] if head else as_float(output).clone()  # which may be the network's own


class Probabilities(Moments):
    """Moments of class probabilities; 1/T sum_t KL(p_t || p) = 1/T sum_t KL(p_t || q) - KL(p || q), q a pivot."""

    def __init__(self, tau: Tensor, several: bool = False) -> None:
        super().__init__()
        self.tau, self.several, self.divergences = tau, several, torch.zeros(())

    def add_outputs(self, chunk: Tensor) -> None:
        """Take in logits (t, N, K, ...), by one kernel of a GPU that has it."""
        logits = as_logits(chunk, self.several)
        if suits_kernel(logits, self.tau):
            from mcbn.engine import kernels

            sums = kernels.Sums(self.pivot, self.sum, self.squares, self.divergences) if self.count else None
            added = kernels.add_probabilities(logits, self.tau, sums, LEAST_PIVOT)
            self.pivot, self.sum, self.squares, self.divergences = added
            self.count += len(logits)
            return
        probs = torch.softmax(logits * self.tau.to(logits), 2)  # (t, N, K, ...)
        self.add(probs)
        self.divergences = self.divergences.to(probs) + prediction.divergence(probs, self._compared, 2).sum(0)

    @property
    def _compared(self) -> Tensor:
        return self.pivot.clamp(min=LEAST_PIVOT)  # (N, K, ...)

    @property
    def mutual_information(self) -> Tensor:
        """1/T sum_t KL(p_t || p), (N, ...)."""
        return (self.divergences / self.count - prediction.divergence(self.mean, self._compared, 1)).clamp(min=0)


def suits_kernel(logits: Tensor, tau: Tensor) -> bool:
    """Tell whether a GPU has a kernel for logits (t, N, K, ...)."""
    if not logits.is_cuda:
        return False
    from mcbn.engine import kernels

    return kernels.suits_probabilities(logits, tau)
