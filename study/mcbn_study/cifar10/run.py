"""The study: train a network a seed, measure it, append its records; what is there is not done again."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn_study.cifar10.measure import Evaluation
from mcbn_study.cifar10.profile import CifarProfile
from mcbn_study.cifar10.train import load_network, save_network, train
from mcbn_study.journal import Journal
from mcbn_study.machine import environment
from mcbn_study.study import Progress

KIND, TRAINING = "cifar10", "cifar10 training"


def run(
    profile: CifarProfile,
    out: Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "cpu",
    networks: Path | None = None,
    dropout: float = 0.0,
) -> Path:
    """Train and measure the networks of several seeds; return the file of records.

    networks: folder of trained ones, which are not trained again; dropout: train with it instead, for MC dropout, and
    measure nothing.
    """
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise MCBNError(f"seeds must be different whole numbers from 0 on; got {list(seeds)}")
    journal, stem = Journal(out, asdict(profile), device), f"resnet{profile.depth}{'-dropout' if dropout else ''}"
    progress = Progress(len(seeds) * profile.steps, "CIFAR-10")
    for seed in seeds:
        path = (networks or out / "networks") / f"{stem}-seed{seed}.safetensors"
        with progress.cell(f"seed {seed}", profile.steps):
            train_network(profile, path, seed=seed, dropout=dropout, device=device, progress=progress)
            facts = {"kind": TRAINING, "network": stem, **load_network(path)[1]}
            if facts not in journal.records:
                journal.append([facts])
            if not dropout:
                evaluate(journal, profile, path, seed)
    progress.close()
    return journal.path


def train_network(
    profile: CifarProfile, path: Path, *, seed: int, dropout: float, device: str, progress: Progress
) -> None:
    """Train the network of a seed unless it has a file already, which must be of the same settings."""
    if path.exists():
        _, facts = load_network(path)
        if facts["training"] != profile.training or facts["dropout"] != dropout:
            others = f"other settings (profile {facts['profile']!r}, dropout {facts['dropout']})"
            raise MCBNError(f"{path} was trained with {others}; use another folder with --out or --networks")
        return
    how: dict[str, Any] = {"seed": seed, "dropout": dropout}
    network, reached = train(profile, profile.load().train, device=device, watch=progress.fraction, **how)
    facts = how | {"profile": profile.name, "training": profile.training} | reached
    facts["milliseconds_per_step"] = round(1000 * reached["seconds"] / reached["steps"], 4)
    save_network(network, path, facts | asdict(environment(device)))


def evaluate(journal: Journal, profile: CifarProfile, path: Path, seed: int) -> None:
    """Measure one network and append its rows, all at once, unless the same file was measured so before."""
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if not journal.has(network_hash=content, part="test"):
        about = {"kind": KIND, "network": path.stem.rpartition("-seed")[0], "network_hash": content}
        evaluation = Evaluation(load_network(path)[0].to(journal.device), profile, profile.load(), seed=seed)
        journal.add([about | row for row in evaluation.rows()])
