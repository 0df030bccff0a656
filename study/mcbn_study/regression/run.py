"""The paper's regression study (Teye et al. 2018, Section 4.3; Table 1 and appendix): search, tau, test, records.

Cells of work: one per data set, family and batch size of the cross-validation, one per data set and method of the
test. Finished ones are never repeated; an interruption loses the one at work.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcbn.data import NAMES, describe, split
from mcbn.errors import MCBNError, require_choice
from mcbn.files import replacing
from mcbn.stacked import Values
from mcbn_study.journal import CellJournal, Record
from mcbn_study.regression import mnf
from mcbn_study.regression.measure import Evaluator, score_run
from mcbn_study.regression.problem import Part, Problem, make_problem, stream_key
from mcbn_study.regression.profile import METHODS, Profile
from mcbn_study.regression.search import Choice, Criterion, cells, choose, fold_problem, search_cell
from mcbn_study.regression.stack import Family, Networks, network_states
from mcbn_study.regression.train import save_networks, train_streams
from mcbn_study.study import Names, Study, Task, run_study

STUDY = "regression"
Choices = Sequence[Choice]  # of each split
Predicted = tuple[Tensor, Tensor, float, float]  # mean and epistemic variance (n,), tau, tau of constant uncertainty
Trained = Sequence[tuple[Networks, Values]]  # networks of one stream each
# Which networks a method tests and by which criterion they were chosen. An ensemble is of the networks of "bn".
TESTED: dict[str, tuple[Family, Criterion]] = {"mcbn": ("bn", "mc"), "bn": ("bn", "plain"), "ensemble": ("bn", "plain")}
TESTED |= {"mcdo": ("dropout", "mc"), "do": ("dropout", "plain")}


def run(profile: Profile, out: Path, *, datasets: Names = (), methods: Names = METHODS, **how: Any) -> CellJournal:
    """Run the study for the given data sets (all of the profile's by default) and methods; how: of `Study`."""
    datasets = tuple(datasets) or profile.datasets
    check_request(datasets, methods, **how)
    return run_study(STUDY, profile, out, partial(list_tasks, datasets=datasets, methods=methods), datasets, **how)


def check_request(datasets: Names, methods: Names, *, device: str = "cpu", **_how: Any) -> None:
    """Refuse unknown names and a GPU that is not there."""
    asked = [("data set", name, NAMES) for name in datasets] + [("method", name, METHODS) for name in methods]
    for kind, name, known in [*asked, ("--device", device, ("cpu", "cuda"))]:
        require_choice(kind, name, known)
    if device == "cuda" and not torch.cuda.is_available():
        raise MCBNError("--device cuda asked, but torch sees no GPU; run with --device cpu")


def list_tasks(study: Study, datasets: Names, methods: Names) -> list[Task]:
    """List the cells of methods that are not on record: the search, which a family's methods share, then the test."""
    tasks: dict[str, Task] = {}
    for dataset, method in product(datasets, methods):
        name = f"{dataset}-test-{method}"
        seeds = study.profile.seeds[: 1 if method == "ensemble" else None]
        if study.has_runs(seeds, kind="test", dataset=dataset, method=method) or study.journal.load(name) is not None:
            continue
        if method in TESTED:
            family, _ = TESTED[method]
            for cell, grid in cells(study.profile, dataset, family).items():
                tasks.setdefault(cell, Task(cell, dataset, search_cell, {"family": family, "cell": cell, "grid": grid}))
        step = {"mnf": score_mnf, "ensemble": score_ensemble}.get(method, score_networks)
        tasks[name] = Task(name, dataset, step, {"method": method})
    return list(tasks.values())


def score_networks(study: Study, method: str) -> None:
    """Train the chosen configuration of every split with every seed, score the runs and write them."""
    family, criterion = TESTED[method]
    choices = choose(study, family, criterion)
    started = time.perf_counter()
    problem = final_problem(study)
    trained = train_chosen(study, problem, choices, family)
    samples = outputs(study, trained, problem, criterion, study.profile.n_samples)
    records = _score_splits(study, method, choices, by_split(study, samples), started)
    if method == "mcbn":
        _save_networks(study, problem, trained, choices)
    means = torch.stack([drawn.mean(0).float() for drawn in samples])  # (B seeds, n)
    study.journal.finish(f"{study.dataset}-test-{method}", {"mean": means}, records)


def score_ensemble(study: Study, method: str) -> None:
    """Score the networks of all seeds, best by the plain criterion, as a deep ensemble (Lakshminarayanan et al. 2017).

    Mean over members, variance across members + 1/tau, which is tuned on the folds by ensembles trained alike.
    """
    choices = choose(study, *TESTED[method])
    started = time.perf_counter()
    choices = _tune_ensemble(study, choices)
    ensembles = by_split(study, _members(study, choices).double().to(study.device))  # (K, n) each
    records = _score_splits(study, method, choices, [[members] for members in ensembles], started)
    taus = torch.tensor([[choice.tau, choice.tau_constant] for choice in choices])
    study.journal.finish(f"{study.dataset}-test-{method}", {"tau": taus}, records)


def _tune_ensemble(study: Study, choices: Choices) -> list[Choice]:
    """Train an ensemble on every fold and tune tau on its validation rows."""
    F, K = study.profile.n_folds, len(study.profile.seeds)
    problem = fold_problem(study, seeds=study.profile.seeds)
    trained = train_chosen(study, problem, choices, "bn")
    members = outputs(study, trained, problem, "plain", 1)  # (1, n) each; all of a fold's are of one length
    tuned = []
    for b, choice in enumerate(choices):
        folds = [torch.cat(members[r : r + K]).cpu() for r in range(b * F * K, (b + 1) * F * K, K)]  # (K, n) each
        moments = [m.mean(0) for m in folds], [m.var(0, correction=0) for m in folds]
        mean, variance = (pad_sequence(each, batch_first=True, padding_value=torch.nan) for each in moments)  # (F, n)
        y = problem.targets[b * F * K : (b + 1) * F * K : K, : mean.shape[1]].cpu()
        tuned.append(choice.tuned(mean, variance, y, study.dataset))
    return tuned


def _members(study: Study, choices: Choices) -> Tensor:
    """Return the test outputs of the plain BN networks, (B K, n): those of method "bn" if tested, else made anew."""
    if (finished := study.journal.load(f"{study.dataset}-test-bn")) is not None:
        return finished["mean"]
    problem = final_problem(study)
    return torch.cat(outputs(study, train_chosen(study, problem, choices, "bn"), problem, "plain", 1)).float()


def score_mnf(study: Study, method: str) -> None:
    """Search, train and test MNF; `seconds` are shared by all runs."""
    p, dataset, device, started = study.profile, study.dataset, study.device, time.perf_counter()
    choices = mnf.search(dataset, p.splits, p, device)
    samples = mnf.train_and_draw(dataset, p.splits, [choice.epochs for choice in choices], p, device).double()
    study.journal.append(_score_splits(study, method, choices, by_split(study, samples), started))


def by_split(study: Study, runs: Any) -> list[Any]:
    """Cut runs, ordered by split and seed, into those of each split."""
    K = len(study.profile.seeds)
    return [runs[start : start + K] for start in range(0, len(runs), K)]


def final_problem(study: Study, splits: Sequence[int] = ()) -> Problem:
    """Stack train+CV and test part of all splits, once a seed; streams ordered by split, seed."""
    runs = product(splits or study.profile.splits, study.profile.seeds)
    parts = [Part(*split(len(study.data.y), s), stream_key(study.dataset, s, None, seed)) for s, seed in runs]
    return make_problem(study.data, parts, study.device)


def train_chosen(study: Study, problem: Problem, choices: Choices, family: Family) -> Trained:
    """Train a network for every stream with the choice of its split."""
    each = len(problem.streams) // len(choices)
    chosen = [(choice.configuration, choice.epochs) for choice in choices for _ in range(each)]
    return train_streams(problem, chosen, family, describe(study.dataset).hidden_units, fused=study.fused)


def outputs(study: Study, trained: Trained, problem: Problem, criterion: Criterion, n_samples: int) -> list[Tensor]:
    """Return the draws (T, n), or the plain output (1, n), of each stream's network in original units."""
    evaluators = {M: Evaluator(problem, M, n_samples) for M in {networks.batch_size for networks, _ in trained}}
    drawn = []
    for networks, values in trained:
        evaluator, r = evaluators[networks.batch_size], int(networks.stream)
        output = evaluator.samples(values, networks)[0] if criterion == "mc" else evaluator.plain(values, networks)
        drawn.append(output[:, : int(problem.query.n[r])].double() * problem.y_std[r] + problem.y_mean[r])
    return drawn


def score_runs(
    study: Study, kind: str, method: str, s: int, samples: Sequence[Tensor], choice: Choice, seconds: float, **more: Any
) -> list[Record]:
    """Make the record of every seed of a split, from draws (T, n) each."""
    y, records = final_targets(study, s), []
    for seed, drawn in zip(study.profile.seeds, samples, strict=False):
        place = {"dataset": study.dataset, "method": method, "split": s, "seed": seed, "config": choice.describe()}
        place |= {"tau": choice.tau, "tau_constant": choice.tau_constant, "n_samples": len(drawn), "n_test": len(y)}
        scores = score_run(drawn, y, choice.tau, choice.tau_constant)
        if len(drawn) == 1:  # a deterministic network has no uncertainty of its own
            scores |= {"crps_normalized": None, "pll_normalized": None}
        records.append(study.record(kind, seconds, **place, **more, **scores))
    return records


def final_targets(study: Study, s: int) -> Tensor:
    """Return the targets of a split's test part."""
    return study.data.y[split(len(study.data.y), s).test].to(study.device)


def _score_splits(study: Study, method: str, choices: Choices, runs: Sequence[Any], started: float) -> list[Record]:
    """Make the records of a test, from draws (T, n) of the runs of each split, and write the predictions."""
    seconds = (time.perf_counter() - started) / sum(map(len, runs))  # shared alike
    records = []
    for s, choice, samples in zip(study.profile.splits, choices, runs, strict=True):
        moments = [(drawn.mean(0), drawn.var(0, correction=0)) for drawn in samples]
        predicted = [(*moment, choice.tau, choice.tau_constant) for moment in moments]
        save_predictions(study, study.dataset, method, s, final_targets(study, s), predicted)
        records += score_runs(study, "test", method, s, samples, choice, seconds)
    return records


def save_predictions(study: Study, dataset: str, method: str, s: int, y: Tensor, runs: Sequence[Predicted]) -> None:
    """Write error and std (seeds, n) of one method and split, whose targets are y (n,)."""
    error = torch.stack([y - mean for mean, *_ in runs])
    std = torch.stack([(variance + 1 / tau).sqrt() for _, variance, tau, _ in runs])
    arrays: dict[str, Any] = {"error": error.half().cpu().numpy(), "std": std.half().cpu().numpy()}
    arrays["constant_std"] = np.array([tau_constant**-0.5 for *_, tau_constant in runs], dtype=np.float32)
    with replacing(study.journal.folder / "predictions" / f"{dataset}-{method}-{s}.npz") as temporary:
        np.savez_compressed(temporary, **arrays)


def _save_networks(study: Study, problem: Problem, trained: Trained, choices: Choices) -> None:
    """Write the networks of the test, by split, seed, and the fold networks of the winning configurations."""
    states = [state for networks, values in trained for state in network_states(values, networks, problem)]
    folds, F = fold_problem(study), study.profile.n_folds
    values = {name: torch.cat([c.values[name] for c in choices]).to(study.device) for name in choices[0].values}
    stream = torch.arange(len(folds.streams), device=study.device)
    unused = torch.zeros(len(stream), device=study.device)
    networks = Networks("bn", stream, unused, unused, 0, describe(study.dataset).hidden_units)
    for end, saved, runs in (
        ("", states, [{"seed": seed} for seed in study.profile.seeds]),
        ("_folds", network_states(values, networks, folds), [{"fold": f, "n_folds": F} for f in range(F)]),
    ):
        infos = [
            {"dataset": study.dataset, "split": s, "config": choice.describe(), "tau": choice.tau}
            | {"tau_constant": choice.tau_constant, "config_hash": study.profile.hash, **run}
            for (s, choice), run in product(zip(study.profile.splits, choices, strict=True), runs)
        ]
        save_networks(study.journal.folder / "networks" / f"{study.dataset}{end}.safetensors", saved, infos)
