"""Tables as people have them: ids, text, names of classes, odd names and sizes; csv and parquet alike."""

import csv
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from command_line import CLASSES, FIT, MODEL, arrays, assert_refused, invoke, network, predict
from mcbn import MCBNError
from mcbn.tables import Layout, find_columns, formats, open_examples, results
from mcbn.tables.formats import CsvTable, ParquetTable, StoredArray

pytestmark = pytest.mark.usefixtures("at_work")

FORMATS = ("csv", "parquet")
KINDS = np.array(["cat", "dog", "eel", "fox"])


def write(name: str, columns: dict[str, Any]) -> str:
    """Write a table in the format that its name says."""
    if name.endswith(".parquet"):
        pq.write_table(pa.table(columns), name)
    else:
        with open(name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    return name


def read(name: str) -> dict[str, list[Any]]:
    if name.endswith(".parquet"):
        return pq.read_table(name).to_pydict()  # type: ignore[no-any-return]
    with open(name, newline="") as file:
        names, *rows = csv.reader(file)
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def table(part: str, **more: Any) -> dict[str, Any]:
    """Three inputs of a part of the data among columns of text."""
    x, _ = arrays(f"{part}.npz")
    age, height, weight = x.T.numpy()
    return {"id": [f"no {i}" for i in range(len(x))], "age": age, "height": height, "weight": weight, **more}


@pytest.mark.parametrize("into", FORMATS)
@pytest.mark.parametrize("suffix", FORMATS)
def test_keys_are_left_out_of_the_fit_and_passed_on_to_the_results(suffix: str, into: str) -> None:
    for part in ("train", "test"):
        notes = ["a, b" if i % 2 else "" for i in range(len(arrays(f"{part}.npz")[0]))]
        write(f"{part}_ids.{suffix}", table(part, note=notes, price=arrays(f"{part}.npz")[1].numpy()))
    fit = ("--data", f"train_ids.{suffix}", "--target", "price", "--key", "id,note", "--out", "ids.mcbn")
    assert invoke("fit", *FIT, *fit, "--tune", "val.csv").exit_code == 0
    options = ("--posterior", "ids.mcbn", *MODEL, "--data", f"test_ids.{suffix}")
    done = invoke("predict", *options, "--key", "note,id", "--out", f"pred.{into}")
    assert done.exit_code == 0, done.output
    assert invoke("predict", *options, "--out", f"bare.{into}").exit_code == 0
    columns, bare = read(f"pred.{into}"), read(f"bare.{into}")
    assert list(columns) == ["note", "id", "mean", "std", "low", "high"]
    assert columns["id"] == [f"no {i}" for i in range(50)]
    assert columns["note"] == ["a, b" if i % 2 else "" for i in range(50)]
    assert {name: columns[name] for name in bare} == bare


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--key", "name"), ("lacks the key column(s) 'name'", "'age'")),
        (("--key", "mean"), ("'mean' is called like a result",)),
        (("--key", "prob_cat"), ("'prob_cat' is called like a result",)),
        (("--key", "set_cat"), ("'set_cat' is called like a result",)),
        (("--key", "ask_human"), ("'ask_human' is called like a result",)),
        (("--key", "age", "--out", "pred.npz"), ("arrays alone", "csv or parquet")),
        (("--key", "age", "--data", "test_x.npy"), ("--key age names columns of a csv or parquet file",)),
    ],
)
def test_keys_that_cannot_be_passed_on_are_refused(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    arguments = ("--posterior", "csv.mcbn", *MODEL, "--data", "test.csv", "--out", "pred.csv")
    assert_refused(invoke("predict", *arguments, *options), *words)


def test_text_among_the_inputs_names_the_cure() -> None:
    for suffix in FORMATS:
        write(f"text.{suffix}", table("train"))
        assert_refused(invoke("fit", *FIT, "--data", f"text.{suffix}", "--out", "t.mcbn"), "'id'", "--key id")


@pytest.mark.parametrize("suffix", FORMATS)
def test_text_labels_go_in_and_come_out(suffix: str) -> None:
    for part in ("train", "test"):
        y = arrays(f"{part}_labels.npz")[1].numpy()
        write(f"{part}_kinds.{suffix}", table(part, kind=KINDS[y].tolist()))
    fit = (*CLASSES[2:], "--task", "classification", "--batch-size", "16", "--key", "id", "--out", "kinds.mcbn")
    data = ("--data", f"train_kinds.{suffix}", "--target", "kind", "--classes", ",".join(KINDS))
    assert invoke("fit", *fit, *data, "--tune", f"train_kinds.{suffix}").exit_code == 0
    options = ("--posterior", "kinds.mcbn", *CLASSES[2:], "--data", f"test_kinds.{suffix}")
    assert invoke("predict", *options, "--key", "id", "--out", f"pred.{suffix}").exit_code == 0
    columns = read(f"pred.{suffix}")
    probs = np.array([columns[f"prob_{kind}"] for kind in KINDS], dtype=float).T
    assert columns["label"] == KINDS[probs.argmax(1)].tolist()
    scored, plain = (
        invoke("evaluate", "--posterior", "kinds.mcbn", *CLASSES[2:], "--data", data, "--json").stdout
        for data in (f"test_kinds.{suffix}", "test_labels.npz")
    )
    assert scored.replace(f"test_kinds.{suffix}", "") == plain.replace("test_labels.npz", "")
    for arguments in (("--predictions", f"pred.{suffix}", "--target", "kind", "--key", "id"), options[:6]):
        done = invoke("report", *arguments, "--data", f"test_kinds.{suffix}", "--out", "page.html", "--overwrite")
        assert done.exit_code == 0, done.output
        assert "dog" in Path("page.html").read_text()


def test_names_of_classes_sort_by_default_and_must_be_as_many_as_the_network_has() -> None:
    y = arrays("train_labels.npz")[1].numpy()
    write("kinds.csv", table("train", kind=KINDS[y].tolist()))
    assert open_examples("kinds.csv", target="kind", passed_on=["id"], classify=True).layout.classes == tuple(
        sorted(set(KINDS[y]))
    )
    fit = (*CLASSES[2:], "--task", "classification", "--batch-size", "16", "--key", "id", "--out", "kinds.mcbn")
    data = ("--data", "kinds.csv", "--target", "kind")
    write("two.csv", table("train", kind=np.where(y > 1, "dog", "cat").tolist()))
    assert_refused(invoke("fit", *fit, *data, "--data", "two.csv"), "4 classes", "2 names", "--classes")
    unknown = invoke("fit", *fit, *data, "--classes", "a,b,c,d", "--tune", "kinds.csv")
    assert_refused(unknown, "row 1, column 'kind'", "is no class of the fit", "'a', 'b'")
    write("hole.csv", table("train", kind=["cat", "", *KINDS[y][2:]]))
    assert_refused(invoke("fit", *fit, "--data", "hole.csv", "--target", "kind"), "row 2, column 'kind' has no label")


def seconds_to_read(suffix: str, width: int, folder: Path) -> float:
    """Read a table by the names of its columns, backwards; return the time of the processor."""
    names = tuple(f"column {i}" for i in range(width))
    path = folder / f"wide{width}.{suffix}"
    write(str(path), {name: [float(i)] for i, name in enumerate(names)})
    start = time.process_time()
    opened = CsvTable(path) if suffix == "csv" else ParquetTable(path)
    columns = find_columns(opened, None, Layout(names[::-1], len(names)))
    (block,) = opened.blocks(columns.inputs, 1)
    taken = time.process_time() - start
    assert block.numbers[0].tolist() == [float(i) for i in range(width)][::-1]
    return taken


@pytest.mark.parametrize(("suffix", "width"), [("csv", 40_000), ("parquet", 4_000)])  # that takes seconds to write
def test_tables_of_thousands_of_columns_are_read_in_time_that_goes_with_them(
    suffix: str, width: int, tmp_path: Path
) -> None:
    tenth = min(seconds_to_read(suffix, width // 10, tmp_path) for _ in range(3))
    assert seconds_to_read(suffix, width, tmp_path) < 40 * tenth  # 100 times where every name is looked for


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    for number, start in enumerate((b"", b"1,2\n"), 1):
        path.write_bytes(start + b"1," * 25_000_000)
        with pytest.raises(MCBNError, match=rf"line {number} has more than 16,777,216 characters.*npy"):
            list(CsvTable(path).blocks([0, 1], 8))


@pytest.mark.parametrize("name", ["big.csv", "big.parquet", "big.npy"])
def test_what_becomes_infinite_in_single_precision_is_refused(name: str) -> None:
    columns = {"age": [1.0, 1e300], "height": [1.0, 2.0], "weight": [1.0, 2.0]}
    if name == "big.npy":
        np.save(name, np.array(list(columns.values())).T)
    else:
        write(name, columns)
    assert_refused(predict("--data", name, "--out", "pred.csv"), "row 2", "1e+300", "single precision")


def test_results_that_are_not_finite_are_refused() -> None:
    state = network().state_dict()
    state["3.weight"][0] = 3e38
    torch.save(state, "large.pt")
    np.save("rows.npy", np.array([[0, 0, 0], [9, -9, 9]], dtype=np.float32))
    done = predict("--weights", "large.pt", "--data", "rows.npy", "--out", "pred.csv")
    assert_refused(done, "no finite", "row")
    assert not Path("pred.csv").exists()


def test_names_that_are_not_utf_8() -> None:
    name = os.fsdecode(b"caf\xe9.csv")
    os.link("test.csv", name)
    done = invoke("predict", "--posterior", "csv.mcbn", *MODEL, "--data", name, "--out", os.fsdecode(b"out\xe9.csv"))
    assert done.exit_code == 0, done.output
    assert invoke("report", "--posterior", "csv.mcbn", *MODEL, "--data", name, "--out", "page.html").exit_code == 0
    assert "caf\\xe9.csv" in Path("page.html").read_text()


def test_archives_that_grow_beyond_proportion_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed("bomb.npz", x=np.zeros((100_000, 3)))
    assert len(StoredArray(Path("bomb.npz"), "x")) == 100_000  # two megabytes fill nothing
    monkeypatch.setattr("mcbn.files.LEAST_SUSPECT", 2**20)
    assert zipfile.ZipFile("bomb.npz").infolist()[0].compress_size < 10_000
    assert_refused(predict("--data", "bomb.npz", "--out", "pred.csv"), "bomb.npz", "200 times", "unpack it yourself")


def test_old_predictions_are_told_from_other_tables(tmp_path: Path) -> None:
    for names, is_result in {
        ("mean", "std", "low", "high"): True,
        ("id", "mean_0", "std_0", "low_0", "high_0", "mean_1"): True,
        ("prob_a", "label", "entropy", "mutual_information"): True,
        ("mean", "std"): False,
        ("age", "label"): False,
    }.items():
        for suffix in FORMATS:
            assert results.is_result(Path(write(str(tmp_path / f"t.{suffix}"), {n: [1.0] for n in names}))) is is_result
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe")
    assert not results.is_result(tmp_path / "t.csv")


def test_a_cell_is_quoted_in_part(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n" + "x" * 100_000 + "\n")
    with pytest.raises(MCBNError) as caught:
        list(CsvTable(tmp_path / "t.csv").blocks([0], 1))
    assert len(str(caught.value)) < 500
    assert formats.is_number("1e3")


def test_names_of_columns_go_from_the_command_line_to_python_and_back() -> None:
    import mcbn

    pandas = pytest.importorskip("pandas")
    for part in ("train", "test"):
        write(f"{part}_named.csv", {**table(part), "id": range(len(arrays(f"{part}.npz")[0]))})
    frame, other = pandas.read_csv("train_named.csv"), ["weight", "id", "age", "height"]
    assert (
        invoke("fit", *FIT[:4], "--data", "train_named.csv", "--key", "id", *FIT[6:], "--out", "n.mcbn").exit_code == 0
    )
    bayes = mcbn.MCBN.load("n.mcbn", network())
    assert torch.equal(bayes.predict(frame[other]).mean, bayes.predict(arrays("train.npz")[0]).mean)
    bayes.fit(frame[["age", "height", "weight"]], n_samples=5, batch_size=16)
    bayes.save("python.mcbn")
    pandas.read_csv("test_named.csv")[other].to_csv("other.csv", index=False)
    done = invoke("predict", "--posterior", "python.mcbn", *MODEL, "--data", "other.csv", "--out", "there.csv")
    assert done.exit_code == 0, done.output
    means = [float(value) for value in read("there.csv")["mean"]]
    assert means == pytest.approx(bayes.predict(arrays("test.npz")[0]).mean.flatten().tolist(), rel=1e-5)
