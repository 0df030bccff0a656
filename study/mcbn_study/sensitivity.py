"""Sensitivity of MCBN to batch size and number of passes (Teye et al. 2018, appendix, four tables).

"Trained and evaluated with varying batch sizes, but other hyperparameters fixed": lambda of each split is the one the
regression study chose for MCBN. The text is silent on epochs and tau: both are selected anew for each M (and tau for
each T), by the same cross-validation, with the T of the table. 3 splits x 5 seeds.

`precision` scores the networks of the regression study at multiples of the tau they chose. Ours, not in the paper.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcbn import MCBN, data
from mcbn.data import describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import paper
from mcbn_study.estimates import cell, mean_cell
from mcbn_study.journal import RECORDS, CellJournal, Journal, Record, read
from mcbn_study.regression.measure import Evaluator, original_units, score_run
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.profile import Configuration, Profile
from mcbn_study.regression.run import by_split, check_request, final_problem, outputs, score_runs, train_chosen
from mcbn_study.regression.search import Choice, Search, cross_validate, fold_problem, grid_networks, winners
from mcbn_study.regression.train import load_networks
from mcbn_study.study import Names, Study, Task, run_study
from mcbn_study.tables import render

STUDY = "sensitivity"
PRECISION: dict[str, Any] = {"n_samples": 500, "factors": [0.5, 1, 1.5, 2, 3, 4]}
METRICS = ("crps", "pll", "crps_normalized", "pll_normalized")
# The largest batch size each table prints; Concrete's 1024 exceeds its 824 training rows and means all of them.
LARGEST_PRINTED = {"boston": 256, "energy": 512, "yacht": 128}


def run(profile: Profile, out: Path, *, regression: Path, datasets: Names = (), **how: Any) -> CellJournal:
    """Run the study; `regression` is the folder whose choice of lambda is kept; how: of `Study`."""
    datasets = tuple(datasets) or profile.datasets
    check_request(datasets, ("mcbn",), **how)
    decays = {name: chosen_decays(regression, profile, name) for name in datasets}
    sizes = [(name, M) for name in datasets for M in batch_sizes(profile, name)]
    tasks = [Task(f"{name}-sensitivity-{M}", name, measure, {"M": M, "decays": decays[name]}) for name, M in sizes]
    return run_study(STUDY, profile, out, lambda _: tasks, datasets, **how)


def batch_sizes(profile: Profile, dataset: str) -> list[int]:
    """Return the batch sizes that the paper's table prints for a data set."""
    return [M for M in profile.sensitivity_batch_sizes if LARGEST_PRINTED.get(dataset, M) >= M]


def pass_counts(profile: Profile, batch_size: int) -> list[int]:
    """Return the T evaluated at a batch size: that of the first tables, and at M = 128 those of the others."""
    more = profile.sensitivity_pass_counts if batch_size == profile.sensitivity_pass_batch_size else ()
    return sorted({profile.sensitivity_samples, *more})


def chosen_decays(folder: Path, profile: Profile, dataset: str) -> list[float]:
    """Read the lambda that the regression study chose for MCBN on each split."""
    records = Journal(folder).find(kind="test", dataset=dataset, method="mcbn")
    decays = {r["split"]: float(r["config"]["weight_decay"]) for r in records}
    if missing := [s for s in profile.sensitivity_splits if s not in decays]:
        command = f"mcbn reproduce regression --datasets {dataset} --methods mcbn --out {folder}"
        lacking = f"{folder} has no MCBN runs of {dataset} on split {missing[0]}, whose weight decay is needed here"
        raise MCBNError(f"{lacking}; first run `{command}`, or name another folder with --regression")
    return [decays[s] for s in profile.sensitivity_splits]


def measure(study: Study, M: int, decays: Sequence[float]) -> None:
    """Select epochs at this batch size, train the final networks once, tune and score for each T."""
    p, started, name = study.profile, time.perf_counter(), f"{study.dataset}-sensitivity-{M}"
    splits, samples, counts = p.sensitivity_splits, p.sensitivity_samples, pass_counts(p, M)
    problem = fold_problem(study, splits=splits)
    configurations = [Configuration(decay, M) for decay in sorted(set(decays))]
    winner = [sorted(set(decays)).index(decay) for decay in decays]
    networks = grid_networks(problem, configurations, "bn", describe(study.dataset).hidden_units)
    selected = cross_validate(study, problem, networks, winner=winner, selection_samples=samples, n_samples=2)
    chosen = [Choice(configurations[c], int(selected["epoch"][0, b, c])) for b, c in enumerate(winner)]
    final = final_problem(study, splits)
    trained = train_chosen(study, final, chosen, "bn")
    records = []
    for T in counts:
        tuned = _tune(study, problem, selected, chosen, T)
        drawn = outputs(study, trained, final, "mc", T)
        seconds = (time.perf_counter() - started) / (len(drawn) * len(counts))
        for s, choice, runs in zip(splits, tuned, by_split(study, drawn), strict=True):
            records += score_runs(study, "sensitivity", "mcbn", s, runs, choice, seconds, batch_size=M)
    study.journal.finish(name, {name: selected[name] for name in ("rmse", "epoch", "winner")}, records)


def _tune(study: Study, problem: Problem, selected: Search, chosen: Sequence[Choice], T: int) -> list[Choice]:
    """Tune tau on the kept fold networks with T draws."""
    F = study.profile.n_folds
    networks = grid_networks(problem, [chosen[0].configuration], "bn", describe(study.dataset).hidden_units)
    values = {name: value.flatten(0, 1).to(study.device) for name, value in winners(selected, 0).items()}  # (B F, ...)
    evaluator = Evaluator(problem, networks.batch_size, T)
    moments = original_units(evaluator.moments(values, networks), problem, networks.stream)
    mean, variance = (torch.split(each.cpu(), F) for each in moments)  # B of (F, n) each
    return [choice.tuned(mean[b], variance[b], selected["y"][0, b], study.dataset) for b, choice in enumerate(chosen)]


def precision(out: str | Path, *, regression: str | Path = "results/regression") -> None:
    """Score the test rows of every network, a record a data set and factor; write the table."""
    journal = Journal(out, PRECISION)
    for path in sorted((Path(regression) / "networks").glob("*[!s].safetensors")):  # no networks of folds
        if not journal.has(dataset=path.stem):
            journal.add(_at_factors(path))
    report_precision(Path(out))


def _at_factors(path: Path) -> list[Record]:
    x, y = data.load(path.stem)
    rows: list[Record] = [{"dataset": path.stem, "factor": factor} for factor in PRECISION["factors"]]
    for network, info in load_networks(path):
        test, how = data.split(len(y), info["split"]).test, {"seed": info["seed"], "n_samples": PRECISION["n_samples"]}
        how |= {"batch_size": info["config"]["batch_size"]}
        bayes = MCBN(network, "regression").fit(x[info["train"]].float(), **how)
        samples = bayes.sample(x[test].float()).flatten(1)  # (T, n)
        for row in rows:
            scores = score_run(samples, y[test], row["factor"] * info["tau"], info["tau_constant"])
            row |= {metric: [*row.get(metric, []), scores[metric]] for metric in METRICS}
    return rows


def report_precision(out: Path) -> None:
    """Write the table of scores beside the paper's, from records alone."""
    content = {"records": read(out / RECORDS), "metrics": METRICS, "mean": mean_cell, "cell": cell, "find": paper.find}
    write_text(out / "table.md", render(__package__, "precision.md.j2", **content))
