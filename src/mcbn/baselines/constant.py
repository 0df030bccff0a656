"""Constant uncertainty (CUBN, CUDO): a stochastic predictor's mean with one variance for every input."""

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor

from mcbn.baselines.predictor import Predictor
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.posterior import Posterior


class ConstantUncertainty(Predictor):
    """The mean over T passes of a predictor, with the constant variance 1/tau (Teye et al. 2018, Section 4.2).

    p(y | x) = N(1/T sum_t f_t(x), 1/tau). Only the variance differs from the wrapped predictor's, so comparing the two
    scores tells what the draws know about the error. CUBN is `ConstantUncertainty(mcbn.MCBN(...))`, CUDO that of
    `MCDropout`. tau is this object's own, tuned by validation CRPS; the wrapped predictor keeps its own.

    Args:
        base: a regression `mcbn.MCBN` or baseline, fitted or to be fitted.
    """

    def __init__(self, base: MCBN[Any] | Predictor) -> None:
        if not isinstance(base, MCBN | Predictor):
            raise MCBNError(f"ConstantUncertainty wraps mcbn.MCBN or a baseline, got {type(base).__name__}")
        if base.task != "regression":
            raise MCBNError(f"a constant variance is for regression; the wrapped predictor does {base.task}")
        super().__init__(base.task, inputs=base.inputs)
        self.base = base
        self._copy: tuple[Posterior, Network] | None = None  # of an MCBN's network, and the fit it belongs to

    def fit(self, *data: Any, **options: Any) -> Self:
        """Fit the wrapped predictor."""
        self.base.fit(*data, **options)
        self.inputs = self.base.inputs
        return self

    @property
    def n_samples(self) -> int:  # type: ignore[override]
        """T of the wrapped predictor: passes behind the mean."""
        return self.base.posterior.n_samples if isinstance(self.base, MCBN) else self.base.n_samples

    @property
    def network(self) -> Network:
        """The network that runs."""
        if not isinstance(self.base, MCBN):
            return self.base.network
        fitted = self.base.posterior
        if self._copy is None or self._copy[0] is not fitted:
            self._copy = fitted, Network(self.base.model, self.base.output)
        return self._copy[1]

    def plain(self, x: Any) -> Tensor:
        """Return what the deterministic network says, (N, ...)."""
        return self.base.plain(x)

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield the mean over the wrapped predictor's draws as the only one, (1, N, ...)."""
        mean: Tensor = self.base.predict(inputs, n_samples=n_samples).mean
        yield mean.unsqueeze(0)

    def __repr__(self) -> str:
        return f"ConstantUncertainty({self.base!r}, tau={self.tau})"
