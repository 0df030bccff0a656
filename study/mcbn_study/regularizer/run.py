"""The exact variational treatment that appendix 1.4 names and does not run: training with KL(q || p) of the statistics.

    python -m mcbn_study.regularizer.run results/regularizer [dataset ...]

The paper's network and splits, trained without a penalty, with weight decay, or with KL / (N tau) under the prior that
weight decay implies or under a fixed one. For each split and method, setting and number of epochs are chosen by
validation RMSE of the MCBN mean on one fold, tau by validation CRPS on it within the paper's search range; then the
whole training part is trained on with some seeds and the test part scored once. Differs from the paper's protocol, to
fit in minutes: one fold of five, batch size 64, at most 200 epochs, three splits and two seeds.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mcbn import MCBN, data, metrics
from mcbn.files import write_text
from mcbn.networks import RegressionMLP, Standardized
from mcbn.progress import tracked
from mcbn_study import journal
from mcbn_study.journal import read
from mcbn_study.regression.profile import TAU_RANGES
from mcbn_study.tables import markdown, to_csv
from mcbn_study.theory import Prior, implied_prior, kl_regularizer

DATASETS = ("boston", "concrete", "energy", "yacht")
SPLITS, SEEDS = (1, 2, 3), (0, 1)
BATCH_SIZE = 64
CHECKPOINTS = (50, 100, 150, 200)  # epochs at which validation looks
N_SAMPLES = 100
UNIT_PRIOR = Prior(mean=0.0, mean_std=1.0, std=1.0, std_std=1.0)  # standardised units: mean 0, std 1, both loosely

Setting = Mapping[str, float]
Penalty = Callable[[nn.Module, Tensor], Tensor]

GRID: Mapping[str, Sequence[Setting]] = {
    "none": ({},),
    "weight decay": tuple({"weight_decay": decay} for decay in (1e-1, 1e-2, 1e-4)),
    "KL, implied prior": tuple(
        {"weight_decay": decay, "tau": tau} for decay, tau in ((1e-2, 10.0), (1e-2, 100.0), (1e-4, 100.0))
    ),
    "KL, fixed prior": tuple({"tau": tau} for tau in (10.0, 100.0)),
}


class Part(NamedTuple):
    """Inputs (N, Q) and targets (N,) of training, those to score, and the range of tau."""

    x: Tensor
    y: Tensor
    x_score: Tensor
    y_score: Tensor
    tau_range: tuple[float, float]


class Choice(NamedTuple):
    """What validation chose for one split and method."""

    setting: Setting
    epochs: int
    tau: float


def penalty_of(method: str, setting: Setting, network: nn.Module, n: int) -> Penalty:
    """Return what is added to half the mean squared error of a batch (N, Q)."""
    if method == "none":
        return lambda net, x: x.new_zeros(())
    if method == "weight decay":
        decay = setting["weight_decay"]
        return lambda net, x: 0.5 * decay * torch.stack([p.square().sum() for p in _matrices(net)]).sum()
    tau = setting["tau"]  # of standardised targets
    prior = UNIT_PRIOR if method == "KL, fixed prior" else implied_prior(network, setting["weight_decay"], n, tau)
    return lambda net, x: kl_regularizer(net, prior, x) / (n * tau)


def _matrices(network: nn.Module) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.ndim > 1]


def train(
    network: Standardized, x: Tensor, y: Tensor, penalty: Penalty, *, epochs: int, seed: int, batch_size: int
) -> Iterator[int]:
    """Train in place as `mcbn.networks.train_regression` does, with any penalty; yield each epoch, in eval mode."""
    inner = network.network
    x, y = network.standardize(x, y)
    y, M = y.reshape(len(y), -1), min(batch_size, len(x))
    optimizer = torch.optim.Adam(inner.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        network.train()
        for rows in torch.split(torch.randperm(len(x), generator=generator)[: len(x) // M * M], M):
            optimizer.zero_grad()
            torch.autograd.backward(0.5 * mse_loss(inner(x[rows]), y[rows]) + penalty(inner, x[rows]))
            optimizer.step()
        network.eval()
        yield epoch


def _fit(network: Standardized, x: Tensor, batch_size: int, n_samples: int, seed: int) -> MCBN[Any]:
    with warnings.catch_warnings():  # running statistics lag behind in short training; MCBN does not use them
        warnings.filterwarnings("ignore", message="mcbn: drawn batch statistics disagree")
        return MCBN(network, "regression").fit(x, n_samples=n_samples, batch_size=batch_size, seed=seed)


def scores(bayes: MCBN[Any], x: Tensor, y: Tensor) -> dict[str, float]:
    """Return RMSE, CRPS (both lower is better) and PLL (higher is better) in original units."""
    samples = bayes.sample(x)  # (T, N)
    mean, variance = samples.mean(0), samples.var(0, correction=0) + 1 / float(bayes.tau)
    return {
        "rmse": float(metrics.rmse(mean, y)),
        "crps": float(metrics.crps_gaussian(mean, variance, y).mean()),
        "pll": float(metrics.pll(samples, y, bayes.tau).mean()),
    }


class Experiment(NamedTuple):
    """Sizes of a run."""

    splits: Sequence[int] = SPLITS
    seeds: Sequence[int] = SEEDS
    batch_size: int = BATCH_SIZE
    checkpoints: Sequence[int] = CHECKPOINTS
    n_samples: int = N_SAMPLES
    grid: Mapping[str, Sequence[Setting]] = GRID

    def select(self, part: Part, method: str) -> tuple[Choice, list[dict[str, Any]]]:
        """Train every setting on a fold's training part; choose by RMSE on its validation part alone."""
        rows: list[dict[str, Any]] = []
        best: tuple[float, Choice] | None = None
        for setting in self.grid[method]:
            for epoch, bayes in self._trained(part, method, setting, 0, self.checkpoints):
                low, high = part.tau_range
                bayes.tau = min(max(float(bayes.tune((part.x_score, part.y_score)).tau), low), high)
                found = scores(bayes, part.x_score, part.y_score)
                rows.append({"stage": "validation", "setting": dict(setting), "epochs": epoch, **found})
                if best is None or found["rmse"] < best[0]:
                    best = found["rmse"], Choice(setting, epoch, float(bayes.tau))
        assert best is not None, "a method has at least one setting and one checkpoint"
        return best[1], rows

    def test(self, part: Part, method: str, choice: Choice, seed: int) -> dict[str, Any]:
        """Train on the whole training part as chosen and score the test part, once."""
        ((_, bayes),) = self._trained(part, method, choice.setting, seed, (choice.epochs,))
        bayes.tau = choice.tau
        found = scores(bayes, part.x_score, part.y_score)
        row = {"stage": "test", "seed": seed, "setting": dict(choice.setting), "epochs": choice.epochs}
        return row | {"tau": choice.tau, **found}

    def _trained(
        self, part: Part, method: str, setting: Setting, seed: int, checkpoints: Sequence[int]
    ) -> Iterator[tuple[int, MCBN[Any]]]:
        network = Standardized(RegressionMLP(part.x.shape[1], seed=seed), part.x, part.y)
        penalty = penalty_of(method, setting, network.network, len(part.x))
        options = {"epochs": max(checkpoints), "seed": seed, "batch_size": self.batch_size}
        for epoch in train(network, part.x, part.y, penalty, **options):
            if epoch in checkpoints:
                yield epoch, _fit(network, part.x, self.batch_size, self.n_samples, seed)


def main(out: str | Path, *, datasets: Sequence[str] = DATASETS, experiment: Experiment | None = None) -> None:
    """Run every dataset, split and method; append records after each split, then write the table."""
    experiment = experiment or Experiment()
    config = {key: value for key, value in experiment._asdict().items() if key not in ("splits", "seeds")}
    for dataset, split in tracked(product(datasets, experiment.splits), "regularizer", "split"):
        journal.Journal(out, config).add(_run_split(experiment, dataset, split))
    report(Path(out))


def _run_split(experiment: Experiment, dataset: str, split: int) -> list[dict[str, Any]]:
    x, y = (part.float() for part in data.load(dataset))
    train_rows, test_rows = data.split(len(y), split)
    fold = data.folds(train_rows)[0]
    limits = TAU_RANGES[dataset]
    validation = Part(x[fold.train], y[fold.train], x[fold.validation], y[fold.validation], limits)
    test = Part(x[train_rows], y[train_rows], x[test_rows], y[test_rows], limits)
    rows: list[dict[str, Any]] = []
    for method in experiment.grid:
        start = time.perf_counter()
        choice, tried = experiment.select(validation, method)
        tried += [experiment.test(test, method, choice, seed) for seed in experiment.seeds]
        seconds = round(time.perf_counter() - start, 2)
        rows += [{"dataset": dataset, "split": split, "method": method, "seconds": seconds, **row} for row in tried]
    return rows


HEAD = ("dataset", "method", "runs", "RMSE", "CRPS", "PLL", "RMSE - weight decay", "CRPS -", "PLL -")
SCORES = ("rmse", "crps", "pll")


def report(out: Path) -> None:
    """Write mean and standard error over runs, and paired differences from weight decay, from records alone."""
    records = [r for r in read(out / "records.jsonl") if r["stage"] == "test"]
    records = journal.latest(records, ("dataset", "split", "method", "seed"))
    runs = {(r["dataset"], r["method"], r["split"], r["seed"]): r for r in records}
    rows, cells = [], []
    for dataset, method in sorted({key[:2] for key in runs}, key=lambda k: (k[0], list(GRID).index(k[1]))):
        own = {key[2:]: r for key, r in runs.items() if key[:2] == (dataset, method)}
        values = [_moments([r[score] for r in own.values()]) for score in SCORES]
        pairs = [(r, runs[dataset, "weight decay", *key]) for key, r in own.items()]
        values += [_moments([r[score] - base[score] for r, base in pairs]) for score in SCORES]
        rows.append([dataset, method, len(own), *(round(v, 5) for pair in values for v in pair)])
        differences = [""] * 3 if method == "weight decay" else [f"{m:+.3f} ± {e:.3f}" for m, e in values[3:]]
        cells.append([dataset, method, str(len(own)), *(f"{m:.3f} ± {e:.3f}" for m, e in values[:3]), *differences])
    write_text(out / "table.md", INTRO + markdown(HEAD, cells))
    head = [*HEAD[:3], *(f"{name}{end}" for name in HEAD[3:] for end in ("", " se"))]
    write_text(out / "table.csv", to_csv(head, rows))


INTRO = (
    "Test scores in original units, mean ± standard error over runs (splits x seeds; runs of one split share its test "
    "part, so the error is a lower bound). RMSE and CRPS: lower is better; PLL: higher. The last columns are paired "
    "differences from weight decay.\n\n"
)


def _moments(values: list[float]) -> tuple[float, float]:
    """Return mean and standard error; one run has no error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    error = float(tensor.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")
    return float(tensor.mean()), error


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or ["results/regularizer"]
    main(folder, datasets=names or DATASETS)
