"""The study: train a network a seed, measure it, append its records; what is there is not done again."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn_study.cifar10.measure import Evaluation
from mcbn_study.cifar10.profile import CifarProfile
from mcbn_study.cifar10.train import load_network, save_network, train
from mcbn_study.journal import Journal
from mcbn_study.machine import environment, tracked

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
    variant = "" if profile.name in ("paper", "quick") else profile.name  # trained otherwise than the paper's
    stem = "-".join(filter(None, (f"resnet{profile.depth}", variant, "dropout" * bool(dropout))))
    journal, networks = Journal(out, asdict(profile), device), networks or out / "networks" / variant
    for seed in tracked(seeds, "CIFAR-10", "seed"):
        if not (path := networks / f"{stem}-seed{seed}.safetensors").exists():
            network, facts = train(profile, profile.load().train, seed=seed, dropout=dropout, device=device)
            save_network(network, path, facts | asdict(environment(device)))
        network, facts = load_network(path)
        if (facts["training"], facts["dropout"]) != (profile.training, dropout):
            others = f"other settings (profile {facts['profile']!r}, dropout {facts['dropout']})"
            raise MCBNError(f"{path} was trained with {others}; use another folder with --out or --networks")
        if (training := {"kind": TRAINING, "network": stem, **facts}) not in journal.records:
            journal.append([training])
        content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        if not dropout and not journal.has(network_hash=content, part="test"):
            evaluation = Evaluation(network.to(device), profile, profile.load(), seed=seed)
            about = {"kind": KIND, "network": stem, "network_hash": content}
            journal.add([about | row for row in evaluation.rows()])  # all at once
    return journal.path
