"""MNF on the regression sets: the baseline of Teye et al. 2018, Tables 1 and 2 of Section 4.3.

What the text leaves open follows the authors' published script: Q-50-50-1, also for Protein; last fifth of the
train+CV part for validation; batches of 100 drawn with replacement, N // 100 of them an epoch; Adam 1e-3; no annealing;
patience 200 epochs; the networks of the test trained anew on all of train+CV for the best number of epochs.
Differs: early stopping judges the mean over 10 draws (the script, and `published_mnf` of a profile: one pass without
noise, new bests more than 20 epochs apart); T is the text's 500 in the paper's profile (the script: 100); all rows are
used (the script drops one).

All splits are searched as one stack of networks, then all splits and seeds trained as one; random streams are those of
(data set, split, seed), so a run is the same whatever else is in its stack.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mcbn import data
from mcbn_study.mnf import stack
from mcbn_study.mnf.layers import MNFNetwork
from mcbn_study.regression.problem import Part, Problem, make_problem
from mcbn_study.regression.profile import Configuration, Profile
from mcbn_study.regression.search import Choice

HIDDEN = (50, 50)
BATCH_SIZE = 100
VALIDATION_PASSES = 10
PUBLISHED_APART = 20  # epochs between new bests in the published script
SEARCH, TEST = 0, 1  # streams of the network that is searched with, and of those that are tested


def search(dataset: str, splits: Sequence[int], profile: Profile, device: str) -> list[Choice]:
    """Find epochs, tau and the constant tau of every split on the last fifth of its train+CV rows."""
    rows = [data.split(data.describe(dataset).n, s).train for s in splits]
    cut = len(rows[0]) * 8 // 10
    problem = make_problem(data.load(dataset), [Part(train[:cut], train[cut:], 0) for train in rows], device)
    keys = [(data.NAMES.index(dataset), s, SEARCH, 0) for s in splits]
    training = _stack(problem, keys, profile.max_epochs)
    judged = [(*key, stack.VALIDATION) for key in keys]
    passes = 0 if profile.published_mnf else VALIDATION_PASSES
    noise = stack.draw_noise(judged, 0, passes, training.network.draw_size).to(device) if passes else None
    query, limits = problem.query, {"max_epochs": profile.max_epochs, "patience": profile.patience_epochs}
    limits["apart"] = PUBLISHED_APART if profile.published_mnf else 0
    epochs = stack.train_until_best(training, query.x, query.y.unsqueeze(2), noise, **limits)
    drawn = _samples(training.network, problem, keys, profile.n_samples).double().cpu()  # (S, T, n)
    mean, variance = drawn.mean(1, keepdim=True), drawn.var(1, correction=0, keepdim=True)  # (S, 1, n) each
    y, choices = data.load(dataset).y, [Choice(Configuration(None, BATCH_SIZE), max(1, count)) for count in epochs]
    targets = [y[None, train[cut:]] for train in rows]  # (1, n) each
    return [choice.tuned(mean[i], variance[i], targets[i], dataset) for i, choice in enumerate(choices)]


def train_and_draw(dataset: str, splits: Sequence[int], epochs: Sequence[int], profile: Profile, device: str) -> Tensor:
    """Train on train+CV for each split's epochs; draw for the test rows, (splits x seeds, T, n) in original units."""
    runs = [(s, seed) for s in splits for seed in profile.seeds]
    parts = [Part(*data.split(data.describe(dataset).n, s), 0) for s, _ in runs]
    problem = make_problem(data.load(dataset), parts, device)
    keys = [(data.NAMES.index(dataset), s, TEST, seed) for s, seed in runs]
    training = _stack(problem, keys, max(epochs))
    stack.train_for(training, [count for count in epochs for _ in profile.seeds])
    return _samples(training.network, problem, keys, profile.n_samples)


def _stack(problem: Problem, keys: stack.Keys, epochs: int) -> stack.Stack:
    x, y = problem.train.x, problem.train.y.unsqueeze(2)
    generators = [stack.generator(*key, stack.INITIAL) for key in keys]
    network = MNFNetwork([x.shape[2], *HIDDEN, 1], generators=generators).to(x)
    return stack.Stack(network, x, y, keys, batch_size=BATCH_SIZE, max_steps=epochs * (x.shape[1] // BATCH_SIZE))


def _samples(network: MNFNetwork, problem: Problem, keys: stack.Keys, n_samples: int) -> Tensor:
    """Draw T networks of each and run them on the new rows: (S, T, n), original units."""
    x = problem.query.x
    mean, std = (value.to(x).view(-1, 1, 1) for value in (problem.y_mean, problem.y_std))
    return torch.cat([some.squeeze(3) * std + mean for some in stack.drawn(network, x, keys, n_samples)], 1)
