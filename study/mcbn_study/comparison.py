"""Does `mcbn.compare` tell a user what the studies found? On their networks, beside what they have on record.

The page says which networks and images, and what can be compared: the gain over the plain network, and CRPS over that
of a constant variance on the same network.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from mcbn import MCBN, data
from mcbn.comparison import compare
from mcbn.files import write_text
from mcbn_study.alternatives.inputs import load_networks as load_classifiers
from mcbn_study.cifar10.profile import PAPER
from mcbn_study.cifar10.train import Augmented
from mcbn_study.estimates import cell, difference, estimate
from mcbn_study.journal import RECORDS, Journal, Record, latest, read
from mcbn_study.networks import standardize
from mcbn_study.regression.train import load_networks
from mcbn_study.tables import render

DATASETS = ("yacht", "boston", "concrete", "energy")
SAMPLED, CONSTANT = "MCBN, sampled", "MCBN mean, constant variance"
# Methods of `compare`: what results/alternatives calls each, tempered
STUDIED = {"temperature": "plain", "MCBN, linear": "mcbn_linear", SAMPLED: "mcbn", "MCBN, tuned M": "mcbn_joint"}
DRAWS: dict[str, Any] = {"n_samples": 16, "batch_size": 32}
AT_ONCE = 250  # images


def run(out: Path, *, networks: Path, regression: Path, device: str = "cpu", images: Any = None) -> None:
    """Compare on every network that is not on record yet; then write the page. device: of the images."""
    journal = Journal(out, {"n_samples": 500})
    for dataset in DATASETS:
        if not journal.has(dataset=dataset):
            journal.add(compare_values(regression / "networks" / f"{dataset}_folds.safetensors"))
    split = images or PAPER.load()
    journal = Journal(out, DRAWS | {"n_validation": len(split.validation.y), "n_test": len(split.test.y)}, device)
    parts = [DataLoader(TensorDataset(standardize(part.x.to(device)), part.y), AT_ONCE) for part in split[1:]]
    for seed, network in sorted(load_classifiers(networks, device).plain.items()):
        if not journal.has(seed=seed):
            bayes = MCBN(network, "classification").fit(Augmented(split.train.x.to(device)), seed=seed, **DRAWS)
            journal.add([{"kind": "classes", "seed": seed, **_compare(bayes, *parts)}])
    report(out, regression=regression)


def compare_values(path: Path) -> Iterator[Record]:
    """Compare on the networks of a data set's folds: tuned on the held-out fold, scored on the split's test rows."""
    for network, info in load_networks(path):
        x, y = (values.float() for values in data.load(info["dataset"]))
        part = data.split(len(x), info["split"])
        held = sorted(set(part.train.tolist()) - set(info["train"].tolist()))
        M, place = info["config"]["batch_size"], {name: info[name] for name in ("dataset", "split", "fold")}
        bayes = MCBN(network, "regression").fit(x[info["train"]], n_samples=500, batch_size=M)
        told = _compare(bayes, (x[held], y[held]), (x[part.test], y[part.test]))
        yield {"kind": "values", **place, "n": len(part.test), **told}


def _compare(bayes: MCBN[Any], tuning: Any, test: Any) -> Record:
    told = compare(bayes, tuning, test)
    return {"rows": [row._asdict() for row in told.rows], "advice": told.advice}


def report(out: str | Path = "results/comparison", *, regression: str | Path = "results/regression") -> Path:
    """Write table.md from the records, here and of both studies, whose folders lie side by side."""
    names, regression = ("kind", "dataset", "split", "fold", "seed"), Path(regression)
    records = latest([dict.fromkeys(names) | r for r in read(Path(out) / RECORDS)], names)
    scores = [r for r in read(regression.parent / "alternatives" / RECORDS) if r["kind"] == "score"]
    content = {"classes": _classes(records, scores), "values": _values(records, read(regression / RECORDS))}
    advice = {name: [r["advice"] for r in records if r["kind"] == name] for name in content}
    return write_text(Path(out) / "table.md", render(__package__, "comparison.md.j2", advice=advice, **content))


def _classes(records: list[Record], scores: list[Record]) -> Iterator[list[str]]:
    """Lay out NLL less that of the plain network, mean over networks: told by `compare`, on record, the difference."""
    found = {(r["method"], r["tempered"], r["seed"]): r["nll"] for r in scores if r["data"] == "test"}
    ours = [r for r in records if r["kind"] == "classes"]
    for method, name in STUDIED.items():
        told = [_loss(r, method) - _loss(r, "plain") for r in ours]
        there = [found[name, True, r["seed"]] - found["plain", False, r["seed"]] for r in ours]
        gaps = [a - b for a, b in zip(told, there, strict=True)]
        yield [method, *(cell(estimate(values, decimals=4), sign="+") for values in (told, there, gaps))]


def _values(records: list[Record], tests: list[Record]) -> Iterator[list[str]]:
    """Lay out CRPS over that of a constant variance, mean over networks: told by `compare`, and on record."""
    for dataset in DATASETS:
        ours = [r for r in records if r["kind"] == "values" and r["dataset"] == dataset]
        final = [r for r in tests if r["kind"] == "test" and (r["dataset"], r["method"]) == (dataset, "mcbn")]
        told = estimate([_loss(r, SAMPLED) / _loss(r, CONSTANT) for r in ours], decimals=3)
        found = estimate([r["crps"] / r["crps_constant"] for r in final], decimals=3)
        yield [dataset, cell(told), cell(found), difference(told, found)]


def _loss(record: Record, method: str) -> float:
    return float(next(row["loss"] for row in record["rows"] if row["method"].startswith(method)))
