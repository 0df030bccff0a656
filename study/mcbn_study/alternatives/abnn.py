"""ABNN (Franchi et al. 2024, arXiv 2312.15297): a trained network, a few epochs more with noise in its batch norm."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn import batches
from mcbn.baselines.predictor import Predictor
from mcbn.errors import MCBNError
from mcbn.network import Output
from mcbn.private_torch import AnyBatchNorm
from mcbn.randomness import isolated_random

ALPHA = 0.1  # spread of the noise; torch-uncertainty
DECAYED_AFTER = (1, 4)  # epochs, each to a tenth of the rate; torch-uncertainty
RATE, PRIOR = 0.01, 1.5  # at first; weight of the favoured classes. Ours: torch-uncertainty names none
Pairs = Iterable[tuple[Tensor, Tensor]]
SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}  # torch-uncertainty


class ABNN(Predictor):
    """Draws of several networks whose batch norm gives gamma x^ (1 + alpha e) + beta, e ~ N(0, 1) for every value.

    One is the trained network itself; the others were trained on with that noise, each with sqrt(K) random classes
    that weigh more in its loss, so that they differ (Franchi et al. 2024). Draw t is of network t mod n. What the paper
    leaves open follows torch-uncertainty, by the same authors, but for what is marked above. Arguments are those of
    `mcbn.MCBN`; the model is a trained classifier with batch norm, which is copied, never modified.
    """

    def __init__(self, model: nn.Module, task: str, *, output: Output = None, **options: Any) -> None:
        super().__init__(task, **options)
        if task != "classification" or not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
            raise MCBNError(f"ABNN is for classifiers with batch norm; got {type(model).__name__}, {task!r}")
        self.model, self.output = model, output

    def fit(self, data: Pairs, *, n_samples: int = 100, seed: int = 0, n_networks: int = 3, epochs: int = 5) -> Self:
        """Train n_networks copies on, each with noise, for some epochs over batches of inputs and classes (M,).

        The seed decides on the noise, the favoured classes and the order of `data`; n_samples: T of the predictions.
        """
        self.n_samples = batches.require_int("n_samples", n_samples, 1)
        self.seed, self.calibration = batches.require_int("seed", seed, 0), None
        with isolated_random(seed), torch.enable_grad():
            trained = [train_on(self.model, data, epochs) for _ in range(n_networks)]
        self._members = [self.copy_network(noisy, self.output) for noisy in (with_noise(self.model), *trained)]
        for member in self._members:
            member.proven = member.draws_random = True
        self.network = self.copy_network(self.model, self.output)
        return self

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield the output of a network with its noise, (1, N, ...), from one network to the next."""
        for t in range(n_samples):
            member = self._members[t % len(self._members)]
            state = int(np.random.SeedSequence([self.seed, t]).generate_state(1, np.uint64)[0])
            with member.undisturbed(state):
                yield member.run_copy(inputs).unsqueeze(0)


def train_on(model: nn.Module, data: Pairs, epochs: int) -> nn.Module:
    """Train a copy on with noise, by cross-entropy in which sqrt(K) random classes weigh `PRIOR`; return it in eval."""
    network, weight = with_noise(model).train(), None
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, **SGD)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = RATE * 0.1 ** sum(epoch >= after for after in DECAYED_AFTER)
        for x, y in data:
            logits = network(x)
            if weight is None:
                weight = class_weights(logits.shape[1]).to(logits)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(logits, y.to(logits.device), weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return network.eval()


def class_weights(n_classes: int) -> Tensor:
    """Draw which floor(sqrt(K)) classes weigh more: (K,)."""
    weight = torch.ones(n_classes)
    weight[torch.randperm(n_classes)[: int(n_classes**0.5)]] = PRIOR
    return weight


def with_noise(model: nn.Module) -> nn.Module:
    """Copy a network and put noise behind each batch norm: y + (y - beta) alpha e = gamma x^ (1 + alpha e) + beta."""
    network = copy.deepcopy(model)
    for module in network.modules():
        if isinstance(module, AnyBatchNorm):
            module.register_forward_hook(_add_noise)
    return network


def _add_noise(module: Any, _inputs: Any, y: Tensor) -> Tensor:
    beta: Tensor = torch.zeros(1) if module.bias is None else module.bias
    return torch.addcmul(y, y - beta.to(y).reshape(-1, *(1,) * (y.ndim - 2)), torch.randn_like(y), value=ALPHA)
