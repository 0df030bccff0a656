"""The exact variational treatment that appendix 1.4 names and does not run: training with KL(q || p) of the statistics.

The paper's network and splits, trained without a penalty, with weight decay, or with KL / (N tau) under the prior that
weight decay implies or under a fixed one; docs/theory.md says how settings are chosen. Differs from the paper's
protocol, to fit in minutes: one fold of five, batch size 64, at most 200 epochs, three splits and two seeds.
"""

import time
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor, nn

from mcbn import MCBN, data
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn_study.estimates import cell, estimate
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.machine import tracked
from mcbn_study.profiles import TAU_RANGES
from mcbn_study.regression.measure import score_run
from mcbn_study.tables import write_tables
from mcbn_study.theory import Prior, implied_prior, kl_regularizer, objective_gap

DATASETS = ("boston", "concrete", "energy", "yacht")
UNIT_PRIOR = Prior(mean=0.0, mean_std=1.0, std=1.0, std_std=1.0)  # standardised units: mean 0, std 1, both loosely
KEYS = ("dataset", "method", "split", "seed")
SCORES = ("rmse", "crps", "pll")
SIZES, STEPS, SEEDS = (100, 400, 1600, 6400), 200, (0, 1, 2)  # of the objective
M, DECAY, TAU = 32, 1e-2, 10.0
Setting = Mapping[str, float]
Trained = list[tuple[int, MCBN[Any]]]  # epochs of training, and the network then
GRID: Mapping[str, Sequence[Setting]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


class Partition(NamedTuple):
    """Inputs (N, Q) and targets (N,) of training, those to score, and the range of tau."""

    x: Tensor
    y: Tensor
    x_score: Tensor
    y_score: Tensor
    tau_range: tuple[float, float]


def training_options(method: str, setting: Setting, network: nn.Module, n: int) -> dict[str, Any]:
    """Return what `train_regression` adds to half the mean squared error: weight decay, or the divergence."""
    if not method.startswith("KL"):
        return {"weight_decay": setting.get("weight_decay", 0.0)}
    tau = setting["tau"]  # of standardised targets
    prior = UNIT_PRIOR if method == "KL, fixed prior" else implied_prior(network, setting["weight_decay"], n, tau)
    return {"weight_decay": 0.0, "penalty": lambda inner, x: kl_regularizer(inner, prior, x) / (n * tau)}


def scores(bayes: MCBN[Any], x: Tensor, y: Tensor) -> dict[str, float | None]:
    """Return RMSE, CRPS (both lower is better) and PLL (higher is better) in original units."""
    scored = score_run(bayes.sample(x), y, float(bayes.tau), float(bayes.tau))
    return {name: scored[name] for name in SCORES}


class Experiment(NamedTuple):
    """Sizes of a run."""

    splits: Sequence[int] = (1, 2, 3)
    seeds: Sequence[int] = (0, 1)
    batch_size: int = 64
    checkpoints: Sequence[int] = (50, 100, 150, 200)  # epochs at which validation looks
    n_samples: int = 100
    grid: Mapping[str, Sequence[Setting]] = GRID

    def select(self, rows: Partition, method: str) -> tuple[Record, list[Record]]:
        """Train every setting on a fold's training part; choose by RMSE on its validation part alone.

        Returns the choice, which is setting, epochs and tau, and what was tried.
        """
        low, high = rows.tau_range
        tried: list[tuple[Record, Record]] = []
        for setting in self.grid[method]:
            for epoch, bayes in self._trained(rows, method, setting, 0, self.checkpoints):
                bayes.tau = min(max(float(bayes.tune((rows.x_score, rows.y_score)).tau), low), high)
                choice = {"setting": dict(setting), "epochs": epoch}
                row = {"stage": "validation", **choice, **scores(bayes, rows.x_score, rows.y_score)}
                tried.append((choice | {"tau": float(bayes.tau)}, row))
        chosen, _ = min(tried, key=lambda one: one[1]["rmse"])
        return chosen, [row for _, row in tried]

    def test(self, rows: Partition, method: str, choice: Record, seed: int) -> Record:
        """Train on the whole training part as chosen and score the test part, once."""
        ((_, bayes),) = self._trained(rows, method, choice["setting"], seed, (choice["epochs"],))
        bayes.tau = choice["tau"]
        return {"stage": "test", "seed": seed, **choice, **scores(bayes, rows.x_score, rows.y_score)}

    def _trained(self, rows: Partition, method: str, setting: Setting, seed: int, at: Sequence[int]) -> Trained:
        network = Standardized(RegressionMLP(rows.x.shape[1], seed=seed), rows.x, rows.y)
        options: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size}
        trained: Trained = []

        def look(epoch: int) -> None:
            if epoch in at:
                with warnings.catch_warnings(action="ignore"):  # running statistics lag, and are not used here
                    bayes = MCBN(network, "regression").fit(rows.x, n_samples=self.n_samples, **options)
                trained.append((epoch, bayes))

        more = training_options(method, setting, network.network, len(rows.x))
        train_regression(network, rows.x, rows.y, epochs=max(at), on_epoch=look, **options, **more)
        return trained


def run(out: str | Path, *, datasets: Sequence[str] = (), experiment: Experiment | None = None) -> None:
    """Run every method on each data set and split that is not on record yet, then write the table."""
    experiment = experiment or Experiment()
    config = {key: value for key, value in experiment._asdict().items() if key not in ("splits", "seeds")}
    journal = Journal(out, config)
    for dataset, split in tracked(product(datasets or DATASETS, experiment.splits), "regularizer", "split"):
        if not all(journal.has(dataset=dataset, split=split, seed=seed) for seed in experiment.seeds):
            journal.add(_run_split(experiment, dataset, split))
    report(Path(out))


def _run_split(experiment: Experiment, dataset: str, split: int) -> list[Record]:
    x, y = (values.float() for values in data.load(dataset))
    whole, test = data.split(len(y), split)
    fold = data.folds(whole)[0]
    validated, tested = (
        Partition(x[train], y[train], x[score], y[score], TAU_RANGES[dataset])
        for train, score in ((fold.train, fold.validation), (whole, test))
    )
    rows: list[Record] = []
    for method in experiment.grid:
        start = time.perf_counter()
        choice, tried = experiment.select(validated, method)
        tried += [experiment.test(tested, method, choice, seed) for seed in experiment.seeds]
        seconds = round(time.perf_counter() - start, 2)
        rows += [{"dataset": dataset, "split": split, "method": method, "seconds": seconds, **row} for row in tried]
    return rows


def report(out: Path) -> None:
    """Write mean and standard error over runs, and paired differences from weight decay, from records alone."""
    runs = {tuple(r[key] for key in KEYS): r for r in read(out / RECORDS) if r["stage"] == "test"}
    rows = []
    for dataset, method in sorted({key[:2] for key in runs}, key=lambda k: (k[0], list(GRID).index(k[1]))):
        keys = [key for key in runs if key[:2] == (dataset, method)]
        pairs = [(runs[key], runs[dataset, "weight decay", *key[2:]]) for key in keys]
        scored = [estimate([r[score] for r, _ in pairs], decimals=3) for score in SCORES]
        gaps = [estimate([r[score] - base[score] for r, base in pairs], decimals=3) for score in SCORES]
        rows.append((dataset, method, scored, gaps))
    write_tables(out, __package__, "regularizer", rows=rows, cell=cell)


def objective(out: str | Path, *, dataset: str = "kin8nm", sizes: Sequence[int] = SIZES, steps: int = STEPS) -> None:
    """Train on the first N rows, compare the gradients of Eq. (1) and Eq. (2) over them; write records and table.

    Section 3.3: do these become one objective as N grows? docs/theory.md says under which assumptions they should.
    """
    x, y = data.load(dataset)
    train, rows = data.split(len(y), 1).train, []
    for n, seed in tracked(product(sizes, SEEDS), "objective", "network"):
        start, first = time.perf_counter(), (x[train[:n]], y[train[:n]])  # (n, Q), (n,)
        network = Standardized(RegressionMLP(x.shape[1], seed=seed).double(), *first)
        epochs = max(1, round(steps / (n // M)))
        train_regression(network, *first, batch_size=M, epochs=epochs, weight_decay=DECAY, seed=seed)
        inputs, targets = network.standardize(*first)
        compare = partial(objective_gap, network.network, inputs, targets[:, None], n=n, tau=TAU, batch_size=M)
        fixed, implied = compare(prior=UNIT_PRIOR)._asdict(), compare(weight_decay=DECAY)._asdict()
        row = {"dataset": dataset, "n": n, "seed": seed, "fixed": fixed, "implied": implied}
        rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
    Journal(out, {"steps": steps, "batch_size": M, "weight_decay": DECAY, "tau": TAU, "split": 1}).add(rows)
    report_objective(Path(out))


def report_objective(out: Path) -> None:
    """Write the gaps, averaged over seeds, from records alone."""
    records = latest(read(out / RECORDS), ("dataset", "n", "seed"))
    rows = []
    for n in sorted({r["n"] for r in records}):
        pairs = [(r["fixed"]["relative"], r["implied"]) for r in records if r["n"] == n]
        of_decay = [i["decay"] / (i["difference"] / i["relative"]) for _, i in pairs]
        against = [i["difference"] / i["decay"] for _, i in pairs]
        columns = [f for f, _ in pairs], [i["relative"] for _, i in pairs], of_decay, against
        rows.append((n, [fmean(values) for values in columns]))
    write_tables(out, __package__, "objective", rows=rows)
