"""What every baseline shares: the verbs of `mcbn.MCBN`, given a way to run draws."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mcbn import batches, noise, prediction
from mcbn.draws import DEFAULT_BATCH_SIZE, isolated_random
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.prediction import ClassificationPrediction, RegressionPrediction

TASKS = ("regression", "classification")
Prediction = RegressionPrediction | ClassificationPrediction
R = TypeVar("R")


class Predictor(ABC):
    """T draws of a network's output, their moments, and a noise level tau tuned on held-out data.

    A method says which network runs (`network`) and how its draws are made (`draws`).
    """

    n_samples: int = 100  # T where a call names none

    def __init__(self, task: str, *, inputs: batches.Picker = None) -> None:
        if task not in TASKS:
            raise MCBNError(f"task must be one of {list(TASKS)}, got {task!r}; segmentation is classification")
        self.task, self.inputs = task, inputs
        self._tau = torch.tensor(math.inf if task == "regression" else 1.0, dtype=torch.float64)

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

    @property
    def tau(self) -> float | Tensor:
        """Noise precision 1/variance: a number, or one an output (D,); inf until tuned (classification: 1)."""
        return self._tau.item() if self._tau.ndim == 0 else self._tau.clone()

    @tau.setter
    def tau(self, value: float | Tensor) -> None:
        tau = torch.as_tensor(value, dtype=torch.float64).detach().cpu().clone()
        if tau.ndim > 1 or not bool((tau > 0).all()):
            raise MCBNError(f"tau must be a positive number, or one for each output; got {value!r}")
        self._tau = tau

    def plain(self, x: Any) -> Tensor:
        """Return what the deterministic network says, (N, ...)."""
        return self._over(x, lambda inputs: self.network(batches.map_tensors(torch.clone, inputs)), torch.cat)

    def sample(self, x: Any, *, n_samples: int | None = None) -> Tensor:
        """Return raw outputs of every draw, (T, N, ...)."""
        T = self._count(n_samples)
        return self._over(x, lambda inputs: torch.cat(list(self.draws(inputs, T))), lambda parts: torch.cat(parts, 1))

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
                return prediction.classification(draws(), self._tau, keep=return_samples)
            again = None if stream else draws
            return prediction.regression(draws(), self._tau, covariance=covariance, keep=return_samples, draws=again)

        return self._over(x, predict_one, prediction.join)

    def tune(
        self,
        data: Any,
        *,
        score: str | None = None,
        targets: batches.Picker = None,
        n_samples: int | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Set tau on held-out data: the noise precision (regression) or inverse temperature (classification).

        Args:
            data: DataLoader or Dataset of (x, y) batches, or a tuple (x, y).
            score: regression: "crps" to minimise (as the paper does) or "pll" to maximise; classification: "pll".
            targets: what of a batch is the target, where it is not the second element or a usual key.
            n_samples: T; what `fit` was given where it is not.
            ignore_index: classification: a label to leave out, such as the void class of a segmentation.
        """
        regression = self.task == "regression"
        score = score or ("crps" if regression else "pll")
        if score not in noise.SCORES or (not regression and score != "pll"):
            raise MCBNError(f"score must be {'crps or pll' if regression else 'pll'}, got {score!r}")
        pairs = self._validation(data, targets)
        count = _length(data)
        if not regression:
            tuned = noise.tune_classification(pairs, self._outputs(n_samples), count, ignore_index)
        elif score == "crps":
            tuned = noise.tune_by_crps(pairs, lambda x: self.predict(x, n_samples=n_samples))
        else:
            tuned = noise.tune_by_pll(pairs, self._outputs(n_samples), count)
        self._tau = tuned.tau
        return self

    def _outputs(self, n_samples: int | None) -> Callable[[Any], Tensor]:
        def outputs(x: Any) -> Tensor:
            with torch.no_grad():
                return prediction.as_float(self.sample(x, n_samples=n_samples))

        return outputs

    def _validation(self, data: Any, targets: batches.Picker) -> Iterator[tuple[Any, Tensor]]:
        """Yield inputs and targets of every validation batch."""
        keys = self.network.accepted_keys()
        with isolated_random():
            for batch in _loader(data) if isinstance(data, DataLoader | Dataset) else [data]:
                yield batches.pick_inputs(batch, self.inputs, keys), batches.pick_targets(batch, targets)

    def _count(self, n_samples: int | None) -> int:
        return self.n_samples if n_samples is None else batches.require_int("n_samples", n_samples, 1)

    def _over(self, x: Any, run: Callable[[Any], R], join: Callable[[list[R]], R]) -> R:
        """Run on one input, or on every batch of a loader and join; results live where the inputs do."""
        network = self.network

        def run_one(inputs: Any) -> R:
            home = next((t.device for t in batches.tensors_of(inputs)), network.device)
            result: Any = run(network.prepare(inputs))
            return result if home == network.device else result.to(home)  # type: ignore[no-any-return]

        if not isinstance(x, DataLoader | Dataset):
            return run_one(x)
        keys = network.accepted_keys()
        with isolated_random():
            return join([run_one(batches.pick_inputs(batch, self.inputs, keys)) for batch in _loader(x)])


def _loader(data: Any) -> DataLoader[Any]:
    return data if isinstance(data, DataLoader) else DataLoader(data, batch_size=DEFAULT_BATCH_SIZE)


def _length(data: Any) -> int:
    """Count the batches of validation data, or assume many."""
    if not isinstance(data, DataLoader | Dataset):
        return 1
    loader = _loader(data)
    return 1000 if isinstance(loader.dataset, IterableDataset) else len(loader)
