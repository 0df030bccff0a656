"""The pages under results/ are what their records say: written anew, they do not differ by a byte."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mcbn_study.journal import digest, read

RESULTS = Path(__file__).parents[2] / "results"
TEXTS = (".md", ".csv", ".tex")
ANTIALIASING = 0.5  # of 255, on average: what versions of fonts and freetype change, a moved line does not
WRITERS = {  # by the folder they write to: module and function, of mcbn_study where nothing else is said
    "alternatives": "alternatives.report:write",
    "cifar10": "cifar10.report:write",
    "comparison": "comparison:report",
    "correlations": "statistics:report_correlations",
    "coverage": "coverage.run:report",
    "estimators": "estimators:run",  # all of it is on record
    "foreign": "foreign.run:write_report",
    "labels": "labels:report",
    "objective": "regularizer:report_objective",
    "posteriors": "posteriors.report:write",
    "precision": "sensitivity:report_precision",
    "regression": "regression.report:write",
    "regularizer": "regularizer:report",
    "segmentation": "segmentation.report:write",
    "segmentation_shift": "segmentation.shift:write_report",
    "shift": "shift.report:write",
    "statistics": "statistics:report",
    "zoo": "mcbn_benchmarks.zoo.table:write",
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results: pages left out, records copied, the rest linked to."""
    if not RESULTS.is_dir():
        pytest.skip("no results beside these tests")

    def copy(source: str, target: str) -> None:
        if Path(source).suffix == ".jsonl":
            shutil.copyfile(source, target)
        elif Path(source).suffix not in (*TEXTS, ".png"):
            os.symlink(source, target)

    target = tmp_path_factory.mktemp("results") / "results"
    shutil.copytree(RESULTS, target, copy_function=copy)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("folder", WRITERS)
def test_pages_written_from_the_records_are_those_that_are_there(folder: str, copied: Path) -> None:
    name, _, function = WRITERS[folder].partition(":")
    module = import_module(name if name.startswith("mcbn_") else f"mcbn_study.{name}")
    getattr(module, function)(copied if folder == "regression" else copied / folder)
    pages = [path for path in sorted((RESULTS / folder).iterdir()) if path.suffix in TEXTS]
    assert pages
    for page in pages:
        assert (copied / folder / page.name).read_text("utf-8") == page.read_text("utf-8"), page.name
    for drawn in sorted((copied / folder).rglob("*.png")):  # figures that records alone draw
        new, kept = (
            np.asarray(Image.open(path).convert("RGB"), float) for path in (drawn, RESULTS / drawn.relative_to(copied))
        )
        assert new.shape == kept.shape, drawn.name
        assert np.abs(new - kept).mean() < ANTIALIASING, drawn.name


def test_every_folder_with_pages_is_written_anew() -> None:
    with_pages = {path.parent.name for path in RESULTS.glob("*/*.md")} - {"solar_cells"}  # `make pages` writes it
    assert with_pages == set(WRITERS)


def test_settings_beside_records_are_those_of_the_records() -> None:
    folders = [path.parent for path in RESULTS.rglob("settings.json")]
    assert folders
    for folder in folders:
        settings = digest(json.loads((folder / "settings.json").read_text()))
        assert {record["config_hash"] for record in read(folder / "records.jsonl")} == {settings}, folder
