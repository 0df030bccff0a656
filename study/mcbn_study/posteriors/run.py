"""Families of q(omega) compared on the study's trained networks: the evaluation that the paper left to future work.

Teye et al. 2018, appendix 1.3, give a factorised Gaussian for the batch statistics and draw training batches instead.
Here every network that the regression study tested predicts with each family (`measure` lists them), T draws each.
linear, gaussian and tuned are also the study's methods mcbn_linear, mcbn_gaussian and mcbn_tuned.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcbn.data import NAMES, Regression, load, split
from mcbn.errors import MCBNError
from mcbn.progress import tracked
from mcbn_study.journal import CellJournal, Record
from mcbn_study.posteriors.measure import FAMILIES, Measured, Network, choose_batch_size, measure
from mcbn_study.regression.profile import Profile
from mcbn_study.regression.run import check_request, save_predictions
from mcbn_study.regression.train import load_networks
from mcbn_study.study import Study

STUDY = "posteriors"
METHODS = {"mcbn_linear": "linear", "mcbn_gaussian": "gaussian", "mcbn_tuned": "tuned"}  # in the regression study


def run(
    profile: Profile,
    out: str | Path = "results/posteriors",
    *,
    regression: str | Path = "results/regression",
    datasets: Sequence[str] = (),
) -> CellJournal:
    """Compare the families on the networks in the folder `regression`; by default on every set that has them.

    Appends to the records of both folders, a data set at a time; finished ones are not repeated.
    """
    check_request(datasets, ("mcbn",), "cpu")
    chosen = tuple(datasets) or _saved_sets(Path(regression), profile)
    files = {name: _network_files(Path(regression), name) for name in chosen}
    study = Study("regression", profile, regression)
    context = Study(STUDY, profile, out)
    for name in tracked(chosen, STUDY, "set"):
        wanted, tests = _expected(profile, name), _expected_tests(profile, name)
        if not (all(context.journal.has(**r) for r in wanted) and all(study.journal.has(**r) for r in tests)):
            _compare(context, study, name, *(load_networks(path) for path in files[name]))
    return context.journal


def _compare(context: Study, study: Study, dataset: str, final: Sequence[Network], trained: Sequence[Network]) -> None:
    """Measure every network of a data set; write predictions, then the records of both folders."""
    data, T = load(dataset), context.profile.n_samples
    choices = {
        s: choose_batch_size([pair for pair in trained if pair[1]["split"] == s], data, T)
        for s in context.profile.splits
    }
    network, info = final[0]
    measure(network, info, data, T, choices[info["split"]])  # first calls compile and load: not to be timed
    measured = [(info, measure(network, info, data, T, choices[info["split"]])) for network, info in final]
    for method, family in METHODS.items():
        _save_predictions(study, dataset, data, method, [(info, found[family]) for info, found in measured])
    pairs = [(info, family, one) for info, found in measured for family, one in found.items()]
    methods = {family: method for method, family in METHODS.items()}
    tests = [_record(study, "test", info, one, method=methods[f]) for info, f, one in pairs if f in methods]
    study.journal.append(tests)
    context.journal.append(_record(context, "posterior", info, one, family=family) for info, family, one in pairs)


def _record(context: Study, kind: str, info: dict[str, Any], one: Measured, **name: str) -> Record:
    place: Record = {"dataset": info["dataset"], **name, "split": info["split"], "seed": info["seed"]}
    place |= {"config": info["config"] | {"posterior_batch_size": one.batch_size}}
    place |= {"tau": one.tau, "tau_constant": info["tau_constant"], "n_samples": context.profile.n_samples}
    place |= {"n_train": len(info["train"]), "n_test": len(one.mean)}
    costs = {"fit_seconds": one.fit_seconds, "predict_seconds": one.predict_seconds, "bytes": one.size}
    return context.record(kind, one.fit_seconds + one.predict_seconds, **place, **one.scores, **costs)


def _save_predictions(
    study: Study, dataset: str, data: Regression, method: str, runs: Sequence[tuple[dict[str, Any], Measured]]
) -> None:
    for s in study.profile.splits:
        y = data.y[split(len(data.y), s).test]
        own = [(info, one) for info, one in runs if info["split"] == s]
        error = torch.stack([y - one.mean for _, one in own])  # (seeds, n)
        std = torch.stack([(one.variance + 1 / one.tau).sqrt() for _, one in own])
        save_predictions(study, dataset, method, s, error, std, [info["tau_constant"] ** -0.5 for info, _ in own])


def _expected(profile: Profile, dataset: str) -> list[Record]:
    runs = [(s, seed) for s in profile.splits for seed in profile.seeds]
    base = {"kind": "posterior", "dataset": dataset}
    return [base | {"family": family, "split": s, "seed": seed} for family in FAMILIES for s, seed in runs]


def _expected_tests(profile: Profile, dataset: str) -> list[Record]:
    runs = [(s, seed) for s in profile.splits for seed in profile.seeds]
    base = {"kind": "test", "dataset": dataset}
    return [base | {"method": method, "split": s, "seed": seed} for method in METHODS for s, seed in runs]


def _saved_sets(folder: Path, profile: Profile) -> tuple[str, ...]:
    found = tuple(name for name in profile.datasets if (folder / "networks" / f"{name}.safetensors").exists())
    if not found:
        raise MCBNError(f"{folder} holds no networks; make them with `{_command(folder, NAMES[0])}`")
    return found


def _network_files(folder: Path, dataset: str) -> tuple[Path, Path]:
    """Return the files of a set's tested networks and of its fold networks."""
    final, trained = (folder / "networks" / f"{dataset}{part}.safetensors" for part in ("", "_folds"))
    for path in (final, trained):
        if not path.exists():
            raise MCBNError(f"there is no {path}; make it with `{_command(folder, dataset)}`")
    return final, trained


def _command(folder: Path, dataset: str) -> str:
    return f"mcbn reproduce regression --datasets {dataset} --methods mcbn --out {folder}"
