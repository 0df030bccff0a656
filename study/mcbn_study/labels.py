"""Which images to have labelled next: at random, by BALD, or by BatchBALD, on CIFAR-10 with a small network.

Each round trains a ResNet-8 from scratch on the images labelled so far, scores it on test images, and asks for more
labels of a pool (the setting of Kirsch et al. 2019, arXiv 1906.08158). The first images and the pool are the same for
all three ways.
"""

import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mcbn import MCBN, metrics
from mcbn.decide import bald, batch_bald
from mcbn.files import write_text
from mcbn.randomness import isolated_random
from mcbn_study.cifar10.profile import PAPER
from mcbn_study.cifar10.train import Augmented
from mcbn_study.data.cifar import Images
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.networks import CifarResNet, standardize
from mcbn_study.tables import render

SETTINGS: dict[str, Any] = {"first": 200, "asked": 40, "rounds": 5, "pool": 1_000, "n_test": 1_000, "steps": 300}
SETTINGS |= {"batch_size": 32, "n_samples": 30, "seeds": [1, 2, 3]}
CHOICES: dict[str, Callable[[Tensor, int, int], Tensor]] = {  # samples (T, N, K), k, seed -> indices (k,)
    "random": lambda draws, k, seed: torch.randperm(draws.shape[1], generator=torch.Generator().manual_seed(seed))[:k],
    "BALD": lambda samples, k, _: bald(samples).topk(k).indices,
    "BatchBALD": lambda samples, k, seed: batch_bald(samples, k, n_configurations=1024, seed=seed).indices,
}


def run(out: str | Path = "results/labels", *, images: Any = None, **changes: Any) -> None:
    """Run every way with every seed that is not on record yet; then write the page."""
    settings = SETTINGS | changes
    journal, split = Journal(out, settings), images or PAPER.load()
    for seed, way in product(settings["seeds"], CHOICES):
        if not journal.has(way=way, seed=seed):
            journal.add(ask(way, seed, split.train, split.test, settings))
    report(out)


def ask(way: str, seed: int, train: Images, test: Images, settings: Record) -> Iterator[Record]:
    """Label round by round; yield the accuracy and likelihood of the averaged probabilities after each."""
    started, first = time.perf_counter(), settings["first"]
    order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(seed))
    labelled, pool = order[:first], order[first : first + settings["pool"]]
    x, y = standardize(test.x[: settings["n_test"]]), test.y[: settings["n_test"]]
    for number in range(settings["rounds"] + 1):
        network = learn(Images(train.x[labelled], train.y[labelled]), seed, settings)
        how = {"n_samples": settings["n_samples"], "batch_size": settings["batch_size"], "seed": seed}
        bayes = MCBN(network, "classification").fit(Augmented(train.x[labelled]), **how)
        pred = bayes.predict(x)
        scores = {"accuracy": metrics.accuracy(pred.probs, y).item(), "nll": metrics.nll(pred.probs, y).mean().item()}
        seconds = round(time.perf_counter() - started, 1)
        yield {"way": way, "seed": seed, "labels": len(labelled), **scores, "seconds": seconds}
        if number == settings["rounds"]:
            return
        chosen = CHOICES[way](bayes.sample(standardize(train.x[pool])), settings["asked"], 1000 * seed + number)
        labelled = torch.cat([labelled, pool[chosen]])
        pool = pool[~torch.isin(torch.arange(len(pool)), chosen)]


def learn(images: Images, seed: int, settings: Record) -> CifarResNet:
    """Train a network from scratch for so many steps: Adam, its rate falling along half a cosine."""
    with isolated_random(seed):
        network = CifarResNet(8, seed=seed)
        optimizer = torch.optim.Adam(network.parameters(), 3e-3, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings["steps"])
        augmented = Augmented(images.x)
        for _ in range(settings["steps"]):
            rows = torch.randperm(len(images.y))[: settings["batch_size"]]
            optimizer.zero_grad()
            loss = cross_entropy(network(torch.stack(augmented.__getitems__(rows.tolist()))), images.y[rows])
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return network.eval()


def report(out: str | Path = "results/labels") -> Path:
    """Write table.md: mean over seeds with its standard error, and the gain over random choice, seed by seed."""
    records = latest(read(Path(out) / RECORDS), ("way", "seed", "labels"))
    found = {(r["way"], r["seed"], r["labels"]): r["accuracy"] for r in records}
    seeds, rows = sorted({r["seed"] for r in records}), []
    for labels in sorted({r["labels"] for r in records}):
        each = {way: [found[way, seed, labels] for seed in seeds] for way in CHOICES}
        gains = [[a - b for a, b in zip(each[way], each["random"], strict=True)] for way in ("BALD", "BatchBALD")]
        cells = [mean_cell(values, scale=100, decimals=1) for values in each.values()]
        rows.append([labels, *cells, *(mean_cell(gain, scale=100, decimals=1, sign="+") for gain in gains)])
    page = render(__package__, "labels.md.j2", rows=rows, seeds=seeds, config=records[0]["config"])
    return write_text(Path(out) / "table.md", page)
