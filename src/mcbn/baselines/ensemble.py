"""A deep ensemble (Lakshminarayanan et al. 2017): networks trained apart, each a draw; temperature scaling has one."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch import Tensor, nn

from mcbn import noise
from mcbn.baselines.predictor import Predictor, of_one_shape
from mcbn.errors import MCBNError
from mcbn.network import Output


class DeepEnsemble(Predictor):
    """Mean and variance over independently trained networks; classification averages their probabilities.

    mean = 1/T sum_t f_t(x), epistemic = 1/T sum_t (f_t(x) - mean)^2, T the number of members (5 is usual), noise 1/tau
    tuned on held-out data. Lakshminarayanan et al. 2017, Section 2.4. `plain` is the first member.
    Differs: members give a mean alone, and the noise is one tau for all inputs, as for the other methods here.

    Args:
        models: trained networks with the same inputs and output shape; copied at construction and `fit`.
        task: "regression", "classification" (one label an input, or one a pixel) or "multilabel".
        output, inputs, outputs: as for `mcbn.MCBN`.

    >>> DeepEnsemble([nn.Linear(3, 1) for _ in range(5)], "regression").predict(x).epistemic.shape
    torch.Size([64, 1])
    """

    def __init__(self, models: Sequence[nn.Module], task: str, *, output: Output = None, **options: Any) -> None:
        super().__init__(task, **options)
        self.models, self.output = list(models), output
        if not self.models:
            raise MCBNError("an ensemble needs at least one network, got none; 5 are usual")
        for position, model in enumerate(self.models):
            if not isinstance(model, nn.Module):
                raise MCBNError(f"member {position} must be a torch.nn.Module, got {type(model).__name__}")
        self.fit()

    def fit(self, data: Any = None) -> Self:
        """Copy the members as they are now; they come trained, so `data` is not looked at."""
        self._members = [self.copy_network(model, self.output) for model in self.models]
        self.network, self.n_samples = self._members[0], len(self._members)
        noise.drop_calibration(self)
        return self

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield the output of each member, (1, N, ...)."""
        if n_samples > len(self._members):
            raise MCBNError(f"n_samples={n_samples} asked of an ensemble of {len(self._members)}; train more members")
        outputs = (member.run_copy(member.prepare(inputs)) for member in self._members[:n_samples])
        return of_one_shape(output.to(self.network.device).unsqueeze(0) for output in outputs)


class Temperature(DeepEnsemble):
    """The network as it is, one pass, an ensemble of one: classes softmax(tau f(x)), regression N(f(x), 1/tau).

    `tune` sets tau, the inverse temperature of greatest held-out likelihood (Guo et al. 2017, Section 4), or the noise
    precision of least held-out CRPS. Labels and means stay those of the network; options as for `DeepEnsemble`.

    >>> Temperature(classifier.model, "classification").tune((x, labels)).predict(x).probs.shape
    torch.Size([64, 3])
    """

    def __init__(self, model: nn.Module, task: str, **options: Any) -> None:
        super().__init__([model], task, **options)
