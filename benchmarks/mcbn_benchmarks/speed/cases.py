"""What is timed: networks of three kinds, few inputs and many, on random data."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mcbn.model import MCBN
from mcbn.networks import RegressionMLP
from mcbn.posterior import Posterior
from mcbn_study.networks.others import UNet, resnet32, resnet50

BATCH_SIZE = 32  # M
QUICK_SAMPLES = 4


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
MEMORY_SAMPLES = (5, 500)
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
        set_running_statistics(network, torch.split(train[:128], BATCH_SIZE))
    return Prepared(network.eval(), train, query)


def fitted(case: Case, ready: Prepared) -> MCBN[Any]:
    """Draw the T sets of statistics; where fewer batches are recorded, each stands for several draws."""
    T = case.n_samples
    few = min(T, case.recorded or T)
    bayes: MCBN[Any] = MCBN(ready.network, case.task).fit(ready.train, n_samples=few, batch_size=BATCH_SIZE)
    if few < T:
        bayes.posterior = repeated(bayes.posterior, T)
    return bayes


def repeated(posterior: Posterior, n_samples: int) -> Posterior:
    """Repeat draws to a number that would take too long to record: running them takes the same time and memory."""
    rows = torch.arange(n_samples) % posterior.n_samples
    mean, var = ({name: value[rows] for name, value in part.items()} for part in (posterior.mean, posterior.var))
    return replace(posterior, mean=mean, var=var)


def norms_of(network: nn.Module) -> list[_BatchNorm]:
    """List the batch norm layers."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


@torch.no_grad()
def set_running_statistics(network: nn.Module, batches: Sequence[Tensor]) -> None:
    """Average the batches' statistics into a network that was never trained, in place."""
    momenta = [layer.momentum for layer in norms_of(network)]
    for layer in norms_of(network):
        layer.momentum = None  # PyTorch's way to say: the plain average of all batches
    network.train()
    for batch in batches:
        network(batch)
    for layer, momentum in zip(norms_of(network), momenta, strict=True):
        layer.momentum = momentum
    network.eval()


class Algorithm1:
    """The loop of Teye et al. 2018, Algorithm 1, as the paper runs it: a training batch through the network per draw.

    Differs: the copy of the network is made once, and moments are summed, not stored; both are in the loop's favour.
    """

    def __init__(self, network: nn.Module, train: Tensor, query: Tensor, batch_size: int = BATCH_SIZE) -> None:
        self.network, self.train, self.query = deepcopy(network).eval(), train, query
        self.norms, self.batch_size = norms_of(self.network), batch_size
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
        rows = torch.randperm(len(self.train), generator=self.generator, device=self.train.device)[: self.batch_size]
        for layer in self.norms:
            layer.training = True
        self.network(self.train[rows])
        for layer in self.norms:
            layer.training = False
        outputs: Tensor = self.network(self.query)  # (N, ...)
        return outputs


class Plain:
    """T passes of the network in eval mode: what drawing costs if statistics came for nothing."""

    def __init__(self, network: nn.Module, query: Tensor) -> None:
        self.network, self.query = network, query

    @torch.no_grad()
    def __call__(self, n_samples: int) -> None:
        """Run T passes."""
        for _ in range(n_samples):
            self.network(self.query)


class Ours:
    """Moments from draws that were fitted before."""

    def __init__(self, bayes: MCBN[Any], query: Tensor, *, compile: bool = False) -> None:
        self.bayes, self.query, self.compile = bayes, query, compile

    def __call__(self, n_samples: int) -> Any:
        """Predict from T draws."""
        return self.bayes.predict(self.query, n_samples=n_samples, compile=self.compile)


class TrainingForwards:
    """T forward passes of one batch in training mode: the least that fitting could cost."""

    def __init__(self, network: nn.Module, batch: Tensor) -> None:
        self.network, self.batch = deepcopy(network).train(), batch

    @torch.no_grad()
    def __call__(self, n_samples: int) -> None:
        """Run T passes."""
        for _ in range(n_samples):
            self.network(self.batch)


class Fit:
    """Fitting T draws."""

    def __init__(self, case: Case, ready: Prepared) -> None:
        self.bayes, self.train = MCBN(ready.network, case.task), ready.train

    def __call__(self, n_samples: int) -> None:
        """Draw T sets of statistics."""
        self.bayes.fit(self.train, n_samples=n_samples, batch_size=BATCH_SIZE)
