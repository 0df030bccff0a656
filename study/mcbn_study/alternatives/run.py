"""The comparison: every method on the networks of every seed and the same images, one record a score."""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from mcbn import metrics, noise
from mcbn.errors import MCBNError, require_choice
from mcbn.prediction import entropy
from mcbn_study.alternatives import methods as catalogue
from mcbn_study.alternatives.inputs import CifarNetworks, Queries, load_networks, questions
from mcbn_study.alternatives.methods import LAPLACE, METHODS, THINNED, Material
from mcbn_study.cifar10.profile import PAPER, Split
from mcbn_study.cifar10.train import Augmented
from mcbn_study.estimates import class_scores
from mcbn_study.journal import Journal, Record
from mcbn_study.machine import timed

SCORES = ("nll", "accuracy", "ece", "brier", "error_auroc")
TIMED = {"cuda": 1250, "cpu": 50}  # images
ON_THINNED = {"dropout", *THINNED}  # methods of the networks trained with dropout
Task = tuple[str, Material, int | None]  # a method, what it is made of, the seed; None: of the ensemble


def run(
    networks: str | Path,
    out: str | Path = "results/alternatives",
    *,
    foreign: str | Path | None = None,
    device: str = "cpu",
    methods: Sequence[str] = (),
    n_samples: int = 128,
    batch_size: int = 32,
    n_test: int | None = None,
    n_corrupted: int = 1250,
    data: Split | None = None,
) -> Path:
    """Measure the methods on every seed, time them on the first; append to `out`/records.jsonl, not what is there.

    networks: folder of those that `mcbn reproduce cifar10` trained, with and without dropout; foreign: npz of foreign
    images (`inputs.build_foreign`); methods: all that can be had by default, with a warning for each that cannot;
    n_corrupted: of the n_test images, at each severity.
    """
    trained, data = load_networks(networks, device), data or PAPER.load()
    sets = questions(data.test, foreign, n_test=n_test, n_corrupted=n_corrupted)
    sizes = {name: len(x) for name, (x, _) in sets.items()}
    draws = {"n_samples": n_samples, "batch_size": batch_size}
    journal, chosen = Journal(out, draws | {"images": sizes}, device), choose(methods, trained)
    for method, material, seed in tasks(trained, data, chosen, **draws):
        key = {"kind": "score", "method": method, "seed": seed}
        if not journal.has(**key):
            journal.add(key | row for row in measure(method, material, sets))
    x, (first, *_) = data.test.x[: TIMED[torch.device(device).type]], sorted(trained.plain)
    timed_tasks = (task for task in tasks(trained, data, chosen, **draws) if task[2] in (first, None))
    clock(Journal(out, draws | {"n": len(x)}, device), timed_tasks, x)
    return journal.path


def clock(journal: Journal, tasks: Iterable[Task], x: Tensor) -> None:
    """Time methods on images; setup_seconds: for MCBN its draws, for its other modes what comes on top of them."""
    for method, material, seed in tasks:
        for name in (method, "dropout_usual") if method == "dropout" else (method,):
            key = {"kind": "cost", "method": name, "seed": seed}
            if not journal.has(**key, device=journal.device):
                sampler, setup = timed(catalogue.make, name, material)
                sampler(x)  # to warm up
                _, seconds = timed(sampler, x)
                journal.add([key | {"setup_seconds": setup, "milliseconds": 1000 * seconds / len(x)}])


def choose(methods: Sequence[str], trained: CifarNetworks) -> Sequence[str]:
    """Return the methods to measure: those asked for, which must be possible, or all that are."""
    lacking = dict[str, str]()
    if not trained.thinned:
        lacking = dict.fromkeys(ON_THINNED, "networks trained with dropout, of which there is none")
    if len(trained.plain) < 2:
        lacking["ensemble"] = f"the networks of at least 2 seeds; there are {len(trained.plain)}"
    if find_spec("laplace") is None:
        lacking["laplace"] = f"laplace-torch; {LAPLACE}"
    for method in methods:
        require_choice("method", method, METHODS)
        if method in lacking:
            raise MCBNError(f"{method} needs {lacking[method]}")
    for method in (method for method in METHODS if method in lacking and not methods):
        warnings.warn(f"mcbn: {method} is left out: it needs {lacking[method]}", stacklevel=3)
    return methods or [method for method in METHODS if method not in lacking]


def tasks(
    trained: CifarNetworks, data: Split, methods: Sequence[str], n_samples: int, batch_size: int
) -> Iterator[Task]:
    """Yield what is to be measured: each method of a seed with what it is made of, then the ensemble."""
    members = [trained.plain[seed] for seed in sorted(trained.plain)]
    train = Augmented(data.train.x.to(members[0].last.weight.device))
    base = Material(members[0], train, data.train, data.validation, n_samples=n_samples, batch_size=batch_size)
    for seed, network in sorted(trained.plain.items()):
        material, thinned = replace(base, network=network, seed=seed), trained.thinned.get(seed)
        on_thinned = replace(base, network=thinned, seed=seed) if thinned else None
        for method in methods:
            if method != "ensemble" and (used := on_thinned if method in ON_THINNED else material):
                yield method, used, seed
    if "ensemble" in methods:
        yield "ensemble", replace(base, members=members), None


def measure(method: str, material: Material, sets: Mapping[str, Queries]) -> Iterator[Record]:
    """Score one method on every set of images, with tau = 1 and with tau tuned on the validation images."""
    started = time.perf_counter()
    sampler = catalogue.make(method, material)
    validation = sampler(material.validation.x)  # (T, N, K)
    taus = {False: 1.0, True: temperature(validation, material.validation.y)}
    inside: dict[bool, Tensor] = {}  # doubts of the test images
    for name, (x, y) in {"validation": material.validation, **sets}.items():
        logits = validation if name == "validation" else sampler(x)
        for tempered, tau in taus.items():
            probs = probabilities(logits, tau)  # (N, K)
            row: Record = {"data": name, "n": len(probs), "tempered": tempered, "tau": tau}
            if y is not None:
                row |= class_scores(probs, y, *SCORES)
            if name == "test":
                inside[tempered] = entropy(probs, 1)
            elif name != "validation":
                row["ood_auroc"] = ood_auroc(inside[tempered], entropy(probs, 1))
            chosen = material.chosen.get(THINNED.get(method, method))
            yield row | {"chosen_batch_size": chosen, "seconds": time.perf_counter() - started}


def probabilities(logits: Tensor, tau: float = 1.0) -> Tensor:
    """1/T sum_t softmax(tau * logits_t): (T, N, K) to (N, K), in double precision."""
    return torch.softmax(tau * logits.double(), 2).mean(0)


def temperature(logits: Tensor, y: Tensor) -> float:
    """Return the tau that maximises the mean log of `probabilities` on validation images (T, N, K), (N,)."""
    return noise.inverse_temperature(logits.double(), y.to(logits.device)).item()


def ood_auroc(home: Tensor, other: Tensor) -> float:
    """Are scores (n,) of other images higher than those at home? 0.5: neither."""
    both = torch.cat([home, other])
    return float(metrics.auroc(both, torch.arange(len(both), device=both.device) >= len(home)))
