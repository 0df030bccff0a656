"""The paper's regression study (Teye et al. 2018, Section 4.3; Table 1 and appendix): search, tau, test, records.

Cells of work: one per data set, family and batch size of the cross-validation, one per data set and method of the
test. Finished ones are never repeated; an interruption loses the one at work.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcbn.data import NAMES, Regression, describe, load, split
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn_study.journal import CellJournal, Record
from mcbn_study.regression import mnf
from mcbn_study.regression.measure import Evaluator, score_run, tune_both
from mcbn_study.regression.problem import Part, Problem, make_problem, stream_key
from mcbn_study.regression.profile import METHODS, Profile
from mcbn_study.regression.search import Choice, Criterion, cells, choose, fold_problem, search_weight
from mcbn_study.regression.stack import Family, Networks, network_states, take
from mcbn_study.regression.train import Job, Trained, save_networks, train_jobs
from mcbn_study.study import Study

STUDY = "regression"
# Which networks a method tests and by which criterion they were chosen. An ensemble is of the networks of "bn".
TESTED: dict[str, tuple[Family, Criterion]] = {
    "mcbn": ("bn", "mc"),
    "bn": ("bn", "plain"),
    "mcdo": ("dropout", "mc"),
    "do": ("dropout", "plain"),
    "ensemble": ("bn", "plain"),
}


def run(
    profile: Profile,
    out: str | Path = "results/regression",
    *,
    datasets: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    device: str = "cpu",
    **numerics: bool,
) -> CellJournal:
    """Run the study for the given data sets (all of the profile's by default) and methods; numerics as `Study`."""
    datasets = tuple(datasets) or profile.datasets
    check_request(datasets, methods, device)
    sets = {name: load(name) for name in datasets}
    study = Study(STUDY, profile, out, device, **numerics)
    work = [(name, method) for name in datasets for method in methods]
    with study.progressing(sum(_weight(profile, *pair) for pair in work)):
        for name, method in work:
            score_method(study, name, sets[name], method)
    return study.journal


def check_request(datasets: Sequence[str], methods: Sequence[str], device: str) -> None:
    """Refuse unknown names and a GPU that is not there."""
    for kind, wanted, known in (("data set", datasets, NAMES), ("method", methods, METHODS)):
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise MCBNError(f"there is no {kind} {unknown[0]!r}; choose from {', '.join(known)}")
    if device not in ("cpu", "cuda"):
        raise MCBNError(f"device must be cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MCBNError("--device cuda asked, but torch sees no GPU; run with --device cpu")


def score_method(study: Study, dataset: str, data: Regression, method: str) -> None:
    """Test one method on every split and seed, unless its records are there."""
    done = is_done(study.journal, study.profile, dataset, method)
    if done or study.journal.load(f"{dataset}-test-{method}") is not None:
        with study.progress.cell("", _weight(study.profile, dataset, method)):
            return
    if method == "mnf":
        _score_mnf(study, dataset, data)
    elif method == "ensemble":
        _score_ensemble(study, dataset, data)
    else:
        _score_networks(study, dataset, data, method)


def expected(profile: Profile, dataset: str, method: str) -> list[Record]:
    """List the records a method gives on a data set, by what tells them apart."""
    seeds = profile.seeds[:1] if method == "ensemble" else profile.seeds
    base = {"kind": "test", "dataset": dataset, "method": method}
    return [base | {"split": s, "seed": seed} for s in profile.splits for seed in seeds]


def is_done(journal: CellJournal, profile: Profile, dataset: str, method: str) -> bool:
    """Tell whether all of them are on record."""
    return all(journal.has(**record) for record in expected(profile, dataset, method))


def _weight(profile: Profile, dataset: str, method: str) -> float:
    """Estimate the work of a method by its search, though methods of one family share theirs."""
    if method not in TESTED:
        return 0.0
    return sum(search_weight(profile, dataset, cell) for cell in cells(profile, dataset, TESTED[method][0]))


def _score_networks(study: Study, dataset: str, data: Regression, method: str) -> None:
    """Train the chosen configuration of every split with every seed, score the runs and write them."""
    family, criterion = TESTED[method]
    choices = choose(study, dataset, data, family, criterion)
    started = time.perf_counter()
    problem = final_problem(study, dataset, data)
    trained = train_chosen(study, dataset, problem, choices, family)
    samples = outputs(study, trained, problem, criterion, study.profile.n_samples)
    seconds = (time.perf_counter() - started) / len(samples)
    records = []
    for s, choice, drawn in zip(study.profile.splits, choices, _by_split(study, samples), strict=True):
        records += score_split(study, dataset, data, method, s, drawn, choice, seconds)
    if method == "mcbn":
        _save_final(study, dataset, problem, trained, choices)
        _save_folds(study, dataset, data, choices)
    means = torch.stack([drawn.mean(0).float() for drawn in samples])  # (B seeds, n)
    study.journal.finish(f"{dataset}-test-{method}", {"mean": means}, records)


def _score_ensemble(study: Study, dataset: str, data: Regression) -> None:
    """Score the networks of all seeds of the configuration best by the plain criterion as one ensemble a split.

    A deep ensemble (Lakshminarayanan et al. 2017) of plain BN networks: mean over members, variance across members
    + 1/tau. tau and its constant twin are tuned on the folds by ensembles of the same configuration and epochs.
    """
    choices = choose(study, dataset, data, *TESTED["ensemble"])
    started = time.perf_counter()
    choices = _tune_ensemble(study, dataset, data, choices)
    members = _members(study, dataset, data, choices)  # (B K, n)
    seconds = (time.perf_counter() - started) / len(choices)
    records = []
    for s, choice, drawn in zip(study.profile.splits, choices, _by_split(study, members), strict=True):
        together = drawn.double().to(study.device)  # (K, n)
        records += score_split(study, dataset, data, "ensemble", s, [together], choice, seconds)
    taus = torch.tensor([[choice.tau, choice.tau_constant] for choice in choices])
    study.journal.finish(f"{dataset}-test-ensemble", {"tau": taus}, records)


def _tune_ensemble(study: Study, dataset: str, data: Regression, choices: Sequence[Choice]) -> list[Choice]:
    """Train an ensemble on every fold and tune tau on its validation rows."""
    F, K = study.profile.n_folds, len(study.profile.seeds)
    problem = fold_problem(study, dataset, data, seeds=study.profile.seeds)
    trained = train_chosen(study, dataset, problem, choices, "bn")
    single = [drawn[0].cpu() for drawn in outputs(study, trained, problem, "plain", 1)]  # (n,) each
    tuned = []
    for b, choice in enumerate(choices):
        first = [(b * F + f) * K for f in range(F)]  # stream of each fold's first member
        members = [torch.stack(single[r : r + K]) for r in first]  # (K, n) each
        units = problem.query.y.double() * problem.y_std[:, None] + problem.y_mean[:, None]
        y = _pad([units[r, : len(single[r])].cpu() for r in first])
        mean, variance = _pad([m.mean(0) for m in members]), _pad([m.var(0, correction=0) for m in members])
        tau, constant = tune_both(mean, variance, y, dataset)
        tuned.append(choice._replace(tau=tau, tau_constant=constant))
    return tuned


def _members(study: Study, dataset: str, data: Regression, choices: Sequence[Choice]) -> Tensor:
    """Return the test outputs of the plain BN networks, (B K, n): those of method "bn" if tested, else made anew."""
    finished = study.journal.load(f"{dataset}-test-bn")
    if finished is not None:
        return finished["mean"]
    problem = final_problem(study, dataset, data)
    trained = train_chosen(study, dataset, problem, choices, "bn")
    return torch.cat(outputs(study, trained, problem, "plain", 1)).float()


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=torch.nan)


def _score_mnf(study: Study, dataset: str, data: Regression) -> None:
    """Search, train and test MNF on the splits that are not on record; `seconds` are shared by all runs."""
    profile = study.profile
    missing = sorted({r["split"] for r in expected(profile, dataset, "mnf") if not study.journal.has(**r)})
    started = time.perf_counter()
    choices = mnf.search(dataset, missing, profile, study.device)
    epochs = [choice.epochs for choice in choices]
    samples = mnf.train_and_draw(dataset, missing, profile.seeds, epochs, profile.n_samples, study.device).double()
    seconds = (time.perf_counter() - started) / len(samples)
    for s, choice, drawn in zip(missing, choices, _by_split(study, samples), strict=True):
        study.journal.append(score_split(study, dataset, data, "mnf", s, drawn, choice, seconds))


def _by_split(study: Study, runs: Any) -> Iterator[Any]:
    """Cut runs, ordered by split and seed, into those of each split."""
    K = len(study.profile.seeds)
    return (runs[start : start + K] for start in range(0, len(runs), K))


def final_problem(study: Study, dataset: str, data: Regression, splits: Sequence[int] = ()) -> Problem:
    """Stack train+CV and test part of all splits, once a seed; streams ordered by split, seed."""
    parts = []
    for s in splits or study.profile.splits:
        train, test = split(len(data.y), s)
        parts += [Part(train, test, stream_key(dataset, s, None, seed)) for seed in study.profile.seeds]
    return make_problem(data, parts, study.device)


def train_chosen(
    study: Study, dataset: str, problem: Problem, choices: Sequence[Choice], family: Family
) -> list[Trained]:
    """Train a network for every stream with the choice of its split."""
    each = len(problem.streams) // len(choices)
    jobs = [Job(r, *choices[r // each][:2]) for r in range(len(problem.streams))]
    return train_jobs(problem, jobs, family, describe(dataset).hidden_units, study.numerics)


def outputs(
    study: Study, trained: Sequence[Trained], problem: Problem, criterion: Criterion, n_samples: int
) -> list[Tensor]:
    """Return the draws (T, n), or the plain output (1, n), of each stream's network in original units."""
    drawn: dict[int, Tensor] = {}
    for places, networks, values in trained:
        evaluator = Evaluator(problem, networks.batch_size, n_samples, study.numerics)
        for i, place in enumerate(places):
            one = torch.tensor([i], device=problem.device)
            alone = take(values, one), networks[one]
            output = evaluator.samples(*alone)[0] if criterion == "mc" else evaluator.plain(*alone)
            r = int(networks.stream[i])
            output = output[:, : int(problem.query.n[r])].double()
            drawn[place] = output * problem.y_std[r] + problem.y_mean[r]
    return [drawn[place] for place in sorted(drawn)]


def score_split(
    study: Study,
    dataset: str,
    data: Regression,
    method: str,
    s: int,
    samples: Sequence[Tensor],
    choice: Choice,
    seconds: float,
) -> list[Record]:
    """Make the record of every seed of a split, from draws (T, n) each, and write the split's predictions."""
    y = final_targets(study, data, s)
    records = []
    for seed, drawn in zip(study.profile.seeds, samples, strict=False):
        place = {"dataset": dataset, "method": method, "split": s, "seed": seed, "config": choice.describe()}
        place |= {"tau": choice.tau, "tau_constant": choice.tau_constant, "n_samples": len(drawn), "n_test": len(y)}
        scores = score_run(drawn, y, choice.tau, choice.tau_constant)
        if len(drawn) == 1:  # a deterministic network has no uncertainty of its own
            scores |= {"crps_normalized": None, "pll_normalized": None}
        records.append(study.record("test", seconds, **place, **scores))
    error = torch.stack([y - drawn.mean(0) for drawn in samples])
    std = torch.stack([(drawn.var(0, correction=0) + 1 / choice.tau).sqrt() for drawn in samples])
    save_predictions(study, dataset, method, s, error, std, [choice.tau_constant**-0.5] * len(samples))
    return records


def final_targets(study: Study, data: Regression, s: int) -> Tensor:
    """Return the targets of a split's test part."""
    return data.y[split(len(data.y), s).test].to(study.device)


def save_predictions(
    study: Study, dataset: str, method: str, s: int, error: Tensor, std: Tensor, constant_std: Sequence[float]
) -> None:
    """Write error and std (seeds, n) of one method and split."""
    arrays: dict[str, Any] = {"error": error.half().cpu().numpy(), "std": std.half().cpu().numpy()}
    arrays["constant_std"] = np.array(constant_std, dtype=np.float32)
    with replacing(study.journal.folder / "predictions" / f"{dataset}-{method}-{s}.npz") as temporary:
        np.savez_compressed(temporary, **arrays)


def _save_final(
    study: Study, dataset: str, problem: Problem, trained: Sequence[Trained], choices: Sequence[Choice]
) -> None:
    """Write the networks of the test, ordered by split, seed."""
    seeds = study.profile.seeds
    states: dict[int, dict[str, Tensor]] = {}
    for places, networks, values in trained:
        states |= dict(zip(places, network_states(values, networks, problem), strict=True))
    infos = [_info(study, dataset, b, choice) | {"seed": seed} for b, choice in enumerate(choices) for seed in seeds]
    path = study.journal.folder / "networks" / f"{dataset}.safetensors"
    save_networks(path, [states[place] for place in sorted(states)], infos)


def _save_folds(study: Study, dataset: str, data: Regression, choices: Sequence[Choice]) -> None:
    """Write the fold networks of the winning configuration, ordered by split, fold."""
    problem, n_folds = fold_problem(study, dataset, data), study.profile.n_folds
    values = {name: torch.cat([choice.values[name] for choice in choices]) for name in choices[0].values}
    values = {name: value.to(study.device) for name, value in values.items()}
    stream = torch.arange(len(problem.streams), device=study.device)
    unused = torch.zeros(len(stream), device=study.device)
    networks = Networks("bn", stream, unused, unused, 0, describe(dataset).hidden_units)
    infos = [
        _info(study, dataset, b, choice) | {"fold": f, "n_folds": n_folds}
        for b, choice in enumerate(choices)
        for f in range(n_folds)
    ]
    path = study.journal.folder / "networks" / f"{dataset}_folds.safetensors"
    save_networks(path, network_states(values, networks, problem), infos)


def _info(study: Study, dataset: str, b: int, choice: Choice) -> dict[str, Any]:
    info: dict[str, Any] = {"dataset": dataset, "split": study.profile.splits[b], "config": choice.describe()}
    return info | {"tau": choice.tau, "tau_constant": choice.tau_constant, "config_hash": study.profile.hash}
