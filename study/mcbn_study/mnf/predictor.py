"""MNF (Louizos and Welling 2017) with the verbs of `mcbn.MCBN`: a network of its own, trained by `fit`."""

from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

from torch import Tensor

from mcbn import batches
from mcbn.baselines.predictor import Predictor
from mcbn.errors import MCBNError, require_choice
from mcbn.network import Network
from mcbn.networks import Standardized
from mcbn_study.mnf import stack
from mcbn_study.mnf.layers import MNFNetwork


class MNF(Predictor):
    """Dense network with multiplicative normalising flows over its weights; a variational posterior, so trained anew.

    Unlike MCBN it cannot be had from a trained network: `fit(x, y)` trains. Inputs and targets are standardised
    inside, so predictions and tau are in the units of y. A draw is one network (z, W and b drawn once for all inputs),
    by (seed, t) alone. hidden: units of the hidden layers; (50, 50) is what Teye et al. 2018 compare with.
    """

    def __init__(self, task: str = "regression", *, hidden: Sequence[int] = (50, 50)) -> None:
        super().__init__(require_choice("task", task, ("regression",)))
        self.hidden = [batches.require_int("hidden", units, 1) for units in hidden]
        self._network: Network | None = None

    def fit(
        self, x: Tensor, y: Tensor, *, epochs: int = 200, batch_size: int = 100, n_samples: int = 100, seed: int = 0
    ) -> Self:
        """Train on inputs x (N, Q) and targets y, (N,) or (N, D), by Adam on 1/2 MSE + KL / N.

        Batch size, of rows drawn with replacement, and learning rate, 1e-3, are the published ones. n_samples: T where
        a later call names none; seed: of initial weights, batches and noise.
        """
        for name, value in (("epochs", epochs), ("batch_size", batch_size), ("n_samples", n_samples)):
            batches.require_int(name, value, 1)
        sizes, y = [x.shape[1], *self.hidden, y[0].numel()], y.to(x)
        network = MNFNetwork(sizes, generators=[stack.generator(seed, stack.INITIAL)]).to(x)
        model = MNFModel(network, x, y)
        inputs, targets = model.standardize(x, y)
        targets = targets.reshape(1, len(y), -1)
        stack.train_for(stack.Stack(network, inputs[None], targets, [[seed]], batch_size=batch_size), [epochs])
        self._network, self.n_samples, self.seed = self.copy_network(model, None), n_samples, seed
        return self

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The trained network."""
        if self._network is None:
            raise MCBNError("not fitted yet; call fit(x, y) first: MNF trains a network of its own")
        return self._network

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield raw outputs of several drawn networks at a time, (t, N, ...)."""
        model = cast(MNFModel, self.network.module)
        network = cast(MNFNetwork, model.network)
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] != network.sizes[0]:
            raise MCBNError(f"MNF could not run on {batches.describe(inputs)}; it takes (N, {network.sizes[0]})")
        rows = model.standardize_inputs(inputs)[None]
        return (model.in_units(some[0]) for some in stack.drawn(network, rows, [[self.seed]], n_samples))


class MNFModel(Standardized):
    """One MNF network in original units: f(x) = y_mean + y_std network((x - x_mean) / x_std)."""

    def forward(self, x: Tensor) -> Tensor:
        """Run without noise: (N, Q) -> (N,) or (N, D), as y was."""
        return self.in_units(cast(MNFNetwork, self.network).centre(self.standardize_inputs(x)[None])[0])
