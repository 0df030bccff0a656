"""Families of q(omega) compared on the study's trained networks: the evaluation that the paper left to future work.

Teye et al. 2018, appendix 1.3, give a factorised Gaussian for the batch statistics and draw training batches instead.
Here every network that the regression study tested predicts with each family, T draws, at its own tau, so that
nothing but the posterior differs:

    sample           the statistics of T training batches, MCBN itself
    sample_again     those of T other batches: how much is Monte Carlo noise
    gaussian         a Gaussian with their full covariance
    layerwise        the same across the units of each layer only
    diagonal         a factorised Gaussian
    linear           one pass through the network's gradient with the covariance of `sample`; PLL is the log density of
                     the Gaussian that results
    linear_gaussian  the same with the covariance of `gaussian`
    tuned            `sample` rescaled to the M', with the tau, of least validation CRPS on the folds; no test data

Normalised scores of all of them lie between the constant twin (CUBN) and the optimum of `sample`, so that families rank
as by CRPS: bounds of their own would reward a worse mean. linear, gaussian and tuned are also the study's
methods mcbn_linear, mcbn_gaussian and mcbn_tuned.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
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
from mcbn.progress import tracked
from mcbn.records import Record
from mcbn.reproduce.context import Context
from mcbn.reproduce.costs import saved_bytes, timed
from mcbn.reproduce.foreign import cifar
from mcbn.reproduce.profiles import TAU_RANGES, Profile
from mcbn.reproduce.regression import check_request
from mcbn.reproduce.saved import load_networks
from mcbn.reproduce.scores import score_gaussian, score_run, tune_tau, validation_crps, with_bounds
from mcbn.reproduce.store import Store
from mcbn.reproduce.testing import save_predictions

__all__ = ["FAMILIES", "METHODS", "choose_batch_size", "cifar", "measure", "run"]

STUDY = "posteriors"
FAMILIES = ("sample", "sample_again", "gaussian", "layerwise", "diagonal", "linear", "linear_gaussian", "tuned")
METHODS = {"mcbn_linear": "linear", "mcbn_gaussian": "gaussian", "mcbn_tuned": "tuned"}  # in the regression study
AGAIN = 1000  # added to the seed of `sample_again`
Bayes = MCBN[RegressionPrediction]
Network = tuple[nn.Module, dict[str, Any]]


class Choice(NamedTuple):
    """The batch size and tau of least validation CRPS."""

    batch_size: int
    tau: float
    crps: float


class Measured(NamedTuple):
    """What one family of one network predicts for the test rows, its scores, and what it costs."""

    mean: Tensor  # (n,)
    variance: Tensor  # (n,), epistemic
    scores: dict[str, float | None]
    tau: float
    batch_size: int
    fit_seconds: float
    predict_seconds: float
    size: int  # bytes of the saved posterior


def run(
    profile: Profile,
    out: str | Path = "results/posteriors",
    *,
    regression: str | Path = "results/regression",
    datasets: Sequence[str] = (),
) -> Store:
    """Compare the families on the networks in the folder `regression`; by default on every set that has them.

    Appends to the records of both folders, a data set at a time; finished ones are not repeated.
    """
    check_request(datasets, ("mcbn",), "cpu")
    chosen = tuple(datasets) or _saved_sets(Path(regression), profile)
    files = {name: _network_files(Path(regression), name) for name in chosen}
    study = Context("regression", profile, Store(Path(regression), profile.settings()), "cpu")
    context = Context(STUDY, profile, Store(Path(out), profile.settings()), "cpu")
    for name in tracked(chosen, STUDY, "set"):
        if not (context.store.has(_expected(profile, name)) and study.store.has(_expected_tests(profile, name))):
            _compare(context, study, name, *(load_networks(path) for path in files[name]))
    return context.store


def measure(network: nn.Module, info: dict[str, Any], data: Regression, T: int, tuned: Choice) -> dict[str, Measured]:
    """Predict the test rows of a network's split with every family."""
    x, M, seed = data.x.float(), info["config"]["batch_size"], info["seed"]
    test = split(len(data.y), info["split"]).test
    query, y, constant = x[test], data.y[test], info["tau_constant"]
    found: dict[str, Measured] = {}
    for family in FAMILIES[:5]:
        kind, shift = ("sample", AGAIN) if family == "sample_again" else (family, 0)
        fit = _fitting(network, x[info["train"]], T, M, seed + shift, kind)
        bayes, seconds = timed(fit)
        bayes.tau = info["tau"]
        found[family] = _sampled(bayes, query, y, constant, seconds)
        if family in ("sample", "gaussian"):
            linear = "linear" if family == "sample" else "linear_gaussian"
            found[linear] = _linear(bayes, query, y, constant, seconds)
        if family == "sample":
            bayes.posterior, bayes.tau = bayes.posterior.at_batch_size(tuned.batch_size), tuned.tau
            found["tuned"] = _sampled(bayes, query, y, constant, seconds)
    bounds = found["sample"].scores
    return {family: one._replace(scores=with_bounds(one.scores, bounds)) for family, one in found.items()}


def choose_batch_size(networks: Sequence[Network], data: Regression, T: int) -> Choice:
    """Choose M' and tau for one split by CRPS on the validation rows of its fold networks, averaged over the folds.

    Candidates are those of `MCBN.tune(batch_sizes="auto")`; the trained M is kept where none is better.
    """
    moments: dict[int, list[tuple[Tensor, Tensor]]] = {}
    targets = []
    for network, info in networks:
        rows = folds(split(len(data.y), info["split"]).train, info["n_folds"])[info["fold"]].validation
        M = info["config"]["batch_size"]
        with warnings.catch_warnings():  # M was chosen for the whole training part: a fold may hold no more rows than M
            warnings.filterwarnings("ignore", message="mcbn: batch_size=.* takes in all")
            bayes = _fitting(network, data.x[info["train"]].float(), T, M, info["fold"], "sample")()
        drawn = bayes.posterior
        targets.append(data.y[rows])
        for candidate in noise.candidates("auto", M):
            bayes.posterior = drawn.at_batch_size(candidate)
            pred = bayes.predict(data.x[rows].float())
            moments.setdefault(candidate, []).append((pred.mean.flatten(), pred.epistemic.flatten()))
    bounds = TAU_RANGES[networks[0][1]["dataset"]]
    return min((_tuned(M, pairs, _pad(targets), bounds) for M, pairs in moments.items()), key=lambda c: c.crps)


def _tuned(M: int, pairs: Sequence[tuple[Tensor, Tensor]], y: Tensor, bounds: tuple[float, float]) -> Choice:
    """Tune tau at one batch size; pairs hold mean and variance (n,) of each fold, y (F, n)."""
    mean, variance = (_pad(parts) for parts in zip(*pairs, strict=True))
    tau = tune_tau(mean, variance, y, bounds)
    log_tau = torch.tensor(math.log(tau), dtype=torch.float64)
    return Choice(M, tau, float(validation_crps(mean, variance, y)(log_tau)))


def _pad(rows: Iterable[Tensor]) -> Tensor:
    return pad_sequence([row.double() for row in rows], batch_first=True, padding_value=torch.nan)


def _fitting(network: nn.Module, x: Tensor, T: int, M: int, seed: int, family: str) -> Callable[[], Bayes]:
    return lambda: MCBN(network, "regression").fit(x, n_samples=T, batch_size=M, seed=seed, posterior=family)


def _sampled(bayes: Bayes, x: Tensor, y: Tensor, tau_constant: float, fit_seconds: float) -> Measured:
    """Score the T draws of a posterior; the time is that of `predict`, moments only."""
    samples = bayes.sample(x).flatten(1).double()  # (T, n)
    _, seconds = timed(lambda: bayes.predict(x))
    tau = float(bayes.tau)
    scores = score_run(samples, y, tau, tau_constant)
    M = bayes.posterior.batch_size
    mean, variance = samples.mean(0), samples.var(0, correction=0)
    return Measured(mean, variance, scores, tau, M, fit_seconds, seconds, saved_bytes(bayes))


def _linear(bayes: Bayes, x: Tensor, y: Tensor, tau_constant: float, fit_seconds: float) -> Measured:
    """Score the Gaussian that the network linearised in its statistics predicts."""
    for _ in range(2):
        bayes.predict(x, method="linear")  # what does not depend on the inputs is made once
    pred, seconds = timed(lambda: bayes.predict(x, method="linear"))
    mean, variance, tau = pred.mean.flatten().double(), pred.epistemic.flatten().double(), float(bayes.tau)
    scores = score_gaussian(mean, variance, y, tau, tau_constant)
    M = bayes.posterior.batch_size
    return Measured(mean, variance, scores, tau, M, fit_seconds, seconds, saved_bytes(bayes))


def _compare(
    context: Context, study: Context, dataset: str, final: Sequence[Network], trained: Sequence[Network]
) -> None:
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
    study.store.append(tests)
    context.store.append(_record(context, "posterior", info, one, family=family) for info, family, one in pairs)


def _record(context: Context, kind: str, info: dict[str, Any], one: Measured, **name: str) -> Record:
    place: Record = {"dataset": info["dataset"], **name, "split": info["split"], "seed": info["seed"]}
    place |= {"config": info["config"] | {"posterior_batch_size": one.batch_size}}
    place |= {"tau": one.tau, "tau_constant": info["tau_constant"], "n_samples": context.profile.n_samples}
    place |= {"n_train": len(info["train"]), "n_test": len(one.mean)}
    costs = {"fit_seconds": one.fit_seconds, "predict_seconds": one.predict_seconds, "bytes": one.size}
    return context.record(kind, one.fit_seconds + one.predict_seconds, **place, **one.scores, **costs)


def _save_predictions(
    study: Context, dataset: str, data: Regression, method: str, runs: Sequence[tuple[dict[str, Any], Measured]]
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
