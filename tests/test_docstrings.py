"""Examples in docstrings do what they say."""

import doctest
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mcbn

SOURCE = Path(mcbn.__file__).parent
SHOWN = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text()]


@cache
def fitted(task: str) -> mcbn.MCBN:
    """A network of 3 inputs under MCBN: one output, or 3 classes."""
    norm, x = torch.nn.BatchNorm1d(8, momentum=None), data()["x"]
    network = torch.nn.Sequential(
        torch.nn.Linear(3, 8), norm, torch.nn.ReLU(), torch.nn.Linear(8, 1 + 2 * (task != "regression"))
    )
    network(x)
    return mcbn.MCBN(network.eval(), task).fit(x, n_samples=20, batch_size=16)


def data() -> dict[str, Any]:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": x.sum(1, keepdim=True), "labels": x.argmax(1)}


def ready(folder: Path) -> dict[str, Any]:
    """Names that examples may use: fitted networks, which they may change, data for them, and a folder."""
    names = {"bayes": "regression", "classifier": "classification"}
    twins = {name: fitted(task).with_posterior(fitted(task).posterior) for name, task in names.items()}
    return {"mcbn": mcbn, "torch": torch, "folder": folder} | data() | twins


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(SOURCE)))
def test_examples_run_as_printed(path: Path, tmp_path: Path) -> None:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    try:
        module = importlib.import_module(name)
    except mcbn.MCBNError as error:  # an extra is not installed
        pytest.skip(str(error))
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(module, name):
        example.globs = ready(tmp_path) | example.globs
        runner.run(example)
    assert runner.tries
    assert not runner.failures


@pytest.mark.parametrize(
    "kind", [mcbn.MCBN, mcbn.RegressionPrediction, mcbn.ClassificationPrediction, mcbn.MultilabelPrediction]
)
def test_every_method_shows_an_example(kind: type) -> None:
    for name, method in vars(kind).items():
        if callable(method) and not name.startswith("_") and name not in SEAM:
            assert ">>> " in method.__doc__ or f".{name}(" in kind.__doc__.partition(">>> ")[2], name


SEAM = {"adopt", "adopt_fit", "copy_network", "draws", "engine_for"}  # of MCBN: what other code builds on
