"""`mcbn fit`, `predict` and `evaluate` as a user types them in a furnished folder, and the same in Python."""

import json
import sys
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner, Result

import mcbn
from mcbn.cli import app

MODULE = "nets_of_the_command_line"
MODEL = ("--model", f"{MODULE}:make", "--weights", "make.pt")
CLASSES = ("--posterior", "class.mcbn", "--model", f"{MODULE}:classes", "--weights", "classes.pt")
FIT = (*MODEL, "--data", "train.npz", "--task", "regression", "--batch-size", "16", "--samples", "30")
COLUMNS = ["mean", "std", "low", "high"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def fit_all() -> None:
    """Fit a posterior on npz files, one on csv files and one on labels, where the data is."""
    tables = ("--data", "train.csv", "--tune", "val.csv", "--target", "price", "--out", "csv.mcbn")
    labels = ("--data", "train_labels.npz", "--task", "classification", "--batch-size", "16", "--out", "class.mcbn")
    for options in ((*FIT, "--tune", "val.npz", "--out", "net.mcbn"), (*FIT, *tables), (*CLASSES[2:], *labels)):
        result = invoke("fit", *options)
        assert result.exit_code == 0, result.output


def predict(*arguments: str) -> Result:
    return invoke("predict", "--posterior", "net.mcbn", *MODEL, *arguments)


def evaluate(*arguments: str) -> dict[str, Any]:
    result = invoke("evaluate", *MODEL, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def arrays(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(name) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def network(name: str = "make") -> torch.nn.Module:
    net = getattr(sys.modules[MODULE], name)()
    net.load_state_dict(torch.load(f"{name}.pt", weights_only=True))
    return net  # type: ignore[no-any-return]


def by_hand() -> mcbn.MCBN[mcbn.RegressionPrediction]:
    """What the commands should come to, in Python."""
    bayes = mcbn.MCBN(network(), "regression")
    return bayes.fit(arrays("train.npz")[0], n_samples=30, batch_size=16, seed=0).tune(arrays("val.npz"))


def assert_refused(result: Result, *words: str, code: int = 2) -> None:
    """One line on stderr that says all this, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("mcbn: ")
    for word in words:
        assert word in lines[0]
