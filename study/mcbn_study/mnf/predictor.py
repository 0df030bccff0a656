"""MNF (Louizos and Welling 2017) with the verbs of `mcbn.MCBN`: a network of its own, trained by `fit`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mcbn import batches, saving
from mcbn.baselines.predictor import Predictor
from mcbn.batching import DEFAULT_BATCH_SIZE
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.networks import Standardized
from mcbn.randomness import isolated_random
from mcbn_study.mnf import stack
from mcbn_study.mnf.layers import MNFNetwork

FORMAT = "mcbn-mnf 1"
VALIDATION_PASSES = 10  # draws behind the mean that early stopping judges


class MNF(Predictor):
    """Dense network with multiplicative normalising flows over its weights; a variational posterior, so trained anew.

    Unlike MCBN it cannot be had from a trained network: `fit(x, y)` trains. Inputs, and regression targets, are
    standardised inside, so predictions and tau are in the units of y. A draw is one network (z, W and b drawn once
    for all inputs), by (seed, t) alone.

    Args:
        task: "regression", or "classification" (one label an input).
        hidden: units of the hidden layers; (50, 50) is what Teye et al. 2018 compare with.
    """

    def __init__(self, task: str, *, hidden: Sequence[int] = (50, 50)) -> None:
        super().__init__(task)
        self.hidden = [batches.require_int("hidden", units, 1) for units in hidden]
        self._network: Network | None = None

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        epochs: int = 200,
        validation: Any = None,
        patience: int = 200,
        batch_size: int = 100,
        learning_rate: float = 1e-3,
        n_samples: int = 100,
        seed: int = 0,
    ) -> Self:
        """Train with Adam on 1/2 MSE (or cross-entropy) + KL / N; batch size and learning rate are the published ones.

        Args:
            x: training inputs (N, Q) with targets y, a tuple (x, y), or a DataLoader or Dataset of such pairs.
            y: targets (N,) or (N, D), or labels (N,).
            epochs: how many, or how many at most where there is validation data.
            validation: regression: pairs like the training data; the epoch of the best RMSE is kept, and training
                ends `patience` epochs after it.
            n_samples: T where a later call names none.
            seed: of initial weights, batches and noise; the global generators are left as they were.
        """
        for name, value in (("epochs", epochs), ("patience", patience), ("batch_size", batch_size)):
            batches.require_int(name, value, 1)
        n_samples, seed = batches.require_int("n_samples", n_samples, 1), batches.require_int("seed", seed, 0)
        if not learning_rate > 0:
            raise MCBNError(f"learning_rate must be positive, got {learning_rate!r}")
        if validation is not None and self.task == "classification":
            raise MCBNError("early stopping by validation RMSE is for regression; leave validation= out")
        inputs, targets = self._pairs(x, y)
        classify = self.task == "classification"
        model = MNFModel(self.hidden, inputs, _logits_of(inputs, targets) if classify else targets, seed=seed)
        rates: dict[str, Any] = {"batch_size": batch_size, "learning_rate": learning_rate, "classify": classify}
        training = stack.Stack(model.network, *model.stacked(inputs, targets), [[seed]], **rates)
        if validation is None:
            stack.train_for(training, [epochs])
        else:
            held_out = model.stacked(*self._pairs(validation, None))
            noise = stack.draw_noise([[seed, stack.VALIDATION]], 0, VALIDATION_PASSES, model.network.draw_size)
            stack.train_until_best(training, *held_out, noise.to(held_out[0]), max_epochs=epochs, patience=patience)
        self._network, self.n_samples, self.seed = self.copy_network(model, None), n_samples, seed
        return self

    def _pairs(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Gather training data as two tensors, targets as the task has them."""
        if isinstance(x, DataLoader | Dataset):
            loader = x if isinstance(x, DataLoader) else DataLoader(x, batch_size=DEFAULT_BATCH_SIZE)
            with isolated_random():
                pairs = [(batches.pick_inputs(b, None, ([], [])), batches.pick_targets(b, None)) for b in loader]
            x, y = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
        if y is None and isinstance(x, tuple | list) and len(x) == 2:
            x, y = x
        if y is None:
            raise MCBNError("MNF is trained by fit, so it needs targets: fit(x, y), fit((x, y)) or a loader of pairs")
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        return x, y.to(x) if self.task == "regression" else y

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The trained network."""
        if self._network is None:
            raise MCBNError("not fitted yet; call fit(x, y) first: MNF trains a network of its own")
        return self._network

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield raw outputs of several drawn networks at a time, (t, N, ...)."""
        model = cast(MNFModel, self.network.module)
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] != model.network.sizes[0]:
            raise MCBNError(f"MNF could not run on {batches.describe(inputs)}; it takes (N, {model.network.sizes[0]})")
        rows = model.standardize_inputs(inputs).unsqueeze(0)
        return (model.in_units(some[0]) for some in stack.drawn(model.network, rows, [[self.seed]], n_samples))

    def save(self, path: str | Path) -> None:
        """Write the trained network, tau and settings as one safetensors file, whole or not at all."""
        model = cast(MNFModel, self.network.module)
        settings = {"task": self.task, "hidden": self.hidden, "n_samples": self.n_samples, "seed": self.seed}
        settings |= {"sizes": model.network.sizes, "tau": self.noise_precision.tolist(), "format": FORMAT}
        saving.save(path, model.state_dict(), {"mcbn": json.dumps(settings)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a saved MNF, ready to predict."""
        tensors, metadata = saving.read_tensors(path, hint="a saved MNF is what save(path) writes")
        settings = json.loads(metadata.get("mcbn", "{}"))
        if settings.get("format") != FORMAT:
            raise MCBNError(f"{path} is not a saved MNF; write one with save(path)")
        method = cls(settings["task"], hidden=settings["hidden"])
        method.n_samples, method.seed = settings["n_samples"], settings["seed"]
        method.tau = torch.tensor(settings["tau"], dtype=torch.float64)
        like = (tensors[name].expand(2, *tensors[name].shape) for name in ("x_mean", "y_mean"))
        model = MNFModel(settings["hidden"], *like, seed=0)
        model.load_state_dict(tensors)
        method._network = method.copy_network(model, None)
        return method

    def __repr__(self) -> str:
        state = "not fitted" if self._network is None else f"n_samples={self.n_samples}, seed={self.seed}"
        return f"MNF({self.task!r}, hidden={self.hidden}, tau={self.tau}, {state})"


class MNFModel(Standardized):
    """One MNF network in original units: f(x) = y_mean + y_std network((x - x_mean) / x_std)."""

    network: MNFNetwork

    def __init__(self, hidden: Sequence[int], x: Tensor, y: Tensor, *, seed: int) -> None:
        sizes = [x.shape[1], *hidden, y[0].numel()]
        super().__init__(MNFNetwork(sizes, generators=[stack.generator(seed, stack.INITIAL)]).to(x), x, y)

    def forward(self, x: Tensor) -> Tensor:
        """Run without noise: (N, Q) -> (N,) or (N, D), as y was."""
        return self.in_units(self.network.centre(self.standardize_inputs(x).unsqueeze(0))[0])

    def stacked(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Bring x (N, Q) and y to what a stack of one trains on: (1, N, Q), and (1, N, D) or labels (1, N)."""
        x = self.standardize_inputs(x.to(self.x_mean)).unsqueeze(0)
        if not y.is_floating_point():
            return x, y.to(x.device).long().unsqueeze(0)
        return x, ((y.to(x) - self.y_mean) / self.y_std).reshape(1, len(y), -1)


def _logits_of(x: Tensor, y: Tensor) -> Tensor:
    """Check labels (N,) and return zeros (N, K): logits have no units."""
    if y.is_floating_point() or y.ndim != 1 or len(y) != len(x) or int(y.min()) < 0:
        raise MCBNError(f"labels must be whole numbers (N,), 0 and up; got {batches.describe(y)} for {len(x)} rows")
    return x.new_zeros(len(x), max(2, int(y.max()) + 1))
