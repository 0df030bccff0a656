"""Networks that the snippets take as trained by somebody: small, on data that scikit-learn carries."""

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(net: nn.Module, data: TensorDataset, loss: nn.Module, epochs: int) -> DataLoader:
    """Train with Adam; return the loader, net in eval mode."""
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-3)
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
    net.eval()
    return loader


def digits() -> tuple[nn.Module, DataLoader, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a classifier of 8 x 8 digits, its training loader, validation and test pairs."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
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
