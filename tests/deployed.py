"""Small trained networks and their inputs as deployed: a table of three groups, and images of three patterns."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mcbn

M, T = 8, 30


def table(n: int, seed: int, classes: tuple[int, ...] = (0, 1, 2)) -> tuple[Tensor, Tensor]:
    """Rows (n, 5) about the centre of their class."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
    centres = torch.tensor([[2.0, 0, 0, 1, 0], [0, 2, 0, -1, 0], [0, 0, 2, 0, 1]])
    return centres[label] + torch.randn(n, 5, generator=generator), label


def images(n: int, seed: int, classes: tuple[int, ...] = (0, 1, 2)) -> tuple[Tensor, Tensor]:
    """Stripes (n, 3, 12, 12) of three directions, with random phase, width, colour and noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
    angle = torch.tensor([0.0, 1.05, 2.1])[label] + 0.2 * torch.randn(n, generator=generator)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    frequency, phase = (
        1 + 0.5 * torch.rand(n, 1, 1, generator=generator),
        6.3 * torch.rand(n, 1, 1, generator=generator),
    )
    colour = 0.5 + torch.rand(n, 3, 1, 1, generator=generator)
    stripes = colour * torch.sin(frequency * along + phase)[:, None]
    return stripes + 0.3 * torch.randn(n, 3, 12, 12, generator=generator), label


def blurred(x: Tensor) -> Tensor:
    """A shift: every pixel the mean of its neighbours."""
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 1)


def faded(x: Tensor) -> Tensor:
    """A shift: contrast x 0.2, and brighter."""
    return 0.2 * x + 0.5


def mlp() -> nn.Sequential:
    """Two batch norms that see one value a channel."""
    norms = [nn.BatchNorm1d(12), nn.BatchNorm1d(10)]
    return nn.Sequential(
        nn.Linear(5, 12), norms[0], nn.ReLU(), nn.Linear(12, 10), norms[1], nn.ReLU(), nn.Linear(10, 3)
    )


def cnn() -> nn.Sequential:
    """Two batch norms over images."""
    first = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    second = [nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(12, 3))


@cache
def trained(kind: str) -> nn.Module:
    """Train the network of "table" or "images" a little."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net, draw = (mlp(), table) if kind == "table" else (cnn(), images)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for step in range(120):
            x, y = draw(64, 1000 + step)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.eval()


@cache
def fitted(kind: str, task: str = "classification") -> Any:
    """An MCBN of that network, T = 30, M = 8."""
    x, _ = (table if kind == "table" else images)(600, 1)
    return mcbn.MCBN(trained(kind), task).fit(x, n_samples=T, batch_size=M)


@cache
def reference(kind: str) -> Tensor:
    """Inputs as deployed, never seen in training."""
    return (table(4000, 2) if kind == "table" else images(2400, 2))[0]


@cache
def watched(kind: str) -> Any:
    """A watch over them, at M = 8."""
    return fitted(kind).watch(reference(kind), batch_size=M)
