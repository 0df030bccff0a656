"""The comparison: every method on the networks of every seed and the same images, one record a score."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mcbn.errors import MCBNError
from mcbn_study.alternatives import laplace, samplers, scores
from mcbn_study.alternatives.images import Queries
from mcbn_study.alternatives.inputs import Data, Networks, load_data, load_networks, questions, require_data
from mcbn_study.alternatives.samplers import METHODS, THINNED, Material, Sampler
from mcbn_study.cifar10.augmentation import Augmented
from mcbn_study.journal import Journal
from mcbn_study.networks.resnet import standardize

TIMED = {"cuda": 1250, "cpu": 50}  # images
ON_THINNED = {"dropout", *THINNED}  # methods of the networks trained with dropout
EVERY = None  # in place of a seed: of the ensemble
Row = dict[str, Any]


def run(
    networks: str | Path,
    out: str | Path = "results/alternatives",
    *,
    foreign: str | Path | None = None,
    device: str = "cpu",
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    n_samples: int = 128,
    batch_size: int = 32,
    n_test: int | None = None,
    n_corrupted: int = 1250,
    data: Data | None = None,
) -> Path:
    """Measure the methods on every seed; append to `out`/records.jsonl, going on after an interruption.

    Args:
        networks: folder of the networks that `mcbn reproduce cifar10` trained, with and without dropout.
        out: folder of records.
        foreign: npz of foreign images (`mcbn_study.alternatives.foreign_images.build`); none are asked about
            without it.
        device: "cpu" or "cuda".
        methods: of `METHODS`; all that can be had by default, with a warning for each that cannot.
        seeds: of the networks; all by default. The ensemble always has all of them.
        n_samples: T of MCBN and MC dropout.
        batch_size: M of MCBN, before it is tuned.
        n_test: how many of the test images; all by default.
        n_corrupted: how many of these are also corrupted, at each severity.
        data: images; CIFAR-10 by default.
    """
    found, data = load_networks(networks, device), load_data() if data is None else require_data(data)
    sets = questions(data.test, foreign, n_test=n_test, n_corrupted=n_corrupted)
    sizes = {name: len(queries.x) for name, queries in sets.items()}
    config = {"n_samples": n_samples, "batch_size": batch_size, "images": sizes}
    journal = Journal(out, config, device)
    for method, material, seed in _tasks(found, data, _choose(methods, found), seeds, n_samples, batch_size):
        if not _measured(journal, method, seed, ("validation", *sets)):
            journal.add(row | {"method": method, "seed": seed} for row in measure(method, material, sets))
    return journal.path


def time_methods(
    networks: str | Path,
    out: str | Path = "results/alternatives",
    *,
    device: str = "cpu",
    methods: Sequence[str] = (),
    n_samples: int = 128,
    batch_size: int = 32,
    data: Data | None = None,
) -> Path:
    """Time each method on the networks of the first seed, alone on its machine; append to `out`/records.jsonl.

    setup_seconds is what it takes to get ready: for MCBN the draws, for its other modes what comes on top of them.
    """
    found, data = load_networks(networks, device), load_data() if data is None else require_data(data)
    x = data.test.x[: TIMED[torch.device(device).type]]
    config = {"n_samples": n_samples, "batch_size": batch_size, "n": len(x)}
    journal, first = Journal(out, config, device), [min(found.plain)]
    for method, material, seed in _tasks(found, data, _choose(methods, found), first, n_samples, batch_size):
        started = time.perf_counter()
        sampler = samplers.make(method, material)
        setup = time.perf_counter() - started
        seconds = _seconds(sampler, x)
        row = {"kind": "cost", "method": method, "seed": seed, "setup_seconds": setup}
        journal.add([row | {"milliseconds": 1000 * seconds / len(x)}])
    return journal.path


def _seconds(sampler: Sampler, x: torch.Tensor) -> float:
    """Run twice, the first time to warm up; a number is fetched, so that the clock stops when the work is done."""
    for _ in range(2):
        started = time.perf_counter()
        sampler(x).sum().item()
    return time.perf_counter() - started


def measure(method: str, material: Material, sets: Mapping[str, Queries]) -> Iterator[Row]:
    """Score one method on every set of images, with tau = 1 and with tau tuned on the validation images."""
    started = time.perf_counter()
    sampler = samplers.make(method, material)
    held = sampler(material.validation.x)  # (T, N, K)
    taus = {False: 1.0, True: scores.temperature(held, material.validation.y)}
    inside: dict[bool, torch.Tensor] = {}
    for name, queries in {"validation": Queries(*material.validation), **sets}.items():
        logits = held if name == "validation" else sampler(queries.x)
        for tempered, tau in taus.items():
            probs = scores.probabilities(logits, tau)  # (N, K)
            row: Row = {"kind": "score", "data": name, "n": len(probs), "tempered": tempered, "tau": tau}
            if queries.y is not None:
                row |= scores.score(probs, queries.y)
            if name == "test":
                inside[tempered] = probs
            elif name != "validation":
                row |= scores.outside(inside[tempered], probs)
            chosen = material.chosen.get(THINNED.get(method, method))
            yield row | {"chosen_batch_size": chosen, "seconds": time.perf_counter() - started}


def _choose(methods: Sequence[str], found: Networks) -> list[str]:
    """Return the methods to measure: those asked for, which must be possible, or all that are."""
    for method in methods:
        if method not in METHODS:
            raise MCBNError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        _require(method, found)
    if methods:
        return list(methods)
    possible = []
    for method in METHODS:
        try:
            _require(method, found)
        except MCBNError as error:
            warnings.warn(f"mcbn: {method} is left out: {error}", stacklevel=3)
        else:
            possible.append(method)
    return possible


def _require(method: str, found: Networks) -> None:
    if method == "laplace":
        laplace.require()
    if method in ON_THINNED and not found.thinned:
        raise MCBNError(f"{method} needs networks trained with dropout, of which there is none")
    if method == "ensemble" and len(found.plain) < 2:
        raise MCBNError(f"an ensemble needs the networks of at least 2 seeds; there are {len(found.plain)}")


def _tasks(
    found: Networks, data: Data, methods: Sequence[str], seeds: Sequence[int], n_samples: int, batch_size: int
) -> Iterator[tuple[str, Material, int | None]]:
    """Yield what is to be measured: each method of a seed with what it is made of, then the ensemble."""
    device = next(iter(found.plain.values())).last.weight.device
    train = Augmented(data.train.x.to(device))
    base = Material(nn.Identity(), standardize, train, data.train, data.validation, n_samples=n_samples)
    for seed in seeds or sorted(found.plain):
        if seed not in found.plain:
            raise MCBNError(f"there is no network of seed {seed}; there are {sorted(found.plain)}")
        network, thinned = found.plain[seed], found.thinned.get(seed)
        material = replace(
            base, network=network, thinned=thinned, batch_size=batch_size, seed=seed, fitted={}, chosen={}
        )
        on_thinned = material if thinned is None else replace(material, network=thinned, fitted={}, chosen={})
        for method in methods:
            if method != "ensemble" and (method not in ON_THINNED or thinned is not None):
                yield method, on_thinned if method in THINNED else material, seed
    if "ensemble" in methods:
        members = [found.plain[seed] for seed in sorted(found.plain)]
        yield "ensemble", replace(base, network=members[0], members=members), EVERY


def _measured(journal: Journal, method: str, seed: int | None, sets: Sequence[str]) -> bool:
    """Tell whether the records hold every set, validation too, twice each: without and with temperature."""
    run: Row = {"kind": "score", "method": method, "seed": seed}
    return all(journal.has(**run, data=name, tempered=tempered) for name in sets for tempered in (False, True))
