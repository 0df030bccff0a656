"""Temperature scaling (Guo et al. 2017): the plain network with one number tuned on held-out data."""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from mcbn.baselines.predictor import Predictor
from mcbn.errors import MCBNError
from mcbn.network import Output


class Temperature(Predictor):
    """The network as it is, one pass: classes softmax(tau f(x)), regression N(f(x), 1/tau).

    `tune` sets tau, the inverse temperature that maximises the held-out likelihood (Guo et al. 2017, Section 4), or
    the noise precision of least held-out CRPS. Labels and means stay those of the plain network; nothing is epistemic.

    Args:
        model: any trained network; copied at construction and `fit`.
        task: "regression", or "classification" (one label an input, or one a pixel).
        output, inputs, outputs: as for `mcbn.MCBN`.

    >>> x, y = torch.randn(40, 3), torch.randint(4, (40,))
    >>> scaled = Temperature(nn.Linear(3, 4), "classification").tune((x, y))
    >>> scaled.predict(x).probs.shape
    torch.Size([40, 4])
    """

    n_samples = 1

    def __init__(self, model: nn.Module, task: str, *, output: Output = None, **options: Any) -> None:
        super().__init__(task, **options)
        if not isinstance(model, nn.Module):
            raise MCBNError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model, self.output = model, output
        self.fit()

    def fit(self, data: Any = None) -> Self:
        """Copy the network as it is now; it comes trained, so `data` is not looked at."""
        self.network, self.calibration = self.copy_network(self.model, self.output), None
        return self

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield the output, (1, N, ...): it has one draw, however many are asked for."""
        with torch.no_grad():
            yield self.network.run_copy(inputs).unsqueeze(0)

    def __repr__(self) -> str:
        return f"Temperature({type(self.model).__name__}, {self.task!r}, tau={self.tau})"
