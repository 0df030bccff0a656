"""Sensitivity of MCBN to batch size and number of passes (Teye et al. 2018, appendix, four tables).

"Trained and evaluated with varying batch sizes, but other hyperparameters fixed": lambda of each split is the one the
regression study chose for MCBN. The text is silent on epochs and tau: both are selected anew for each M (and tau for
each T), by the same cross-validation, with the T of the table. 3 splits x 5 seeds.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mcbn.data import Regression, describe, load
from mcbn.errors import MCBNError
from mcbn_study.journal import CellJournal, Record, read
from mcbn_study.progress import Progress
from mcbn_study.regression.context import Context
from mcbn_study.regression.evaluation import Evaluator
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.profile import Profile
from mcbn_study.regression.run import check_request
from mcbn_study.regression.scores import score_run
from mcbn_study.regression.search import Choice, fold_problem, rules_of, run_kept, tune_both
from mcbn_study.regression.selection import Configuration, CrossValidation, Search, networks_of, original_units
from mcbn_study.regression.testing import final_problem, final_targets, outputs, train_chosen

STUDY = "sensitivity"
# The largest batch size each table prints; Concrete's 1024 exceeds its 824 training rows and means all of them.
LARGEST_PRINTED = {"boston": 256, "energy": 512, "yacht": 128}


def run(
    profile: Profile,
    out: str | Path = "results/sensitivity",
    *,
    regression: str | Path = "results/regression",
    datasets: Sequence[str] = (),
    device: str = "cpu",
    compiled: bool = False,
    fused: bool = False,
) -> CellJournal:
    """Run the study; `regression` is the folder of the regression study, whose choice of lambda is kept."""
    datasets = tuple(datasets) or profile.datasets
    check_request(datasets, ("mcbn",), device)
    sets = {name: load(name) for name in datasets}
    decays = {name: chosen_decays(Path(regression), profile, name) for name in datasets}
    context = Context(STUDY, profile, CellJournal(Path(out), profile.settings()), device, compiled, fused)
    work = [(name, M) for name in datasets for M in batch_sizes(profile, name)]
    context.progress = Progress(sum(_weight(*pair) for pair in work), STUDY)
    try:
        for name, M in work:
            context.progress.start(f"{name}-{M}", _weight(name, M))
            if context.store.load(f"{name}-sensitivity-{M}") is None:
                _measure(context, name, sets[name], M, decays[name])
            context.progress.end()
    finally:
        context.progress.close()
    return context.store


def batch_sizes(profile: Profile, dataset: str) -> list[int]:
    """Return the batch sizes that the paper's table prints for a data set."""
    return [M for M in profile.sensitivity_batch_sizes if LARGEST_PRINTED.get(dataset, M) >= M]


def pass_counts(profile: Profile, batch_size: int) -> list[int]:
    """Return the T evaluated at a batch size: that of the first tables, and at M = 128 those of the others."""
    counts = {profile.sensitivity_samples}
    if batch_size == profile.sensitivity_pass_batch_size:
        counts |= set(profile.sensitivity_pass_counts)
    return sorted(counts)


def chosen_decays(folder: Path, profile: Profile, dataset: str) -> list[float]:
    """Read the lambda that the regression study chose for MCBN on each split."""
    records = read(folder / "records.jsonl")
    own = [r for r in records if (r["kind"], r.get("dataset"), r.get("method")) == ("test", dataset, "mcbn")]
    found = {r["split"]: float(r["config"]["weight_decay"]) for r in own}
    missing = [s for s in profile.sensitivity_splits if s not in found]
    if missing:
        raise MCBNError(
            f"{folder} has no MCBN runs of {dataset} on split {missing[0]}, whose weight decay is needed here; first "
            f"run `mcbn reproduce regression --datasets {dataset} --methods mcbn --out {folder}`, or name another "
            "folder with --regression"
        )
    return [found[s] for s in profile.sensitivity_splits]


def _measure(context: Context, dataset: str, data: Regression, M: int, decays: Sequence[float]) -> None:
    """Select epochs at this batch size, train the final networks once, tune and score for each T."""
    splits, started = context.profile.sensitivity_splits, time.perf_counter()
    problem = fold_problem(context, dataset, data, splits=splits)
    configurations = [Configuration(decay, M) for decay in sorted(set(decays))]
    winner = [sorted(set(decays)).index(decay) for decay in decays]
    name = f"{dataset}-sensitivity-{M}"
    found = _select(context, name, dataset, problem, configurations, winner)
    epochs = [int(found.epoch[0, b, c]) for b, c in enumerate(winner)]
    chosen = [Choice(configurations[c], epochs[b], 0.0, 0.0, {}) for b, c in enumerate(winner)]
    final = final_problem(context, dataset, data, splits)
    trained = train_chosen(context, dataset, final, chosen, "bn")
    records, counts = [], pass_counts(context.profile, M)
    for T in counts:
        tuned = _tune(context, dataset, problem, found, chosen, T)
        samples = outputs(context, trained, final, "mc", T)
        seconds = (time.perf_counter() - started) / (len(samples) * len(counts))
        records += _records(context, dataset, data, samples, tuned, seconds)
    tensors = {"rmse": found.rmse, "epoch": found.epoch, "winner": found.winner}
    context.store.finish(name, tensors, records)


def _select(
    context: Context, name: str, dataset: str, problem: Problem, configurations: list[Configuration], winner: list[int]
) -> Search:
    profile = context.profile
    rules = replace(rules_of(context, dataset), search_samples=profile.sensitivity_samples, n_samples=2)
    hidden = describe(dataset).hidden_units
    validation = CrossValidation(
        problem, profile.n_folds, configurations, rules, hidden=hidden, family="bn", winner=winner
    )
    return run_kept(context, name, validation)


def _tune(
    context: Context, dataset: str, problem: Problem, found: Search, chosen: Sequence[Choice], T: int
) -> list[Choice]:
    """Tune tau on the kept fold networks with T draws."""
    F = context.profile.n_folds
    networks = networks_of(problem, [chosen[0].configuration], "bn", describe(dataset).hidden_units)
    networks = networks.like(problem.train.x)
    values = {name: value[0].flatten(0, 1).to(context.device) for name, value in found.values.items()}  # (B F, ...)
    evaluator = Evaluator(problem, networks.batch_size, T, **context.numerics)
    moments = original_units(evaluator.moments(values, networks), problem, networks.stream)
    tuned = []
    for b, choice in enumerate(chosen):
        folds = slice(b * F, (b + 1) * F)
        tau, constant = tune_both(moments.mean[folds].cpu(), moments.variance[folds].cpu(), found.y[0, b], dataset)
        tuned.append(replace(choice, tau=tau, tau_constant=constant))
    return tuned


def _records(
    context: Context,
    dataset: str,
    data: Regression,
    samples: Sequence[Tensor],
    tuned: Sequence[Choice],
    seconds: float,
) -> list[Record]:
    seeds, records = context.profile.seeds, []
    for i, drawn in enumerate(samples):
        b, k = divmod(i, len(seeds))
        choice, s = tuned[b], context.profile.sensitivity_splits[b]
        y = final_targets(context, data, s)
        place = {"dataset": dataset, "method": "mcbn", "split": s, "seed": seeds[k], "config": choice.describe()}
        place |= {"batch_size": choice.configuration.batch_size, "n_samples": len(drawn), "n_test": len(y)}
        place |= {"tau": choice.tau, "tau_constant": choice.tau_constant}
        scores = score_run(drawn, y, choice.tau, choice.tau_constant)
        records.append(context.record("sensitivity", seconds, **place, **scores))
    return records


def _weight(dataset: str, batch_size: int) -> float:
    return describe(dataset).n * (1 / batch_size + 0.01)
