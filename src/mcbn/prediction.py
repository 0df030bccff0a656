"""What a prediction holds: moments over the draws, and the quantities that follow from them."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from mcbn.errors import MCBNError, require_number
from mcbn.outputs import flatten, is_matrix, match_shape, noise_variance, require_labels, split_head

if TYPE_CHECKING:
    from mcbn.conformal import Calibration
    from mcbn.field.novelty import Novelty

SMALLEST = torch.finfo(torch.float32).tiny  # constants of an exported graph are single precision


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Prediction:
    """What both tasks share."""

    spread_name: ClassVar[str]  # of the variance over the draws, (N, ...)
    n_samples: int
    samples: Tensor | None = None  # raw outputs, (T, N, ...)
    novelty: "Novelty | None" = None  # of each input, where predict was given a watch
    calibration: "Calibration | None" = None  # what `MCBN.calibrate` kept
    between: Tensor | None = None  # of several networks: variance of their means, part of that over all draws

    @property
    def within(self) -> Tensor:
        """Of several networks: the variance over draws within each on average; that over all = within + between."""
        spread: Tensor = getattr(self, self.spread_name)
        return spread if self.between is None else spread - self.between

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo error of the mean or the averaged probabilities, (N, ...); NaN for a single draw."""
        return standard_error(getattr(self, self.spread_name), self.n_samples)

    def to(self, device: torch.device | str | None) -> Self:
        """Move every tensor to a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if hasattr(value, "to")})

    def reject(self, risk: float, *, delta: float = 0.1, tolerance: float | None = None) -> Tensor:
        """Tell which inputs to leave to a human, boolean (N,), so that errors among the others stay below `risk`.

        They do with probability 1 - delta over the data `MCBN.calibrate` was given, under its condition: a
        Clopper-Pearson bound at each of 20 thresholds, with Bonferroni's correction (`mcbn.decide.threshold`).

        Args:
            risk: share of errors to accept among what is kept, between 0 and 1.
            delta: probability that the promise fails.
            tolerance: regression: how far off a prediction may be before it counts as an error.

        >>> pred = classifier.calibrate((x, labels)).predict(x)
        >>> pred.reject(risk=0.9).shape
        torch.Size([64])
        """
        from mcbn import decide

        return decide.reject(self, risk, delta=delta, tolerance=tolerance)

    def __repr__(self) -> str:
        shape = tuple(getattr(self, self.spread_name).shape)
        return f"{type(self).__name__}(shape={shape}, n_samples={self.n_samples})"


def join(predictions: Sequence[Any]) -> Any:
    """Join predictions of successive batches into one."""
    if not predictions:
        raise MCBNError("the data to predict for gives no batch at all; give it afresh, with one example or more")

    def joined(name: str) -> Any:
        values = [getattr(prediction, name) for prediction in predictions]
        if name == "draws":
            return None  # running them again would need every batch kept
        if name == "novelty" and values[0] is not None:
            return join(values)
        if name == "samples" and values[0] is not None:  # a tolerance stops some early
            return torch.cat([samples[: min(map(len, values))] for samples in values], 1)
        if isinstance(values[0], Tensor) and name != "tau":
            return torch.cat(values)
        if name == "calibration":  # what promises nothing of a batch promises nothing of all
            return next((kept for kept in values if kept and kept.mismatch), values[0])
        return min(values) if name == "n_samples" else values[0]  # fewest: errors are never told too small

    kind = type(predictions[0])
    return kind(**{field.name: joined(field.name) for field in fields(kind)})


def require_level(level: float | None) -> float:
    """Check a level; 0.95 where none is named."""
    return require_number("level", 0.95 if level is None else level)


def central_interval(mean: Tensor, std: Tensor, level: float | None) -> tuple[Tensor, Tensor]:
    """Return the central interval (low, high) of the Gaussian with this mean and standard deviation."""
    half = math.sqrt(2) * torch.erfinv(torch.tensor(require_level(level), dtype=torch.float64)).item() * std
    return mean - half, mean + half


def smallest_set(probs: Tensor, level: float | None) -> Tensor:
    """Return which of the classes (N, K, ...) are most probable and together reach the level: at least one."""
    ordered, order = probs.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered  # probability of the classes ranked above
    return torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, before < require_level(level))


def warn_if_untuned(tau: Tensor, what: str = "interval") -> None:
    """Warn whoever called the caller about intervals without observation noise."""
    if bool(torch.isinf(tau).any()):
        lacks = f"so the {what} holds the network's own uncertainty only, no observation noise"
        warnings.warn(f"mcbn: the noise was never tuned, {lacks}; call tune, or mcbn fit --tune, first", stacklevel=3)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RegressionPrediction(_Prediction):
    """Predictive moments of a regression network (Teye et al. 2018, section 3.4 and appendix 1.5), each (N, ...).

    variance = epistemic + aleatoric, aleatoric = 1/tau. Without a tuned tau (tau = inf) aleatoric is zero. Of a network
    with a head for its noise, aleatoric = 1/T sum_t sigma_t^2 / tau; `samples` then hold its log variances too.

    >>> pred = bayes.tune((x, y)).predict(x).to("cpu")
    >>> pred.mean.shape, torch.equal(pred.variance, pred.epistemic + pred.aleatoric), pred.all_samples().shape
    (torch.Size([64, 1]), True, torch.Size([20, 64, 1]))
    >>> torch.equal(pred.about(bayes.plain(x)).std, pred.std)  # the same spread about another mean
    True
    """

    spread_name = "epistemic"
    mean: Tensor
    epistemic: Tensor
    tau: Tensor  # one output's shape, broadcastable: () or (D, 1, ...); of noise="full" the precision matrix (D, D)
    epistemic_covariance: Tensor | None = None  # (N, D, D)
    draws: Callable[[], Iterator[Tensor]] | None = None
    head_variance: Tensor | None = None  # (N, ...), 1/T sum_t sigma_t^2 that the network gives itself
    shift: Tensor | None = None  # (N, ...), of the mean from that of the draws

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the observation noise, 1/tau, or the network's own divided by tau."""
        if self.head_variance is not None:
            return self.head_variance / self.tau
        return noise_variance(self.tau, self.mean).expand_as(self.mean)

    @property
    def variance(self) -> Tensor:
        """Total predictive variance."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """Square root of the total variance."""
        warn_if_untuned(self.tau, "std")
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Full predictive covariance over the flattened outputs, that of the noise included, (N, D, D)."""
        if self.epistemic_covariance is None:
            raise MCBNError("the covariance over outputs was not computed; predict(x, covariance=True)")
        full = is_matrix(self.tau, self.mean)
        noise = torch.linalg.inv(self.tau) if full else torch.diag_embed(flatten(self.aleatoric, 1))
        return self.epistemic_covariance + noise

    def about(self, mean: Tensor) -> Self:
        """Return the same spread about another mean (N, ...), for which no calibration holds."""
        mean = match_shape(mean, self.mean, "means")
        shift = mean - self.mean if self.shift is None else mean - self.mean + self.shift
        return replace(self, mean=mean, shift=shift, calibration=None)

    def interval(
        self, level: float | None = None, *, calibrated: bool = True, groups: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return the interval (low, high) that holds the target with probability `level`, (N, ...) each.

        A promise after `MCBN.calibrate`, under its condition. Before, or with calibrated=False, it is that of the
        Gaussian with the predictive mean and variance. `level` is by default what `calibrate` was given, or 0.95;
        `groups` (N,) are the numbers of a calibration by groups.

        >>> low, high = bayes.tune((x, y)).predict(x).interval(0.9)
        >>> bool((low < high).all())
        True
        """
        if calibrated and self.calibration is not None:
            return self.calibration.interval(self, level, groups)
        interval = central_interval(self.mean, self.variance.sqrt(), level)
        warn_if_untuned(self.tau)
        return interval

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of targets under the T-component mixture, per point (N,) (Teye et al. 2018, appendix 1.5).

        log 1/T sum_j N(y; f_j, tau^-1 I); tau may be a matrix, and a head gives sigma_j^2 / tau in place of 1/tau. The
        draws are streamed a second time unless samples were kept.

        >>> bayes.tune((x, y)).predict(x).log_prob(y).shape
        torch.Size([64])
        """
        if bool(torch.isinf(self.tau).any()):
            raise MCBNError("log_prob needs the noise of the targets; call tune(validation_data) or set bayes.tau")
        y = match_shape(y, self.mean)
        if self.shift is not None:
            y = y - self.shift
        log_sum = torch.full(self.mean.shape[:1], -math.inf, dtype=self.mean.dtype, device=self.mean.device)
        for chunk in self._chunks():
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(self._log_density(chunk.to(self.mean), y), 0))
        return log_sum - math.log(self.n_samples if self.samples is None else len(self.samples))

    def _log_density(self, chunk: Tensor, y: Tensor) -> Tensor:
        """log N(y; f_j, noise of draw j) of raw outputs (t, N, ...): (t, N)."""
        tau = self.tau
        if self.head_variance is not None:
            chunk, log_variance = split_head(chunk, 2)
            tau = tau * torch.exp(-log_variance)  # (t, N, D, ...)
        residual = chunk - y  # (t, N, ...)
        if is_matrix(tau, self.mean):
            distance, log_det = residual * (residual @ tau), torch.logdet(tau)  # (t, N, D)
        else:
            distance, log_det = tau * residual.square(), flatten(tau.expand_as(residual).log(), 2).sum(2)
        D = residual[0, 0].numel() if residual.shape[1] else 1
        return 0.5 * (log_det - flatten(distance, 2).sum(2) - D * math.log(2 * math.pi))

    def all_samples(self) -> Tensor:
        """Return the network's output under every draw, (T, N, ...): kept, or run again."""
        return torch.cat(list(self._chunks()))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of pickles and copies how the draws run again: they hold numbers alone."""
        return vars(self) | {"draws": None}

    def _chunks(self) -> Iterable[Tensor]:
        if self.samples is not None:
            return [self.samples]
        if self.draws is None:
            raise MCBNError("this needs the draws themselves; predict(..., return_samples=True) keeps them")
        return self.draws()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ClassificationPrediction(_Prediction):
    """Class probabilities averaged over the draws, and how much the draws disagree; classes on axis 1.

    >>> pred = classifier.predict(x)
    >>> pred.probs.shape, pred.label.shape, bool((pred.mutual_information <= pred.entropy).all())
    (torch.Size([64, 3]), torch.Size([64]), True)
    >>> torch.equal(pred.about(classifier.plain_mean(x)).label, classifier.plain(x).argmax(1))
    True
    """

    spread_name = "variance"
    probs: Tensor  # (N, K, ...)
    mutual_information: Tensor  # in nats, (N, ...): 1/T sum_t KL(p_t || probs), how much the draws disagree
    variance: Tensor  # (N, K, ...), of the probabilities over the draws

    @property
    def label(self) -> Tensor:
        """Most probable class, (N, ...)."""
        return self.probs.argmax(1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities in nats, (N, ...): total uncertainty."""
        return entropy(self.probs, 1)

    @property
    def expected_entropy(self) -> Tensor:
        """Average entropy of a single draw, in nats, (N, ...): what remains where the draws agree."""
        return self.entropy - self.mutual_information

    @property
    def std(self) -> Tensor:
        """Standard deviation of the probabilities over the draws, (N, K, ...)."""
        return self.variance.sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """Log of the averaged probability of each label, (N, ...).

        >>> classifier.predict(x).log_prob(labels).shape
        torch.Size([64])
        """
        y = require_labels(y, self.probs)
        return self.probs.gather(1, y.unsqueeze(1)).squeeze(1).log()

    def set(self, level: float | None = None, *, calibrated: bool = True, groups: Any = None, seed: int = 0) -> Tensor:
        """Return which classes to expect, boolean (N, K, ...): the true one is among them with probability `level`.

        A promise after `MCBN.calibrate`, under the condition stated there. Before, or with calibrated=False, they are
        the fewest classes with probability `level` together. `level` and `groups` as for intervals; `seed` is that of
        sets calibrated with randomize=True, a new one for every call.

        >>> classifier.predict(x).set(0.9).any(1).all()  # never empty
        tensor(True)
        """
        if calibrated and self.calibration is not None:
            return self.calibration.set(self.probs, level, groups, seed)
        return smallest_set(self.probs, level)

    def about(self, probs: Tensor) -> Self:
        """Return other probabilities (N, K, ...), not calibrated, with the same variance and mutual information."""
        return replace(self, probs=match_shape(probs, self.probs, "probabilities"), calibration=None)


class MultilabelPrediction(ClassificationPrediction):
    """Of several labels an input that do not exclude each other: all quantities of each label alone, (N, K, ...).

    probs are those that a label holds, label is 1 where it does; log_prob takes y of 0 and 1.
    """

    @property
    def label(self) -> Tensor:
        """1 where a label is more probable than not, (N, K, ...)."""
        return (self.probs > 0.5).long()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probability of each label in nats, (N, K, ...)."""
        return entropy(torch.stack([self.probs, 1 - self.probs]), 0)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log of the averaged probability of what each label is, (N, K, ...).

        >>> several = mcbn.MCBN(classifier.model, "multilabel").fit(x, batch_size=16)
        >>> several.predict(x).log_prob(labels.unsqueeze(1) == torch.arange(3)).shape
        torch.Size([64, 3])
        """
        both = torch.stack([1 - self.probs, self.probs], 1)  # (N, 2, K, ...)
        return both.gather(1, require_labels(y, both).unsqueeze(1)).squeeze(1).log()

    def set(self, *_: Any, **__: Any) -> Tensor:
        """Refuse: a set is of classes that exclude each other.

        >>> mcbn.MCBN(classifier.model, "multilabel").fit(x, batch_size=16).predict(x).set(0.9)
        Traceback (most recent call last):
        mcbn.errors.MCBNError: labels that do not exclude each other have no set of one true class; choose by probs
        """
        raise MCBNError("labels that do not exclude each other have no set of one true class; choose by probs")


def standard_error(variance: Tensor, n_samples: int) -> Tensor:
    """sqrt(s^2 / T) with s^2 = variance * T / (T - 1)."""
    return (variance / (n_samples - 1)).sqrt() if n_samples > 1 else torch.full_like(variance, math.nan)


def entropy(probs: Tensor, axis: int) -> Tensor:
    """-sum_k p_k log p_k along an axis, in nats."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(axis)


def divergence(probs: Tensor, pivot: Tensor, axis: int) -> Tensor:
    """KL(p || q) = sum_k p_k log(p_k / q_k) - p_k + q_k along an axis, in nats; q is positive.

    As sum_k q_k [(1 + r) log(1 + r) - r], r = (p - q) / q, in which a small difference keeps its digits.
    """
    r = (probs - pivot) / pivot
    u = 1 + r
    log = torch.where(u == 1, r, u.clamp(min=SMALLEST).log() * r / (u - 1))  # Kahan's log1p, which ONNX has not
    return (pivot * (u * log - r)).sum(axis)


def mutual_information(probs: Tensor) -> Tensor:
    """1/T sum_t KL(p_t || p) of draws (T, N, K, ...) with average p, in nats, (N, ...)."""
    return divergence(probs, probs.mean(0).clamp(min=SMALLEST), 2).mean(0)
