"""The study of shifts: corruptions by their formulas, baselines by theirs, and the study in small."""

import dataclasses
from pathlib import Path

from cifar import images, trained
from mcbn_study.cifar10.train import save_network
from mcbn_study.journal import read
from mcbn_study.shift import run as study
from mcbn_study.shift.profile import QUICK, Inputs

TINY = dataclasses.replace(
    QUICK, near=dataclasses.replace(QUICK.near, steps=4, rates=((0, 0.01),), batch_size=8), stream=(2, 20, 2)
)


def small_inputs() -> Inputs:
    parts = [images(n, seed) for n, seed in ((60, 1), (20, 2), (1500, 3))]
    return Inputs(*parts, {"other": images(20, 9).x}, None)


def test_study_measures_and_records_once(tmp_path: Path) -> None:
    folder = tmp_path / "nets"
    folder.mkdir()
    for seed in (1, 2):
        save_network(trained(), folder / f"resnet8-seed{seed}.safetensors", {"seed": seed})
    options = {"networks": folder, "datasets": ["yacht"]}
    path = study.run(TINY, small_inputs(), tmp_path / "out", **options)
    records = read(path)
    assert {r["kind"] for r in records} == {*study.MEASUREMENTS, "ensemble", "near", "sensor"}
    study.run(TINY, small_inputs(), tmp_path / "out", **options)
    assert read(path) == records
