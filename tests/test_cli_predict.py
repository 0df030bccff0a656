"""`mcbn fit` and `mcbn predict`: files of every format in, the library's own numbers out."""

from pathlib import Path

import numpy as np
import pytest
import torch

import mcbn
from command_line import (
    COLUMNS,
    FIT,
    MODEL,
    MODULE,
    arrays,
    assert_refused,
    by_hand,
    evaluate,
    invoke,
    network,
    predict,
)
from mcbn import tables
from workplace import NAMES, read_csv, write_csv

pytestmark = pytest.mark.usefixtures("at_work")


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
        options = ("--data", data, "--out", "pred.npz", "--overwrite")
        result = invoke("predict", "--posterior", "csv.mcbn", *MODEL, *options)
        assert result.exit_code == 0, result.output
        with np.load("pred.npz") as file:
            found[data] = file["mean"]
    for data, mean in found.items():
        np.testing.assert_allclose(mean, found["test.npz"], rtol=1e-5, atol=1e-6, err_msg=data)


def test_prediction_in_blocks_equals_prediction_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert predict("--data", "test.npz", "--out", "whole.npz").exit_code == 0
    monkeypatch.setattr(tables, "MOST_ROWS", 7)
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
        options = ("--data", train, "--tune", val, "--target", "-1", "--out", "bare.mcbn", "--overwrite")
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


def test_fit_obeys_its_options() -> None:
    def fitted(*options: str) -> mcbn.Posterior:
        result = invoke("fit", *FIT, *options, "--out", "other.mcbn", "--overwrite")
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
        options = (*options, "--coverage", "0.5", "--overwrite")
        assert predict("--data", "test_x.npy", "--out", "pred.csv", *options).exit_code == 0
        found = read_csv(Path("pred.csv"))
        np.testing.assert_allclose(found["std"], pred.std.numpy(), rtol=1e-4)
        np.testing.assert_allclose(found["high"] - found["low"], 2 * 0.67449 * pred.std.numpy(), rtol=1e-4)


def test_images_go_to_npz_and_not_to_a_table() -> None:
    x = np.random.default_rng(0).normal(size=(30, 2, 5, 4)).astype(np.float32)
    np.save("images.npy", x)
    fit = ("--data", "images.npy", "--task", "regression", "--batch-size", "8", "--out", "images.mcbn")
    assert invoke("fit", "--model", f"{MODULE}:pixels", "--own-weights", *fit).exit_code == 0
    options = ("--posterior", "images.mcbn", "--model", f"{MODULE}:pixels", "--own-weights", "--data", "images.npy")
    result = invoke("predict", *options, "--out", "maps.npz")
    assert result.exit_code == 0, result.output
    assert "the noise was never tuned" in result.stderr
    assert result.stderr.count("\n") == 1
    with np.load("maps.npz") as file:
        assert file["std"].shape == (30, 1, 5, 4)
    assert_refused(invoke("predict", *options, "--out", "maps.csv"), "shape", ".npz")
    assert not Path("maps.csv").exists()
