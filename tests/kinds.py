"""One small network for every kind of batch norm, with random weights and running statistics that fit its data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    calls: tuple[str, ...]  # stochastic calls expected, in order


class BatchNormAct2d(nn.BatchNorm2d):
    """Batch norm and activation in one module, in the manner of timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        training = self.training or (self.running_mean is None and self.running_var is None)
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, 0.1, self.eps)
        return self.act(x)


class Functional(nn.Module):
    """A module with buffers of its own names that calls the function, positionally and by name."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(channels))
        self.register_buffer("v", torch.ones(channels))
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.m, self.v, self.gamma, training=self.training, eps=1e-3)
        return torch.batch_norm(x.relu(), None, self.gamma, self.m, self.v, self.training, 0.1, 1e-4, True)


class Twice(nn.Module):
    """One batch norm layer called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bn = nn.Linear(5, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.b(self.bn(self.a(x)).relu()))


class TwoNames(nn.Module):
    """One batch norm layer registered under two names and called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.alias = self.inner[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.inner(x))


class Residual(nn.Module):
    """Convolutions with a normalised shortcut whose name says nothing, dropout, and a 1-d norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, eps=0.1)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.drop, self.head = nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(self.conv(x)) + self.shortcut(x))
        return self.head(self.drop(x.amax((2, 3))))


def mlp(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6, bias=False),
        nn.BatchNorm1d(6, **options),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, **options),
        nn.ReLU(),
        nn.Linear(6, 2),
    )


def lazy() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6), nn.LazyBatchNorm1d(), nn.Linear(6, 2))
    net(torch.zeros(3, 5))
    return net


def compiled() -> nn.Module:
    return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]


KINDS: dict[str, Kind] = {
    "1d": Kind(mlp, (5,), ("1", "4")),
    "1d-length": Kind(lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (3, 7), ("1",)),
    "2d": Kind(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (3, 6, 6), ("1",)),
    "3d": Kind(lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.ReLU()), (1, 3, 4, 4), ("1",)),
    "sync": Kind(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(mlp()), (5,), ("1", "4")),
    "lazy": Kind(lazy, (5,), ("1",)),
    "no-affine": Kind(lambda: mlp(affine=False), (5,), ("1", "4")),
    "no-tracking": Kind(lambda: mlp(track_running_stats=False), (5,), ("1", "4")),
    "neither": Kind(lambda: mlp(track_running_stats=False, affine=False), (5,), ("1", "4")),
    "cumulative": Kind(lambda: mlp(momentum=None), (5,), ("1", "4")),
    "large-eps": Kind(lambda: mlp(eps=0.3), (5,), ("1", "4")),
    "fused-activation": Kind(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.Conv2d(4, 2, 3)), (3, 6, 6), ("1",)
    ),
    "two-names": Kind(TwoNames, (5,), ("inner.1", "inner.1#2")),
    "called-twice": Kind(Twice, (5,), ("bn", "bn#2")),
    "bare": Kind(lambda: nn.BatchNorm1d(5), (5,), ("",)),
    "functional": Kind(lambda: nn.Sequential(nn.Linear(5, 6), Functional(6)), (5,), ("1", "1#2")),
    "residual": Kind(Residual, (3, 6, 6), ("first", "shortcut.1", "head.1")),
    "data-parallel": Kind(lambda: nn.DataParallel(mlp()), (5,), ("1", "4")),
    "compiled": Kind(compiled, (5,), ("1", "4")),
    "compiled-inside": Kind(lambda: nn.Sequential(compiled(), nn.Linear(2, 2)), (5,), ("0.1", "0.4")),
}


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm | Functional)


def norms_in_training(model: nn.Module) -> nn.Module:
    """Put batch norm alone into train mode, the hand-made way."""
    model.eval()
    for module in model.modules():
        if is_norm(module):
            module.training = True
    return model


def scramble(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter a random value, gamma and beta too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.1)


def settle(model: nn.Module, x: Tensor, batch_size: int = 8) -> nn.Module:
    """Let running statistics settle on the data, as training does."""
    norms_in_training(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(200):
            model(x[torch.randperm(len(x), generator=generator)[:batch_size]])
    return model.eval()


def make(
    name: str, *, n: int = 24, dtype: torch.dtype = torch.float32, seed: int = 0, batch_size: int = 8
) -> tuple[nn.Module, Tensor]:
    """Build a network of one kind, as trained at a batch size, and inputs for it, (n, ...)."""
    kind = KINDS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.make().to(dtype)
        x = torch.randn(n, *kind.shape, dtype=dtype)
    scramble(model, seed)
    return settle(model, x, batch_size), x


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal numbers in double precision, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
