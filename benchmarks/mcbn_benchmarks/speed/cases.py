"""What is timed, and against whom: networks of three kinds, few inputs and many, on random data.

Beside `predict` run the loop of Algorithm 1, plain passes, and torch-uncertainty where it can be had.
"""

import importlib
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.networks import RegressionMLP
from mcbn.private_torch import AnyBatchNorm
from mcbn_study.networks.others import UNet, resnet32, resnet50

BATCH_SIZE = 32  # M
QUICK_SAMPLES = 4
PEER_PACKAGE = "torch_uncertainty"
Method = Callable[[int], object]  # runs so many draws


@dataclass(frozen=True)
class Case:
    """One network, N inputs and T draws."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    rows: int  # of random training data
    n: int
    n_samples: int
    task: str = "classification"
    recorded: int | None = None  # training batches drawn, their statistics repeated to T; None: T of them

    @property
    def title(self) -> str:
        """Name and size, what `--only` is searched in."""
        return f"{self.name} N={self.n}"


MLP = Case("mlp", partial(RegressionMLP, 13, seed=0), (13,), 1000, 1, 500, "regression")
RESNET32 = Case("resnet32", resnet32, (3, 32, 32), 128, 1, 128)
UNET = Case("unet", UNet, (3, 256, 256), 64, 1, 20, recorded=4)  # on a CPU one batch takes seconds
RESNET50 = Case("resnet50", resnet50, (3, 224, 224), 64, 1, 32)
SIZES = {MLP: (1, 100, 2000, 20_000), RESNET32: (1, 32, 256), UNET: (1, 8), RESNET50: (1, 32, 256)}
MEMORY = (
    replace(MLP, name="memory mlp", n=2000),
    replace(MLP, name="memory mlp", n=100_000),  # where a few draws fill a chunk on a GPU too
    replace(UNET, name="memory unet"),
)
FIT = (
    replace(MLP, name="fit mlp 1,000 rows", n_samples=100),
    replace(MLP, name="fit mlp 100,000 rows", rows=100_000, n_samples=100),
    replace(MLP, name="fit mlp T=500", n_samples=500),
    replace(RESNET32, name="fit resnet32", n_samples=16),
    replace(RESNET32, name="fit resnet32 T=128"),
)


def speed_cases(device: str, *, quick: bool = False) -> list[Case]:
    """List the cases that are timed on this kind of device."""
    if quick:
        return [replace(case, n_samples=QUICK_SAMPLES) for case in (MLP, RESNET32)]
    networks = [case for case in SIZES if device == "cuda" or case is not RESNET50]
    return [replace(case, n=n) for case in networks for n in SIZES[case]]


class Prepared(NamedTuple):
    """A case made ready to run, all on one device."""

    network: nn.Module
    train: Tensor  # (rows, ...)
    query: Tensor  # (N, ...)


def prepare(case: Case, device: str) -> Prepared:
    """Make network and data from a fixed seed, running statistics set by the training data."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = case.build().to(device)
    train = torch.randn(case.rows, *case.shape, generator=generator).to(device)
    query = torch.randn(case.n, *case.shape, generator=generator).to(device)
    if case.rows:
        update_bn(torch.split(train[:128], BATCH_SIZE), network)
    return Prepared(network.eval(), train, query)


def fitted(case: Case, ready: Prepared) -> MCBN[Any]:
    """Draw the T sets of statistics; where fewer batches are recorded, each stands for several draws.

    Running repeated draws takes the time and memory of others.
    """
    T = case.n_samples
    few = min(T, case.recorded or T)
    bayes: MCBN[Any] = MCBN(ready.network, case.task).fit(ready.train, n_samples=few, batch_size=BATCH_SIZE)
    if few < T:
        rows, drawn = torch.arange(T) % few, bayes.posterior
        mean, var = ({name: value[rows] for name, value in each.items()} for each in (drawn.mean, drawn.var))
        bayes.posterior = replace(drawn, mean=mean, var=var)
    return bayes


class Algorithm1:
    """The loop of Teye et al. 2018, Algorithm 1: per draw a training batch sets the statistics, then the inputs run.

    Differs from `mcbn.algorithm`, in the loop's favour: batch norm in train mode takes the statistics, on a copy that
    is made once, and moments are summed, not stored. Variances are unbiased, as PyTorch keeps running ones: same work.
    """

    def __init__(self, network: nn.Module, train: Tensor, query: Tensor, batch_size: int = BATCH_SIZE) -> None:
        self.network, self.train, self.query, self.batch_size = deepcopy(network).eval(), train, query, batch_size
        self.norms = [module for module in self.network.modules() if isinstance(module, AnyBatchNorm)]
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
