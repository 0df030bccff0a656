"""Cross-validation over the grid: cells of stacked networks, and what each split chooses from them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mcbn.data import Regression, describe, folds, split
from mcbn_study.journal import Record
from mcbn_study.regression.context import Context
from mcbn_study.regression.problem import Part, Problem, make_problem
from mcbn_study.regression.profile import TAU_RANGES, Profile
from mcbn_study.regression.scores import tune_tau
from mcbn_study.regression.selection import CRITERIA, Configuration, CrossValidation, Rules, Search
from mcbn_study.regression.stack import Family, Values
from mcbn_study.regression.streams import stream_key

Criterion = Literal["mc", "plain"]
KEEP_SECONDS = 60.0  # between states kept of a search at work
WIDE = 50  # above so many units a dropout cell holds one rate: a larger stack saves no time, but more is lost with it


@dataclass(frozen=True)
class Cell:
    """One stacked cross-validation: configurations that share a batch size."""

    name: str
    configurations: tuple[Configuration, ...]


@dataclass(frozen=True)
class Choice:
    """What cross-validation chose for one split: configuration, epochs, tau, and the fold networks it kept."""

    configuration: Configuration
    epochs: int
    tau: float
    tau_constant: float
    values: Values  # each (F, ...)

    def describe(self) -> dict[str, object]:
        """Return the configuration as records have it."""
        c = self.configuration
        settings = {"weight_decay": c.weight_decay, "batch_size": c.batch_size}
        return settings | {"dropout": c.rate, "epochs": self.epochs}


def cells(profile: Profile, dataset: str, family: Family) -> list[Cell]:
    """List the stacked programs of a data set's search."""
    decays = profile.weight_decays
    if family == "bn":
        sizes = profile.batch_sizes_of(dataset)
        return [Cell(f"{dataset}-bn-{M}", tuple(Configuration(decay, M) for decay in decays)) for M in sizes]
    M = profile.dropout_batch_size
    grid = [tuple(Configuration(decay, M, rate) for decay in decays) for rate in profile.rates]
    if describe(dataset).hidden_units <= WIDE:
        return [Cell(f"{dataset}-dropout", tuple(c for row in grid for c in row))]
    return [Cell(f"{dataset}-dropout-{row[0].rate}", row) for row in grid]


def fold_problem(
    context: Context,
    dataset: str,
    data: Regression,
    *,
    splits: Sequence[int] | None = None,
    seeds: Sequence[int] = (),
) -> Problem:
    """Stack the folds of all splits, once a seed (that of the search by default); ordered by split, fold, seed."""
    parts = []
    for s in splits or context.profile.splits:
        for f, fold in enumerate(folds(split(len(data.y), s).train, context.profile.n_folds)):
            parts += [Part(*fold, stream_key(dataset, s, f, seed)) for seed in seeds or (context.profile.search_seed,)]
    return make_problem(data, parts, context.device)


def rules_of(context: Context, dataset: str) -> Rules:
    """Return the protocol's rules for a data set."""
    profile = context.profile
    return Rules(
        evaluate_every=profile.evaluate_every,
        patience=profile.patience,
        max_epochs=profile.max_epochs,
        search_samples=profile.search_samples(dataset),
        n_samples=profile.n_samples,
        **context.numerics,
        fused=context.fused,
    )


def search(context: Context, dataset: str, data: Regression, family: Family) -> list[tuple[Cell, Search]]:
    """Run or read every cell of a family's cross-validation."""
    problem: Problem | None = None
    found = []
    for cell in cells(context.profile, dataset, family):
        context.progress.start(cell.name, search_weight(context.profile, dataset, cell))
        tensors = context.store.load(cell.name)
        if tensors is None:
            problem = problem or fold_problem(context, dataset, data)
            tensors = _search_cell(context, dataset, family, cell, problem)
        found.append((cell, _search_of(tensors)))
        context.progress.end()
    return found


def choose(context: Context, dataset: str, data: Regression, family: Family, criterion: Criterion) -> list[Choice]:
    """Choose the configuration and tau of each split."""
    found, i = search(context, dataset, data, family), CRITERIA.index(criterion)
    choices = []
    for b in range(len(context.profile.splits)):
        cell, best = min(found, key=lambda pair: float(pair[1].rmse[i, b].min()))
        c = int(best.winner[i, b])
        tau, constant = tune_both(best.mean[i, b], best.variance[i, b], best.y[i, b], dataset)
        values = {name: value[i, b] for name, value in best.values.items()}
        choices.append(Choice(cell.configurations[c], int(best.epoch[i, b, c]), tau, constant, values))
    return choices


def tune_both(mean: Tensor, variance: Tensor, y: Tensor, dataset: str) -> tuple[float, float]:
    """Tune tau and the tau of constant uncertainty on validation rows (F, n) within the data set's range."""
    bounds = TAU_RANGES[dataset]
    constant = tune_tau(mean, torch.zeros_like(mean), y, bounds)
    return (tune_tau(mean, variance, y, bounds) if bool((variance > 0).any()) else constant), constant


def search_weight(profile: Profile, dataset: str, cell: Cell) -> float:
    """Estimate the work of a cell, for progress: steps, and evaluations that grow with the rows."""
    rows, networks = describe(dataset).n, len(cell.configurations)
    return rows * (networks / cell.configurations[0].batch_size + 0.1 * networks) * profile.max_epochs


def run_kept(context: Context, name: str, validation: CrossValidation) -> Search:
    """Run a cross-validation, keeping its state every minute; one that was interrupted goes on from there."""
    part, kept = f"{name}.part", time.monotonic()
    state = context.store.load(part)
    if state is not None:
        validation.restore(state)

    def on_evaluation(epoch: int) -> None:
        nonlocal kept
        context.progress.fraction(epoch / context.profile.max_epochs)
        if time.monotonic() - kept >= KEEP_SECONDS:
            context.store.keep(part, validation.state())
            kept = time.monotonic()

    return validation.run(on_evaluation)


def _search_cell(context: Context, dataset: str, family: Family, cell: Cell, problem: Problem) -> dict[str, Tensor]:
    profile, started = context.profile, time.perf_counter()
    validation = CrossValidation(
        problem,
        profile.n_folds,
        list(cell.configurations),
        rules_of(context, dataset),
        hidden=describe(dataset).hidden_units,
        family=family,
    )
    found = run_kept(context, cell.name, validation)
    tensors = {name: value for name, value in vars(found).items() if name != "values"}
    tensors |= {f"value.{name}": value for name, value in found.values.items()}
    seconds = time.perf_counter() - started
    context.store.finish(cell.name, tensors, _records(context, dataset, family, cell, found, seconds))
    return tensors


def _records(context: Context, dataset: str, family: Family, cell: Cell, found: Search, seconds: float) -> list[Record]:
    """Make one record a split and batch size or dropout rate: RMSE and epoch of every lambda."""
    C = len(context.profile.weight_decays)
    records = []
    for b, s in enumerate(context.profile.splits):
        for first in range(0, len(cell.configurations), C):
            part = slice(first, first + C)
            own = cell.configurations[part]
            scores: Record = {"weight_decay": [c.weight_decay for c in own]}
            for i, name in enumerate(CRITERIA):
                scores[f"rmse_{name}"] = [x if x < torch.inf else None for x in found.rmse[i, b, part].tolist()]
                scores[f"epoch_{name}"] = found.epoch[i, b, part].tolist()
            scores |= {"stopped": found.stopped[b, part].tolist(), "cell": cell.name}
            place = {"dataset": dataset, "split": s, "family": family}
            place |= {"batch_size": own[0].batch_size, "dropout": own[0].rate}
            records.append(context.record("selection", seconds, **place, **scores))
    return records


def _search_of(tensors: dict[str, Tensor]) -> Search:
    values = {name.removeprefix("value."): v for name, v in tensors.items() if name.startswith("value.")}
    return Search(values=values, **{name: v for name, v in tensors.items() if not name.startswith("value.")})
