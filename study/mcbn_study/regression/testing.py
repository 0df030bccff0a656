"""The test of chosen configurations: final networks, their draws and scores, and the networks on disk."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcbn.data import Regression, describe, split
from mcbn.files import replacing
from mcbn_study.journal import Record
from mcbn_study.regression.context import Context
from mcbn_study.regression.evaluation import Evaluator
from mcbn_study.regression.final import Job, Trained, train_jobs
from mcbn_study.regression.problem import Part, Problem, make_problem
from mcbn_study.regression.saved import network_states, save_networks
from mcbn_study.regression.scores import score_run
from mcbn_study.regression.search import Choice, Criterion, choose, fold_problem
from mcbn_study.regression.stack import Family
from mcbn_study.regression.streams import stream_key
from mcbn_study.regression.train import Networks

# Which networks a method tests and by which criterion they were chosen.
TESTED: dict[str, tuple[Family, Criterion]] = {
    "mcbn": ("bn", "mc"),
    "bn": ("bn", "plain"),
    "mcdo": ("dropout", "mc"),
    "do": ("dropout", "plain"),
}


def score_networks(context: Context, dataset: str, data: Regression, method: str) -> None:
    """Train the chosen configuration of every split with every seed, score the runs and write them."""
    family, criterion = TESTED[method]
    choices = choose(context, dataset, data, family, criterion)
    started = time.perf_counter()
    problem = final_problem(context, dataset, data)
    trained = train_chosen(context, dataset, problem, choices, family)
    samples = outputs(context, trained, problem, criterion, context.profile.n_samples)
    seconds = (time.perf_counter() - started) / len(samples)
    seeds, records = len(context.profile.seeds), []
    for b, choice in enumerate(choices):
        own = samples[b * seeds : (b + 1) * seeds]
        y = final_targets(context, data, context.profile.splits[b])
        records += score_split(context, dataset, method, b, own, y, choice, seconds)
    if method == "mcbn":
        _save_final(context, dataset, problem, trained, choices)
        _save_folds(context, dataset, data, choices)
    means = torch.stack([drawn.mean(0).float() for drawn in samples])  # (B seeds, n)
    context.store.finish(f"{dataset}-test-{method}", {"mean": means}, records)


def final_problem(context: Context, dataset: str, data: Regression, splits: Sequence[int] | None = None) -> Problem:
    """Stack train+CV and test part of all splits, once a seed; streams ordered by split, seed."""
    parts = []
    for s in splits or context.profile.splits:
        train, test = split(len(data.y), s)
        parts += [Part(train, test, stream_key(dataset, s, None, seed)) for seed in context.profile.seeds]
    return make_problem(data, parts, context.device)


def train_chosen(
    context: Context, dataset: str, problem: Problem, choices: Sequence[Choice], family: Family
) -> list[Trained]:
    """Train a network for every stream with the choice of its split."""
    each = len(problem.streams) // len(choices)
    chosen = [choices[r // each] for r in range(len(problem.streams))]
    jobs = [Job(r, choice.configuration, choice.epochs) for r, choice in enumerate(chosen)]
    numerics = context.numerics | {"fused": context.fused}
    return train_jobs(problem, jobs, family, describe(dataset).hidden_units, **numerics)


def outputs(
    context: Context, trained: Sequence[Trained], problem: Problem, criterion: Criterion, n_samples: int
) -> list[Tensor]:
    """Return the draws (T, n), or the plain output (1, n), of each stream's network in original units."""
    found: dict[int, Tensor] = {}
    for part in trained:
        evaluator = Evaluator(problem, part.networks.batch_size, n_samples, **context.numerics)
        for i, job in enumerate(part.jobs):
            one = torch.tensor([i], device=problem.device)
            values, network = {name: value[one] for name, value in part.values.items()}, part.networks[one]
            mc = criterion == "mc"
            drawn = evaluator.samples(values, network)[0] if mc else evaluator.plain(values, network)
            r = int(network.stream[0])
            drawn = drawn[:, : int(problem.query.n[r])].double()
            found[job] = drawn * problem.y_std[r] + problem.y_mean[r]
    return [found[job] for job in sorted(found)]


def final_targets(context: Context, data: Regression, number: int) -> Tensor:
    """Return the targets of a split's test part."""
    return data.y[split(len(data.y), number).test].to(context.device)


def score_split(
    context: Context,
    dataset: str,
    method: str,
    b: int,
    samples: Sequence[Tensor],
    y: Tensor,
    choice: Choice,
    seconds: float,
) -> list[Record]:
    """Make the record of every seed of a split and write the split's predictions."""
    s, tau, constant = context.profile.splits[b], choice.tau, choice.tau_constant
    records = []
    for seed, drawn in zip(context.profile.seeds, samples, strict=False):
        place = {"dataset": dataset, "method": method, "split": s, "seed": seed, "config": choice.describe()}
        place |= {"tau": tau, "tau_constant": constant, "n_samples": len(drawn), "n_test": len(y)}
        scores = score_run(drawn, y, tau, constant)
        if len(drawn) == 1:  # a deterministic network has no uncertainty of its own
            scores |= {"crps_normalized": None, "pll_normalized": None}
        records.append(context.record("test", seconds, **place, **scores))
    error = torch.stack([y - drawn.mean(0) for drawn in samples])
    std = torch.stack([(drawn.var(0, correction=0) + 1 / tau).sqrt() for drawn in samples])
    save_predictions(context, dataset, method, s, error, std, [constant**-0.5] * len(samples))
    return records


def save_predictions(
    context: Context, dataset: str, method: str, s: int, error: Tensor, std: Tensor, constant_std: Sequence[float]
) -> None:
    """Write error and std (seeds, n) of one method and split."""
    arrays: dict[str, Any] = {"error": error.half().cpu().numpy(), "std": std.half().cpu().numpy()}
    arrays["constant_std"] = torch.tensor(constant_std, dtype=torch.float32).numpy()
    with replacing(context.store.folder / "predictions" / f"{dataset}-{method}-{s}.npz") as temporary:
        np.savez_compressed(temporary, **arrays)


def _save_final(
    context: Context, dataset: str, problem: Problem, trained: Sequence[Trained], choices: Sequence[Choice]
) -> None:
    """Write the networks of the test, ordered by split, seed."""
    seeds = context.profile.seeds
    states: dict[int, dict[str, Tensor]] = {}
    for part in trained:
        states |= dict(zip(part.jobs, network_states(part.values, part.networks, problem), strict=True))
    places = [divmod(job, len(seeds)) for job in sorted(states)]
    infos = [_info(context, dataset, b, choices[b]) | {"seed": seeds[k]} for b, k in places]
    path = context.store.folder / "networks" / f"{dataset}.safetensors"
    save_networks(path, [states[job] for job in sorted(states)], infos)


def _save_folds(context: Context, dataset: str, data: Regression, choices: Sequence[Choice]) -> None:
    """Write the fold networks of the winning configuration, ordered by split, fold."""
    problem, n_folds = fold_problem(context, dataset, data), context.profile.n_folds
    names = choices[0].values
    values = {name: torch.cat([choice.values[name] for choice in choices]).to(context.device) for name in names}
    stream = torch.arange(len(problem.streams), device=context.device)
    unused = torch.zeros(len(stream), device=context.device)
    networks = Networks("bn", stream, unused, unused, 0, describe(dataset).hidden_units)
    infos = [
        _info(context, dataset, b, choice) | {"fold": f, "n_folds": n_folds}
        for b, choice in enumerate(choices)
        for f in range(n_folds)
    ]
    path = context.store.folder / "networks" / f"{dataset}_folds.safetensors"
    save_networks(path, network_states(values, networks, problem), infos)


def _info(context: Context, dataset: str, b: int, choice: Choice) -> dict[str, Any]:
    info: dict[str, Any] = {"dataset": dataset, "split": context.profile.splits[b], "config": choice.describe()}
    return info | {"tau": choice.tau, "tau_constant": choice.tau_constant, "config_hash": context.profile.hash}
