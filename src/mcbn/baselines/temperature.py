"""Temperature scaling (Guo et al. 2017): the plain network with one number tuned on held-out data."""

from typing import Any

from torch import nn

from mcbn.baselines.ensemble import DeepEnsemble


class Temperature(DeepEnsemble):
    """The network as it is, one pass, an ensemble of one: classes softmax(tau f(x)), regression N(f(x), 1/tau).

    `tune` sets tau, the inverse temperature of greatest held-out likelihood (Guo et al. 2017, Section 4), or the noise
    precision of least held-out CRPS. Labels and means stay those of the network; options as for `DeepEnsemble`.

    >>> Temperature(classifier.model, "classification").tune((x, labels)).predict(x).probs.shape
    torch.Size([64, 3])
    """

    def __init__(self, model: nn.Module, task: str, **options: Any) -> None:
        super().__init__([model], task, **options)
