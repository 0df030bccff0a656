"""The study: every network, every measurement, one record a number; what is on record is not measured again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from mcbn.data import NAMES
from mcbn_study.journal import Journal
from mcbn_study.machine import timed
from mcbn_study.shift import measure
from mcbn_study.shift.profile import Inputs, ShiftProfile
from mcbn_study.shift.train import Subject, foreign_subjects, near_subjects, own_subjects

Measurement = Callable[[Subject, Any, ShiftProfile], Iterator[measure.Row]]
MEASUREMENTS: dict[str, Measurement] = {
    "alarms": measure.alarms,
    "streams": measure.streams,
    "novelty": measure.novelty,
    "power": measure.power,
    "repair": measure.repair,
    "centre": measure.centre,
}
CORRUPTED = ("power", "repair", "centre")  # ask for corrupted images
NEAR_SEEDS = (1, 2, 3)


def run(
    profile: ShiftProfile,
    inputs: Inputs,
    out: Path,
    *,
    networks: Path | None = None,
    weights: Path | None = None,
    device: str = "cpu",
    kinds: Sequence[str] = (),
    datasets: Sequence[str] = NAMES,
) -> Path:
    """Measure every network; append to `out`/records.jsonl.

    Args:
        profile: how much of everything.
        inputs: images.
        out: folder of records; networks of six classes lie in its `networks`.
        networks: folder of the networks of `mcbn reproduce cifar10`; none: only foreign ones.
        weights: folder of foreign ResNets, resnet20.npz and the like.
        device: cpu or cuda.
        kinds: of measurements: `MEASUREMENTS`, ensemble, near, sensor; all by default.
        datasets: of the tables with a drifting sensor.
    """
    journal, inputs = Journal(out, asdict(profile), device), inputs.on(device)
    ours = own_subjects(networks, inputs, device) if networks else []
    subjects = [*ours, *foreign_subjects(weights, inputs, device)]
    corrupted = measure.Corrupted(inputs, profile)
    for kind, subject in product(MEASUREMENTS, subjects):
        if kind in (kinds or MEASUREMENTS):
            rows = partial(MEASUREMENTS[kind], subject, corrupted if kind in CORRUPTED else inputs, profile)
            _do(journal, rows, kind=kind, network=subject.name, seed=subject.seed)
    if ours and (not kinds or "ensemble" in kinds):
        rows = partial(measure.ensemble, ours, corrupted, profile)
        _do(journal, rows, kind="ensemble", network=ours[0].name, seed=None)
    for subject in near_subjects(profile, inputs, out / "networks", NEAR_SEEDS) if not kinds or "near" in kinds else ():
        rows = partial(measure.novelty, subject, inputs, profile, near=True)
        _do(journal, rows, kind="near", network=subject.name, seed=subject.seed)
    for dataset, split in product(datasets, range(1, profile.tables + 1)) if not kinds or "sensor" in kinds else ():
        _do(journal, partial(measure.sensor, dataset, split), kind="sensor", network=dataset, seed=split)
    return journal.path


def _do(journal: Journal, rows: Callable[[], Iterator[measure.Row]], **key: object) -> None:
    """Measure what is not on record yet."""
    if not journal.has(**key):
        measured, seconds = timed(lambda: list(rows()))
        journal.add({**key, **row, "seconds": round(seconds, 3)} for row in measured)
