"""Cross-validation over the grid: cells of stacked networks with early stopping, and what each split chooses from them.

Symbols: B splits, F folds, C configurations that share a batch size; S = B F C networks of one stacked program. Two
criteria each: the validation RMSE of the mean over T draws ("mc") and of the plain network ("plain"). Protocol: Teye
et al. 2018, Section 4.3, and published code.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcbn.data import describe, folds, split
from mcbn.stacked import Values
from mcbn_study.journal import Record
from mcbn_study.profiles import TAU_RANGES
from mcbn_study.regression.measure import Evaluator, original_units, rmse, tune_tau
from mcbn_study.regression.problem import Part, Problem, make_problem, stream_key
from mcbn_study.regression.profile import Configuration, Profile
from mcbn_study.regression.stack import Family, Networks, take
from mcbn_study.regression.train import Trainer, ascending, networks_of
from mcbn_study.study import Study

Criterion = Literal["mc", "plain"]
CRITERIA: tuple[Criterion, ...] = ("mc", "plain")
# What cross-validation found, by name. rmse, epoch (2, B, C): the best mean RMSE over folds of each criterion, and its
# epoch; stopped (B, C): the last epoch trained; winner (2, B): the best configuration; value.NAME (2, B, F, ...):
# parameters of the winners' fold networks; mean, variance, y (2, B, F, n) of their validation rows in original units,
# NaN beyond a fold's own.
Search = dict[str, Tensor]
Grid = tuple[Configuration, ...]  # of one cell: all share a batch size
SHRINK = 0.75  # the stack is rebuilt once so small a part of it is still in training
WIDE = 50  # above so many units a dropout cell holds one rate: a larger stack saves no time, but more is lost with it


class CrossValidation:
    """Trains networks as (B, F, C); `winner`: each split's configuration, if known."""

    def __init__(
        self, problem: Problem, profile: Profile, networks: Networks, *, fused: bool = False, winner: Sequence[int] = ()
    ) -> None:
        self.problem, self.profile, self.networks, self._winner = problem, profile, networks, winner
        R = len(problem.streams)  # ordered by split, then fold
        self.F, self.B, self.C = profile.n_folds, R // profile.n_folds, len(networks.stream) // R
        self._place = ascending(problem, networks)  # of each network in the trainer: where it is in (B, F, C)
        self.trainer = Trainer(problem, networks[self._place], fused=fused)
        # The best evaluation of each criterion, split and configuration, and the parameters it had: none yet
        self.rmse = torch.full((2, self.B, self.C), torch.inf, dtype=torch.float64, device=problem.device)
        self.epoch, self.waited = (torch.zeros_like(self.rmse, dtype=torch.int64) for _ in range(2))
        first = take(self.trainer.values, torch.argsort(self._place))
        self.kept = {name: torch.stack([value, value]) for name, value in first.items()}  # (2, B F C, ...)
        self.running = torch.ones(self.B, self.C, dtype=torch.bool, device=problem.device)
        self.stopped = torch.full((self.B, self.C), profile.max_epochs)

    def run(self) -> Search:
        """Train until every configuration has stopped."""
        every, most = self.profile.evaluate_every, self.profile.max_epochs
        evaluator = Evaluator(self.problem, self.networks.batch_size, self.profile.selection_samples)
        while bool(self.running.any()) and self.trainer.epoch + every <= most:
            if len(running := self._running()) <= SHRINK * len(self._place):
                self.trainer.keep(running)
                self._place = self._place[running]
            self.trainer.advance(every)
            if self.profile.fresh_draws:
                evaluator.draw_anew(self.trainer.epoch)
            self._evaluate(evaluator, self.trainer.epoch)
        return self._result()

    def _running(self) -> Tensor:
        """Return the places in the trainer of networks whose configuration has not stopped."""
        return torch.nonzero(self.running[self._place // (self.F * self.C), self._place % self.C]).flatten()

    def _evaluate(self, evaluator: Evaluator, epoch: int) -> None:
        local = self._running()
        places = self._place[local]
        at = places // (self.F * self.C), places % self.C
        networks, values = self.trainer.networks[local], take(self.trainer.values, local)
        predictions = evaluator.moments(values, networks)[0], evaluator.plain(values, networks)
        for i, prediction in enumerate(predictions):
            scores = rmse(prediction, self.problem, networks.stream)
            mean = scores.new_zeros(self.B, self.C).index_put_(at, scores, accumulate=True) / self.F
            better = (mean < self.rmse[i]) & self.running  # NaN is never better
            self.rmse[i] = torch.where(better, mean, self.rmse[i])
            self.epoch[i] = torch.where(better, epoch, self.epoch[i])
            self.waited[i] = torch.where(better, 0, self.waited[i] + 1)
            chosen = better[at]  # (networks,)
            for name, kept in self.kept.items():
                kept[i, places[chosen]] = values[name][chosen]
        waiting = (self.waited >= self.profile.patience).all(0)
        self.stopped[(self.running & waiting).cpu()] = epoch
        self.running &= ~waiting

    def _result(self) -> Search:
        """Gather the scores, and evaluate the best networks of each split and criterion with all T draws."""
        winner = self.rmse.argmin(2)  # (2, B)
        if self._winner:
            winner = torch.tensor([self._winner] * len(CRITERIA), device=self.problem.device)
        folds = torch.arange(0, self.B * self.F * self.C, self.C, device=winner.device)
        at = [folds + row.repeat_interleave(self.F) for row in winner]  # (B F,) each
        kept = [{name: kept[i, places] for name, kept in self.kept.items()} for i, places in enumerate(at)]
        validated = [self._validate(*each) for each in zip(CRITERIA, kept, at, strict=True)]
        rows = dict(zip(("mean", "variance", "y"), map(torch.stack, zip(*validated, strict=True)), strict=True))
        rows |= {f"value.{name}": torch.stack([values[name] for values in kept]) for name in self.kept}
        result = {name: torch.unflatten(tensor, 1, (self.B, self.F)) for name, tensor in rows.items()}
        result |= {"rmse": self.rmse, "epoch": self.epoch, "stopped": self.stopped, "winner": winner}
        return {name: tensor.cpu() for name, tensor in result.items()}

    def _validate(self, criterion: Criterion, values: Values, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return moments and targets of the validation rows, (B F, n) in original units."""
        networks = self.networks[places]
        evaluator = Evaluator(self.problem, networks.batch_size, self.profile.n_samples)
        if criterion == "mc":
            moments = evaluator.moments(values, networks)
        else:
            mean = evaluator.plain(values, networks).double()
            moments = mean, torch.zeros_like(mean)
        return *original_units(moments, self.problem, networks.stream), self.problem.targets[networks.stream]


def grid_networks(problem: Problem, configurations: Sequence[Configuration], family: Family, hidden: int) -> Networks:
    """List every configuration for every stream, stream first. All share one batch size."""
    streams = [stream for stream in range(len(problem.streams)) for _ in configurations]
    return networks_of(problem, family, streams, [*configurations] * len(problem.streams), hidden)


class Choice(NamedTuple):
    """What validation chose for one split: configuration, epochs, tau, and the fold networks it kept."""

    configuration: Configuration
    epochs: int
    tau: float = 0.0
    tau_constant: float = 0.0
    values: Values = {}  # each (F, ...)  # noqa: RUF012

    def tuned(self, mean: Tensor, variance: Tensor, y: Tensor, dataset: str) -> "Choice":
        """Tune tau and the tau of constant uncertainty on validation rows (F, n) within the data set's range."""
        constant = tune_tau(mean, torch.zeros_like(mean), y, TAU_RANGES[dataset])
        tau = tune_tau(mean, variance, y, TAU_RANGES[dataset]) if bool((variance > 0).any()) else constant
        return self._replace(tau=tau, tau_constant=constant)

    def describe(self) -> dict[str, object]:
        """Return the configuration as records have it."""
        weight_decay, batch_size, rate = self.configuration
        return {"weight_decay": weight_decay, "batch_size": batch_size, "dropout": rate, "epochs": self.epochs}


def cells(profile: Profile, dataset: str, family: Family) -> dict[str, Grid]:
    """Return the stacked programs of a data set's search by name: the configurations of each."""
    decays = profile.weight_decays
    if family == "bn":
        sizes = profile.batch_sizes_of(dataset)
        return {f"{dataset}-bn-{M}": tuple(Configuration(decay, M) for decay in decays) for M in sizes}
    M = profile.dropout_batch_size
    grid = [tuple(Configuration(decay, M, rate) for decay in decays) for rate in profile.rates]
    if describe(dataset).hidden_units <= WIDE:
        return {f"{dataset}-dropout": sum(grid, ())}
    return {f"{dataset}-dropout-{row[0].rate}": row for row in grid}


def fold_problem(study: Study, *, splits: Sequence[int] = (), seeds: Sequence[int] = ()) -> Problem:
    """Stack the folds of all splits, once a seed (that of the search by default); ordered by split, fold, seed."""
    parts = []
    for s in splits or study.profile.splits:
        for f, fold in enumerate(folds(split(len(study.data.y), s).train, study.profile.n_folds)):
            place = (0, 0) if study.profile.one_stream else (s, f)
            keys = [stream_key(study.dataset, *place, seed) for seed in seeds or (study.profile.search_seed,)]
            parts += [Part(*fold, key) for key in keys]
    return make_problem(study.data, parts, study.device)


def search_cell(study: Study, family: Family, cell: str, grid: Grid) -> Search:
    """Return what one cell of the cross-validation found; one that has no file yet is run and written."""
    if (search := study.journal.load(cell)) is None:
        started = time.perf_counter()
        problem = fold_problem(study)
        networks = grid_networks(problem, grid, family, describe(study.dataset).hidden_units)
        search = cross_validate(study, problem, networks)
        records = _records(study, family, grid, search, {"cell": cell, "seconds": time.perf_counter() - started})
        study.journal.finish(cell, search, records)
    return search


def cross_validate(
    study: Study, problem: Problem, networks: Networks, *, winner: Sequence[int] = (), **samples: Any
) -> Search:
    """Run a cross-validation by the profile; samples: its selection_samples and n_samples, where others are wanted."""
    p = study.profile
    searched = p.selection_samples_large if describe(study.dataset).n > p.large else p.selection_samples
    rules = replace(p, **({"selection_samples": searched} | samples))
    return CrossValidation(problem, rules, networks, fused=study.fused, winner=winner).run()


def _records(study: Study, family: Family, grid: Grid, search: Search, whole: Record) -> list[Record]:
    """Make one record a split and batch size or dropout rate: RMSE and epoch of every lambda."""
    C, records = len(study.profile.weight_decays), []
    for (b, s), first in product(enumerate(study.profile.splits), range(0, len(grid), C)):
        row = slice(first, first + C)
        configurations = grid[row]
        place: Record = {"dataset": study.dataset, "split": s, "family": family}
        place |= {"batch_size": configurations[0].batch_size, "dropout": configurations[0].rate}
        scores: Record = {"weight_decay": [c.weight_decay for c in configurations]}
        for i, name in enumerate(CRITERIA):
            scores[f"rmse_{name}"] = [x if x < torch.inf else None for x in search["rmse"][i, b, row].tolist()]
            scores[f"epoch_{name}"] = search["epoch"][i, b, row].tolist()
        scores |= {"stopped": search["stopped"][b, row].tolist()}
        records.append(study.record("selection", **place, **scores, **whole))
    return records


def winners(search: Search, *at: int) -> Values:
    """Return the parameters of the winners' fold networks of a criterion, or of a criterion and split."""
    return {name.removeprefix("value."): value[at] for name, value in search.items() if name.startswith("value.")}


def choose(study: Study, family: Family, criterion: Criterion) -> list[Choice]:
    """Choose the configuration and tau of each split."""
    grids = cells(study.profile, study.dataset, family)
    searches = [(grid, search_cell(study, family, cell, grid)) for cell, grid in grids.items()]
    choices, i = [], CRITERIA.index(criterion)
    for b in range(len(study.profile.splits)):
        grid, best = min(searches, key=lambda pair: float(pair[1]["rmse"][i, b].min()))
        c = int(best["winner"][i, b])
        choice = Choice(grid[c], int(best["epoch"][i, b, c]), values=winners(best, i, b))
        choices.append(choice.tuned(best["mean"][i, b], best["variance"][i, b], best["y"][i, b], study.dataset))
    return choices
