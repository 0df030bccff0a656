"""What is timed, against whom, and how: networks of three kinds, few inputs and many, on random data.

Beside `predict` run the loop of Algorithm 1, plain passes, and torch-uncertainty where it can be had; time and peak
memory are taken of methods that do the same work.
"""

import multiprocessing
import re
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.networks import RegressionMLP
from mcbn.private_torch import AnyBatchNorm
from mcbn_study.machine import gpu_growth, timed
from mcbn_study.networks import UNet, cifar_resnet, resnet50

LEAST_REPEATS, MOST_REPEATS = 3, 20
ENOUGH_SECONDS = 3.0  # of the fastest method, over its repeats
MOST_SECONDS = 30.0  # of all, once each has its least repeats
TURN_SECONDS, MOST_CALLS = 0.02, 50
CPU_DRAW_SECONDS = 1.0  # a baseline slower than that for T draws times fewer of them
LEAST_DRAWS = 8
MOST_TURN_SECONDS = 15.0  # a draw may take that long by itself (UNet): then one is timed
CUDA_WARM_UPS = 5  # graphs are captured on the way
PLAIN_MEMORY_DRAWS = 2  # plain passes free what they used: more of them need no more
BATCH_SIZE = 32  # M
QUICK_SAMPLES = 4
WHOLE = {"mcbn", "linear", "fit", "training", "predict", "first"}  # first words of methods that run all T draws
R = TypeVar("R")
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
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        """Name and size, what `--only` is searched in."""
        return f"{self.name} N={self.n}"


def efficientnet() -> nn.Module:
    """Build torchvision's EfficientNet-B0."""
    network: nn.Module = import_module("torchvision.models").efficientnet_b0()
    return network


MLP = Case("mlp", partial(RegressionMLP, 13, seed=0), (13,), 1000, 1, 500, "regression")
RESNET32 = Case("resnet32", partial(cifar_resnet, 5), (3, 32, 32), 128, 1, 128)
UNET = Case("unet", UNet, (3, 256, 256), 64, 1, 20, recorded=4)  # on a CPU one batch takes seconds
RESNET50 = Case("resnet50", resnet50, (3, 224, 224), 64, 1, 32)
EFFICIENT = replace(RESNET50, name="efficientnet", build=efficientnet)
SIZES = {MLP: (1, 100, 2000, 20_000), RESNET32: (1, 32, 256), UNET: (1, 8), RESNET50: (1, 32, 256)}
FITTED = (("1,000 rows", 1000, 100), ("100,000 rows", 100_000, 100), ("T=500", 1000, 500))  # title, rows, T
MEMORY = [*(replace(MLP, name="memory mlp", n=n) for n in (2000, 100_000)), replace(UNET, name="memory unet")]
FIT = [replace(MLP, name=f"fit mlp {title}", rows=rows, n_samples=T) for title, rows, T in FITTED]
FIT += [replace(RESNET32, name=f"fit resnet32{end}", n_samples=T) for end, T in (("", 16), (" T=128", 128))]
PRECISION = [  # on a GPU alone
    replace(case, name=f"{case.name} {name}", dtype=dtype, n=n, n_samples=32, recorded=4)
    for case, sizes in ((RESNET50, (1, 32, 256)), (RESNET32, (1, 32, 256)), (UNET, (1, 32)), (EFFICIENT, (1, 32, 256)))
    for n in sizes
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))
]


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
    """Draw the T sets of statistics; where fewer batches are recorded, each stands for several draws: same cost."""
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
        total: Any = 0
        squares: Any = 0
        for _ in range(n_samples):
            for inputs, training in ((self.batch(), True), (self.query, False)):
                for layer in self.norms:
                    layer.training = training
                outputs = self.network(inputs)  # at last those of the query, (N, ...)
            total += outputs
            squares += outputs.square()
        mean = total / n_samples
        return mean, squares / n_samples - mean.square()

    def batch(self) -> Tensor:
        """Draw M training rows, (M, ...)."""
        rows = torch.randperm(len(self.train), generator=self.generator, device=self.train.device)
        return self.train[rows[: self.batch_size]]


@torch.no_grad()
def forwards(network: nn.Module, inputs: Tensor, n_samples: int) -> None:
    """Run T passes of a network as it is: in eval mode what draws cost if statistics came for nothing."""
    for _ in range(n_samples):
        network(inputs)


def folded(network: nn.Module) -> nn.Module:
    """Return a copy with every batch norm behind a convolution folded into its weights, channels last."""
    copy: nn.Module = deepcopy(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for layers in [module for module in copy.modules() if isinstance(module, nn.Sequential)]:
        for place, (convolution, norm) in enumerate(pairwise(layers)):
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                layers[place], layers[place + 1] = fuse_conv_bn_eval(convolution, norm), nn.Identity()
    return copy


def fit_peer(case: Case, ready: Prepared, folder: Path | None) -> Method:
    """Fit torch-uncertainty's MCBatchNorm, and return T passes with its stored statistics, (T N, ...)."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in ready.network.modules()):
        raise MCBNError("it knows 2-d batch norm only")
    T, device = case.n_samples, ready.query.device
    wrapped = load_peer(folder)(num_estimators=T, mc_batch_size=BATCH_SIZE, device=device)
    wrapped.mc_batch_norm_layers = []  # the class's own list would collect the layers of every case
    wrapped.set_model(ready.network)
    rows = TensorDataset(ready.train, torch.zeros(len(ready.train)))
    generator = torch.Generator().manual_seed(0)  # rows with repetition: its `fit` wants T batches from one pass
    sampler = RandomSampler(rows, replacement=True, num_samples=T * BATCH_SIZE, generator=generator)
    wrapped.fit(DataLoader(rows, sampler=sampler))
    wrapped.eval()

    @torch.no_grad()
    def run(n_samples: int) -> object:
        wrapped.num_estimators = n_samples
        return wrapped(ready.query)

    return run


def load_peer(folder: Path | None) -> Any:
    """Import MCBatchNorm from an installed package, or from the one under `folder`.

    Its package imports torchvision, lightning, timm and more, none of which MCBatchNorm uses; so its packages are
    entered by their folders, without running their `__init__`.
    """
    spec = PathFinder.find_spec("torch_uncertainty", [str(folder)] if folder else None)
    if spec is None or not spec.submodule_search_locations:
        where = "torch-uncertainty is not installed" if folder is None else f"--peer-path {folder} does not hold it"
        raise MCBNError(f"{where}; pip install it as benchmarks/README.md says")
    for name in ("", ".layers", ".post_processing"):
        package = ModuleType(spec.name + name)
        package.__path__ = [str(Path(spec.submodule_search_locations[0]) / name.lstrip("."))]
        sys.modules[package.__name__] = package
    package.__dict__["PostProcessing"] = import_module(f"{package.__name__}.abstract").PostProcessing
    return import_module(f"{package.__name__}.mc_batch_norm").MCBatchNorm


class Timing(NamedTuple):
    """Least time of T draws over the repeats, since noise only adds to it; where fewer were timed, scaled to T."""

    milliseconds: float
    draws_timed: int
    seconds: float  # of all repeats


def time_interleaved(
    methods: Mapping[str, Method], n_samples: int, device: str, most_repeats: int = MOST_REPEATS
) -> dict[str, Timing]:
    """Time methods in turns (a, b, c, a, b, c), so that noise of the machine meets all alike."""
    draws = {name: _warm_up(run, n_samples, device, name.split()[0] in WHOLE) for name, run in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    repeats, totals = 0, [0.0]
    while repeats < min(LEAST_REPEATS, most_repeats) or not (
        repeats >= most_repeats or min(totals) >= ENOUGH_SECONDS or sum(totals) >= MOST_SECONDS
    ):
        for name, run in methods.items():
            first = timed(run, draws[name])[1]
            calls = min(MOST_CALLS, int(TURN_SECONDS / max(first, 1e-9)))  # short work repeats within its turn, warm
            seconds[name] += [timed(run, draws[name])[1] for _ in range(calls)] or [first]
        repeats, totals = min(map(len, seconds.values())), [*map(sum, seconds.values())]
    return {
        name: Timing(1000 * min(taken) * n_samples / draws[name], draws[name], sum(taken))
        for name, taken in seconds.items()
    }


def _warm_up(run: Method, n_samples: int, device: str, whole: bool) -> int:
    """Run once before the clock counts; return how many draws to time."""
    if whole or device == "cuda":
        for _ in range(CUDA_WARM_UPS if whole and device == "cuda" else 1):
            run(n_samples)
        return n_samples
    run(1)
    one = timed(run, 1)[1]
    return min(n_samples, max(LEAST_DRAWS, int(CPU_DRAW_SECONDS / one)), max(1, int(MOST_TURN_SECONDS / one)))


def peak_bytes(case: Case, ready: Prepared, bayes: MCBN[Any], method: str, device: str) -> int:
    """Return by how much memory grows at its peak in the first call of `mcbn` or `plain x T`.

    On the CPU in a process of its own, which reads the fitted draws from a file: training batches must not count.
    """
    if device == "cuda":
        return gpu_growth(partial(_first_call, method, case, ready, bayes))
    with tempfile.TemporaryDirectory() as folder:
        bayes.save(Path(folder) / "fitted.mcbn")
        torch.save(ready.network.state_dict(), Path(folder) / "network.pt")
        return apart(growth, case, method, Path(folder))


def apart(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function in a process of its own, which does nothing before."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=warnings.simplefilter, initargs=("ignore",)) as pool:
        return pool.submit(function, *arguments).result()


def growth(case: Case, method: str, folder: Path) -> int:
    """Return the growth of this process's peak memory in bytes over one call."""
    ready = prepare(replace(case, rows=0), "cpu")
    ready.network.load_state_dict(torch.load(folder / "network.pt", weights_only=True))
    bayes: MCBN[Any] = MCBN.load(folder / "fitted.mcbn", ready.network)
    with suppress(OSError):  # let the peak start at what is resident now, where the system can
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_resident()
    _first_call(method, case, ready, bayes)
    return peak_resident() - before


def _first_call(method: str, case: Case, ready: Prepared, bayes: MCBN[Any]) -> None:
    if method == "mcbn":
        bayes.engine.plans_at_once = True  # what later calls need
        bayes.predict(ready.query, n_samples=case.n_samples)
    else:
        forwards(ready.network, ready.query, PLAIN_MEMORY_DRAWS)


def peak_resident() -> int:
    """Return the peak resident bytes of this process; ru_maxrss counts the parent's too, so /proc comes first."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text() if status.exists() else "")
    return 1024 * (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
