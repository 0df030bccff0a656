"""Families of q(omega) compared on the study's trained networks: the evaluation that the paper left to future work.

Teye et al. 2018, appendix 1.3, give a factorised Gaussian for the batch statistics and draw training batches instead.
Here every network that the regression study tested predicts with each family (`measure` lists them), T draws each.
linear, gaussian and tuned are also the study's methods mcbn_linear, mcbn_gaussian and mcbn_tuned.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from mcbn.data import NAMES, load, split
from mcbn.errors import MCBNError
from mcbn_study.journal import CellJournal, Record
from mcbn_study.posteriors.measure import FAMILIES, FamilyScores, Networks, choose_batch_size, measure
from mcbn_study.progress import tracked
from mcbn_study.regression.profile import Profile
from mcbn_study.regression.run import check_request, save_predictions
from mcbn_study.regression.train import load_networks
from mcbn_study.study import Study

STUDY = "posteriors"
METHODS = {"mcbn_linear": "linear", "mcbn_gaussian": "gaussian", "mcbn_tuned": "tuned"}  # in the regression study


def run(profile: Profile, out: str | Path, *, regression: str | Path, datasets: Sequence[str] = ()) -> CellJournal:
    """Compare the families on the networks in `regression`, of all sets by default; append to both folders' records."""
    check_request(datasets, ("mcbn",))
    folder = Path(regression) / "networks"
    saved = [name for name in profile.datasets if (folder / f"{name}.safetensors").exists()]
    files = {n: [folder / f"{n}{end}.safetensors" for end in ("", "_folds")] for n in datasets or saved or NAMES[:1]}
    for name, path in ((name, path) for name, paths in files.items() for path in paths):
        if not path.exists():
            command = f"mcbn reproduce regression --datasets {name} --methods mcbn --out {regression}"
            raise MCBNError(f"there is no {path}; make it with `{command}`")
    regression_study, study = Study("regression", profile, regression), Study(STUDY, profile, out)
    for name in tracked(files, STUDY, "set"):
        tested = {f: regression_study.has_runs(kind="test", dataset=name, method=m) for m, f in METHODS.items()}
        compared = {f: study.has_runs(kind="posterior", dataset=name, family=f) for f in FAMILIES}
        if missing := [family for family in FAMILIES if not (compared[family] and tested.get(family, True))]:
            _compare(study, regression_study, name, missing, *(load_networks(path) for path in files[name]))
    return study.journal


def _compare(
    study: Study, regression: Study, dataset: str, families: Sequence[str], final: Networks, trained: Networks
) -> None:
    """Measure every network of a data set with these families; write predictions, then the records of both folders."""
    data, T = load(dataset), study.profile.n_samples
    by_split = {s: [pair for pair in trained if pair[1]["split"] == s] for s in study.profile.splits}
    choices = {s: choose_batch_size(nets, data, T) for s, nets in by_split.items() if "tuned" in families}
    network, info = final[0]
    measure(network, info, data, T, choices.get(info["split"]), families)  # first calls compile: not to be timed
    measured = [(info, measure(net, info, data, T, choices.get(info["split"]), families)) for net, info in final]
    methods = {family: method for method, family in METHODS.items() if family in families}
    for (family, method), s in product(methods.items(), study.profile.splits):
        runs = [(info, by_family[family]) for info, by_family in measured if info["split"] == s]
        predicted = [(one.mean, one.variance, one.tau, info["tau_constant"]) for info, one in runs]
        save_predictions(regression, dataset, method, s, data.y[split(len(data.y), s).test], predicted)
    pairs = [(info, family, one) for info, by_family in measured for family, one in by_family.items()]
    tests = [_record(regression, "test", info, one, method=methods[f]) for info, f, one in pairs if f in methods]
    regression.journal.append(tests)
    study.journal.append(_record(study, "posterior", info, one, family=f) for info, f, one in pairs)


def _record(study: Study, kind: str, info: dict[str, Any], one: FamilyScores, **name: str) -> Record:
    place: Record = {"dataset": info["dataset"], **name, "split": info["split"], "seed": info["seed"]}
    place |= {"config": info["config"] | {"posterior_batch_size": one.batch_size}}
    place |= {"tau": one.tau, "tau_constant": info["tau_constant"], "n_samples": study.profile.n_samples}
    place |= {"n_train": len(info["train"]), "n_test": len(one.mean)}
    seconds = one.costs["fit_seconds"] + one.costs["predict_seconds"]
    return study.record(kind, seconds, **place, **one.scores, **one.costs)
