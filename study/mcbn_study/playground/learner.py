"""A small batch-normalised network that goes on learning while points come and go, and its MCBN bands.

Network of Teye et al. 2018, Figure 1: one input, three hidden layers of 30 units. Differs: tau of MCBN and of its
constant twin are tuned on the points themselves, as there are no others.
"""

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.networks import RegressionMLP, adam
from mcbn.noise import constant_tau, tau_by_crps
from mcbn.page.templates import rounded

HIDDEN = (30, 30, 30)
RANGE = 7.0  # points and grid lie in -RANGE..RANGE, both ways
GRID = 141
LEARNING_RATE = 3e-3  # ours: the toy must move while one watches
WEIGHT_DECAY = 1e-5
MOST_POINTS = 400
MOST_DRAWS = 300
UNITS = 4.0  # the network sees x and y over this


@dataclass(frozen=True)
class Settings:
    """What the sliders set; tau None is tuned on the points."""

    batch_size: int = 16
    n_samples: int = 100
    tau: float | None = None

    def __post_init__(self) -> None:
        if not (_whole(self.batch_size, 2, MOST_POINTS) and _whole(self.n_samples, 2, MOST_DRAWS)):
            raise MCBNError(
                f"batch_size must be 2 to {MOST_POINTS} and n_samples 2 to {MOST_DRAWS};"
                f" got {self.batch_size!r} and {self.n_samples!r}"
            )
        tau = self.tau
        if tau is not None and (isinstance(tau, bool) or not isinstance(tau, int | float) or not 1e-6 < tau < 1e6):
            raise MCBNError(f"tau must be a number from 1e-6 to 1e6, or null to tune it; got {tau!r}")


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


class Learner:
    """One network and its optimiser; the points are given anew with every call."""

    def __init__(self, seed: int = 0) -> None:
        self.network = RegressionMLP(1, HIDDEN, seed=seed)
        self.optimizer = adam(self.network, WEIGHT_DECAY, LEARNING_RATE)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0

    def train(self, points: Tensor, batch_size: int, seconds: float) -> float:
        """Take steps on batches of M of the points (N, 2) for so long; return the last loss."""
        x, y = (points / UNITS).chunk(2, 1)  # (N, 1) each
        M, loss = min(batch_size, len(points)), torch.zeros(())
        end = time.perf_counter() + seconds
        self.network.train()
        while time.perf_counter() < end:
            rows = torch.randperm(len(points), generator=self.generator)[:M]
            self.optimizer.zero_grad()
            loss = 0.5 * (self.network(x[rows]) - y[rows]).square().mean()
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.steps += 1
        self.network.eval()
        return float(loss.detach()) * UNITS**2

    def bands(self, points: Tensor, settings: Settings) -> dict[str, Any]:
        """Predict on the grid: mean and std of MCBN, and of the twin with the same mean and one std."""
        x, y = (points / UNITS).chunk(2, 1)  # (N, 1) each
        M = min(settings.batch_size, len(points))
        with warnings.catch_warnings(action="ignore"):  # running statistics lag behind while it learns
            bayes = MCBN(self.network, "regression").fit(x, n_samples=settings.n_samples, batch_size=M)
        at_points = bayes.predict(x)
        tau = float(tau_by_crps(at_points.mean, at_points.epistemic, y)) / UNITS**2
        constant = float(constant_tau(at_points.mean, y)) / UNITS**2
        tau = tau if settings.tau is None else settings.tau
        grid = torch.linspace(-RANGE, RANGE, GRID)[:, None]  # (G, 1)
        pred = bayes.predict(grid / UNITS)
        epistemic = pred.epistemic[:, 0] * UNITS**2  # (G,)
        bands = {
            "mean": pred.mean[:, 0] * UNITS,
            "epistemic_std": epistemic.sqrt(),
            "std": (epistemic + 1 / tau).sqrt(),
        }
        rows = {name: rounded(values.tolist()) for name, values in bands.items()}
        at = [round(v, 3) for v in grid[:, 0].tolist()]
        return {"x": at, **rows, "constant_std": constant**-0.5, "tau": tau}


def read_points(value: object) -> Tensor:
    """Check points sent by a page: 2 to 400 pairs of numbers within the range, (N, 2)."""
    if not isinstance(value, list) or not 2 <= len(value) <= MOST_POINTS:
        raise MCBNError(f"points must be a list of 2 to {MOST_POINTS} pairs [x, y]")
    try:
        points = torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise MCBNError(f"points must be pairs of numbers: {error}") from error
    if points.ndim != 2 or points.shape[1] != 2 or not bool((points.abs() <= RANGE).all()):
        raise MCBNError(f"points must be pairs of numbers from {-RANGE:g} to {RANGE:g}")
    return points
