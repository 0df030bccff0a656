"""The two estimators: parameters, validation of input and prediction behind scikit-learn's interface."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state, validation  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from mcbn.batches import require_int
from mcbn.conformal import cross_interval, cross_set
from mcbn.errors import MCBNError
from mcbn.prediction import join
from mcbn.sklearn.rows import Rows, distinct
from mcbn.sklearn.training import train

BLOCK = 8192  # rows predicted at a time
VALUES = 2**23  # edges of intervals held at once: one a row and held-out row
LIMITS: dict[str, tuple[Any, int]] = dict.fromkeys(("n_samples", "patience", "epochs", "hidden"), (Integral, 1))
LIMITS |= dict.fromkeys(("batch_size", "n_folds"), (Integral, 2))
LIMITS |= dict.fromkeys(("weight_decay", "learning_rate"), (Real, 0))
Array = NDArray[np.float64]

PARAMETERS = Path(__file__).with_name("parameters.txt").read_text("utf-8")


@dataclass(repr=False, eq=False)
class MCBNEstimator(BaseEstimator):  # type: ignore[misc]
    """Train a batch-normalised network, then draw its batch statistics (Teye et al. 2018, Algorithm 1)."""

    task: ClassVar[str]
    hidden: int | Sequence[int] = (50, 50)
    _: KW_ONLY
    n_samples: int = 100
    batch_size: int | None = None
    epochs: int | None = None
    weight_decay: float = 3e-4
    learning_rate: float = 3e-3
    early_stopping: bool = True
    patience: int = 250
    n_folds: int = 5
    random_state: Any = None
    device: Any = None

    def _train(self, rows: Rows, n_outputs: int) -> Self:
        """Check the parameters, train, tune and keep the result."""
        for name, (kind, least) in LIMITS.items():
            values = self.hidden_sizes() if name == "hidden" else [getattr(self, name)]
            for value in values if values != [None] or name not in ("epochs", "batch_size") else ():
                if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:
                    numbers = "whole numbers" if kind is Integral else "numbers"
                    raise MCBNError(f"{name} takes {numbers} of at least {least}; got {value!r}")
        if rows.size < 2:
            raise MCBNError("training needs 2 rows of positive weight; got 1 sample")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.bayes_, self.n_iter_, self.folds_ = train(rows, n_outputs, self, seed)
        return self

    def hidden_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the hidden layers; a number is that of the only one."""
        return tuple(self.hidden) if isinstance(self.hidden, Iterable) else (self.hidden,)

    def _blocks(self, X: ArrayLike, size: int = BLOCK) -> Sequence[Tensor]:
        """Check inputs and return them as tensors, some rows in each."""
        check_is_fitted(self)
        x: Array = validate_data(self, X, dtype=np.float64, reset=False)
        return torch.split(torch.tensor(x), size)

    def _prediction(self, X: ArrayLike, *, calibrated: bool = False) -> Any:
        blocks, bayes = self._blocks(X), self.folds_[0] if calibrated and self.folds_ else self.bayes_
        return join([bayes.predict(block) for block in blocks])

    def _fold_predictions(self, X: ArrayLike) -> Iterator[list[Any]]:
        """Predict a few rows at a time with the network of every fold: what comes next is as wide as all scores."""
        calibrations: list[Any] = [bayes.calibration for bayes in self.folds_]
        n = sum(len(calibration.scores[0]) for calibration in calibrations)
        for block in self._blocks(X, min(BLOCK, max(1, VALUES // n))):
            yield [bayes.predict(block) for bayes in self.folds_]


def _weights(sample_weight: ArrayLike | None, x: Array) -> Array:
    """Check the weight of each row, 1 where none are given."""
    return np.asarray(validation._check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True))


class MCBNRegressor(RegressorMixin, MCBNEstimator):  # type: ignore[misc]
    """Regression with uncertainty: a batch-normalised network under MCBN (Teye et al. 2018).

    Inputs and targets are standardised inside; y may have several columns. The noise precision tau, one an output,
    minimises the CRPS of held-out rows. Whole-number sample weights equal repeated rows; others count relative to
    their mean.

    >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
    >>> model = MCBNRegressor(epochs=5, random_state=0).fit(X, np.sin(3 * X[:, 0]))
    >>> mean, std = model.predict(X, return_std=True)
    >>> mean.shape, std.shape
    ((40,), (40,))
    """

    __doc__ = (__doc__ or "") + PARAMETERS
    task = "regression"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X (N, Q) and y (N,) or (N, D); fit and tune MCBN."""
        x, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        return self._train(distinct(x, target, _weights(sample_weight, x)), 1 if target.ndim == 1 else target.shape[1])

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Predict the mean, shaped as y was; with return_std also the predictive std, noise included."""
        prediction = self._prediction(X)
        return (prediction.mean.numpy(), prediction.std.numpy()) if return_std else prediction.mean.numpy()

    def predict_interval(self, X: ArrayLike, coverage: float = 0.95, calibrated: bool = True) -> tuple[Array, Array]:
        """Predict (low, high), each shaped as `predict`: CV+ over the folds, which needs no rows of its own.

        Of exchangeable rows at least 1 - 2 (1 - coverage) lie inside, in practice about `coverage`
        (`mcbn.conformal.cross_interval`). Where one part is held out, at least `coverage` lie inside the interval of
        its network; below 4 rows, or with calibrated=False, it is the central one of the predictive Gaussian.
        """
        check_is_fitted(self)
        if not calibrated or len(self.folds_) < 2:
            pairs = [self._prediction(X, calibrated=calibrated).interval(coverage)]
        else:
            pairs = [cross_interval(folds, coverage) for folds in self._fold_predictions(X)]
        low, high = (torch.cat(edges).numpy() for edges in zip(*pairs, strict=True))
        return low, high

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Draw targets from the predictive distribution, (N, S) or (N, D, S).

        y_s = f_t(s)(x) + tau^-1/2 eps: draw t(s) of the statistics is the same for all x, so the functions are
        coherent; each is used once before any is used twice.
        """
        S, generator = require_int("n_samples", n_samples, 1), check_random_state(random_state)
        blocks, T = self._blocks(X), self.bayes_.posterior.n_samples
        draws = np.concatenate([generator.permutation(T) for _ in range(-(-S // T))])[:S]
        functions = np.concatenate([self.bayes_.sample(block).numpy()[draws] for block in blocks], 1)  # (S, N, ...)
        noise = np.asarray(self.bayes_.noise_std) * generator.standard_normal(functions.shape)
        return np.moveaxis(functions + noise, 0, -1)

    def __sklearn_tags__(self) -> Any:
        """Declare several outputs."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class MCBNClassifier(ClassifierMixin, MCBNEstimator):  # type: ignore[misc]
    """Classification with uncertainty: a batch-normalised network under MCBN (Teye et al. 2018).

    Inputs are standardised inside. Probabilities are averaged over the draws; the inverse temperature tau, at most 1,
    maximises the likelihood of held-out rows. Whole-number sample weights equal repeated rows; others count relative
    to their mean. For entropy and mutual information ask `bayes_.predict`.

    >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
    >>> model = MCBNClassifier(epochs=5, random_state=0).fit(X, X[:, 0] > 0)
    >>> model.predict_proba(X).shape
    (40, 2)
    """

    __doc__ = (__doc__ or "") + PARAMETERS + "    classes_ : the labels, in the order of the probabilities.\n"
    task = "classification"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X (N, Q) and labels y (N,); fit and tune MCBN."""
        x, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(labels)
        labels, weights = validation.column_or_1d(labels, warn=True), _weights(sample_weight, x)
        classes = np.unique(labels[weights > 0])
        if len(classes) < 2:
            raise MCBNError(f"classification needs 2 classes; the data holds one class: {classes.tolist()[0]!r}")
        rows = distinct(x, np.searchsorted(classes, labels).astype(np.float64), weights)
        self._train(rows._replace(y=rows.y.long()), len(classes)).classes_ = classes  # together: a fit may fail
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Predict the most probable label, (N,)."""
        most_probable = self.predict_proba(X).argmax(1)  # (N,); before `classes_`, which comes with the fit
        return np.asarray(self.classes_[most_probable])

    def predict_proba(self, X: ArrayLike) -> Array:
        """Predict the probability of each of `classes_`, (N, K), averaged over the draws."""
        return np.asarray(self._prediction(X).probs.numpy(), dtype=np.float64)

    def predict_set(self, X: ArrayLike, coverage: float = 0.95) -> NDArray[np.bool_]:
        """Tell which of `classes_` to expect, (N, K): the true one is among them as `MCBNRegressor.predict_interval`
        promises, by cross-conformal prediction over the folds (`mcbn.conformal.cross_set`).
        """
        check_is_fitted(self)
        if len(self.folds_) < 2:
            return np.asarray(self._prediction(X, calibrated=True).set(coverage).numpy())
        return torch.cat([cross_set(folds, coverage) for folds in self._fold_predictions(X)]).numpy()
