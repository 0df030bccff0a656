"""torch-uncertainty's MCBatchNorm, where it can be had: its own files, without the packages that it imports besides."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from mcbn.errors import MCBNError
from mcbn_benchmarks.speed.cases import BATCH_SIZE, Case, Prepared

PACKAGE = "torch_uncertainty"


class Peer:
    """MCBatchNorm, fitted; T passes with its stored statistics."""

    def __init__(self, case: Case, ready: Prepared, folder: Path | None) -> None:
        self.query = ready.query
        self.wrapped = load_class(folder)(
            num_estimators=case.n_samples, mc_batch_size=BATCH_SIZE, device=ready.query.device
        )
        self.wrapped.mc_batch_norm_layers = []  # the class's own list would collect the layers of every case
        self.wrapped.set_model(ready.network)
        self.wrapped.fit(_loader(ready.train, case.n_samples * BATCH_SIZE))
        self.wrapped.eval()

    @torch.no_grad()
    def __call__(self, n_samples: int) -> Tensor:
        """Return the outputs of T draws, (T N, ...)."""
        self.wrapped.num_estimators = n_samples
        outputs: Tensor = self.wrapped(self.query)
        return outputs


def reason_against(ready: Prepared, folder: Path | None) -> str:
    """Say why the peer cannot run this case; empty where it can."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in ready.network.modules()):
        return "cannot run: it knows 2-d batch norm only"
    try:
        load_class(folder)
    except Exception as error:  # a foreign package may fail in any way
        return f"cannot be imported here: {error}"
    return ""


def load_class(folder: Path | None) -> Any:
    """Import MCBatchNorm from an installed package, or from the one under `folder`.

    Its package imports torchvision, lightning, timm and more, none of which MCBatchNorm uses; so its packages are
    entered by their folders, without running their `__init__`.
    """
    home = _home(folder)
    if f"{PACKAGE}.post_processing.mc_batch_norm" not in sys.modules:
        for name in ("", ".layers", ".post_processing"):
            package = ModuleType(PACKAGE + name)
            package.__path__ = [str(home / name.lstrip("."))]
            sys.modules[package.__name__] = package
        abstract = importlib.import_module(f"{PACKAGE}.post_processing.abstract")
        sys.modules[f"{PACKAGE}.post_processing"].__dict__["PostProcessing"] = abstract.PostProcessing
    return importlib.import_module(f"{PACKAGE}.post_processing.mc_batch_norm").MCBatchNorm


def _home(folder: Path | None) -> Path:
    """Find the package's folder without importing it."""
    if folder is not None:
        if not (folder / PACKAGE).is_dir():
            raise MCBNError(f"--peer-path {folder} holds no folder {PACKAGE}; pip install --target it there")
        return folder / PACKAGE
    spec = importlib.util.find_spec(PACKAGE) if PACKAGE not in sys.modules else None
    if spec is None or not spec.submodule_search_locations:
        raise MCBNError("torch-uncertainty is not installed; see benchmarks/README.md")
    return Path(next(iter(spec.submodule_search_locations)))


def _loader(train: Tensor, count: int) -> DataLoader[tuple[Tensor, ...]]:
    """Load random rows, each as often as it comes: its `fit` wants T batches from one pass."""
    data = TensorDataset(train, torch.zeros(len(train)))
    generator = torch.Generator().manual_seed(0)
    return DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=count, generator=generator))
