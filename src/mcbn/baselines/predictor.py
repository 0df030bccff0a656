"""What every baseline shares: the verbs of `mcbn.MCBN`, given a way to run draws. And the constant twin of any."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from mcbn import batches, moments, noise, prediction
from mcbn.conformal import Calibration
from mcbn.errors import MCBNError, require_choice
from mcbn.model import MCBN
from mcbn.network import Network, Output, is_stream
from mcbn.outputs import OutputReading, require_outputs


def of_one_shape(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pass on what several networks give, (t, N, ...); refuse outputs that cannot be averaged."""
    shapes = dict[str, None]()
    for output in outputs:
        shapes[str(tuple(output.shape[1:]))] = None
        if len(shapes) > 1:
            raise MCBNError(f"members must give outputs of one shape; got {', '.join(shapes)}")
        yield output


class Predictor(ABC):
    """T draws of a network's output, their moments, and tau: a method says which `network` runs and its `draws`."""

    n_samples: int = 100  # T where a call names none
    network: Network  # the private copy that runs
    noise = "constant"

    def __init__(self, task: str, *, inputs: batches.Picker = None, outputs: str = "auto") -> None:
        self.task, self.inputs = noise.require_task(task), inputs
        self.outputs, self.noise_precision = require_outputs(outputs, task), noise.initial_tau(task)
        self.calibration: Calibration | None = None

    def copy_network(self, model: nn.Module, output: Output) -> Network:
        """Copy a network, with its outputs read as asked."""
        reading = None if self.task == "regression" else OutputReading(self.outputs, self.task == "multilabel")
        return Network(model, output, reading)

    @abstractmethod
    def fit(self, *data: Any, **options: Any) -> Self:
        """Make the method ready to predict."""

    @abstractmethod
    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield raw outputs for prepared inputs in chunks (t, N, ...), `n_samples` draws in all."""

    def plain(self, x: Any) -> Tensor:
        """Return what the deterministic network says, (N, ...)."""
        return self.network.over(x, self.network.raw, torch.cat, self.inputs)

    def sample(self, x: Any, *, n_samples: int | None = None) -> Tensor:
        """Return raw outputs of every draw, (T, N, ...)."""
        T, network = self._count(n_samples), self.network

        def sample_batch(inputs: Any) -> Tensor:
            samples = torch.cat([*self.draws(inputs, T)])
            return samples if network.reading is None else network.reading.restore(samples)

        return network.over(x, sample_batch, lambda blocks: torch.cat(blocks, 1), self.inputs)

    def predict(
        self,
        x: Any,
        *,
        n_samples: int | None = None,
        return_samples: bool = False,
        covariance: bool = False,
        mean: str = "drawn",
    ) -> Any:
        """Predict with uncertainty, moments streamed over draws; arguments as for `mcbn.MCBN.predict`."""
        T, mean = self._count(n_samples), require_choice("mean", mean, moments.MEANS)

        def draws(inputs: Any) -> Iterator[Tensor]:
            with torch.no_grad():
                yield from self.draws(inputs, T)

        def predict_batch(inputs: Any) -> Any:
            again = None if is_stream(x) else lambda _: draws(inputs)  # all of them: none stopped early
            pred = moments.summarise(self, draws(inputs), draws=again, keep=return_samples, covariance=covariance)
            return moments.finish(pred, self, self.network, inputs, mean=mean)

        return self.network.over(x, predict_batch, prediction.join, self.inputs)

    def tune(self, data: Any, *, score: str | None = None, n_samples: int | None = None, **options: Any) -> Self:
        """Set tau on held-out data as `mcbn.MCBN.tune` does, with its targets and ignore_index as options."""
        score = noise.require_score(self.task, score)
        tuned = noise.tune(self, data, score=score, n_samples=self._count(n_samples), **options)
        self.tau = tuned.tau
        noise.warn_if_bound(tuned, self.task)
        return self

    tau: Any = MCBN.tau
    calibrate: Any = MCBN.calibrate  # to be called after `tune`

    def _count(self, n_samples: int | None) -> int:
        return self.n_samples if n_samples is None else batches.require_int("n_samples", n_samples, 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.task!r}, tau={self.tau}, n_samples={self.n_samples})"


class ConstantUncertainty(Predictor):
    """The mean over T passes of a predictor, with the constant variance 1/tau (Teye et al. 2018, Section 4.2).

    p(y | x) = N(1/T sum_t f_t(x), 1/tau). Only the variance differs from the wrapped predictor's, so comparing the two
    scores tells what the draws know about the error. CUBN is `ConstantUncertainty(mcbn.MCBN(...))`, CUDO that of
    `MCDropout`. tau is this object's own, tuned by validation CRPS; the wrapped predictor keeps its own.

    Args:
        base: a regression `mcbn.MCBN` or baseline, fitted or to be fitted.

    >>> ConstantUncertainty(bayes).tune((x, y)).predict(x).variance.unique().numel()
    1
    """

    def __init__(self, base: MCBN[Any] | Predictor) -> None:
        if not isinstance(base, MCBN | Predictor):
            raise MCBNError(f"ConstantUncertainty wraps mcbn.MCBN or a baseline, got {type(base).__name__}")
        if base.task != "regression":
            raise MCBNError(f"a constant variance is for regression; the wrapped predictor does {base.task}")
        super().__init__(base.task, inputs=base.inputs)
        self.base = base

    def fit(self, *data: Any, **options: Any) -> Self:
        """Fit the wrapped predictor."""
        self.base.fit(*data, **options)
        self.inputs = self.base.inputs
        noise.drop_calibration(self)
        return self

    @property
    def n_samples(self) -> int:  # type: ignore[override]
        """T of the wrapped predictor: passes behind the mean."""
        return self.base.posterior.n_samples if isinstance(self.base, MCBN) else self.base.n_samples

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The network that runs."""
        return self.base.engine.network if isinstance(self.base, MCBN) else self.base.network

    def plain(self, x: Any) -> Tensor:
        """Return what the deterministic network says, (N, ...)."""
        return self.base.plain(x)

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield the mean over the wrapped predictor's draws as the only one, (1, N, ...)."""
        mean: Tensor = self.base.predict(inputs, n_samples=n_samples).mean
        yield mean.unsqueeze(0)
