"""One trained network with every family of q(omega), at its own tau, so that nothing but the posterior differs.

    sample           the statistics of T training batches, MCBN itself
    sample_again     those of T other batches: how much is Monte Carlo noise
    gaussian         a Gaussian with their full covariance
    layerwise        the same across the units of each layer only
    diagonal         a factorised Gaussian
    linear           the covariance of `sample` through the network's gradient, mean from 8 draws; PLL of a Gaussian
    linear_gaussian  the same with the covariance of `gaussian`
    plain_mean       the network's own mean with the spread of `sample`; PLL as for linear
    tuned            `sample` rescaled to the M', with the tau, of least validation CRPS on the folds; no test data

Scores are normalised between the constant twin (CUBN) and the optimum of `sample`: own bounds would reward bad means.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mcbn import noise
from mcbn.data import Regression, folds, split
from mcbn.model import MCBN
from mcbn.prediction import RegressionPrediction
from mcbn_study.machine import saved_bytes, timed
from mcbn_study.profiles import TAU_RANGES
from mcbn_study.regression.measure import score_gaussian, score_run, tune_tau, validation_crps, with_bounds

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
