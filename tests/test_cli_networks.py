"""Networks of every kind on the command line: sigmoids, heads with a variance, several labels, the plain mean."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import CLASSES, MODEL, arrays, assert_refused, invoke, network
from mcbn import scale
from mcbn.tables.formats import CsvTable
from test_cli_tables import read, table, write
from workplace import write_csv

pytestmark = pytest.mark.usefixtures("at_work")

OWN = """
import torch
from torch import nn

class ByHand(nn.Module):
    def forward(self, x):
        return 1 / (1 + torch.exp(-x))

def body(units):
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8, momentum=None)
    network = nn.Sequential(nn.Linear(3, 8), norm, nn.Tanh(), nn.Linear(8, units))
    network(torch.randn(200, 3))
    return network.eval()

def head():
    return body(2)

def pair():
    return body(2)

def labels():
    return nn.Sequential(body(3), nn.Sigmoid())

def by_hand():
    return nn.Sequential(body(1), ByHand())
"""


def own(name: str, *arguments: str) -> tuple[str, ...]:
    Path("own_networks.py").write_text(OWN)
    return (*arguments, "--model", f"own_networks:{name}", "--own-weights")


def fit_own(name: str, task: str, *options: str) -> Any:
    return invoke(*own(name, "fit", "--task", task, "--batch-size", "16", "--samples", "20"), *options)


def done(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return result


def test_a_head_gives_its_own_noise() -> None:
    train = ("--data", "train.csv", "--target", "price", "--tune", "val.csv", "--out", "h.mcbn")
    done(fit_own("head", "regression", *train, "--noise", "head"))
    done(invoke(*own("head", "predict", "--posterior", "h.mcbn"), "--data", "test.csv", "--out", "h.csv"))
    columns = read("h.csv")
    assert list(columns) == ["mean", "std", "low", "high"]  # one output, not two
    assert len(set(columns["std"])) == 50
    done(invoke(*own("head", "evaluate", "--posterior", "h.mcbn"), "--data", "test.csv"))
    assert_refused(
        fit_own("head", "regression", *train, "--noise", "own", "--overwrite"), "noise must be one of", "'own'"
    )


def test_outputs_that_cannot_be_told_are_said_by_an_option() -> None:
    y = (arrays("train.npz")[1] > 0).long()
    np.savez("binary.npz", x=arrays("train.npz")[0].numpy(), y=y.numpy())
    options = ("--data", "binary.npz", "--out", "b.mcbn")
    assert_refused(fit_own("by_hand", "classification", *options), 'pass outputs="probs"')
    done(fit_own("by_hand", "classification", *options, "--outputs", "probs"))
    done(invoke(*own("by_hand", "predict", "--posterior", "b.mcbn"), "--data", "test_x.npy", "--out", "b.npz"))
    import own_networks  # type: ignore[import-not-found]

    plain = own_networks.by_hand()(torch.from_numpy(np.load("test_x.npy"))).detach()[:, 0].numpy()
    with np.load("b.npz") as file:
        np.testing.assert_allclose(file["probs"][:, 1], plain, atol=0.1)  # squashed twice: 0.5 and more


def test_several_labels_an_input() -> None:
    for part in ("train", "test"):
        x = arrays(f"{part}.npz")[0].numpy()
        write(
            f"{part}_several.csv", table(part, warm=(x[:, 0] > 0) * 1, tall=(x[:, 1] > 0) * 1, wide=(x[:, 2] > 0) * 1)
        )
    data = ("--data", "train_several.csv", "--target", "warm,tall,wide", "--key", "id", "--out", "s.mcbn")
    done(fit_own("labels", "multilabel", *data, "--tune", "train_several.csv"))
    arguments = (*own("labels", "predict", "--posterior", "s.mcbn"), "--data", "test_several.csv", "--out", "s.csv")
    done(invoke(*arguments, "--key", "id"))
    columns = read("s.csv")
    assert [name for name in columns if name.startswith(("prob", "label"))] == [
        *(f"prob_{k}" for k in range(3)),
        *(f"label_{k}" for k in range(3)),
    ]
    for k in range(3):
        assert [int(float(p) > 0.5) for p in columns[f"prob_{k}"]] == list(map(int, columns[f"label_{k}"]))
    done(invoke(*arguments, "--overwrite"))  # it is known for an old result
    scores = json.loads(
        done(invoke(*own("labels", "evaluate", "--posterior", "s.mcbn"), "--data", "test_several.csv", "--json")).stdout
    )
    assert 0 < scores["mcbn"]["nll"] < 2
    named = fit_own("labels", "multilabel", *data[:-1], "t.mcbn", "--classes", "a,b,c")
    assert_refused(named, "--classes names those of --task classification", "multilabel")


def test_the_networks_own_mean_is_an_option() -> None:
    options = ("--posterior", "csv.mcbn", *MODEL, "--data", "test.csv")
    for mean in ("drawn", "plain"):
        done(invoke("predict", *options, "--mean", mean, "--out", f"{mean}.csv"))
    drawn, plain = read("drawn.csv"), read("plain.csv")
    x = torch.from_numpy(np.load("test_x.npy"))
    expected = network().eval()(x).detach().numpy()
    np.testing.assert_allclose(np.array(plain["mean"], dtype=float), expected, rtol=1e-5, atol=1e-5)
    assert plain["std"] == drawn["std"]
    scores = [json.loads(done(invoke("evaluate", *options, "--mean", m, "--json")).stdout) for m in ("drawn", "plain")]
    rmse = float(np.sqrt(np.mean((expected - arrays("test.npz")[1].numpy()) ** 2)))
    assert scores[1]["mcbn"]["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert scores[1]["worse_mean"] is None
    assert scores[0]["mcbn"]["rmse"] != scores[1]["mcbn"]["rmse"]
    assert_refused(invoke("predict", *options, "--mean", "median", "--out", "m.csv"), "mean must be one of", "'median'")


def test_files_of_a_folder_take_the_networks_own_mean_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(Path("test.csv").read_text())
    options = ("--posterior", "csv.mcbn", *MODEL, "--data", str(tmp_path / "in"))
    done(invoke("predict", *options, "--mean", "plain", "--out", str(tmp_path / "out")))
    done(
        invoke("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "test.csv", "--mean", "plain", "--out", "p.csv")
    )
    results = scale.read_results(tmp_path / "out").to_pydict()
    np.testing.assert_allclose(results["mean"], np.array(read("p.csv")["mean"], dtype=float), rtol=1e-6)
    other = invoke("predict", *options, "--resume", "--out", str(tmp_path / "out"))
    assert_refused(other, "belongs to another job", "options")
    assert_refused(invoke("predict", *options, "--mean", "best", "--out", str(tmp_path / "o")), "mean must be one of")
    assert not (tmp_path / "o").exists()
    risk = invoke("predict", *options, "--risk", "0.1", "--out", str(tmp_path / "o"))
    assert_refused(risk, "--risk marks the rows of one file")


def test_a_row_taken_for_names_of_columns_is_told() -> None:
    x, y = arrays("train_labels.npz")
    rows = [[*row, ("cat", "dog", "eel", "fox")[k]] for row, k in zip(x.tolist(), y.tolist(), strict=True)]
    write_csv(Path("bare.csv"), None, rows)  # as many public sets come: no names, the label last
    fit = (*CLASSES[2:], "--task", "classification", "--batch-size", "16", "--out", "bare.mcbn")
    said = done(invoke("fit", *fit, "--data", "bare.csv", "--target", "-1", "--classes", "cat,dog,eel,fox"))
    assert "its first line" in said.stderr
    assert "is taken for the names of columns" in said.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for names in (("id", "2019", "2020", "price"), ("a", "b", "c", "kind")):  # years are names, too
            write_csv(Path("named.csv"), names, [[1, 2.0, 3.0, 4.0]] if "2019" in names else rows)
            assert CsvTable(Path("named.csv")).names == names


def test_another_encoding_is_told_with_its_cure() -> None:
    for encoding in ("utf-16", "latin-1"):
        Path("other.csv").write_bytes("größe,b,c\n1,2,3\n".encode(encoding))
        refused = invoke("predict", "--posterior", "net.mcbn", *MODEL, "--data", "other.csv", "--out", "o.csv")
        assert_refused(refused, "not a text file in UTF-8", "save it as such")
