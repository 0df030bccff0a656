"""`mcbn fit`, `mcbn predict`, `mcbn evaluate` on real files."""

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import mcbn
from mcbn import metrics
from mcbn.cli import app
from mcbn.tabular import source
from workplace import NAMES, command, environment, furnish, read_csv, run, working_in, write_csv

MODULE = "nets_of_the_command_line"
MODEL = ("--model", f"{MODULE}:make", "--weights", "make.pt")
FIT = (*MODEL, "--data", "train.npz", "--task", "regression", "--batch-size", "16", "--samples", "30")
COLUMNS = ["mean", "std", "low", "high"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with a posterior fitted on npz files and one on csv files."""
    made = tmp_path_factory.mktemp("work")
    furnish(made, MODULE)
    before = Path.cwd()
    os.chdir(made)
    try:
        assert invoke("fit", *FIT, "--tune", "val.npz", "--out", "net.mcbn").exit_code == 0
        tables = ("--data", "train.csv", "--tune", "val.csv", "--target", "price", "--out", "csv.mcbn")
        assert invoke("fit", *FIT, *tables).exit_code == 0
        labels = ("--data", "train_labels.npz", "--task", "classification", "--batch-size", "16", "--out", "class.mcbn")
        assert invoke("fit", "--model", f"{MODULE}:classes", "--weights", "classes.pt", *labels).exit_code == 0
    finally:
        os.chdir(before)
    return made


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with working_in(folder, monkeypatch):
        yield


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


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


def test_fit_and_predict_equal_the_library() -> None:
    assert predict("--data", "test.npz", "--out", "pred.npz").exit_code == 0
    pred = by_hand().predict(arrays("test.npz")[0])
    low, high = pred.interval(0.95)
    with np.load("pred.npz") as file:
        for name, expected in zip(COLUMNS, (pred.mean, pred.std, low, high), strict=True):
            np.testing.assert_allclose(file[name], expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_every_output_format_holds_the_same_numbers(suffix: str) -> None:
    assert predict("--data", "test.npz", "--out", "pred.npz").exit_code == 0
    assert predict("--data", "test.npz", "--out", f"pred.{suffix}").exit_code == 0
    with np.load("pred.npz") as file:
        expected = dict(file)
    if suffix == "csv":
        found = read_csv(Path("pred.csv"))
        assert "".join(Path("pred.csv").read_text().splitlines()[:1]) == ",".join(COLUMNS)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        found = {name: np.array(column) for name, column in parquet.read_table("pred.parquet").to_pydict().items()}
    assert list(found) == COLUMNS
    for name in COLUMNS:
        assert (found[name].astype(np.float32) == expected[name]).all()  # all digits are there


def test_every_input_format_gives_the_same_predictions() -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    x, y = arrays("test.npz")
    table = dict(zip(NAMES, torch.cat([x, y[:, None]], 1).T.numpy(), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(table), "test.parquet")
    np.save("fortran.npy", np.asfortranarray(x.numpy()))
    found = {}
    for data in ("test.npz", "test_x.npy", "fortran.npy", "test.csv", "test.parquet", f"{MODULE}:test_loader"):
        result = invoke("predict", "--posterior", "csv.mcbn", *MODEL, "--data", data, "--out", "pred.npz")
        assert result.exit_code == 0, result.output
        with np.load("pred.npz") as file:
            found[data] = file["mean"]
    for data, mean in found.items():
        np.testing.assert_allclose(mean, found["test.npz"], rtol=1e-5, atol=1e-6, err_msg=data)


def test_prediction_in_blocks_equals_prediction_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert predict("--data", "test.npz", "--out", "whole.npz").exit_code == 0
    monkeypatch.setattr(source, "MOST_ROWS", 7)
    for suffix in ("npz", "csv"):
        assert predict("--data", "test.npz", "--out", f"blocks.{suffix}").exit_code == 0
    with np.load("whole.npz") as whole, np.load("blocks.npz") as blocks:
        for name in COLUMNS:
            np.testing.assert_allclose(blocks[name], whole[name], rtol=1e-5)
        np.testing.assert_allclose(read_csv(Path("blocks.csv"))["mean"], whole["mean"], rtol=1e-5)


def test_columns_are_found_by_name_in_any_order_among_others() -> None:
    x, _ = arrays("test.npz")
    rows = [["it's, me", w, a, h] for a, h, w in x.tolist()]
    write_csv(Path("mixed.csv"), ["id", "weight", "age", "height"], rows, delimiter=";")
    for data, out in (("test.csv", "a.csv"), ("mixed.csv", "b.csv")):
        assert invoke("predict", "--posterior", "csv.mcbn", *MODEL, "--data", data, "--out", out).exit_code == 0
    assert Path("a.csv").read_text() == Path("b.csv").read_text()


def test_a_table_without_header_takes_targets_by_place() -> None:
    for part in ("train", "val", "test"):
        x, y = arrays(f"{part}.npz")
        np.save(f"{part}.npy", torch.cat([x, y[:, None]], 1).numpy())
        write_csv(Path(f"bare_{part}.csv"), None, np.load(f"{part}.npy").tolist())
    expected = evaluate("--posterior", "net.mcbn", "--data", "test.npz")
    for train, val, test in (("bare_train.csv", "bare_val.csv", "bare_test.csv"), ("train.npy", "val.npy", "test.npy")):
        options = ("--data", train, "--tune", val, "--target", "-1", "--out", "bare.mcbn")
        assert invoke("fit", *FIT, *options).exit_code == 0
        found = evaluate("--posterior", "bare.mcbn", "--data", test)  # the fit's --target is remembered
        assert found["mcbn"] == pytest.approx(expected["mcbn"], rel=1e-4)


def test_a_loader_draws_the_same_batches_as_its_arrays() -> None:
    options = (*MODEL, "--data", f"{MODULE}:train_loader", "--task", "regression", "--samples", "30")
    assert invoke("fit", *options, "--out", "loader.mcbn").exit_code == 0
    loaded, direct = (mcbn.MCBN.load(name, network()).posterior for name in ("loader.mcbn", "net.mcbn"))
    assert loaded.batch_size == direct.batch_size == 16
    for name in direct.layers:
        torch.testing.assert_close(loaded.mean[name], direct.mean[name])


@pytest.mark.parametrize("factory", ["test_loader", "dataset", "streamed", "tensors", "dicts", "generated"])
def test_whatever_a_factory_returns_is_scored_alike(factory: str) -> None:
    data = f"{MODULE}:{factory}"
    expected = evaluate("--posterior", "net.mcbn", "--data", "test.npz", "--tune", "test.npz")
    found = evaluate("--posterior", "net.mcbn", "--data", data, "--tune", data)
    for part in ("mcbn", "constant"):
        assert found[part] == pytest.approx(expected[part], rel=1e-4)
    assert predict("--data", data, "--out", "pred.csv").exit_code == 0
    assert len(read_csv(Path("pred.csv"))["mean"]) == 50


def test_fit_obeys_its_options() -> None:
    def fitted(*options: str) -> mcbn.Posterior:
        result = invoke("fit", *FIT, *options, "--out", "other.mcbn")
        assert result.exit_code == 0, result.output
        return mcbn.MCBN.load("other.mcbn", network()).posterior

    plain = fitted()
    assert torch.equal(fitted("--seed", "0").mean["1"], plain.mean["1"])
    assert not torch.equal(fitted("--seed", "1").mean["1"], plain.mean["1"])
    assert fitted("--posterior", "gaussian").family == "gaussian"
    assert fitted("--samples", "7").n_samples == 7
    assert list(fitted("--layers", "1").layers) == list(plain.layers)
    torch.save({"state_dict": {f"module.{k}": v for k, v in network().state_dict().items()}}, "checkpoint.pt")
    assert torch.equal(fitted("--weights", "checkpoint.pt").mean["1"], plain.mean["1"])


def test_safetensors_weights_are_the_same_weights() -> None:
    from safetensors.torch import save_file

    save_file(network().state_dict(), "make.safetensors")
    options = ("--posterior", "net.mcbn", "--model", f"{MODULE}:make", "--data", "test_x.npy")
    assert invoke("predict", *options, "--weights", "make.safetensors", "--out", "a.csv").exit_code == 0
    assert invoke("predict", *options, "--weights", "make.pt", "--out", "b.csv").exit_code == 0
    assert Path("a.csv").read_text() == Path("b.csv").read_text()


def test_predict_obeys_its_options() -> None:
    x, _ = arrays("test.npz")
    bayes = by_hand()
    for options, pred in (
        (("--method", "linear"), bayes.predict(x, method="linear")),
        (("--samples", "5"), bayes.predict(x, n_samples=5)),
    ):
        assert predict("--data", "test_x.npy", "--out", "pred.csv", "--coverage", "0.5", *options).exit_code == 0
        found = read_csv(Path("pred.csv"))
        np.testing.assert_allclose(found["std"], pred.std.numpy(), rtol=1e-4)
        np.testing.assert_allclose(found["high"] - found["low"], 2 * 0.67449 * pred.std.numpy(), rtol=1e-4)


def test_several_outputs_are_numbered_and_scored() -> None:
    model = ("--model", f"{MODULE}:pair", "--weights", "pair.pt")
    for part in ("train", "val", "test"):
        x, y = arrays(f"{part}.npz")
        rows = torch.cat([x, torch.stack([y, -y], 1)], 1).tolist()
        write_csv(Path(f"pair_{part}.csv"), ["a", "b", "c", "up", "down"], rows)
    tables = ("--data", "pair_train.csv", "--tune", "pair_val.csv", "--target", "up,down", "--out", "pair.mcbn")
    assert invoke("fit", *model, *tables, "--task", "regression", "--batch-size", "16").exit_code == 0
    common = ("--posterior", "pair.mcbn", *model, "--data", "pair_test.csv")
    assert invoke("predict", *common, "--out", "pair.csv").exit_code == 0
    assert list(read_csv(Path("pair.csv"))) == [f"{name}_{d}" for name in COLUMNS for d in (0, 1)]
    result = invoke("evaluate", *common, "--json")
    report = json.loads(result.stdout)
    assert len(report["constant_tau"]) == len(report["tau"]) == 2
    assert 0.8 < report["coverage"]["0.95"] <= 1


def test_evaluate_equals_the_definitions() -> None:
    report = evaluate("--posterior", "net.mcbn", "--data", "test.npz", "--coverage", "0.8")
    x, y = arrays("test.npz")
    bayes = by_hand()
    pred = bayes.predict(x)
    mean, std, target = (part.double().numpy() for part in (pred.mean, pred.std, y))
    assert report["tau"] == pytest.approx(bayes.tau, rel=1e-4)
    assert report["mcbn"]["rmse"] == pytest.approx(np.sqrt(((mean - target) ** 2).mean()), rel=1e-5)
    density = torch.distributions.Normal(bayes.sample(x).double(), float(bayes.tau) ** -0.5).log_prob(y.double())
    assert report["mcbn"]["pll"] == pytest.approx((density.logsumexp(0) - math.log(30)).mean().item(), rel=1e-4)
    grid = np.linspace(-12, 12, 40001)  # CRPS as the integral it is
    cdf = torch.special.ndtr(torch.from_numpy((grid[:, None] - mean) / std)).numpy()
    crps = (((cdf - (grid[:, None] >= target)) ** 2).sum(0) * (grid[1] - grid[0])).mean()
    assert report["mcbn"]["crps"] == pytest.approx(crps, rel=1e-3)
    for level, width in (("0.5", 0.67449), ("0.8", 1.28155), ("0.95", 1.95996)):
        assert report["coverage"][level] == pytest.approx((abs(target - mean) <= width * std).mean())
    assert (report["n_points"], report["n_samples"], report["batch_size"]) == (50, 30, 16)


def test_the_constant_twin_is_the_best_constant_of_the_validation_data() -> None:
    x, y = arrays("val.npz")
    mean = by_hand().predict(x).mean
    taus = torch.logspace(-2, 3, 4001, dtype=torch.float64)
    scores = [metrics.crps_gaussian(mean, torch.full_like(mean, 1 / tau), y).mean().item() for tau in taus.tolist()]
    best = taus[int(np.argmin(scores))].item()
    of_fit = evaluate("--posterior", "net.mcbn", "--data", "test.npz")
    of_tune = evaluate("--posterior", "net.mcbn", "--data", "test.npz", "--tune", "val.npz")
    assert of_fit["constant_tau"] == pytest.approx(best, rel=5e-3)
    assert of_tune["constant_tau"] == pytest.approx(of_fit["constant_tau"], rel=1e-6)
    assert (of_fit["constant_tau_tuned_on"], of_tune["constant_tau_tuned_on"]) == (
        "the validation data of the fit",
        "val.npz",
    )
    test_x, test_y = arrays("test.npz")
    test_mean = by_hand().predict(test_x).mean
    constant = metrics.crps_gaussian(test_mean, torch.full_like(test_mean, 1 / of_fit["constant_tau"]), test_y)
    assert of_fit["constant"]["crps"] == pytest.approx(constant.mean().item(), rel=1e-5)
    optimum = metrics.crps_optimum(test_mean, test_y).mean().item()
    share = (of_fit["mcbn"]["crps"] - of_fit["constant"]["crps"]) / (optimum - of_fit["constant"]["crps"])
    assert of_fit["normalized_percent"]["crps"] == pytest.approx(100 * share, rel=1e-3)


def test_a_twin_without_validation_data_is_tuned_on_the_scored_data_and_says_so() -> None:
    bayes = by_hand()
    bayes.save("plain.mcbn")
    report = evaluate("--posterior", "plain.mcbn", "--data", "test.npz")
    assert "scored data itself" in report["constant_tau_tuned_on"]
    assert report["constant"]["crps"] <= evaluate("--posterior", "net.mcbn", "--data", "test.npz")["constant"]["crps"]
    text = invoke("evaluate", *MODEL, "--posterior", "plain.mcbn", "--data", "test.npz").stdout
    assert "tuned on the scored data itself" in text
    assert "inside the 95 % interval" in text


def test_classification_writes_probabilities_and_scores_them() -> None:
    model = ("--posterior", "class.mcbn", "--model", f"{MODULE}:classes", "--weights", "classes.pt")
    assert invoke("predict", *model, "--data", "test_x.npy", "--out", "pred.csv").exit_code == 0
    found = read_csv(Path("pred.csv"))
    assert list(found) == [*(f"prob_{k}" for k in range(4)), "label", "entropy", "mutual_information"]
    probs = np.stack([found[f"prob_{k}"] for k in range(4)], 1)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)
    assert (found["label"] == probs.argmax(1)).all()
    np.testing.assert_allclose(found["entropy"], -(probs * np.log(probs)).sum(1), rtol=1e-4)
    result = invoke("evaluate", *model, "--data", "test_labels.npz", "--json")
    report, y = json.loads(result.stdout), arrays("test_labels.npz")[1].numpy()
    right = probs.argmax(1) == y
    assert report["mcbn"]["accuracy"] == pytest.approx(right.mean())
    assert report["mcbn"]["nll"] == pytest.approx(-np.log(probs[np.arange(50), y]).mean(), rel=1e-4)
    assert report["mcbn"]["brier"] == pytest.approx(((probs - np.eye(4)[y]) ** 2).sum(1).mean(), rel=1e-4)
    pairs = found["entropy"][~right][:, None] - found["entropy"][right]
    assert report["mcbn"]["error_auroc"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2, rel=1e-4)
    plain = network("classes").eval()(arrays("test_labels.npz")[0]).softmax(1)
    assert report["plain"]["nll"] == pytest.approx(metrics.nll(plain.detach(), y).item(), rel=1e-4)
    assert "plain network" in invoke("evaluate", *model, "--data", "test_labels.npz").stdout


def test_images_go_to_npz_and_not_to_a_table() -> None:
    x = np.random.default_rng(0).normal(size=(30, 2, 5, 4)).astype(np.float32)
    np.save("images.npy", x)
    fit = ("--data", "images.npy", "--task", "regression", "--batch-size", "8", "--out", "images.mcbn")
    assert invoke("fit", "--model", f"{MODULE}:pixels", *fit).exit_code == 0
    options = ("--posterior", "images.mcbn", "--model", f"{MODULE}:pixels", "--data", "images.npy")
    result = invoke("predict", *options, "--out", "maps.npz")
    assert result.exit_code == 0, result.output
    assert "tau was never tuned" in result.stderr
    assert result.stderr.count("\n") == 1
    with np.load("maps.npz") as file:
        assert file["std"].shape == (30, 1, 5, 4)
    assert_refused(invoke("predict", *options, "--out", "maps.csv"), "shape", ".npz")
    assert not Path("maps.csv").exists()


def assert_refused(result: Result, *words: str, code: int = 2) -> None:
    """One line on stderr that says all this, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("mcbn: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "nowhere.npz"), ("no file nowhere.npz",)),
        (("--data", "make.pt"), (".csv", ".npz")),
        (("--data", "."), ("folder",)),
        (("--data", "train.npz", "--model", "no.such.module:make"), ("cannot import", "no.such.module")),
        (("--data", "train.npz", "--model", f"{MODULE}:maker"), ("no 'maker'", "did you mean 'make'")),
        (("--data", "train.npz", "--model", f"{MODULE}.py"), ("package.module:factory",)),
        (("--data", "train.npz", "--model", f"{MODULE}:needs_an_argument"), ("without arguments", "width")),
        (("--data", "train.npz", "--model", f"{MODULE}:number"), ("int", "torch.nn.Module")),
        (("--data", "train.npz", "--model", f"{MODULE}:constant"), ("int", "torch.nn.Module")),
        (("--data", "train.npz", "--weights", "nowhere.pt"), ("no file nowhere.pt",)),
        (("--data", "train.npz", "--weights", "train.npz"), ("not a file of weights",)),
        (("--data", "train.npz", "--weights", "classes.pt"), ("are not those of Sequential", "3.weight")),
        (("--data", "train.csv"), ("4 input columns", "--target")),
        (("--data", "train.csv", "--target", "prize"), ("no column 'prize'", "'price'")),
        (("--data", "train.npz", "--target", "z"), ("no array 'z'", "'x'")),
        (("--data", "train.npz", "--task", "regresion"), ("regression", "classification")),
        (("--data", "train.npz", "--posterior", "normal"), ("posterior", "gaussian")),
        (("--data", "train.npz", "--layers", "bn9"), ("bn9",)),
        (("--data", "train.npz", "--device", "abacus"), ("--device abacus",)),
        (("--data", "train.npz", "--tune", "val_x.npy"), ("--target",)),
        (("--data", "train.npz", "--batch-size", "0"), ("batch_size",)),
        (("--data", "train.npz", "--out", "nowhere/net.mcbn"), ("folder nowhere does not exist",)),
        (("--data", f"{MODULE}:number"), ("a int",)),
    ],
)
def test_fit_says_in_one_line_what_is_wrong(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    before = sorted(os.listdir())
    assert_refused(invoke("fit", *FIT, "--out", "bad.mcbn", *options), *words)
    assert sorted(os.listdir()) == before


def test_fit_asks_for_the_batch_size_of_arrays() -> None:
    options = ("--data", "train.npz", "--task", "regression", "--out", "bad.mcbn")
    assert_refused(invoke("fit", *MODEL, *options), "--batch-size")


def test_weights_that_would_run_code_are_refused() -> None:
    torch.save(torch.nn.Linear(2, 2), "pickled.pt")
    assert_refused(
        invoke("fit", *FIT, "--weights", "pickled.pt", "--out", "bad.mcbn"), "not a file of weights", "state_dict"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["1,2,3", "4,5"], ("row 2 (line 3)", "2 columns", "3")),
        (["1,2,3", "4,5,6", "7,tall,9"], ("row 3 (line 4)", "column 'height'", "'tall' is not a number")),
        (["1,2,3", "", "4,,6"], ("row 2 (line 4)", "column 'height'", "'' is not a number")),
        (["1,2,nan"], ("row 1", "column 'weight'", "nan")),
        ([], ("no rows",)),
    ],
)
def test_a_bad_cell_is_named_by_row_and_column(rows: list[str], words: tuple[str, ...]) -> None:
    Path("bad.csv").write_text("\n".join(["age,height,weight", *rows]) + "\n")
    before = sorted(os.listdir())
    assert_refused(predict("--data", "bad.csv", "--out", "pred.csv"), "bad.csv", *words)
    assert sorted(os.listdir()) == before


def test_a_bad_cell_late_in_the_file_leaves_no_half_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_ROWS", 10)
    write_csv(Path("late.csv"), NAMES[:3], [[1, 2, 3]] * 95 + [[1, "x", 3]])
    Path("pred.csv").write_text("earlier result")
    before = sorted(os.listdir())
    assert_refused(predict("--data", "late.csv", "--out", "pred.csv"), "row 96 (line 97)", "column 'height'")
    assert Path("pred.csv").read_text() == "earlier result"
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "train.csv", "--posterior", "net.mcbn"), ("4 input columns", "fitted on 3")),
        (("--data", "wide.npy"), ("5 input columns", "fitted on 3")),
        (("--data", "wide.npz"), ("5 columns", "fitted on 3")),
        (("--data", "lacking.csv", "--posterior", "csv.mcbn"), ("lacks", "'weight'")),
        (("--data", "test_x.npy", "--posterior", "nowhere.mcbn"), ("no file nowhere.mcbn",)),
        (("--data", "test_x.npy", "--posterior", "train.npz"), ("train.npz", "safetensors")),
        (("--data", "test_x.npy", "--model", f"{MODULE}:pair", "--weights", "pair.pt"), ("another network",)),
        (("--data", "test_x.npy", "--out", "pred.xlsx"), (".csv, .parquet, .npz",)),
        (("--data", "test_x.npy", "--out", "nowhere/pred.csv"), ("folder nowhere does not exist",)),
        (("--data", "test_x.npy", "--coverage", "95"), ("between 0 and 1",)),
        (("--data", "test_x.npy", "--method", "guess"), ("sample", "linear")),
        (("--data", "test_x.npy", "--samples", "1000"), ("1000", "30 draws")),
        (("--data", "broken.npz"), ("broken.npz",)),
        (("--data", "text.npy"), ("not numbers",)),
        (("--data", "many.npz"), ("'a', 'b'", "'x'")),
    ],
)
def test_predict_says_in_one_line_what_is_wrong(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    np.save("wide.npy", np.zeros((4, 5)))
    np.savez("wide.npz", x=np.zeros((4, 5)))
    np.savez("many.npz", a=np.zeros((4, 3)), b=np.zeros((4, 3)))
    np.save("text.npy", np.array([["a"]]))
    Path("broken.npz").write_bytes(b"PK nothing")
    write_csv(Path("lacking.csv"), ["age", "height"], [[1, 2]])
    before = sorted(os.listdir())
    assert_refused(predict("--out", "pred.csv", *options), *words)
    assert sorted(os.listdir()) == before


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that even root cannot write to")
def test_a_folder_that_cannot_be_written_is_refused() -> None:
    assert_refused(predict("--data", "test_x.npy", "--out", "/proc/pred.csv"), "cannot use /proc/")
    assert_refused(invoke("fit", *FIT, "--out", "/proc/net.mcbn"), "cannot use /proc/")


def test_an_output_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "pred.csv")

    monkeypatch.setattr("os.replace", refuse)
    before = sorted(os.listdir())
    assert_refused(predict("--data", "test_x.npy", "--out", "pred.csv"), "pred.csv", "Permission denied")
    assert_refused(invoke("fit", *FIT, "--out", "new.mcbn"), "Permission denied")
    assert sorted(os.listdir()) == before


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_refused(predict("--data", "test_x.npy", "--out", "pred.parquet"), "pip install 'mcbn[parquet]'")


def test_bad_parquet_cells_are_named() -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    columns = {"age": [1.0, 2.0], "height": [1, 2], "weight": ["heavy", "light"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "text.parquet")
    assert_refused(predict("--data", "text.parquet", "--out", "pred.csv"), "row 1", "column 'weight'", "string")
    pyarrow.parquet.write_table(pyarrow.table(columns | {"weight": [1.0, None]}), "hole.parquet")
    assert_refused(predict("--data", "hole.parquet", "--out", "pred.csv"), "row 2", "column 'weight'", "empty")
    Path("no.parquet").write_text("nothing")
    assert_refused(predict("--data", "no.parquet", "--out", "pred.csv"), "not a parquet file")


def test_evaluate_needs_targets_and_a_noise_level() -> None:
    options = ("--posterior", "net.mcbn", *MODEL, "--data")
    assert_refused(invoke("evaluate", *options, "test_x.npy"), "--target")
    assert invoke("fit", *FIT, "--out", "untuned.mcbn").exit_code == 0
    assert_refused(invoke("evaluate", *MODEL, "--posterior", "untuned.mcbn", "--data", "test.npz"), "tau", "--tune")
    assert evaluate("--posterior", "untuned.mcbn", "--data", "test.npz", "--tune", "val.npz")["tau"] > 0


def test_other_weights_are_a_warning_of_one_line() -> None:
    result = invoke(
        "predict", "--posterior", "net.mcbn", "--model", f"{MODULE}:make", "--data", "test_x.npy", "--out", "p.csv"
    )
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0].startswith("mcbn: warning: net.mcbn was fitted on other weights")


def test_debug_shows_where_it_went_wrong() -> None:
    for arguments in (("--debug", "fit"), ("fit", "--debug")):
        result = invoke(*arguments, *FIT, "--data", "nowhere.npz", "--out", "bad.mcbn")
        assert isinstance(result.exception, mcbn.MCBNError)
    assert_refused(
        invoke("fit", *FIT, "--data", "nowhere.npz", "--out", "bad.mcbn"), "nowhere.npz"
    )  # nothing is left of it


def test_other_errors_are_one_line_too_and_exit_with_1() -> None:
    before = sorted(os.listdir())
    assert_refused(
        predict("--data", f"{MODULE}:failing", "--out", "pred.csv"), "IndexError: no such row", "--debug", code=1
    )
    assert_refused(predict("--data", f"{MODULE}:nothing", "--out", "pred.csv"), "holds no rows")
    assert sorted(os.listdir()) == before


def test_scores_that_do_not_exist_are_null_and_dashes() -> None:
    bayes = by_hand()
    x, y = arrays("test.npz")
    y[0] = bayes.predict(x).mean[0]  # predicted exactly: no optimum of the log likelihood
    np.savez("exact.npz", x=x.numpy(), y=y.numpy())
    bayes.save("plain.mcbn")
    assert evaluate("--posterior", "plain.mcbn", "--data", "exact.npz")["normalized_percent"]["pll"] is None
    text = invoke("evaluate", *MODEL, "--posterior", "plain.mcbn", "--data", "exact.npz").stdout
    assert re.search(r"PLL .*-$", text, re.MULTILINE)
    bad = invoke("evaluate", *MODEL, "--posterior", "plain.mcbn", "--data", "test.npz", "--coverage", "95")
    assert_refused(bad, "between 0 and 1")


def test_an_interruption_leaves_no_half_file() -> None:
    before = sorted(os.listdir())
    assert_refused(predict("--data", f"{MODULE}:interrupted", "--out", "pred.csv"), "interrupted", code=130)
    assert sorted(os.listdir()) == before


@pytest.mark.slow
def test_the_commands_run_as_processes(folder: Path) -> None:
    fit = run(folder, "fit", *FIT, "--tune", "val.csv", "--data", "train.csv", "--target", "price", "--out", "own.mcbn")
    assert fit.returncode == 0, fit.stderr
    assert fit.stderr == ""  # no bar where nobody looks
    assert "30" in fit.stdout
    assert "tau = " in fit.stdout
    common = ("--posterior", "own.mcbn", *MODEL, "--data", "test.csv")
    done = run(folder, "predict", *common, "--out", "own.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_csv(folder / "own.csv")["mean"]) == 50
    scores = run(folder, "evaluate", *common, "--json")
    expected = evaluate("--posterior", "csv.mcbn", "--data", "test.csv")
    assert json.loads(scores.stdout)["mcbn"] == pytest.approx(expected["mcbn"], rel=1e-5)
    wrong = run(folder, "fit", *FIT, "--model", "nowhere:make", "--out", "own.mcbn")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "cannot import 'nowhere'" in wrong.stderr


def write_large(path: Path, rows: int) -> None:
    """Write a table of the three inputs among ten other columns."""
    block = np.random.default_rng(0).normal(size=(1000, 13))
    lines = "\n".join(",".join(f"{value:.6f}" for value in row) for row in block.tolist()) + "\n"
    with path.open("w") as file:
        file.write(",".join([*NAMES[:3], *(f"other_{number}" for number in range(10))]) + "\n")
        for _ in range(rows // 1000):
            file.write(lines)


MEASURED = """
import resource, sys
from pathlib import Path
from mcbn import progress
from mcbn.cli import app
progress.SHOW_AFTER = 0
try:
    app(sys.argv[1:])
finally:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    # ru_maxrss of a new process begins with its parent's; VmHWM does not
    peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    print("peak", peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def on_a_terminal(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a process whose stderr is a terminal; return its exit code, its output and what the terminal saw."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    shown = b""
    with subprocess.Popen(
        arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        while part := _read(ours):
            shown += part
        output, _ = process.communicate(timeout=60)
    os.close(ours)
    return process.returncode, output, shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.slow
def test_a_large_csv_predicts_in_bounded_memory_with_a_bar_on_a_terminal(folder: Path) -> None:
    write_large(folder / "large.csv", 200_000)
    arguments = ("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "large.csv", "--out", "large_pred.csv")
    status, output, shown = on_a_terminal([sys.executable, "-c", MEASURED, *arguments], folder)
    assert status == 0, shown
    assert "200000 predictions" in output
    assert int(output.split("peak")[1]) < 1e6  # kB
    assert "predicting" in shown
    assert "/200000" in shown
    with (folder / "large_pred.csv").open() as file:
        assert sum(1 for _ in file) == 200_001


@pytest.mark.parametrize("factory", ["train_loader", "by_workers"])
def test_bars_count_batches_whichever_process_makes_them(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, tuple[int | None, list[int]]] = {}

    @contextmanager
    def bar(title: str, total: int | None, unit: str) -> Iterator[Any]:
        counts[title] = (total, [])
        yield counts[title][1].append

    monkeypatch.setattr("mcbn.cli.fitted.bar", bar)
    data = f"{MODULE}:{factory}"
    options = ("--data", data, "--tune", data, "--task", "regression", "--samples", "30", "--out", "bars.mcbn")
    assert invoke("fit", *MODEL, *options).exit_code == 0
    assert {title: (total, sum(ticks)) for title, (total, ticks) in counts.items()} == {
        "drawing": (30, 30),
        "tuning": (8, 8),
        "tuning the constant twin": (120, 120),
    }


@pytest.mark.slow
def test_ctrl_c_stops_a_process_without_a_half_file(folder: Path) -> None:
    write_large(folder / "large.csv", 200_000)
    before = sorted(os.listdir(folder))
    arguments = ("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "large.csv", "--out", "stopped.csv")
    with subprocess.Popen(
        command(*arguments), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 100
        while sorted(os.listdir(folder)) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)  # until it has begun to write
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "mcbn: interrupted\n")
    assert sorted(os.listdir(folder)) == before
