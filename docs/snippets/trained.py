"""Networks that the snippets take as trained by somebody: small, on data that scikit-learn carries."""

from collections.abc import Callable

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(net: nn.Module, data: TensorDataset, loss: Callable[..., Tensor], epochs: int) -> DataLoader:
    """Train with Adam, in double precision so that threads decide no digit; return the loader, net in eval mode."""
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(net.double().parameters(), 3e-3, weight_decay=1e-3)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(net(x.double()), y.double() if y.is_floating_point() else y).backward()
            optimizer.step()
    net.float().eval()
    return loader


def digits() -> tuple[nn.Module, DataLoader, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a classifier of 8 x 8 digits, its training loader, validation and test pairs."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images))  # as they come, one writer follows another
    x, y = torch.tensor(images)[order].float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)[order]
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )
    loader = train(net, TensorDataset(x[:900], y[:900]), nn.CrossEntropyLoss(), epochs=4)
    return net, loader, (x[900:1300], y[900:1300]), (x[1300:], y[1300:])


def diabetes() -> tuple[nn.Module, DataLoader, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a network for the progression of diabetes in units of its spread, loader, validation and test pairs."""
    torch.manual_seed(0)
    rows, progression = load_diabetes(return_X_y=True)
    x, y = torch.tensor(rows).float() * 20, torch.tensor(progression).float()
    order = torch.randperm(len(x))
    x, y = x[order], ((y - 152) / 77)[order]
    net = nn.Sequential(
        *(nn.Linear(10, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 50), nn.BatchNorm1d(50), nn.ReLU()),
        *(nn.Linear(50, 1), nn.Flatten(0)),
    )
    loader = train(net, TensorDataset(x[:250], y[:250]), nn.MSELoss(), epochs=10)
    return net, loader, (x[250:346], y[250:346]), (x[346:], y[346:])


def squares(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw images of noise with one square each; return them, the pixels of the square, and its corner."""
    generator = torch.Generator().manual_seed(seed)
    corners, pixels = torch.randint(0, 16, (n, 2), generator=generator), torch.zeros(n, 24, 24, dtype=torch.int64)
    for image, (i, j) in zip(pixels, corners.tolist(), strict=True):
        image[i : i + 8, j : j + 8] = 1
    return pixels[:, None] * 0.8 + 0.5 * torch.randn(n, 1, 24, 24, generator=generator), pixels, corners


def shapes() -> tuple[nn.Module, DataLoader, Tensor, Tensor]:
    """Return a network that segments squares (1) on noise (0), its training loader, new images and their labels."""
    images, labels, _ = squares(200, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 2, 1)),
    )
    loader = train(net, TensorDataset(images[:160], labels[:160]), nn.CrossEntropyLoss(), epochs=15)
    return net, loader, images[160:], labels[160:]


def waves() -> tuple[nn.Module, DataLoader, Tensor, Tensor]:
    """Return a network that tells slow waves (0) from fast ones (1), its training loader, new series and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (400,), generator=generator)
    phase = torch.rand(400, 1, 1, generator=generator) * 6.3
    time = torch.arange(64) / 10
    series = torch.sin(time * (1 + 0.4 * labels[:, None, None]) + phase)
    series = series + 0.8 * torch.randn(400, 1, 64, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv1d(1, 16, 9), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 9, stride=2), nn.BatchNorm1d(16)),
        *(nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 2)),
    )
    loader = train(net, TensorDataset(series[:300], labels[:300]), nn.CrossEntropyLoss(), epochs=12)
    return net, loader, series[300:], labels[300:]


class Detector(nn.Sequential):
    """Gives the centre of a square and a score, as a dict: the kind of output a detector has."""

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Return centres (N, 2) in pixels and scores (N,)."""
        output = super().forward(image)
        return {"centre": 12 + 6 * output[:, :2], "score": output[:, 2]}


def centres() -> tuple[nn.Module, DataLoader, Tensor, Tensor]:
    """Return a small detector of squares, its training loader, new images and the centres of their squares."""
    images, _, corners = squares(400, seed=1)
    torch.manual_seed(0)
    net = Detector(
        *(nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1600, 32)),
        *(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)),
    )
    rows = TensorDataset(images[:300], corners[:300] + 4.0)
    loader = train(net, rows, lambda output, centre: (output["centre"] - centre).square().mean(), epochs=15)
    return net, loader, images[300:], corners[300:] + 4.0
