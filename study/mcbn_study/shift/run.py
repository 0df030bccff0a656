"""The study: every network, every measurement, one record a number; what is on record is not measured again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from mcbn.data import NAMES
from mcbn.errors import require_choice
from mcbn_study.journal import Journal, Record
from mcbn_study.machine import timed
from mcbn_study.shift import measure
from mcbn_study.shift.profile import Inputs, ShiftProfile
from mcbn_study.shift.train import load_subjects, near_subjects

MEASUREMENTS = ("alarms", "streams", "novelty", "centre", "cost")  # of each network, by functions of `measure`
AT_SEVERITIES = ("power", "repair", "mixture")
NEAR_SEEDS = (1, 2, 3)


def run(
    profile: ShiftProfile,
    inputs: Inputs,
    out: Path,
    *,
    networks: Path | None = None,
    weights: Path | None = None,
    only: Sequence[str] = (),
    device: str = "cpu",
    kinds: Sequence[str] = (),
    severities: Sequence[str] = (),
    datasets: Sequence[str] = NAMES,
) -> Path:
    """Measure every network; append to `out`/records.jsonl; networks of six classes lie in its `networks`.

    networks: folder of those of `mcbn reproduce cifar10`; weights: of ResNets of others, resnet20.npz and the like;
    only: some of these by name and seed, "resnet32 1"; kinds: of `MEASUREMENTS` and `AT_SEVERITIES`, ensemble, near,
    sensor; severities: those of the profile by default; datasets: of the tables with a drifting sensor.
    """
    journal = Journal(out, asdict(profile), device)
    found = {f"{subject.name} {subject.seed}": subject for subject in load_subjects(networks, weights, inputs, device)}
    subjects = [found[require_choice("only", name, [*found])] for name in only or found]
    ours = [subject for subject in subjects if subject.name == "resnet32"]
    corrupted, chosen = measure.Corrupted(inputs, profile), tuple(map(int, severities)) or (0, *profile.severities)

    def do(kind: str, network: str, seed: int | None, rows: Callable[..., Iterator[Record]], **key: Any) -> None:
        if (not kinds or kind in kinds) and not journal.has(kind=kind, network=network, seed=seed, **key):
            measured, seconds = timed(lambda: list(rows(**key)))
            same = {"kind": kind, "network": network, "seed": seed, **key, "seconds": round(seconds, 3)}
            journal.add({**same, **row} for row in measured)

    for kind, subject in product(MEASUREMENTS, subjects):
        do(kind, subject.name, subject.seed, partial(getattr(measure, kind), subject, corrupted, profile))
    for severity, kind, subject in product(chosen, AT_SEVERITIES, subjects):
        rows = partial(getattr(measure, kind), subject, corrupted, profile)
        do(kind, subject.name, subject.seed, rows, severity=severity)
    for severity in chosen if len(ours) > 1 or (ours and not only) else ():
        do("ensemble", ours[0].name, None, partial(measure.ensemble, ours, corrupted, profile), severity=severity)
    for subject in near_subjects(profile, inputs, out / "networks", NEAR_SEEDS) if not kinds or "near" in kinds else ():
        do("near", subject.name, subject.seed, partial(measure.novelty, subject, corrupted, profile, near=True))
    for dataset, split in product(datasets, range(1, profile.tables + 1)):
        do("sensor", dataset, split, partial(measure.sensor, dataset, split))
    return journal.path
