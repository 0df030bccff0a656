"""What regressor and classifier share: parameters, validation of input, training, prediction in pieces."""

from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.sklearn.rows import Rows
from mcbn.sklearn.training import Settings, train

PIECE = 8192  # rows predicted at a time
LEAST = {"n_samples": 1, "patience": 1, "batch_size": 2, "epochs": 1, "hidden": 1, "n_folds": 2}
Array = NDArray[np.float64]

PARAMETERS = """
    Parameters
    ----------
    hidden : sizes of the hidden layers, each Linear -> BatchNorm -> ReLU.
    n_samples : T, joint draws of the batch statistics.
    batch_size : M, of training and of the draws; at most half the rows, so that draws differ. None: 32, from 600 rows
        on 64.
    epochs : most epochs of training; None: about 10,000 steps, from 50 to 1,000 epochs.
    weight_decay : lambda, on weight matrices alone.
    learning_rate : of Adam; above the paper's 1e-3, as weights are averaged over epochs.
    early_stopping : end training, and choose its best epoch, by the loss on held-out rows.
    patience : epochs without a lower held-out loss before training ends.
    n_folds : held-out parts, each with a network of its own trained on the rest, beside the one of all rows that
        predicts; they set tau (and stop early).
    random_state : seed or generator of the weights, the held-out rows, the batches and the draws.
    device : where to train and predict, such as "cuda"; None: the CPU. On a CPU,
        `torch.set_num_threads(1)` is fastest for networks of this size.

    Attributes
    ----------
    bayes_ : the fitted `mcbn.MCBN`; its `tau` is the tuned noise precision (classes: inverse temperature).
    n_iter_ : epochs of training.
    n_features_in_, feature_names_in_ : as everywhere in scikit-learn.
"""


class MCBNEstimator(BaseEstimator):  # type: ignore[misc]
    """Train a batch-normalised network, then draw its batch statistics (Teye et al. 2018, Algorithm 1)."""

    _task: str

    def __init__(
        self,
        hidden: Sequence[int] = (50, 50),
        *,
        n_samples: int = 100,
        batch_size: int | None = None,
        epochs: int | None = None,
        weight_decay: float = 3e-4,
        learning_rate: float = 3e-3,
        early_stopping: bool = True,
        patience: int = 250,
        n_folds: int = 5,
        random_state: Any = None,
        device: Any = None,
    ) -> None:
        self.hidden = hidden
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.epochs = epochs
        self.weight_decay = weight_decay
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.patience = patience
        self.n_folds = n_folds
        self.random_state = random_state
        self.device = device

    def _weights(self, sample_weight: ArrayLike | None, x: Array) -> Array | None:
        if sample_weight is None:
            return None
        weights: Array = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        return weights

    def _train(self, rows: Rows, n_outputs: int) -> Self:
        """Train, tune and keep the result."""
        settings = self._settings(n_outputs)
        if rows.size < 2:
            raise MCBNError("training needs 2 rows of positive weight; got 1 sample")
        self.bayes_, self.n_iter_ = train(rows, settings)
        return self

    def _settings(self, n_outputs: int) -> Settings:
        hidden = (self.hidden,) if isinstance(self.hidden, Integral) else tuple(self.hidden)
        whole = {name: getattr(self, name) for name in ("n_samples", "patience", "n_folds")}
        whole |= {name: value for name in ("epochs", "batch_size") if (value := getattr(self, name)) is not None}
        for name, value in [*whole.items(), *(("hidden", size) for size in hidden)]:
            _require(name, value, Integral, f"whole numbers of at least {LEAST[name]}", least=LEAST[name])
        for name in ("weight_decay", "learning_rate"):
            _require(name, getattr(self, name), Real, "numbers of at least 0")
        return Settings(
            task=self._task,
            hidden=tuple(int(size) for size in hidden),
            n_outputs=n_outputs,
            epochs=None if self.epochs is None else int(self.epochs),
            batch_size=None if self.batch_size is None else int(self.batch_size),
            weight_decay=float(self.weight_decay),
            learning_rate=float(self.learning_rate),
            n_samples=int(self.n_samples),
            n_folds=int(self.n_folds),
            patience=int(self.patience) if self.early_stopping else None,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            device=torch.device("cpu" if self.device is None else self.device),
        )

    def _pieces(self, X: ArrayLike) -> Iterator[Tensor]:
        """Check inputs and yield them as tensors, some rows at a time."""
        check_is_fitted(self)
        x: Array = validate_data(self, X, dtype=np.float64, reset=False)
        return iter(torch.split(torch.tensor(x), PIECE))


def _require(name: str, value: Any, kind: Any, allowed: str, *, least: float = 0) -> None:
    """Check a numeric parameter."""
    if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:
        raise MCBNError(f"{name} takes {allowed}; got {value!r}")
