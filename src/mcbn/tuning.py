"""What MCBN and the baselines share: a task, tau tuned on held-out data, runs over tensors and loaders alike."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mcbn import batches, noise
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.outputs import as_float
from mcbn.randomness import isolated_random
from mcbn.training_data import DEFAULT_BATCH_SIZE

TASKS = ("regression", "classification")
R = TypeVar("R")


class Tunable(ABC):
    """A method that samples and predicts, with a noise level tau."""

    def __init__(self, task: str, inputs: batches.Picker) -> None:
        if task not in TASKS:
            raise MCBNError(f"task must be one of {list(TASKS)}, got {task!r}; segmentation is classification")
        self.task, self.inputs = task, inputs
        self._tau = torch.tensor(math.inf if task == "regression" else 1.0, dtype=torch.float64)

    @abstractmethod
    def sample(self, x: Any, *, n_samples: int | None = None) -> Tensor:
        """Return raw outputs of every draw, (T, N, ...)."""

    @abstractmethod
    def predict(self, x: Any, *, n_samples: int | None = None) -> Any:
        """Predict with uncertainty."""

    @abstractmethod
    def _running(self) -> Network:
        """Return the private copy that runs."""

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
        options: dict[str, Any] = {"targets": targets, "n_samples": n_samples, "ignore_index": ignore_index}
        self._tau = self._best_tau(data, score=self._score(score), **options).tau
        return self

    def _score(self, score: str | None) -> str:
        """Check what tau is tuned by: CRPS for regression and PLL for classification where nothing is asked."""
        regression = self.task == "regression"
        score = score or ("crps" if regression else "pll")
        if score not in noise.SCORES or (not regression and score != "pll"):
            raise MCBNError(f"score must be {'crps or pll' if regression else 'pll'}, got {score!r}")
        return score

    def _best_tau(
        self,
        data: Any,
        *,
        score: str,
        targets: batches.Picker,
        n_samples: int | None,
        ignore_index: int | None,
    ) -> noise.Tuned:
        """Find the best tau of the draws as they are."""
        pairs = self._validation(data, targets)

        def samples(x: Any) -> Tensor:
            with torch.no_grad():
                return as_float(self.sample(x, n_samples=n_samples))

        if self.task == "classification":
            return noise.tune_classification(pairs, samples, _length(data), ignore_index)
        if score == "crps":
            return noise.tune_by_crps(pairs, lambda x: self.predict(x, n_samples=n_samples))
        return noise.tune_by_pll(pairs, samples, _length(data))

    def _validation(self, data: Any, targets: batches.Picker) -> Iterator[tuple[Any, Tensor]]:
        """Yield inputs and targets of every validation batch."""
        keys = self._running().accepted_keys()
        with isolated_random():
            for batch in _loader(data) if isinstance(data, DataLoader | Dataset) else [data]:
                yield batches.pick_inputs(batch, self.inputs, keys), batches.pick_targets(batch, targets)

    def _over(self, x: Any, network: Network, run: Callable[[Any], R], join: Callable[[list[R]], R]) -> R:
        """Run on one input, or on every batch of a loader and join; results live where the inputs do."""

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
