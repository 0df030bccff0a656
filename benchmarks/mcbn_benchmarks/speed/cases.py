"""What is timed: networks of three kinds, few inputs and many, on random data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from mcbn.model import MCBN
from mcbn.networks import RegressionMLP
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
