"""Five networks of a newcomer, from training to saved predictions: what the README promises, tried in one go.

    python tests/five_networks.py

A table (diabetes MLP), pictures (digits CNN), segmentation (shapes UNet), two outputs with correlated noise, and
batches that are dicts read by workers. It needs scikit-learn for the first two sets and takes about half a minute.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mcbn


def train(network: nn.Module, loader: DataLoader[Any], loss: Callable[..., Tensor], epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(network(x), y).backward()
            optimizer.step()
    return network.eval()


def pairs(x: Tensor, y: Tensor, batch_size: int = 32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, drop_last=True)


def halves(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Cut into training, validation and test, 60 : 20 : 20."""
    a, b = int(0.6 * len(x)), int(0.8 * len(x))
    return (x[:a], y[:a]), (x[a:b], y[a:b]), (x[b:], y[b:])


def reloaded(bayes: mcbn.MCBN[Any], x: Any) -> Any:
    """Predict from a saved file, which must give the same."""
    with tempfile.TemporaryDirectory() as folder:
        bayes.save(Path(folder) / "net.mcbn")
        loaded: Any = mcbn.MCBN.load(Path(folder) / "net.mcbn", bayes.model, inputs=bayes.inputs)
        first, second = bayes.predict(x), loaded.predict(x)
    same = [getattr(p, "probs" if hasattr(p, "probs") else "mean") for p in (first, second)]
    torch.testing.assert_close(*same)
    return second


def diabetes() -> str:
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
    fit, validation, (x_test, y_test) = halves(20 * x, (y[:, None] - 152) / 77)
    network = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    loader = pairs(*fit)
    bayes = mcbn.MCBN(train(network, loader, F.mse_loss, 20), "regression").fit(loader, n_samples=50)
    low, high = reloaded(bayes.tune(validation), x_test).interval(0.9)
    return f"{float(((low <= y_test) & (y_test <= high)).float().mean()):.0%} of targets in their 90 % intervals"


def digits() -> str:
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target)
    fit, validation, (x_test, y_test) = halves(x, y)
    network = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    loader = pairs(*fit)
    trained = train(network, loader, F.cross_entropy, 4)
    bayes = mcbn.MCBN(nn.Sequential(trained, nn.Softmax(1)), "classification").fit(loader, n_samples=20)
    pred = reloaded(bayes.tune(validation), x_test)
    return f"{float((pred.label == y_test).float().mean()):.0%} of digits right, read as {bayes.reads}"


class UNet(nn.Module):
    """One step down, one up, a bridge between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.low = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        bridge = self.down(x)
        return self.up(torch.cat([bridge, F.interpolate(self.low(bridge), scale_factor=2)], 1))  # type: ignore[no-any-return]


def shapes() -> str:
    centre, radius = 4 + 16 * torch.rand(120, 2, 1, 1), 3 + 3 * torch.rand(120, 1, 1)
    place = torch.stack(torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij"))
    y = ((place - centre).square().sum(1).sqrt() < radius).long()  # (N, 24, 24)
    fit, validation, (x_test, y_test) = halves(y[:, None] + 0.5 * torch.randn(120, 1, 24, 24), y)
    loader = pairs(*fit, batch_size=8)
    bayes = mcbn.MCBN(train(UNet(), loader, F.cross_entropy, 10), "classification").fit(loader, n_samples=20)
    pred = reloaded(bayes.tune(validation), x_test)
    return f"{float((pred.label == y_test).float().mean()):.1%} of pixels right, entropy {tuple(pred.entropy.shape)}"


def two_outputs() -> str:
    x = torch.randn(600, 4)
    shared = torch.randn(600, 1)
    y = torch.stack([x[:, 0], x[:, 1] - x[:, 2]], 1) + 0.5 * shared + 0.3 * torch.randn(600, 2)
    fit, validation, (x_test, y_test) = halves(x, y)
    network = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    loader = pairs(*fit)
    trained = train(network, loader, F.mse_loss, 20)
    bayes = mcbn.MCBN(trained, "regression", noise="full").fit(loader, n_samples=50).tune(validation)
    pred = reloaded(bayes, x_test)
    covariance = torch.linalg.inv(torch.as_tensor(bayes.tau))
    correlation = covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt()
    return f"noise correlated {float(correlation):.2f}, log density {float(pred.log_prob(y_test).mean()):.2f}"


class Records(Dataset[dict[str, Any]]):
    """Examples with names, as records of a file have them."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int) -> dict[str, Any]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(row))
        return {"id": f"row-{row}", "features": x, "label": (x[:2].sum() > 0).float()}


class Named(nn.Module):
    """A network that takes its input by name; one unit, squashed by a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)  # type: ignore[no-any-return]


def dicts() -> str:
    loader = DataLoader(Records(), batch_size=32, shuffle=True, num_workers=2)
    network = Named()
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy(network(batch["features"])[:, 0], batch["label"]).backward()
            optimizer.step()
    bayes = mcbn.MCBN(network.eval(), "classification").fit(loader, n_samples=20).tune(loader)
    ordered = DataLoader(Records(), batch_size=64, num_workers=2)
    pred, y = reloaded(bayes, ordered), torch.cat([batch["label"] for batch in ordered])
    return f"{float((pred.label == y).float().mean()):.0%} of labels right, read as {bayes.reads}"


TRIES = {"diabetes MLP": diabetes, "digits CNN": digits, "shapes UNet": shapes}
TRIES |= {"two outputs": two_outputs, "dict batches with workers": dicts}

if __name__ == "__main__":
    warnings.filterwarnings("error", message="mcbn:")  # a first try should not need to be warned
    for name, trial in TRIES.items():
        torch.manual_seed(0)
        print(f"{name}: {trial()}")
