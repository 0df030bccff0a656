"""Sensitivity of MCBN to batch size and number of passes (Teye et al. 2018, appendix, four tables).

"Trained and evaluated with varying batch sizes, but other hyperparameters fixed": lambda of each split is the one the
regression study chose for MCBN. The text is silent on epochs and tau: both are selected anew for each M (and tau for
each T), by the same cross-validation, with the T of the table. 3 splits x 5 seeds.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from mcbn.data import Regression, describe, load
from mcbn.errors import MCBNError
from mcbn_study.journal import CellJournal, Journal, Record
from mcbn_study.regression.measure import Evaluator, original_units, score_run, tune_both
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.profile import Configuration, Profile
from mcbn_study.regression.run import check_request, final_problem, final_targets, outputs, train_chosen
from mcbn_study.regression.search import (
    Choice,
    CrossValidation,
    Search,
    fold_problem,
    grid_networks,
    rules_of,
    run_kept,
)
from mcbn_study.study import Study

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
    **numerics: bool,
) -> CellJournal:
    """Run the study; `regression` is the folder of the regression study, whose choice of lambda is kept."""
    datasets = tuple(datasets) or profile.datasets
    check_request(datasets, ("mcbn",), device)
    sets = {name: load(name) for name in datasets}
    decays = {name: chosen_decays(Path(regression), profile, name) for name in datasets}
    study = Study(STUDY, profile, out, device, **numerics)
    work = [(name, M) for name in datasets for M in batch_sizes(profile, name)]
    with study.progressing(sum(_weight(*pair) for pair in work)):
        for name, M in work:
            with study.progress.cell(f"{name}-{M}", _weight(name, M)):
                if study.journal.load(f"{name}-sensitivity-{M}") is None:
                    measure(study, name, sets[name], M, decays[name])
    return study.journal


def _weight(dataset: str, batch_size: int) -> float:
    return describe(dataset).n * (1 / batch_size + 0.01)


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
    records = Journal(folder).find(kind="test", dataset=dataset, method="mcbn")
    decays = {r["split"]: float(r["config"]["weight_decay"]) for r in records}
    missing = [s for s in profile.sensitivity_splits if s not in decays]
    if missing:
        raise MCBNError(
            f"{folder} has no MCBN runs of {dataset} on split {missing[0]}, whose weight decay is needed here; first "
            f"run `mcbn reproduce regression --datasets {dataset} --methods mcbn --out {folder}`, or name another "
            "folder with --regression"
        )
    return [decays[s] for s in profile.sensitivity_splits]


def measure(study: Study, dataset: str, data: Regression, M: int, decays: Sequence[float]) -> None:
    """Select epochs at this batch size, train the final networks once, tune and score for each T."""
    splits, started = study.profile.sensitivity_splits, time.perf_counter()
    problem = fold_problem(study, dataset, data, splits=splits)
    configurations = [Configuration(decay, M) for decay in sorted(set(decays))]
    winner = [sorted(set(decays)).index(decay) for decay in decays]
    name = f"{dataset}-sensitivity-{M}"
    selected = _select(study, name, dataset, problem, configurations, winner)
    chosen = [Choice(configurations[c], int(selected.epoch[0, b, c])) for b, c in enumerate(winner)]
    final = final_problem(study, dataset, data, splits)
    trained = train_chosen(study, dataset, final, chosen, "bn")
    records, counts = [], pass_counts(study.profile, M)
    for T in counts:
        tuned = _tune(study, dataset, problem, selected, chosen, T)
        samples = outputs(study, trained, final, "mc", T)
        seconds = (time.perf_counter() - started) / (len(samples) * len(counts))
        records += _records(study, dataset, data, samples, tuned, seconds)
    tensors = {"rmse": selected.rmse, "epoch": selected.epoch, "winner": selected.winner}
    study.journal.finish(name, tensors, records)


def _select(
    study: Study, name: str, dataset: str, problem: Problem, configurations: list[Configuration], winner: list[int]
) -> Search:
    rules = rules_of(study, dataset)._replace(search_samples=study.profile.sensitivity_samples, n_samples=2)
    hidden, F = describe(dataset).hidden_units, study.profile.n_folds
    validation = CrossValidation(problem, F, configurations, rules, hidden=hidden, family="bn", winner=winner)
    return run_kept(study, name, validation)


def _tune(
    study: Study, dataset: str, problem: Problem, selected: Search, chosen: Sequence[Choice], T: int
) -> list[Choice]:
    """Tune tau on the kept fold networks with T draws."""
    F = study.profile.n_folds
    networks = grid_networks(problem, [chosen[0].configuration], "bn", describe(dataset).hidden_units)
    networks = networks.like(problem.train.x)
    values = {name: value[0].flatten(0, 1).to(study.device) for name, value in selected.values.items()}  # (B F, ...)
    evaluator = Evaluator(problem, networks.batch_size, T, study.numerics)
    moments = original_units(evaluator.moments(values, networks), problem, networks.stream)
    tuned = []
    for b, choice in enumerate(chosen):
        mean, variance = (each[b * F : (b + 1) * F].cpu() for each in moments)
        tau, constant = tune_both(mean, variance, selected.y[0, b], dataset)
        tuned.append(choice._replace(tau=tau, tau_constant=constant))
    return tuned


def _records(
    study: Study, dataset: str, data: Regression, samples: Sequence[Tensor], tuned: Sequence[Choice], seconds: float
) -> list[Record]:
    runs = [
        (s, seed, choice)
        for s, choice in zip(study.profile.sensitivity_splits, tuned, strict=True)
        for seed in study.profile.seeds
    ]
    records = []
    for (s, seed, choice), drawn in zip(runs, samples, strict=True):
        y = final_targets(study, data, s)
        place = {"dataset": dataset, "method": "mcbn", "split": s, "seed": seed, "config": choice.describe()}
        place |= {"batch_size": choice.configuration.batch_size, "n_samples": len(drawn), "n_test": len(y)}
        place |= {"tau": choice.tau, "tau_constant": choice.tau_constant}
        scores = score_run(drawn, y, choice.tau, choice.tau_constant)
        records.append(study.record("sensitivity", seconds, **place, **scores))
    return records
