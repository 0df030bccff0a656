"""The study: train a network a seed, measure it, append its records; what is there is not done again."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn_study.cifar10.measure import Evaluation
from mcbn_study.cifar10.parts import held_out
from mcbn_study.cifar10.profile import Profile
from mcbn_study.cifar10.saved import load_network, network_facts, save_network
from mcbn_study.cifar10.train import train_together
from mcbn_study.cifar10.trainer import Epoch
from mcbn_study.data.cifar import Images, cifar10
from mcbn_study.journal import RECORDS, Journal
from mcbn_study.machine import environment
from mcbn_study.progress import Progress

KIND, TRAINING = "cifar10", "cifar10 training"


def run(
    profile: Profile,
    out: Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "cpu",
    networks: Path | None = None,
    dropout: float = 0.0,
    together: bool | None = None,
) -> Path:
    """Train and measure the networks of several seeds; return the file of records.

    Args:
        profile: what is trained and measured.
        out: folder of records; networks lie in its `networks`.
        seeds: one network each.
        device: cpu or cuda.
        networks: folder of trained networks to use instead of training, where it has them.
        dropout: train networks with dropout instead, for MC dropout; they are not measured here.
        together: train all seeds at the same time before any is measured; by default on a GPU.
    """
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise MCBNError(f"seeds must be different whole numbers from 0 on; got {list(seeds)}")
    folder = networks or out / "networks"
    progress = Progress(len(seeds) * profile.steps, "CIFAR-10")
    at_once = device != "cpu" if together is None else together
    for group in [seeds] if at_once else [[seed] for seed in seeds]:
        progress.start(f"seed {', '.join(map(str, group))}", len(group) * profile.steps)

        def watch(seed: int, epoch: Epoch) -> None:
            progress.fraction(epoch.steps / profile.steps)

        for path in train_several(profile, folder, seeds=group, dropout=dropout, device=device, watch=watch):
            record_training(out, path)
            if not dropout:
                evaluate_one(profile, path, out, device=device)
        progress.end()
    progress.close()
    return out / RECORDS


def network_path(folder: Path, profile: Profile, seed: int, dropout: float = 0.0) -> Path:
    """Name the file of a network."""
    return folder / f"resnet{profile.depth}{'-dropout' if dropout else ''}-seed{seed}.safetensors"


def train_one(
    profile: Profile,
    folder: Path,
    *,
    seed: int,
    dropout: float = 0.0,
    device: str = "cpu",
    watch: Callable[[Epoch], None] = lambda epoch: None,
) -> Path:
    """Train one network, or go on with it, unless its file is there already; return the file."""
    options: dict[str, Any] = {"dropout": dropout, "device": device, "watch": lambda seed, epoch: watch(epoch)}
    return train_several(profile, folder, seeds=[seed], **options)[0]


def train_several(
    profile: Profile,
    folder: Path,
    *,
    seeds: Sequence[int],
    dropout: float = 0.0,
    device: str = "cpu",
    parallel: bool = True,
    watch: Callable[[int, Epoch], None] = lambda seed, epoch: None,
) -> list[Path]:
    """Train the networks that have no file yet, or go on with them, all at the same time; return the files."""
    paths = {seed: network_path(folder, profile, seed, dropout) for seed in seeds}
    for path in paths.values():
        if path.exists():
            _require_same_training(path, profile, dropout)
    left = [seed for seed, path in paths.items() if not path.exists()]
    unfinished = folder / "unfinished"
    if left:
        found = train_together(
            profile,
            training_images(profile),
            seeds=left,
            dropout=dropout,
            device=device,
            parallel=parallel,
            checkpoints=[unfinished / paths[seed].name for seed in left],
            watch=watch,
        )
        for seed, (network, epochs) in zip(left, found, strict=True):
            facts = _facts(profile, seed, dropout, epochs[-1], len(left))
            save_network(network, paths[seed], facts | asdict(environment(device)))
    if unfinished.is_dir() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return list(paths.values())


def _facts(profile: Profile, seed: int, dropout: float, last: Epoch, together: int) -> dict[str, Any]:
    """Say how a network was trained; `together` is how many shared the seconds."""
    facts = {"seed": seed, "dropout": dropout, "profile": profile.name, "training": profile.training}
    facts |= {"steps": last.steps, "loss": last.loss, "accuracy": last.accuracy, "seconds": last.seconds}
    return facts | {"milliseconds_per_step": round(1000 * last.seconds / last.steps, 4), "together": together}


def evaluate_one(profile: Profile, path: Path, out: Path, *, device: str = "cpu") -> None:
    """Measure one network and append its rows, all at once, unless the same file was measured so before."""
    facts = network_facts(path)
    config = asdict(profile)
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    about = {"kind": KIND, "network": path.stem.rpartition("-seed")[0], "network_hash": content}
    journal = Journal(out, config, device)
    if journal.has(network_hash=content):
        return
    train, validation, test = study_images(profile)
    evaluation = Evaluation(
        load_network(path), profile, train=train, validation=validation, test=test, seed=facts["seed"], device=device
    )
    journal.add(about | row for row in evaluation.rows())


def record_training(out: Path, path: Path) -> None:
    """Append what a network's file says of its training, once."""
    facts: dict[str, Any] = {"kind": TRAINING, "network": path.stem.rpartition("-seed")[0], **network_facts(path)}
    journal = Journal(out)
    if facts not in journal.records:
        journal.append([facts])


def training_images(profile: Profile) -> Images:
    """Return the images that are trained on."""
    data, (index, _) = cifar10("train"), held_out()
    return _take(data, index[: profile.n_train])


def study_images(profile: Profile) -> tuple[Images, Images, Images]:
    """Return training, validation and test images."""
    data, (train, validation) = cifar10("train"), held_out()
    test = cifar10("test")
    parts = _take(data, train[: profile.n_train]), _take(data, validation[: profile.n_validation])
    return (*parts, Images(test.x[: profile.n_test], test.y[: profile.n_test]))


def _take(data: Images, index: Any) -> Images:
    return Images(data.x[index], data.y[index])


def _require_same_training(path: Path, profile: Profile, dropout: float) -> None:
    facts = network_facts(path)
    if facts["training"] != profile.training or facts["dropout"] != dropout:
        raise MCBNError(
            f"{path} was trained with other settings (profile {facts['profile']!r}, dropout {facts['dropout']}); use "
            "another folder with --out or --networks"
        )
