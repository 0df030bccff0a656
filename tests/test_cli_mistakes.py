"""Mistakes on the command line: one line that says what is wrong, and nothing half-written."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mcbn
from command_line import FIT, MODEL, MODULE, assert_refused, invoke, predict
from mcbn import tables
from workplace import NAMES, write_csv

pytestmark = pytest.mark.usefixtures("at_work")


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
        (("--data", "train.csv", "--target", "prize"), ("lacks the target column(s) 'prize'", "'price'")),
        (("--data", "train.npz", "--target", "z"), ("no array 'z'", "'x'")),
        (("--data", "train.npz", "--task", "regresion"), ("regression", "classification")),
        (("--data", "train.npz", "--posterior", "normal"), ("posterior", "gaussian")),
        (("--data", "train.npz", "--layers", "bn9"), ("bn9",)),
        (("--data", "train.npz", "--layers", "²"), ("²",)),
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
    monkeypatch.setattr(tables, "MOST_ROWS", 10)
    write_csv(Path("late.csv"), NAMES[:3], [[1, 2, 3]] * 95 + [[1, "x", 3]])
    Path("pred.csv").write_text("mean,std,low,high\n")  # an earlier result
    before = sorted(os.listdir())
    options = ("--data", "late.csv", "--out", "pred.csv", "--overwrite")
    assert_refused(predict(*options), "row 96 (line 97)", "column 'height'")
    assert Path("pred.csv").read_text() == "mean,std,low,high\n"
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


def test_other_weights_are_a_warning_of_one_line() -> None:
    options = ("--model", f"{MODULE}:make", "--own-weights", "--data", "test_x.npy", "--out", "p.csv")
    result = invoke("predict", "--posterior", "net.mcbn", *options)
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


def test_an_interruption_leaves_no_half_file() -> None:
    before = sorted(os.listdir())
    assert_refused(predict("--data", f"{MODULE}:interrupted", "--out", "pred.csv"), "interrupted", code=130)
    assert sorted(os.listdir()) == before
