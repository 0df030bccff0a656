"""A deep ensemble (Lakshminarayanan et al. 2017) of the study's plain BN networks, with one tau for the noise."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcbn.data import Regression
from mcbn_study.regression.context import Context
from mcbn_study.regression.search import Choice, choose, fold_problem, tune_both
from mcbn_study.regression.testing import final_problem, final_targets, outputs, score_split, train_chosen


def score_ensemble(context: Context, dataset: str, data: Regression) -> None:
    """Score the networks of all seeds of the configuration best by the plain criterion as one ensemble a split.

    Mean over members, variance across members + 1/tau. tau and its constant twin are tuned on the folds by ensembles
    of the same configuration and epochs.
    """
    choices = choose(context, dataset, data, "bn", "plain")
    started = time.perf_counter()
    choices = _tune(context, dataset, data, choices)
    members = _final_outputs(context, dataset, data, choices)  # (B K, n)
    seconds = (time.perf_counter() - started) / len(choices)
    K, records = len(context.profile.seeds), []
    for b, choice in enumerate(choices):
        drawn = members[b * K : (b + 1) * K].double().to(context.device)  # (K, n)
        y = final_targets(context, data, context.profile.splits[b])
        records += score_split(context, dataset, "ensemble", b, [drawn], y, choice, seconds)
    taus = torch.tensor([[choice.tau, choice.tau_constant] for choice in choices])
    context.store.finish(f"{dataset}-test-ensemble", {"tau": taus}, records)


def _tune(context: Context, dataset: str, data: Regression, choices: Sequence[Choice]) -> list[Choice]:
    """Train an ensemble on every fold and tune tau on its validation rows."""
    F, K = context.profile.n_folds, len(context.profile.seeds)
    problem = fold_problem(context, dataset, data, seeds=context.profile.seeds)
    trained = train_chosen(context, dataset, problem, choices, "bn")
    single = [drawn[0].cpu() for drawn in outputs(context, trained, problem, "plain", 1)]  # (n,) each
    tuned = []
    for b, choice in enumerate(choices):
        first = [(b * F + f) * K for f in range(F)]  # stream of each fold's first member
        members = [torch.stack(single[r : r + K]) for r in first]  # (K, n) each
        targets = [_targets(problem.query.y[r], problem.y_std[r], problem.y_mean[r], len(single[r])) for r in first]
        mean, variance = _pad([m.mean(0) for m in members]), _pad([m.var(0, correction=0) for m in members])
        tau, constant = tune_both(mean, variance, _pad(targets), dataset)
        tuned.append(replace(choice, tau=tau, tau_constant=constant))
    return tuned


def _final_outputs(context: Context, dataset: str, data: Regression, choices: Sequence[Choice]) -> Tensor:
    """Return the test outputs of the plain BN networks, (B K, n): those of method "bn" if tested, else made anew."""
    finished = context.store.load(f"{dataset}-test-bn")
    if finished is not None:
        return finished["mean"]
    problem = final_problem(context, dataset, data)
    trained = train_chosen(context, dataset, problem, choices, "bn")
    return torch.cat(outputs(context, trained, problem, "plain", 1)).float()


def _targets(y: Tensor, std: Tensor, mean: Tensor, n: int) -> Tensor:
    return (y[:n].double() * std + mean).cpu()


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=torch.nan)
