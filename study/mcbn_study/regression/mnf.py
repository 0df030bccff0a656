"""MNF on the regression sets: the baseline of Teye et al. 2018, Tables 1 and 2 of Section 4.3.

What the text leaves open follows the authors' published script: Q-50-50-1, also for Protein; last fifth of the
train+CV part for validation; batches of 100 drawn with replacement, N // 100 of them an epoch; Adam 1e-3; no annealing;
patience 200 epochs; the networks of the test trained anew on all of train+CV for the best number of epochs.
Differs: early stopping judges the mean over 10 draws (the script: one pass without noise, new bests 20 epochs apart at
least); T is the text's 500 in the paper's profile (the script: 100); all rows are used (the script drops one).

All splits are searched as one stack of networks, then all splits and seeds trained as one; random streams are those of
(data set, split, seed), so a run is the same whatever else is in its stack.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mcbn import data
from mcbn.batches import require_int
from mcbn.errors import MCBNError
from mcbn.networks import Standardized
from mcbn_study.journal import digest
from mcbn_study.machine import environment
from mcbn_study.mnf import stack
from mcbn_study.mnf.layers import MNFNetwork
from mcbn_study.regression.profile import TAU_RANGES
from mcbn_study.regression.scores import score_run
from mcbn_study.regression.search import tune_both

HIDDEN = (50, 50)
BATCH_SIZE = 100
LEARNING_RATE = 1e-3
PATIENCE = 200
VALIDATION_PASSES = 10
SEARCH, TEST = 0, 1  # streams of the network that is searched with, and of those that are tested


class Profile(Protocol):
    """What is asked of a profile; `patience_epochs` is used where there is one."""

    @property
    def max_epochs(self) -> int:
        """Most epochs of the search."""

    @property
    def n_samples(self) -> int:
        """T of tau and of the test."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers, but for data set, split and seed."""

    max_epochs: int
    n_samples: int
    patience: int = PATIENCE
    validation_passes: int = VALIDATION_PASSES
    hidden: tuple[int, ...] = HIDDEN
    batch_size: int = BATCH_SIZE
    learning_rate: float = LEARNING_RATE

    @property
    def hash(self) -> str:
        """Name the configuration by 12 hexadecimal digits."""
        return digest(asdict(self))


class Choice(NamedTuple):
    """What the search found for one split."""

    epochs: int
    tau: float
    tau_constant: float


class Parts(NamedTuple):
    """Standardised training rows and the rows to predict for, of a stack of S networks."""

    x: Tensor  # (S, N, Q)
    y: Tensor  # (S, N, 1)
    x_new: Tensor  # (S, n, Q)
    y_new: Tensor  # (S, n, 1), standardised
    target: Tensor  # (S, n), original units, float64
    y_mean: Tensor  # (S, 1, 1)
    y_std: Tensor  # (S, 1, 1)


def run(
    dataset: str, splits: Sequence[int], seeds: Sequence[int], profile: Profile, device: str | torch.device = "cpu"
) -> Iterator[dict[str, Any]]:
    """Search, train and test MNF on splits and seeds; yield one "test" record for each (split, seed).

    Each has one key more, "_predictions": y - mean (n,), sqrt(variance + 1/tau) (n,), and tau_constant^-1/2.
    `seconds` is the whole time divided by the number of records, as all networks train together.
    """
    settings = Settings(
        max_epochs=require_int("max_epochs", profile.max_epochs, 1),
        n_samples=require_int("n_samples", profile.n_samples, 1),
        patience=require_int("patience_epochs", getattr(profile, "patience_epochs", PATIENCE), 1),
    )
    if dataset not in TAU_RANGES:
        raise MCBNError(f"there is no dataset {dataset!r}; choose one of {', '.join(TAU_RANGES)}")
    if not splits or not seeds:
        return
    start, device = time.perf_counter(), torch.device(device)
    choices = search(dataset, splits, settings, device)
    samples, target = train_and_draw(dataset, splits, seeds, choices, settings, device)
    seconds = (time.perf_counter() - start) / len(target)
    where = environment(device.type)
    for i, (s, seed) in enumerate((s, seed) for s in splits for seed in seeds):
        choice = choices[i // len(seeds)]
        yield {
            "kind": "test",
            "study": "regression",
            "profile": getattr(profile, "name", "custom"),
            "dataset": dataset,
            "method": "mnf",
            "split": s,
            "seed": seed,
            "config": {"weight_decay": None, "batch_size": BATCH_SIZE, "dropout": None, "epochs": choice.epochs},
            "tau": choice.tau,
            "tau_constant": choice.tau_constant,
            "n_samples": settings.n_samples,
            "n_test": target.shape[1],
            **score_run(samples[i], target[i], choice.tau, choice.tau_constant),
            "seconds": round(seconds, 3),
            "device": where.hardware,
            "commit": where.commit,
            "config_hash": getattr(profile, "hash", settings.hash),
            "_predictions": _predictions(samples[i].double(), target[i], choice),
        }


def search(dataset: str, splits: Sequence[int], settings: Settings, device: torch.device) -> list[Choice]:
    """Find epochs, tau and the constant tau of every split on the last fifth of its train+CV rows."""
    rows = [data.split(data.describe(dataset).n, s).train for s in splits]
    cut = len(rows[0]) * 8 // 10
    parts = _gather(dataset, [(own[:cut], own[cut:]) for own in rows], device)
    keys = [_key(dataset, s, SEARCH, 0) for s in splits]
    training = _stack(parts, keys, settings, settings.max_epochs)
    judged = [(*key, stack.VALIDATION) for key in keys]
    noise = stack.draw_noise(judged, 0, settings.validation_passes, training.network.draw_size).to(device)
    epochs = stack.train_until_best(
        training, parts.x_new, parts.y_new, noise, max_epochs=settings.max_epochs, patience=settings.patience
    )
    drawn = _samples(training.network, parts, keys, settings.n_samples).double().cpu()  # (S, T, n)
    return [_choose(dataset, *found) for found in zip(epochs, drawn, parts.target.cpu(), strict=True)]


def train_and_draw(
    dataset: str,
    splits: Sequence[int],
    seeds: Sequence[int],
    choices: Sequence[Choice],
    settings: Settings,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Train on all of train+CV and draw for the test rows: draws (S, T, n) and targets (S, n), S = splits x seeds."""
    jobs = [(s, seed) for s in splits for seed in seeds]
    parts = _gather(dataset, [data.split(data.describe(dataset).n, s) for s, _ in jobs], device)
    keys = [_key(dataset, s, TEST, seed) for s, seed in jobs]
    epochs = [choice.epochs for choice in choices for _ in seeds]
    training = _stack(parts, keys, settings, max(epochs))
    stack.train_for(training, epochs)
    return _samples(training.network, parts, keys, settings.n_samples), parts.target


def _choose(dataset: str, epochs: int, samples: Tensor, y: Tensor) -> Choice:
    """Tune tau for draws (T, n), and for their mean alone, at y (n,)."""
    mean, variance = samples.mean(0, keepdim=True), samples.var(0, correction=0, keepdim=True)  # (1, n) each
    return Choice(max(1, epochs), *tune_both(mean, variance, y.unsqueeze(0), dataset))


def _predictions(samples: Tensor, y: Tensor, choice: Choice) -> tuple[Tensor, Tensor, float]:
    std = (samples.var(0, correction=0) + 1 / choice.tau).sqrt()
    return (y - samples.mean(0)).cpu(), std.cpu(), choice.tau_constant**-0.5


def _stack(parts: Parts, keys: Sequence[Sequence[int]], settings: Settings, epochs: int) -> stack.Stack:
    sizes = [parts.x.shape[2], *settings.hidden, 1]
    network = MNFNetwork(sizes, generators=[stack.generator(*key, stack.INITIAL) for key in keys]).to(parts.x)
    return stack.Stack(
        network,
        parts.x,
        parts.y,
        keys,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        max_steps=epochs * (parts.x.shape[1] // settings.batch_size),
    )


@torch.no_grad()
def _samples(network: MNFNetwork, parts: Parts, keys: Sequence[Sequence[int]], n_samples: int) -> Tensor:
    """Draw T networks of each and run them on the new rows: (S, T, n), original units."""
    step, size = stack.draws_at_once(network, parts.x_new), network.draw_size
    drawn = []
    for start in range(0, n_samples, step):
        own = [(*key, stack.DRAWS) for key in keys]
        noise = stack.draw_noise(own, start, min(start + step, n_samples), size).to(parts.x)
        drawn.append(network.sample(parts.x_new, noise).squeeze(3) * parts.y_std + parts.y_mean)
    return torch.cat(drawn, 1)


def _gather(dataset: str, rows: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Parts:
    """Standardise by each network's own training rows; rows (training, new) of each."""
    x, y = data.load(dataset)
    made = []
    for train, new in rows:
        units = Standardized(nn.Identity(), x[train], y[train])
        old, fresh = units.standardize(x[train], y[train]), units.standardize(x[new], y[new])
        made.append((old[0], old[1][:, None], fresh[0], fresh[1][:, None], units.y_mean, units.y_std))
    x_old, y_old, x_new, y_new, mean, std = (
        torch.stack(column).to(device, torch.float32) for column in zip(*made, strict=True)
    )
    target = torch.stack([y[new] for _, new in rows]).to(device)
    return Parts(x_old, y_old, x_new, y_new, target, mean.reshape(-1, 1, 1), std.reshape(-1, 1, 1))


def _key(dataset: str, split: int, phase: int, seed: int) -> tuple[int, ...]:
    return data.NAMES.index(dataset), split, phase, seed
