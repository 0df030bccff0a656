"""Who is timed beside `predict`: the loop of Algorithm 1, plain passes, and torch-uncertainty where it can be had."""

import importlib
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from mcbn.errors import MCBNError
from mcbn_benchmarks.speed.cases import BATCH_SIZE, Case, Prepared

Method = Callable[[int], object]  # runs so many draws
ALGORITHM_1, PLAIN, PEER, FORWARDS = "algorithm 1", "plain x T", "torch-uncertainty", "training forwards"
PEER_PACKAGE = "torch_uncertainty"


class Algorithm1:
    """The loop of Teye et al. 2018, Algorithm 1: per draw a training batch sets the statistics, then the inputs run.

    Differs from `mcbn.algorithm`, in the loop's favour: batch norm in train mode takes the statistics, on a copy that
    is made once, and moments are summed, not stored. Variances are unbiased, as PyTorch keeps running ones: same work.
    """

    def __init__(self, network: nn.Module, train: Tensor, query: Tensor, batch_size: int = BATCH_SIZE) -> None:
        self.network, self.train, self.query, self.batch_size = deepcopy(network).eval(), train, query, batch_size
        self.norms = [module for module in self.network.modules() if isinstance(module, _BatchNorm)]
        self.generator = torch.Generator(train.device).manual_seed(0)
        for layer in self.norms:
            layer.momentum = 1.0  # one batch sets the statistics

    @torch.no_grad()
    def __call__(self, n_samples: int) -> tuple[Tensor, Tensor]:
        """Return mean and variance over T draws, each (N, ...)."""
        outputs = self._draw()  # (N, ...)
        total, squares = outputs.clone(), outputs.square()
        for _ in range(n_samples - 1):
            outputs = self._draw()
            total += outputs
            squares += outputs.square()
        mean = total / n_samples
        return mean, squares / n_samples - mean.square()

    def _draw(self) -> Tensor:
        for inputs, training in ((self.batch(), True), (self.query, False)):
            for layer in self.norms:
                layer.training = training
            outputs: Tensor = self.network(inputs)
        return outputs  # (N, ...)

    def batch(self) -> Tensor:
        """Draw M training rows, (M, ...)."""
        rows = torch.randperm(len(self.train), generator=self.generator, device=self.train.device)
        return self.train[rows[: self.batch_size]]


@torch.no_grad()
def forwards(network: nn.Module, inputs: Tensor, n_samples: int) -> None:
    """Run T passes of a network as it is: in eval mode what draws cost if statistics came for nothing."""
    for _ in range(n_samples):
        network(inputs)


class Peer:
    """torch-uncertainty's MCBatchNorm, fitted; T passes with its stored statistics."""

    def __init__(self, case: Case, ready: Prepared, folder: Path | None) -> None:
        self.query, T, device = ready.query, case.n_samples, ready.query.device
        self.wrapped = load_peer(folder)(num_estimators=T, mc_batch_size=BATCH_SIZE, device=device)
        self.wrapped.mc_batch_norm_layers = []  # the class's own list would collect the layers of every case
        self.wrapped.set_model(ready.network)
        rows = TensorDataset(ready.train, torch.zeros(len(ready.train)))
        generator = torch.Generator().manual_seed(0)  # rows with repetition: its `fit` wants T batches from one pass
        sampler = RandomSampler(rows, replacement=True, num_samples=T * BATCH_SIZE, generator=generator)
        self.wrapped.fit(DataLoader(rows, sampler=sampler))
        self.wrapped.eval()

    @torch.no_grad()
    def __call__(self, n_samples: int) -> Tensor:
        """Return the outputs of T draws, (T N, ...)."""
        self.wrapped.num_estimators = n_samples
        outputs: Tensor = self.wrapped(self.query)
        return outputs

    @staticmethod
    def reason_against(ready: Prepared, folder: Path | None) -> str:
        """Say why it cannot run this case; empty where it can."""
        if not any(isinstance(module, nn.BatchNorm2d) for module in ready.network.modules()):
            return "cannot run: it knows 2-d batch norm only"
        try:
            load_peer(folder)
        except Exception as error:  # a foreign package may fail in any way
            return f"cannot be imported here: {error}"
        return ""


def load_peer(folder: Path | None) -> Any:
    """Import MCBatchNorm from an installed package, or from the one under `folder`.

    Its package imports torchvision, lightning, timm and more, none of which MCBatchNorm uses; so its packages are
    entered by their folders, without running their `__init__`.
    """
    spec = PathFinder.find_spec(PEER_PACKAGE, [str(folder)] if folder else None)
    if spec is None or not spec.submodule_search_locations:
        where = "torch-uncertainty is not installed" if folder is None else f"--peer-path {folder} does not hold it"
        raise MCBNError(f"{where}; pip install it as benchmarks/README.md says")
    home, processing = Path(spec.submodule_search_locations[0]), f"{PEER_PACKAGE}.post_processing"
    if f"{processing}.mc_batch_norm" not in sys.modules:
        for name in ("", ".layers", ".post_processing"):
            package = ModuleType(PEER_PACKAGE + name)
            package.__path__ = [str(home / name.lstrip("."))]
            sys.modules[package.__name__] = package
        abstract = importlib.import_module(f"{processing}.abstract")
        sys.modules[processing].__dict__["PostProcessing"] = abstract.PostProcessing
    return importlib.import_module(f"{processing}.mc_batch_norm").MCBatchNorm
