"""Training for the estimators: networks of k folds and one of all rows side by side; the folds choose epochs and tau.

The protocol of Teye et al. 2018, Section 4.3, in one run: the number of epochs by validation error and tau by
validation CRPS, both over all folds, then the network trained on all rows for as many epochs. Differs: the networks
used are running averages of the weights over epochs, their statistics taken afresh (Izmailov et al. 2018, arXiv
1803.05407); inputs and targets of all folds share the standardisation of all rows.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from mcbn.model import MCBN
from mcbn.networks import RegressionMLP, Standardized, StandardizedInputs
from mcbn.noise import inverse_temperature, tau_by_crps
from mcbn.sklearn.rows import Rows, folds
from mcbn.sklearn.stack import Stack, State, population_output

# Chosen on held-out folds of the training rows of Boston and Concrete (docs/ecosystem.md).
BATCH_SIZE = 32
LARGE_BATCH_SIZE = 64
MANY_ROWS = 600
MOST_EPOCHS = 1000
LEAST_EPOCHS = 50
STEPS = 10_000  # an automatic number of epochs stays near this many steps
MOST_DECAY = 0.98  # of the average, from epoch to epoch
CHECK_EVERY = 5  # epochs


@dataclass(frozen=True)
class Settings:
    """What a training run is made of."""

    task: str
    hidden: tuple[int, ...]
    n_outputs: int
    batch_size: int | None
    epochs: int | None
    weight_decay: float
    learning_rate: float
    n_samples: int
    n_folds: int
    patience: int | None  # None: no early stopping
    seed: int
    device: torch.device


class Trained(NamedTuple):
    """A fitted MCBN with its tau, and the epochs its network was trained for."""

    bayes: MCBN[Any]
    epochs: int


def train(rows: Rows, settings: Settings) -> Trained:
    """Train, choose epochs and tau on held-out rows, and draw the batch statistics of the network of all rows."""
    run = _Run(rows, settings)
    state, epochs = run.train()
    bayes = run.bayes(len(run.splits), rows, state)
    bayes.tau = run.tau(state)
    return Trained(bayes, epochs)


class _Run:
    """One training run: the splits, what the networks see of them, and the stack of networks."""

    def __init__(self, rows: Rows, settings: Settings) -> None:
        self.settings, self.classify = settings, settings.task == "classification"
        self.splits = folds(rows, settings.n_folds, settings.seed)
        self.rows = rows.take(rows.repeated().numpy())  # as often as their weights say, for the moments
        self.scale = self._standardized(nn.Identity())
        self.parts = [*(part for part, _ in self.splits), rows]
        # at most half the rows of each network, so that draws of batch statistics differ
        asked = settings.batch_size or (BATCH_SIZE if rows.size < MANY_ROWS else LARGE_BATCH_SIZE)
        self.batch_size = max(2, min(asked, min(part.size for part in self.parts) // 2))
        self.n_batches = max(1, rows.size // self.batch_size)
        self.stack = Stack(
            rows.x.shape[1],
            settings.hidden,
            settings.n_outputs,
            seeds=[settings.seed] * len(self.parts),
            weight_decay=settings.weight_decay,
            learning_rate=settings.learning_rate,
            device=settings.device,
        )

    def train(self) -> tuple[State, int]:
        """Train all networks; return the averages of the epoch of lowest held-out loss, or the last, and that epoch."""
        streams = [_Stream(part, self.settings.seed + s) for s, part in enumerate(self.parts)]
        seen = [self._seen(part) for part in self.parts]
        held = [self._seen(part) for _, part in self.splits]
        best, chosen, state = math.inf, 0, None
        last = self.settings.epochs or min(MOST_EPOCHS, max(LEAST_EPOCHS, STEPS // self.n_batches))
        for epoch in range(1, last + 1):
            self._epoch(streams, seen)
            if self.settings.patience is None or (epoch % CHECK_EVERY and epoch < last):
                continue
            loss = self._held_out_loss(seen, held)
            if state is None or loss < best:
                best, chosen = loss, epoch
                state = {name: value.clone() for name, value in self.stack.average.items()}
            elif epoch - chosen >= self.settings.patience:
                break
        return (self.stack.average, last) if state is None else (state, chosen)

    def _epoch(self, streams: "list[_Stream]", seen: list[tuple[Tensor, Tensor]]) -> None:
        """Take as many steps as one pass over all rows has, on rows drawn for each network."""
        B, M = self.n_batches, self.batch_size
        rows = [stream.take(B * M).reshape(B, M).to(self.settings.device) for stream in streams]
        x = torch.stack([x[index] for (x, _), index in zip(seen, rows, strict=True)], 1)  # (B, S, M, Q)
        y = torch.stack([y[index] for (_, y), index in zip(seen, rows, strict=True)], 1)  # (B, S, M, ...)
        for x_batch, y_batch in zip(x, y, strict=True):
            self.stack.step(x_batch, y_batch)
        self.stack.update_average(MOST_DECAY)

    def _held_out_loss(self, seen: list[tuple[Tensor, Tensor]], held: list[tuple[Tensor, Tensor]]) -> float:
        """Weighted mean loss of the averaged networks over all held-out rows."""
        total = weight = 0.0
        for s, (part, out) in enumerate(self.splits):
            (x, _), (x_held, y_held) = seen[s], held[s]
            output = population_output(self.stack.average, s, x, _share(part).to(x), x_held)  # (N, D)
            if self.classify:
                each = cross_entropy(output, y_held, reduction="none")  # (N,)
            else:
                each = (output - y_held).square().mean(1)  # (N,)
            total += float(out.weights.to(each) @ each)
            weight += float(out.weights.sum())
        return total / weight

    def _seen(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return what networks are trained on: standardised in double precision, then single; y (n, D) or (n,)."""
        if isinstance(self.scale, Standardized):
            x, y = self.scale.standardize(rows.x, rows.y)
            y = y.reshape(len(y), -1).float()
        else:
            x, y = self.scale.standardize(rows.x), rows.y
        return x.to(self.settings.device, torch.float32), y.to(self.settings.device)

    def _standardized(self, network: nn.Module) -> Standardized | StandardizedInputs:
        """Wrap a network to work in original units: those of all rows, whatever the network was trained on."""
        if self.classify:
            return StandardizedInputs(network, self.rows.x)
        return Standardized(network, self.rows.x, self.rows.y)

    def bayes(self, s: int, rows: Rows, state: State) -> MCBN[Any]:
        """Draw the batch statistics of network s, in original units and double precision, from its training rows."""
        network = self.stack.network(s, state).to(self.settings.device)
        self._settle(network, rows)
        # mps has no double precision
        dtype = torch.float32 if self.settings.device.type == "mps" else torch.float64
        whole = self._standardized(network).to(self.settings.device, dtype)
        bayes: MCBN[Any] = MCBN(whole, self.settings.task)
        return bayes.fit(
            rows.x[rows.repeated()],
            n_samples=self.settings.n_samples,
            batch_size=self.batch_size,
            seed=self.settings.seed,
        )

    def _settle(self, network: RegressionMLP, rows: Rows) -> None:
        """Set running statistics to the averages of one epoch's batches, and the network to eval mode."""
        x, _ = self._seen(rows)
        index = _Stream(rows, self.settings.seed).take(self.n_batches * self.batch_size)
        update_bn(x[index.to(x.device)].reshape(self.n_batches, self.batch_size, -1), network)
        network.eval()

    def tau(self, state: State) -> Tensor:
        """Tune tau on the held-out rows of all folds: the noise precision of each output, or inverse temperature.

        Logits are never sharpened: rows that are all classified rightly would drive tau to infinity.
        """
        fitted = [self.bayes(s, part, state) for s, (part, _) in enumerate(self.splits)]
        chosen = [held.take(held.repeated().numpy()) for _, held in self.splits]
        y = torch.cat([held.y for held in chosen])
        if self.classify:
            logits = [bayes.sample(held.x) for bayes, held in zip(fitted, chosen, strict=True)]
            return inverse_temperature(torch.cat(logits, 1), y).clamp(max=1)
        pairs = [bayes.predict(held.x) for bayes, held in zip(fitted, chosen, strict=True)]
        mean, epistemic = (torch.cat([getattr(p, name) for p in pairs]) for name in ("mean", "epistemic"))
        tau = tau_by_crps(*(part.reshape(len(y), -1) for part in (mean, epistemic, y)))  # (D,)
        return tau.reshape(()) if tau.numel() == 1 else tau


class _Stream:
    """An endless sequence of row numbers: one epoch's order after another."""

    def __init__(self, rows: Rows, seed: int) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(seed)
        self.left = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> Tensor:
        """Return the next rows, (count,)."""
        while len(self.left) < count:
            self.left = torch.cat([self.left, self.rows.order(self.generator)])
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def _share(rows: Rows) -> Tensor:
    return rows.weights / rows.weights.sum()
