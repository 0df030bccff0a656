"""Small imitations of what the packages of the zoo do with batch norm: the part of it that needs none of them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn_benchmarks.zoo.entries import Entry, Specimen


class BatchNormAct2d(nn.BatchNorm2d):
    """Batch norm, dropout and activation in one module, in the manner of timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.2), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then activate."""
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        result: Tensor = self.act(self.drop(x))
        return result


class GhostBatchNorm(nn.Module):
    """Batch norm of pieces of a batch, at most `virtual` rows each, in the manner of TabNet (arXiv 1705.08741)."""

    def __init__(self, channels: int, virtual: int) -> None:
        super().__init__()
        self.virtual, self.bn = virtual, nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise piece by piece."""
        return torch.cat([self.bn(piece) for piece in x.chunk(-(-len(x) // self.virtual), 0)])


class Reparameterised(nn.Module):
    """Parallel branches, one of them batch norm alone, in the manner of RepVGG and MobileOne."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.point = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.identity = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branches."""
        return F.relu(self.wide(x) + self.point(x) + self.identity(x))


class Recurrent(nn.Module):
    """An LSTM beside convolutions with batch norm, in the manner of LSTM-FCN."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.conv = nn.Sequential(
            nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)
        )
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify series (N, 4, L)."""
        last = self.rnn(x.transpose(1, 2))[0][:, -1]  # (N, 6)
        result: Tensor = self.head(torch.cat([last, self.conv(x).relu().mean(2)], 1))
        return result


IMITATIONS: dict[str, tuple[tuple[int, ...], Callable[[], list[nn.Module]]]] = {  # the shape of an input, and modules
    "BatchNormAct": ((3, 8, 8), lambda: [nn.Conv2d(3, 6, 3), BatchNormAct2d(6), nn.Conv2d(6, 4, 3), BatchNormAct2d(4)]),
    "reparameterised": ((3, 8, 8), lambda: [nn.Conv2d(3, 6, 3), Reparameterised(6), Reparameterised(6), nn.Flatten()]),
    "ghost batch norm": (
        (5,),
        lambda: [nn.Linear(5, 8), GhostBatchNorm(8, 4), nn.ReLU(), nn.Linear(8, 8), GhostBatchNorm(8, 4)],
    ),
    "volume": ((1, 6, 6, 6), lambda: [nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.PReLU(), nn.ConvTranspose3d(4, 2, 2)]),
    "LSTM and convolutions": ((4, 20), lambda: [Recurrent()]),
}


def _specimen(shape: tuple[int, ...], modules: list[nn.Module]) -> Specimen:
    return Specimen(nn.Sequential(*modules), torch.randn(12, *shape))


ENTRIES = [
    Entry("mcbn", "imitations", name, lambda shape=shape, modules=modules: _specimen(shape, modules()))  # type: ignore[misc]
    for name, (shape, modules) in IMITATIONS.items()
]
