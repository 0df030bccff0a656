"""Last-layer Laplace by laplace-torch (Daxberger et al. 2021): a Gaussian over the weights of the last linear layer."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random

AT_ONCE = 1000


def require() -> Any:
    """Return laplace-torch's `Laplace`, or say which extra brings it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its back ends use deprecated parts of torch
            from laplace import Laplace  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MCBNError(
            f"last-layer Laplace needs laplace-torch ({error}); pip install 'mcbn[laplace]', or leave `laplace` out of "
            "the methods"
        ) from error
    return Laplace


class LastLayer:
    """Probabilities of a network whose last linear layer has a Gaussian posterior.

    The layer's inputs are computed once and its posterior fitted on them, which is last-layer Laplace exactly: nothing
    before the layer is random. Kronecker-factored curvature, prior precision by marginal likelihood, probit
    approximation: laplace-torch's own defaults.

    Args:
        network: ends in a linear layer; runs where it is, the layer itself on the CPU.
        x: prepared training images (N, ...), in parts.
        y: their classes (N,).
    """

    def __init__(self, network: nn.Module, x: Iterable[Tensor], y: Tensor) -> None:
        Laplace = require()
        self.network = network
        self.layer = last_linear(network)
        head = copy.deepcopy(self.layer).cpu()
        features = torch.cat([self.features(part) for part in x])  # (N, F)
        loader = DataLoader(TensorDataset(features, y.cpu()), batch_size=AT_ONCE)
        with isolated_random(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.posterior = Laplace(head, "classification", subset_of_weights="all", hessian_structure="kron")
            self.posterior.fit(loader)
            self.posterior.optimize_prior_precision(method="marglik")

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer is given, (N, F), on the CPU."""
        seen: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        try:
            self.network(x)
        finally:
            hook.remove()
        return seen[0].cpu()

    def __call__(self, x: Tensor) -> Tensor:
        """Return log probabilities, (N, K)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probs: Tensor = self.posterior(self.features(x), pred_type="glm", link_approx="probit")
        return probs.detach().clamp(min=torch.finfo(probs.dtype).tiny).log()


def last_linear(network: nn.Module) -> nn.Linear:
    """Find the last linear layer of a network."""
    found = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise MCBNError(f"{type(network).__name__} has no linear layer, so no last-layer Laplace")
    return found[-1]
