"""MCBN regression behind scikit-learn's interface."""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]

from mcbn.batches import require_int
from mcbn.prediction import RegressionPrediction, join
from mcbn.sklearn.base import PARAMETERS, Array, MCBNEstimator
from mcbn.sklearn.rows import distinct


class MCBNRegressor(RegressorMixin, MCBNEstimator):  # type: ignore[misc]
    """Regression with uncertainty: a batch-normalised network under MCBN (Teye et al. 2018).

    Inputs and targets are standardised inside; y may have several columns. The noise precision tau, one an output,
    minimises the CRPS of held-out rows. Whole-number sample weights equal repeated rows; others count relative to
    their mean.
    """

    __doc__ = (__doc__ or "") + PARAMETERS
    _task = "regression"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X (N, Q) and y (N,) or (N, D); fit and tune MCBN."""
        x, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        target = np.asarray(target, dtype=np.float64)
        rows = distinct(x, target, self._weights(sample_weight, x))
        return self._train(rows, 1 if target.ndim == 1 else target.shape[1])

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Predict the mean, shaped as y was; with return_std also the predictive std, noise included."""
        pred = self._prediction(X)
        return (pred.mean.numpy(), pred.std.numpy()) if return_std else pred.mean.numpy()

    def predict_interval(self, X: ArrayLike, coverage: float = 0.95) -> tuple[Array, Array]:
        """Predict (low, high), the central interval of the predictive Gaussian, each shaped as `predict`."""
        low, high = self._prediction(X).interval(coverage)
        return low.numpy(), high.numpy()

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Draw targets from the predictive distribution, (N, S) or (N, D, S).

        y_s = f_t(s)(x) + tau^-1/2 eps: draw t(s) of the statistics is the same for all x, so the functions are
        coherent; each is used once before any is used twice.
        """
        S, generator = require_int("n_samples", n_samples, 1), check_random_state(random_state)
        pieces = self._pieces(X)
        T = self.bayes_.posterior.n_samples
        draws = np.concatenate([generator.permutation(T) for _ in range(-(-S // T))])[:S]
        functions = np.concatenate([self.bayes_.sample(piece).numpy()[draws] for piece in pieces], 1)  # (S, N, ...)
        noise = np.asarray(self.bayes_.noise_std) * generator.standard_normal(functions.shape)
        return np.moveaxis(functions + noise, 0, -1)

    def _prediction(self, X: ArrayLike) -> RegressionPrediction:
        with torch.no_grad():
            pieces = self._pieces(X)
            result: RegressionPrediction = join([self.bayes_.predict(piece) for piece in pieces])
            return result

    def __sklearn_tags__(self) -> Any:
        """Declare several outputs."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
