"""MCBN classification behind scikit-learn's interface."""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import column_or_1d, validate_data  # type: ignore[import-untyped]

from mcbn.errors import MCBNError
from mcbn.prediction import ClassificationPrediction, join
from mcbn.sklearn.base import PARAMETERS, Array, MCBNEstimator
from mcbn.sklearn.rows import distinct


class MCBNClassifier(ClassifierMixin, MCBNEstimator):  # type: ignore[misc]
    """Classification with uncertainty: a batch-normalised network under MCBN (Teye et al. 2018).

    Inputs are standardised inside. Probabilities are averaged over the draws; the inverse temperature tau, at most 1,
    maximises the likelihood of held-out rows. Whole-number sample weights equal repeated rows; others count relative
    to their mean. For entropy and mutual information ask `bayes_.predict`.
    """

    __doc__ = (__doc__ or "") + PARAMETERS + "    classes_ : the labels, in the order of the probabilities.\n"
    _task = "classification"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X (N, Q) and labels y (N,); fit and tune MCBN."""
        x, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(labels)
        labels = column_or_1d(labels, warn=True)
        weights = self._weights(sample_weight, x)
        kept = np.ones(len(x), dtype=bool) if weights is None else weights > 0
        self.classes_ = np.unique(labels[kept])
        K = len(self.classes_)
        if K < 2:
            raise MCBNError(
                f"classification needs at least 2 classes; the data holds one class: {self.classes_.tolist()[0]!r}"
            )
        numbers = np.searchsorted(self.classes_, labels[kept]).astype(np.float64)
        rows = distinct(x[kept], numbers, None if weights is None else weights[kept])
        return self._train(rows._replace(y=rows.y.long()), K)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Predict the most probable label, (N,)."""
        chosen = self.predict_proba(X).argmax(1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def predict_proba(self, X: ArrayLike) -> Array:
        """Predict the probability of each of `classes_`, (N, K), averaged over the draws."""
        with torch.no_grad():
            pieces = self._pieces(X)
            result: ClassificationPrediction = join([self.bayes_.predict(piece) for piece in pieces])
        return np.asarray(result.probs.numpy(), dtype=np.float64)
