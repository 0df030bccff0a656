"""Training for the estimators: networks of k folds and one of all rows side by side; the folds choose epochs and tau.

The protocol of Teye et al. 2018, Section 4.3, in one run: the number of epochs by validation error and tau by
validation CRPS, both over all folds, then the network trained on all rows for as many epochs. Differs: the networks
used are running averages of the weights over epochs, their statistics taken afresh (Izmailov et al. 2018, arXiv
1803.05407); inputs and targets of all folds share the standardisation of all rows.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import update_bn

from mcbn import stacked
from mcbn.model import MCBN
from mcbn.networks import BN_EPSILON, Standardized
from mcbn.noise import inverse_temperature, tau_by_crps
from mcbn.prediction import join
from mcbn.sklearn.rows import Rows, folds
from mcbn.stacked import Values

if TYPE_CHECKING:
    from mcbn.sklearn.estimators import MCBNEstimator

# Chosen on held-out folds of the training rows of Boston, Concrete and Protein (docs/estimators.md).
BATCH_SIZES = {0: 32, 600: 64, 20_000: 256}  # from so many rows on
ONE_PART = 20_000  # rows from which on a single held-out part is enough to set epochs and tau
MOST_EPOCHS = 1000
LEAST_EPOCHS = 50
STEPS = 10_000  # an automatic number of epochs stays near this many steps
MOST_DECAY = 0.98  # of the average, from epoch to epoch
CHECK_EVERY = 5  # epochs


def train(rows: Rows, n_outputs: int, settings: "MCBNEstimator", seed: int) -> tuple[MCBN[Any], int, list[MCBN[Any]]]:
    """Train, choose epochs and tau on held-out rows, and draw the batch statistics of the network of all rows.

    Returns the fitted MCBN, its epochs, and the MCBN of every fold, if any, calibrated on the rows it has not seen.
    """
    run = _Run(rows, n_outputs, settings, seed)
    values, epochs = run.train()
    *fitted, bayes = (run.bayes(s, training, values) for s, training in enumerate(run.training))
    held_out = [held.take(held.repeated()) for _, held in run.splits]
    bayes.tau = run.tau(fitted, held_out)
    if run.splits[0][0] is run.splits[0][1]:  # too few rows to hold any out
        return bayes, epochs, []
    for fold, held in zip(fitted, held_out, strict=True):
        fold.tau = bayes.tau
        fold.calibrate((held.x, held.y))
    return bayes, epochs, fitted


class Stack:
    """Networks side by side, their optimiser and the running average of their weights."""

    def __init__(self, values: Values, *, weight_decay: float, learning_rate: float) -> None:
        self.values = values
        self.average = {name: value.clone() for name, value in values.items()}
        self.optimizer = torch.optim.Adam(values.values(), lr=learning_rate, fused=True)
        self.weight_decay = torch.full_like(values["weights"][:, 0], weight_decay)  # (S,)
        self.updates = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one step of every network on its batch: x (S, M, Q), y (S, M, D) or class numbers (S, M)."""
        for name, gradient in stacked.gradients(self.values, x, y, self.weight_decay).items():
            self.values[name].grad = gradient
        self.optimizer.step()

    def update_average(self, most_decay: float) -> None:
        """Take the present weights into the average, which forgets by `most_decay` at most."""
        decay = min(most_decay, self.updates / (self.updates + 10))
        for name, value in self.values.items():
            self.average[name].lerp_(value, 1 - decay)
        self.updates += 1


def population_output(values: Values, s: int, x: Tensor, share: Tensor, new: Tensor) -> Tensor:
    """Run network s on new inputs with the statistics of all training rows x (n, Q) of shares (n,): (N, D)."""
    n, sizes = len(x), stacked.layer_sizes(values, x.shape[1])
    *hidden, last = stacked.matrices(values["weights"][s : s + 1], sizes)
    h = torch.cat([x, new])  # (n + N, Q)
    for i, weight in enumerate(hidden, 1):
        h = h @ weight[0]
        mean = share @ h[:n]  # (H,)
        var = share @ (h[:n] - mean).square()  # (H,)
        gamma, beta = values[f"gamma{i}"][s], values[f"beta{i}"][s]
        h = (gamma * (h - mean) * torch.rsqrt(var + BN_EPSILON) + beta).relu_()
    return h[n:] @ last[0] + values[f"bias{len(hidden) + 1}"][s]


class _Run:
    """One training run: the splits, what the networks see of them, and the stack of networks."""

    def __init__(self, rows: Rows, n_outputs: int, settings: "MCBNEstimator", seed: int) -> None:
        self.settings, self.seed, self.classify = settings, seed, settings.task == "classification"
        self.device = torch.device(settings.device or "cpu")
        self.splits = folds(rows, settings.n_folds, seed)[: 1 if len(rows.x) >= ONE_PART else None]
        repeated = rows.take(rows.repeated())  # as often as their weights say, for the moments
        self.units = repeated.x, None if self.classify else repeated.y  # of all networks, whatever they are trained on
        self.scale = Standardized(nn.Identity(), *self.units)
        self.training = [*(training for training, _ in self.splits), rows]  # of each network
        # at most half the rows of each network, so that draws of batch statistics differ
        asked = settings.batch_size or max(M for least, M in BATCH_SIZES.items() if rows.size >= least)
        self.batch_size = max(2, min(asked, min(training.size for training in self.training) // 2))
        self.n_batches, seeds = max(1, rows.size // self.batch_size), [seed] * len(self.training)
        values = stacked.initial_values(rows.x.shape[1], settings.hidden_sizes(), n_outputs, seeds=seeds)
        values = {name: value.to(self.device) for name, value in values.items()}
        self.stack = Stack(values, weight_decay=settings.weight_decay, learning_rate=settings.learning_rate)

    def train(self) -> tuple[Values, int]:
        """Train all networks; return the averages of the epoch of lowest held-out loss, or the last, and that epoch."""
        count = self.n_batches * self.batch_size
        numbers = [_row_numbers(training, self.seed + s, count) for s, training in enumerate(self.training)]
        seen = [self._seen(training) for training in self.training]
        held = [self._seen(held) for _, held in self.splits]
        best, chosen, values = math.inf, 0, None
        last = self.settings.epochs or min(MOST_EPOCHS, max(LEAST_EPOCHS, STEPS // self.n_batches))
        for epoch in range(1, last + 1):
            self._epoch(numbers, seen)
            if not self.settings.early_stopping or (epoch % CHECK_EVERY and epoch < last):
                continue
            loss = self._held_out_loss(seen, held)
            if values is None or loss < best:
                best, chosen = loss, epoch
                values = {name: value.clone() for name, value in self.stack.average.items()}
            elif epoch - chosen >= self.settings.patience:
                break
        return (self.stack.average, last) if values is None else (values, chosen)

    def _epoch(self, numbers: Sequence[Iterator[Tensor]], seen: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take as many steps as one pass over all rows has, on rows drawn for each network."""
        B, M = self.n_batches, self.batch_size
        rows = [next(numbers_of_one).reshape(B, M).to(self.device) for numbers_of_one in numbers]
        x = torch.stack([x[index] for (x, _), index in zip(seen, rows, strict=True)], 1)  # (B, S, M, Q)
        y = torch.stack([y[index] for (_, y), index in zip(seen, rows, strict=True)], 1)  # (B, S, M, ...)
        for x_batch, y_batch in zip(x, y, strict=True):
            self.stack.step(x_batch, y_batch)
        self.stack.update_average(MOST_DECAY)

    def _held_out_loss(self, seen: Sequence[tuple[Tensor, Tensor]], held: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Weighted mean loss of the averaged networks over all held-out rows."""
        loss, total, weight = cross_entropy if self.classify else mse_loss, 0.0, 0.0
        for s, (training, out) in enumerate(self.splits):
            (x, _), (x_held, y_held) = seen[s], held[s]
            share = (training.weights / training.weights.sum()).to(x)
            output = population_output(self.stack.average, s, x, share, x_held)  # (N, D)
            each = loss(output, y_held, reduction="none").reshape(len(output), -1).mean(1)  # (N,)
            total += float(out.weights.to(each) @ each)
            weight += float(out.weights.sum())
        return total / weight

    def _seen(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return what networks are trained on: standardised in double precision, then single; y (n, D) or (n,)."""
        x, y = self.scale.standardize(rows.x, rows.y)
        y = y if self.classify else y.reshape(len(y), -1).float()
        return x.to(self.device, torch.float32), y.to(self.device)

    def bayes(self, s: int, rows: Rows, values: Values) -> MCBN[Any]:
        """Draw the batch statistics of network s, in original units and double precision, from its training rows."""
        network, (x, _) = stacked.network(values, s, rows.x.shape[1]).to(self.device), self._seen(rows)
        index = next(_row_numbers(rows, self.seed, self.n_batches * self.batch_size)).to(self.device)
        update_bn(x[index].reshape(self.n_batches, self.batch_size, -1), network)  # running statistics of one epoch
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # mps has no double precision
        bayes: MCBN[Any] = MCBN(Standardized(network, *self.units).eval().to(self.device, dtype), self.settings.task)
        x, T = rows.x[rows.repeated()], self.settings.n_samples
        return bayes.fit(x, n_samples=T, batch_size=self.batch_size, seed=self.seed)

    def tau(self, fitted: Sequence[MCBN[Any]], held_out: Sequence[Rows]) -> Tensor:
        """Tune tau on the held-out rows of all folds; logits are never sharpened: rows all right would ask for it."""
        pairs = list(zip(fitted, held_out, strict=True))
        y = torch.cat([held.y.reshape(len(held.y), -1) for held in held_out])  # (n, D)
        if self.classify:
            logits = torch.cat([bayes.sample(held.x) for bayes, held in pairs], 1)  # (T, n, K)
            return inverse_temperature(logits, y[:, 0]).clamp(max=1)
        pred = join([bayes.predict(held.x) for bayes, held in pairs])
        tau = tau_by_crps(pred.mean.reshape(y.shape), pred.epistemic.reshape(y.shape), y)  # (D,)
        return tau.reshape(()) if tau.numel() == 1 else tau


def _row_numbers(rows: Rows, seed: int, count: int) -> Iterator[Tensor]:
    """Yield numbers of rows without end, (count,) at a time: one epoch's order after another."""
    generator, left = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(left) < count:
            left = torch.cat([left, rows.order(generator)])
        yield left[:count]
        left = left[count:]
