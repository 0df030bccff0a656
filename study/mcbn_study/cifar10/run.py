"""The study: train a network a seed, measure it, append its records; what is there is not done again."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.progress import bar
from mcbn_study.cifar10.measure import Evaluation
from mcbn_study.cifar10.profile import CifarProfile
from mcbn_study.cifar10.train import Epoch, load_network, network_facts, save_network, train
from mcbn_study.journal import Journal
from mcbn_study.machine import environment

KIND, TRAINING = "cifar10", "cifar10 training"


def run(
    profile: CifarProfile,
    out: Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "cpu",
    networks: Path | None = None,
    dropout: float = 0.0,
    together: bool | None = None,
    queries: bool = False,
) -> Path:
    """Train and measure the networks of several seeds; return the file of records.

    networks: folder of trained ones, which are not trained again; dropout: train with it instead, for MC dropout, and
    measure nothing; together: train all seeds at the same time before any is measured, by default on a GPU; queries:
    measure the estimator with fresh batches alone.
    """
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise MCBNError(f"seeds must be different whole numbers from 0 on; got {list(seeds)}")
    journal = Journal(out, asdict(profile), device)
    taken = dict.fromkeys(seeds, 0)
    at_once, folder = device != "cpu" if together is None else together, networks or out / "networks"

    def watch(seed: int, epoch: Epoch) -> None:
        tick(epoch.steps - taken[seed])
        taken[seed] = epoch.steps

    with bar("CIFAR-10", len(seeds) * profile.steps, "step") as tick:
        for group in [seeds] if at_once else [[seed] for seed in seeds]:
            for path in train_networks(profile, folder, seeds=group, dropout=dropout, device=device, watch=watch):
                facts = {"kind": TRAINING, "network": path.stem.rpartition("-seed")[0], **network_facts(path)}
                if facts not in journal.records:
                    journal.append([facts])
                if not dropout:
                    evaluate(journal, profile, path, queries)
    return journal.path


def train_networks(
    profile: CifarProfile, folder: Path, *, seeds: Sequence[int], dropout: float = 0.0, device: str = "cpu", **how: Any
) -> list[Path]:
    """Train the networks that have no file yet, or go on with them, all at the same time; how: as `train` takes it."""
    stem = f"resnet{profile.depth}{'-dropout' if dropout else ''}"
    paths = {seed: folder / f"{stem}-seed{seed}.safetensors" for seed in seeds}
    for path in filter(Path.exists, paths.values()):
        facts = network_facts(path)
        if facts["training"] != profile.training or facts["dropout"] != dropout:
            others = f"other settings (profile {facts['profile']!r}, dropout {facts['dropout']})"
            raise MCBNError(f"{path} was trained with {others}; use another folder with --out or --networks")
    left = [seed for seed, path in paths.items() if not path.exists()]
    unfinished = folder / "unfinished"
    if left:
        how |= {"dropout": dropout, "device": device, "files": [unfinished / paths[seed].name for seed in left]}
        for trainer in train(profile, profile.load().train, seeds=left, **how):
            last = trainer.epochs[-1]
            facts = {"seed": trainer.seed, "dropout": dropout, "profile": profile.name, "training": profile.training}
            facts |= {"steps": last.steps, "loss": last.loss, "accuracy": last.accuracy, "seconds": last.seconds}
            facts["milliseconds_per_step"] = round(1000 * last.seconds / last.steps, 4)
            facts["together"] = len(left)  # shared the seconds
            save_network(trainer.network, paths[trainer.seed], facts | asdict(environment(device)))
    if unfinished.is_dir() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return list(paths.values())


def evaluate(journal: Journal, profile: CifarProfile, path: Path, queries: bool = False) -> None:
    """Measure one network and append its rows, all at once, unless the same file was measured so before."""
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if journal.has(network_hash=content, part="query" if queries else "test"):
        return
    about = {"kind": KIND, "network": path.stem.rpartition("-seed")[0], "network_hash": content}
    network, seed = load_network(path).to(journal.device), network_facts(path)["seed"]
    evaluation = Evaluation(network, profile, profile.load(), seed=seed)
    journal.add([about | row for row in (evaluation.queries() if queries else evaluation.rows())])
