"""Families of q(omega) compared on the study's trained networks: the evaluation that the paper left to future work.

Teye et al. 2018, appendix 1.3, give a factorised Gaussian for the batch statistics and draw training batches instead.
Here every network that the regression study tested predicts with each family, T draws each, at its own tau, so that
nothing but the posterior differs. report.toml says what each family is.

Scores are normalised between the constant twin (CUBN) and the optimum of `sample`: own bounds would reward bad means.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mcbn import noise
from mcbn.data import NAMES, Regression, folds, load, split
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.prediction import RegressionPrediction
from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import saved_bytes, timed, tracked
from mcbn_study.profiles import TAU_RANGES
from mcbn_study.regression.measure import score_gaussian, score_run, tune_tau, validation_crps, with_bounds
from mcbn_study.regression.profile import Profile
from mcbn_study.regression.run import check_request, save_predictions
from mcbn_study.regression.train import load_networks
from mcbn_study.study import Names, Study

STUDY = "posteriors"
METHODS = {"mcbn_linear": "linear", "mcbn_gaussian": "gaussian", "mcbn_tuned": "tuned"}  # in the regression study
DRAWN = ("sample", "sample_again", "gaussian", "layerwise", "diagonal")
LINEAR = {"sample": "linear", "gaussian": "linear_gaussian"}
FAMILIES = (*DRAWN, "linear", "linear_gaussian", "plain_mean", "tuned")
AGAIN = 1000  # added to the seed of `sample_again`
Bayes = MCBN[RegressionPrediction]
Tuned = tuple[int, float] | None  # M' and tau
Networks = Sequence[tuple[nn.Module, dict[str, Any]]]  # each with what `load_networks` says of it


class FamilyScores(NamedTuple):
    """What one family of one network predicts for the test rows, its scores, and what it costs."""

    mean: Tensor  # (n,)
    variance: Tensor  # (n,), epistemic
    scores: dict[str, float | None]
    tau: float
    batch_size: int
    costs: dict[str, float]  # seconds to fit and to predict, bytes of the saved posterior


def run(profile: Profile, out: Path, *, regression: Path, datasets: Names = ()) -> CellJournal:
    """Compare the families on the networks in `regression`, of all sets by default; append to both folders' records."""
    check_request(datasets, ("mcbn",))
    folder = regression / "networks"
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


def measure(
    network: nn.Module, info: dict[str, Any], data: Regression, T: int, tuned: Tuned, families: Sequence[str] = FAMILIES
) -> dict[str, FamilyScores]:
    """Predict the test rows of a network's split with these families; tuned: the M' and tau that were chosen for it."""
    x, M, seed = data.x.float(), info["config"]["batch_size"], info["seed"]
    test = split(len(data.y), info["split"]).test
    rows = x[test], data.y[test], info["tau_constant"]
    measured: dict[str, FamilyScores] = {}
    wanted = {"sample", *families}  # whose scores bound those of all
    for family in (drawn for drawn in DRAWN if wanted & {drawn, LINEAR.get(drawn)}):
        kind, shift = ("sample", AGAIN) if family == "sample_again" else (family, 0)
        bayes, seconds = timed(partial(_fit, network, x[info["train"]], T, M, seed + shift, kind))
        bayes.tau = info["tau"]
        if family in wanted:
            measured[family] = _score(bayes, *rows, seconds, "sample")
        if (linear := LINEAR.get(family, "")) in wanted:
            measured[linear] = _score(bayes, *rows, seconds, "linear")
        if family == "sample" and "plain_mean" in wanted:
            measured["plain_mean"] = _score(bayes, *rows, seconds, "sample", "plain")
        if family == "sample" and tuned is not None:
            bayes.posterior, bayes.tau = bayes.posterior.at_batch_size(tuned[0]), tuned[1]
            measured["tuned"] = _score(bayes, *rows, seconds, "sample")
    bounds = measured["sample"].scores
    return {f: measured[f]._replace(scores=with_bounds(measured[f].scores, bounds)) for f in families}


def choose_batch_size(networks: Networks, data: Regression, T: int) -> tuple[int, float]:
    """Choose M' and tau for one split by CRPS on the validation rows of its fold networks, averaged over the folds."""
    moments: dict[int, list[tuple[Tensor, Tensor]]] = {}
    targets = []
    for network, info in networks:
        rows = folds(split(len(data.y), info["split"]).train, info["n_folds"])[info["fold"]].validation
        M = info["config"]["batch_size"]
        with warnings.catch_warnings(action="ignore"):  # M was chosen for the whole part: a fold may hold no more rows
            bayes = _fit(network, data.x[info["train"]].float(), T, M, info["fold"])
        drawn = bayes.posterior
        targets.append(data.y[rows])
        for candidate in noise.candidates("auto", M):
            bayes.posterior = drawn.at_batch_size(candidate)
            pred = bayes.predict(data.x[rows].float())
            moments.setdefault(candidate, []).append((pred.mean.flatten(), pred.epistemic.flatten()))
    tuned = {M: _tune(pairs, _pad(targets), TAU_RANGES[networks[0][1]["dataset"]]) for M, pairs in moments.items()}
    best = min(tuned, key=lambda candidate: tuned[candidate][1])
    return best, tuned[best][0]


def _tune(pairs: Sequence[tuple[Tensor, Tensor]], y: Tensor, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return tau and its CRPS; pairs hold mean and variance (n,) of each fold, y (F, n)."""
    mean, variance = map(_pad, zip(*pairs, strict=True))
    tau = tune_tau(mean, variance, y, bounds)
    return tau, float(validation_crps(mean, variance, y)(torch.tensor(math.log(tau), dtype=torch.float64)))


def _pad(rows: Iterable[Tensor]) -> Tensor:
    return pad_sequence([row.double() for row in rows], batch_first=True, padding_value=torch.nan)


def _fit(network: nn.Module, x: Tensor, T: int, M: int, seed: int, family: str = "sample") -> Bayes:
    return MCBN(network, "regression").fit(x, n_samples=T, batch_size=M, seed=seed, posterior=family)


def _score(
    bayes: Bayes, x: Tensor, y: Tensor, tau_constant: float, fit_seconds: float, method: str, centre: str = "drawn"
) -> FamilyScores:
    """Score the T draws of a posterior, or a Gaussian: of the linearised network, or about the network's own mean."""
    for _ in range(2):  # the time is that of moments alone, once what does not depend on the inputs is made
        bayes.predict(x, method=method, mean=centre)
    pred, seconds = timed(lambda: bayes.predict(x, method=method, mean=centre))
    mean, variance, tau = pred.mean.flatten().double(), pred.epistemic.flatten().double(), float(bayes.tau)
    if method == "linear" or centre == "plain":
        scores = score_gaussian(mean, variance, y, tau, tau_constant)
    else:
        samples = bayes.sample(x).flatten(1).double()  # (T, n)
        mean, variance, scores = samples.mean(0), samples.var(0, correction=0), score_run(samples, y, tau, tau_constant)
    costs = {"fit_seconds": fit_seconds, "predict_seconds": seconds, "bytes": saved_bytes(bayes)}
    return FamilyScores(mean, variance, scores, tau, bayes.posterior.batch_size, costs)
