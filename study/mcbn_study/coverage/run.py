"""Is what `calibrate` promises what one counts? Intervals on the regression sets, sets and refusals on CIFAR-10.

Regression: of the training rows of a split a quarter calibrates (100 to 1000 rows), a tenth tunes tau, the rest trains
five networks side by side, one a seed. The page says what is counted.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn

from mcbn import MCBN, data, decide, metrics, stacked
from mcbn.baselines import DeepEnsemble, Temperature
from mcbn.conformal import Calibration
from mcbn.files import write_text
from mcbn.networks import Standardized
from mcbn_study.alternatives import methods
from mcbn_study.alternatives.inputs import load_networks
from mcbn_study.alternatives.run import SCORES, probabilities, tasks, temperature
from mcbn_study.cifar10.profile import PAPER
from mcbn_study.estimates import class_scores
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.tables import render

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
SETTINGS = {"splits": [1, 2, 3, 4, 5], "seeds": [1, 2, 3, 4, 5], "steps": 10_000, "batch_size": 64, "n_samples": 100}
SETS: Record = {"aps": {}, "raps": {"penalty": (0.01, 2)}, "aps by class": {"by": "class"}}
SETS["aps by class, randomised"] = {"by": "class", "randomized": True}
SETS |= {"lac": {"score": "lac"}, "lac by class": {"score": "lac", "by": "class"}}
INTERVALS = ("before", "after", "plain", "one width")
SET_LEVEL = 0.95  # above the networks' accuracy: sets of one class would do for less
ENSEMBLES = ("ensemble", "mcbn of each")
HALVES, RESAMPLINGS, RISK, DELTA = 100, 1000, 0.02, 0.1
BAND = 2.576  # standard errors: 99 of 100 kept promises stay inside


def run(out: str | Path = "results/coverage", *, datasets: Sequence[str] = (), **changes: Any) -> Path:
    """Train, calibrate and count what is not on record yet."""
    settings: dict[str, Any] = SETTINGS | changes
    journal = Journal(out, settings | {"intervals": [*INTERVALS]})
    for dataset, split in product(datasets or data.NAMES, settings["splits"]):
        if not journal.has(kind="coverage", dataset=dataset, split=split):
            journal.add(measure(dataset, split, settings))
    return journal.path


def measure(dataset: str, split: int, settings: dict[str, Any]) -> Iterator[Record]:
    """Measure the networks of one split, each by itself and all as an ensemble."""
    started = time.perf_counter()
    x, y = (values.float() for values in data.load(dataset))
    train, test = data.split(len(x), split)
    rows = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(split))]
    n, n_tuning = min(1000, max(100, len(rows) // 4)), len(rows) // 10
    tuning, held, new = ((x[part], y[part]) for part in (rows[n : n + n_tuning], rows[:n], test))
    inputs, targets = x[rows[n + n_tuning :]], y[rows[n + n_tuning :]]
    hidden = (100, 100) if dataset == "protein" else (50, 50)  # Teye et al. 2018, Section 4.3
    networks = train_networks(inputs, targets, hidden, settings)
    how = {"n_samples": settings["n_samples"], "batch_size": min(settings["batch_size"], len(inputs) // 2)}
    place = {"dataset": dataset, "split": split, "n_calibration": n, "n_test": len(test)}
    for seed, network in networks.items():
        bayes = MCBN(network, "regression").fit(inputs, seed=seed, **how)
        yield {"kind": "coverage", **place, "seed": seed, **count_intervals(bayes, tuning, held, new)}
    members: Any = list(networks.values())
    several: list[Any] = [DeepEnsemble(members, "regression"), MCBN(members, "regression").fit(inputs, **how)]
    for name, ensemble in zip(ENSEMBLES, several, strict=True):
        pred = ensemble.tune(tuning).predict(new[0])
        crps = metrics.crps_gaussian(pred.mean, pred.variance, new[1]).mean().item()
        seconds = round(time.perf_counter() - started, 3)
        yield {"kind": "ensemble", **place, "method": name, "crps": crps, "seconds": seconds}


def count_intervals(bayes: Any, tuning: Any, held: Any, new: Any) -> Record:
    """Return share inside and mean width at every level: before calibration, after, and by one width for all inputs.

    "plain": that around the plain network; "one width": around the mean of the draws. "exact": what the predicted
    standard deviations would change if they were true and the targets Gaussian; "varied": how they differ.
    """
    x, y = new
    plain = Temperature(bayes.model, "regression").tune(tuning).calibrate(held, score="absolute").predict(x)
    pred = bayes.tune(tuning).calibrate(held).predict(x)
    one = bayes.calibrate(held, score="absolute").predict(x)
    counted = {}
    for name, source in zip(INTERVALS, (pred, pred, plain, one), strict=True):
        pairs = [source.interval(level, calibrated=name != "before") for level in LEVELS]
        inside = [((low <= y) & (y <= high)).double().mean().item() for low, high in pairs]
        counted[name] = {"inside": inside, "width": [(high - low).double().mean().item() for low, high in pairs]}
    varied, known = float(pred.std.std() / pred.std.mean()), [exact_width(pred.std, level) for level in LEVELS]
    return {"methods": counted, "varied": varied, "exact": known}


def exact_width(std: Tensor, level: float) -> float:
    """Return q mean(std) / w, where q and w hold the share `level` of |z| and of all std |z|, z standard normal."""
    z = torch.special.ndtri(torch.linspace(0.5, 1, 1002, dtype=torch.float64)[1:-1])
    w = (z[:, None] * std.flatten().double()).flatten().quantile(level)
    return float(z.quantile(level) * std.double().mean() / w)


def train_networks(x: Tensor, y: Tensor, hidden: Sequence[int], settings: dict[str, Any]) -> dict[int, Standardized]:
    """Train a network a seed as `mcbn.sklearn` does, side by side, in original units."""
    from mcbn.sklearn.training import MOST_DECAY, Stack

    inputs, targets = Standardized(torch.nn.Identity(), x, y).standardize(x, y)
    seeds, M = settings["seeds"], min(settings["batch_size"], len(x) // 2)
    stack = Stack(stacked.initial_values(x.shape[1], hidden, seeds=seeds), weight_decay=3e-4, learning_rate=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(settings["steps"]):
        index = torch.randint(len(x), (len(seeds), M), generator=generator)
        stack.step(inputs[index], targets.reshape(len(y), -1)[index])
        if step % max(1, len(x) // M) == 0:
            stack.update_average(MOST_DECAY)
    batches = torch.split(inputs[torch.randperm(len(x), generator=generator)], M)[: len(x) // M]
    networks = {seed: stacked.network(stack.average, s, x.shape[1]) for s, seed in enumerate(seeds)}
    for network in networks.values():
        update_bn(batches, network)
    return {seed: Standardized(network, x, y).eval() for seed, network in networks.items()}


def run_cifar(networks: Path, out: Path, *, device: str = "cpu", n_samples: int = 32, images: Any = None) -> Path:
    """Count sets and refusals of the plain networks, of MCBN and of the ensemble on the test images."""
    counted = {"level": SET_LEVEL, "halves": HALVES, "resamplings": RESAMPLINGS, "risk": RISK, "delta": DELTA}
    journal = Journal(out, counted | {"n_samples": n_samples, "sets": [*SETS]}, device)
    trained, images = load_networks(networks, device), images or PAPER.load()
    for method, material, seed in tasks(trained, images, ["plain", "mcbn", "ensemble"], n_samples, 32):
        key = {"kind": "sets", "method": method, "seed": seed}
        if not journal.has(**key):
            started = time.perf_counter()
            sampler = methods.make(method, material)
            tau = temperature(sampler(material.validation.x), material.validation.y)
            probs, y = probabilities(sampler(images.test.x), tau).cpu(), images.test.y.cpu()
            sets = {name: count_sets(probs, y, **how) for name, how in SETS.items()}
            counts = {"sets": sets, "risk": count_risk(probs, y), "seconds": time.perf_counter() - started}
            journal.add([{**key, **class_scores(probs, y, *SCORES), **counts}])
    return journal.path


def count_sets(probs: Tensor, y: Tensor, score: str = "aps", **how: Any) -> Record:
    """Return mean coverage, that of each class, and mean size of sets, over halves of the test images."""
    settings, totals = Calibration(score, {}, {}, **how), torch.zeros(2 + probs.shape[1]).double()
    for number in range(HALVES):
        held, new = torch.randperm(len(y), generator=torch.Generator().manual_seed(number)).chunk(2)
        scores = settings.score_classes(probs[held], HALVES + number).gather(1, y[held, None])
        groups = y[held] if settings.by == "class" else torch.zeros_like(held)
        ordered = {int(g): scores[groups == g].sort(0).values for g in torch.unique(groups)}
        counts = {g: len(some) for g, some in ordered.items()}
        sets = replace(settings, scores=ordered, counts=counts).set(probs[new], SET_LEVEL, seed=number)
        inside = sets.gather(1, y[new][:, None])[:, 0].double()
        of_classes = [inside[y[new] == k].mean() for k in range(probs.shape[1])]
        totals += torch.stack([inside.mean(), sets.sum(1).double().mean(), *of_classes])
    share, size, *classes = (totals / HALVES).tolist()
    return {"inside": share, "size": size, "classes": classes}


def count_risk(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Return how often the promised risk was exceeded, and the mean share kept; the images are the population."""
    (top, label), exceeded, kept = probs.max(1), 0, 0.0
    for number in range(RESAMPLINGS):
        held = torch.randint(len(y), (len(y) // 2,), generator=torch.Generator().manual_seed(number))
        chosen = decide.threshold(1 - top[held], label[held] != y[held], risk=RISK, delta=DELTA)
        keep = 1 - top < chosen.threshold
        exceeded += bool(keep.any()) and (label != y)[keep].double().mean().item() > RISK
        kept += keep.double().mean().item()
    return {"exceeded": exceeded / RESAMPLINGS, "kept": kept / RESAMPLINGS}


def report(out: str | Path = "results/coverage") -> Path:
    """Write table.md from the records."""
    records = read(Path(out) / RECORDS)
    runs = latest([r for r in records if r["kind"] == "coverage"], ("dataset", "split", "seed"))
    ensembles = latest([r for r in records if r["kind"] == "ensemble"], ("dataset", "split", "method"))
    counted = [r for r in records if "sets" in r]
    for r in counted:
        r["T"] = r["config"].get("n_samples", 128) if r["method"] == "mcbn" else 1
    sets = latest(counted, ("method", "seed", "T"))
    names = list(dict.fromkeys(r["dataset"] for r in runs))
    rows = [summarize(*([r for r in some if r["dataset"] == name] for some in (runs, ensembles))) for name in names]
    return write_text(Path(out) / "table.md", render(__package__, rows=rows, sets=sets, levels=LEVELS))


def summarize(runs: Sequence[Record], ensembles: Sequence[Record]) -> Record:
    """Average the runs of one data set; `kept` tells of each level whether the share inside is near the promise.

    Near: within 2.58 standard errors of [level, level + 1 / (n + 1)]. The share of one split varies by
    level (1 - level) (1 / n + 1 / n_test); seeds of a split share its rows and count as one.
    """
    n, n_test, splits = runs[0]["n_calibration"], runs[0]["n_test"], len({r["split"] for r in runs})
    row: Record = {"dataset": runs[0]["dataset"], "runs": len(runs), "n": n, "kept": []}
    for method, what in product(INTERVALS, ("inside", "width")):
        columns = zip(*(r["methods"][method][what] for r in runs), strict=True)
        row[f"{method.split()[0]}_{what}"] = [fmean(column) for column in columns]
    after, one, plain = (row[f"{method}_width"] for method in ("after", "one", "plain"))
    row["by_mean"] = [ours / theirs for ours, theirs in zip(one, plain, strict=True)]
    row["by_std"] = [ours / theirs for ours, theirs in zip(after, one, strict=True)]
    row["exact"] = [fmean(column) for column in zip(*(r["exact"] for r in runs), strict=True)]
    row["varied"] = fmean(r["varied"] for r in runs)
    for level, share in zip(LEVELS, row["after_inside"], strict=True):
        error = BAND * (level * (1 - level) * (1 / n + 1 / n_test) / splits) ** 0.5
        row["kept"].append(level - error <= share <= level + 1 / (n + 1) + error)
    return row | {"crps": [fmean(r["crps"] for r in ensembles if r["method"] == m) for m in ENSEMBLES]}
