"""What every baseline shares: the verbs of `mcbn.MCBN`, given a way to run draws."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mcbn import batches, prediction
from mcbn import moments as streaming
from mcbn.network import Network
from mcbn.prediction import ClassificationPrediction, RegressionPrediction
from mcbn.tuning import Tunable

Prediction = RegressionPrediction | ClassificationPrediction


class Predictor(Tunable):
    """T draws of a network's output, their moments, and a noise level tau tuned on held-out data.

    A method says which network runs (`network`) and how its draws are made (`draws`).
    """

    n_samples: int = 100  # T where a call names none

    def __init__(self, task: str, *, inputs: batches.Picker = None) -> None:
        super().__init__(task, inputs)

    @abstractmethod
    def fit(self, *data: Any, **options: Any) -> Self:
        """Make the method ready to predict."""

    @property
    @abstractmethod
    def network(self) -> Network:
        """The private copy that runs."""

    @abstractmethod
    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield raw outputs for prepared inputs in chunks (t, N, ...), `n_samples` draws in all."""

    def plain(self, x: Any) -> Tensor:
        """Return what the deterministic network says, (N, ...)."""
        network = self.network
        return self._over(x, network, lambda inputs: network(batches.map_tensors(torch.clone, inputs)), torch.cat)

    def sample(self, x: Any, *, n_samples: int | None = None) -> Tensor:
        """Return raw outputs of every draw, (T, N, ...)."""
        T = self._count(n_samples)

        def sample_one(inputs: Any) -> Tensor:
            return torch.cat(list(self.draws(inputs, T)))

        return self._over(x, self.network, sample_one, lambda parts: torch.cat(parts, 1))

    def predict(
        self, x: Any, *, n_samples: int | None = None, return_samples: bool = False, covariance: bool = False
    ) -> Any:
        """Predict with uncertainty: a RegressionPrediction or ClassificationPrediction, moments streamed over draws.

        Args:
            x: a tensor, whatever the network takes, or a DataLoader or Dataset of batches.
            n_samples: T; what `fit` was given where it is not.
            return_samples: keep the raw outputs as `pred.samples`, (T, N, ...).
            covariance: regression: the full covariance over outputs as `pred.covariance`, (N, D, D).
        """
        T = self._count(n_samples)
        stream = isinstance(x, DataLoader | Dataset)

        def predict_one(inputs: Any) -> Prediction:
            def draws() -> Iterator[Tensor]:
                with torch.no_grad():
                    yield from self.draws(inputs, T)

            if self.task == "classification":
                return streaming.classification(draws(), self._tau, keep=return_samples)
            again = None if stream else draws
            return streaming.regression(draws(), self._tau, covariance=covariance, keep=return_samples, draws=again)

        return self._over(x, self.network, predict_one, prediction.join)

    def _running(self) -> Network:
        return self.network

    def _count(self, n_samples: int | None) -> int:
        return self.n_samples if n_samples is None else batches.require_int("n_samples", n_samples, 1)
