"""`mcbn watch`, `mcbn adapt`, `predict --watch` and `export --watch` as a user types them, and the same in Python."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mcbn
from command_line import CLASSES, MODEL, MODULE, assert_refused, fit_all, invoke, network, predict
from mcbn.cli.field import ALARM
from mcbn.field.watch import Watch
from workplace import NAMES, furnish, working_in, write_csv

NET = ("--posterior", "net.mcbn", *MODEL)
M = 4
SHIFT = 3.0


def rows_of(name: str) -> list[dict[str, str]]:
    with open(name, newline="") as file:
        return list(csv.DictReader(file))


def normal(n: int, seed: int, *, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)) + shift


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A furnished folder with posteriors, a reference, and inputs before and after a shift."""
    folder = tmp_path_factory.mktemp("field")
    before = os.getcwd()
    furnish(folder, MODULE)
    os.chdir(folder)
    try:
        fit_all()
        np.savez("reference.npz", x=normal(1200, 1).numpy())
        np.savez("home.npz", x=normal(80, 2).numpy())
        np.savez("away.npz", x=normal(80, 3, shift=SHIFT).numpy(), y=normal(80, 4)[:, 0].numpy())
        result = invoke("watch", *NET, "--reference", "reference.npz", "--watch", "home.watch", "--batch-size", str(M))
        assert result.exit_code == 0, result.output
        assert "batch_size=4" in result.stdout
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with working_in(place, monkeypatch):
        yield


def fitted() -> Any:
    return mcbn.MCBN.load("net.mcbn", network())


def watch(*arguments: str) -> Any:
    return invoke("watch", *NET, "--watch", "home.watch", *arguments)


def test_a_table_of_readings_is_what_the_watch_reads() -> None:
    result = watch("--data", "home.npz", "--out", "p.csv")
    assert result.exit_code == 0, result.output
    home = Watch.load("home.watch", fitted())
    home.reset()
    x, rows = torch.from_numpy(np.load("home.npz")["x"]), rows_of("p.csv")
    assert [row["row"] for row in rows] == [str(start) for start in range(0, 80, M)]
    for batch, row in zip(x.split(M), rows, strict=True):
        reading = home(batch)
        assert float(row["p_value"]) == reading.p_value
        assert float(row["distance"]) == pytest.approx(reading.distance)
        assert float(row["layer_1"]) == pytest.approx(reading.layers[0].distance)
        assert (row["kind"], row["explanation"]) == (reading.kind, reading.explain())
        assert float(row["evidence"]) == pytest.approx(home.update(batch).value)


def test_a_shift_ends_with_the_code_of_an_alarm() -> None:
    result = watch("--data", "away.npz", "--out", "p.csv")
    assert result.exit_code == ALARM == 3
    assert "ALARM; farthest, at row" in result.stderr
    assert "from layer 1 on" in result.stderr
    assert {row["kind"] for row in rows_of("p.csv")} == {"inputs"}


def test_a_stream_goes_on_from_call_to_call() -> None:
    Path("own.watch").write_bytes(Path("home.watch").read_bytes())
    np.savez("few.npz", x=normal(M, 5, shift=SHIFT).numpy())
    own = ("--watch", "own.watch", "--data", "few.npz", "--out", "p.csv", "--overwrite")
    codes, evidence = [], []
    for _ in range(8):
        codes.append(invoke("watch", *NET, *own, "--continue").exit_code)
        evidence.append(float(rows_of("p.csv")[0]["evidence"]))
    assert sorted(set(codes)) == [0, ALARM]
    assert codes == sorted(codes)
    assert evidence == sorted(evidence)
    alone = invoke("watch", *NET, *own)  # another stream
    assert (alone.exit_code, float(rows_of("p.csv")[0]["evidence"])) == (0, evidence[0])


@pytest.mark.parametrize("suffix", ["csv", "npy", "npz", "parquet"])
def test_nan_and_empty_cells_are_an_alarm_of_their_own(suffix: str) -> None:
    x = normal(3 * M, 6).double().numpy()
    x[1, 1] = np.nan  # in the first batch that the loaded network meets
    name = f"nan.{suffix}"
    if suffix == "csv":
        cells = x.tolist()
        cells[1][1] = ""
        write_csv(Path(name), None, cells)
    elif suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {f"c{c}": [None if np.isnan(v) else v for v in x[:, c]] for c in range(3)}
        parquet.write_table(pyarrow.table(columns), name)
    else:
        np.save(name, x) if suffix == "npy" else np.savez(name, x=x)
    result = watch("--data", name, "--out", "p.csv", "--page", "p.html")
    assert result.exit_code == ALARM, result.output
    assert "holds NaN or infinity" in result.stderr
    rows = rows_of("p.csv")
    assert [row["kind"] == "not finite" for row in rows] == [True, False, False]
    assert rows[0]["distance"] == rows[0]["layer_1"] == "inf"
    assert "not finite" in Path("p.html").read_text()
    assert_refused(predict("--data", name, "--out", "pred.csv"), "row 2")  # a prediction still refuses it


def test_a_page_names_columns_as_the_table_does() -> None:
    table = ("--posterior", "csv.mcbn", *MODEL, "--watch", "home.watch", "--data", "train.csv", "--target", "price")
    result = invoke("watch", *table, "--out", "named.csv", "--page", "named.html")
    assert result.exit_code in (0, ALARM), result.output
    header = Path("named.html").read_text().split("The strangest inputs")[1].split("</tr>")[0]
    for name in NAMES[:3]:
        assert name in header
    assert "x1" not in header


def test_a_page_shows_the_readings_and_both_posteriors() -> None:
    moved = invoke("adapt", *NET, "--reference", "reference.npz", "--data", "away.npz", "--out", "moved.mcbn")
    assert moved.exit_code == 0, moved.output
    assert "moved by 80 inputs" in moved.stdout
    options = ("--data", "away.npz", "--out", "p.csv", "--page", "p.html")
    assert watch(*options, "--adapted", "moved.mcbn").exit_code == ALARM
    page = Path("p.html").read_text()
    for words in ("The stream has shifted", "The strangest inputs", "Before and after adaptation", "RMSE"):
        assert words in page
    again = watch(*options, "--overwrite")
    assert again.exit_code == ALARM
    assert "Before and after" not in Path("p.html").read_text()


def test_adapting_is_what_python_does_and_keeps_what_the_fit_knew() -> None:
    result = invoke("adapt", *NET, "--reference", "reference.npz", "--data", "away.npz", "--out", "moved.mcbn")
    assert result.exit_code == 0, result.output
    bayes, x = fitted(), torch.from_numpy(np.load("away.npz")["x"])
    expected = bayes.adapt(x, reference=torch.from_numpy(np.load("reference.npz")["x"]))
    assert expected.adaptation.explain() in result.stdout
    loaded = mcbn.MCBN.load("moved.mcbn", network())
    torch.testing.assert_close(loaded.predict(x).mean, expected.predict(x).mean)
    evaluated = invoke("evaluate", "--posterior", "moved.mcbn", *MODEL, "--data", "test.npz", "--json")
    assert "constant" in evaluated.stdout  # tau of the constant twin went along


def test_adapting_calibrates_anew() -> None:
    options = ("--reference", "reference.npz", "--data", "away.npz", "--calibrate", "away.npz", "--out", "moved.mcbn")
    assert invoke("adapt", *NET, *options).exit_code == 0
    assert mcbn.MCBN.load("moved.mcbn", network()).calibration is not None


def test_predictions_carry_novelty() -> None:
    assert predict("--watch", "home.watch", "--data", "away.npz", "--out", "p.csv").exit_code == 0
    novelty = Watch.load("home.watch", fitted()).novelty(torch.from_numpy(np.load("away.npz")["x"]))
    rows = rows_of("p.csv")
    for name in ("p_value", "distance", "combined"):
        written = [float(row[f"novelty_{name}"]) for row in rows]
        np.testing.assert_allclose(written, getattr(novelty, name).numpy(), rtol=1e-6)


def tables(folder: str, count: int = 3) -> None:
    Path(folder).mkdir(exist_ok=True)
    for i in range(count):
        write_csv(Path(folder) / f"{i}.csv", None, normal(3 * M + 1, 10 + i, shift=SHIFT * (i == 2)).tolist())


@pytest.fixture
def folder() -> Iterator[None]:
    tables("rows")
    yield
    for path in Path("rows").iterdir():
        path.unlink()
    Path("rows").rmdir()


@pytest.mark.usefixtures("folder")
def test_files_of_a_folder_are_read_each_by_itself() -> None:
    pytest.importorskip("pyarrow")
    result = watch("--data", "rows", "--out", "p.csv", "--page", "p.html")
    assert result.exit_code in (0, ALARM), result.output
    rows, home = rows_of("p.csv"), Watch.load("home.watch", fitted())
    assert [(row["file"], row["row"]) for row in rows] == [(f"{i}.csv", str(M * b)) for i in range(3) for b in range(3)]
    batch = normal(3 * M + 1, 11)[M : 2 * M]
    assert float(rows[4]["p_value"]) == home(batch).p_value
    assert not list(Path.cwd().glob(".mcbn-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_ray_reads_a_folder_as_one_process_does() -> None:
    pytest.importorskip("ray")
    assert watch("--data", "rows", "--out", "here.csv").exit_code in (0, ALARM)
    result = watch("--data", "rows", "--out", "there.csv", "--engine", "ray", "--workers", "1")
    assert result.exit_code in (0, ALARM), result.output
    assert rows_of("here.csv") == rows_of("there.csv")


@pytest.mark.usefixtures("folder")
def test_a_folder_can_be_reference_and_pool() -> None:
    pytest.importorskip("pyarrow")
    tables("rows", 3)
    result = invoke("adapt", *NET, "--reference", "reference.npz", "--data", "rows", "--out", "moved.mcbn")
    assert result.exit_code == 0, result.output
    assert "39 inputs" in result.stdout
    refused = invoke("adapt", *NET, "--reference", "rows", "--data", "away.npz", "--out", "moved.mcbn", "--overwrite")
    assert_refused(refused, "false_alarms=0.01 takes 99 held-out batches")


@pytest.mark.usefixtures("folder")
def test_novelty_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from mcbn import scale

    out = str(tmp_path / "out")
    assert predict("--watch", "home.watch", "--data", "rows", "--out", out).exit_code == 0
    written = scale.read_results(out).column("novelty_distance").to_numpy()
    home = Watch.load("home.watch", fitted())
    expected = torch.cat([home.novelty(normal(3 * M + 1, 10 + i, shift=SHIFT * (i == 2))).distance for i in range(3)])
    np.testing.assert_allclose(written, expected.numpy(), rtol=1e-6)
    other = invoke("predict", *NET, "--data", "rows", "--out", out, "--resume")
    assert_refused(other, "belongs to another job: its watch was")


def test_an_exported_watch_runs_without_torch() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    x, home = np.load("away.npz")["x"], Watch.load("home.watch", fitted())
    options = ("--watch", "home.watch", "--data", "away.npz", "--out", "w.onnx")
    result = invoke("export", *NET, *options)
    assert result.exit_code == 0, result.output
    distance, p_value = onnxruntime.InferenceSession("w.onnx").run(None, {"x": x[:M]})
    reading = home(torch.from_numpy(x[:M]))
    assert float(distance[0]) == pytest.approx(reading.distance, rel=1e-4)
    assert float(p_value[0]) == pytest.approx(reading.p_value, rel=1e-6)
    assert invoke("export", *NET, *options, "--each", "--overwrite").exit_code == 0
    distances, _ = onnxruntime.InferenceSession("w.onnx").run(None, {"x": x})
    np.testing.assert_allclose(distances, home.novelty(torch.from_numpy(x)).distance.numpy(), rtol=1e-4)


def test_mistakes_are_one_line() -> None:
    np.savez("one.npz", x=normal(1, 7).numpy())
    np.savez("wide.npz", x=np.zeros((20, 4), np.float32))
    make = ("--reference", "reference.npz", "--watch", "new.watch")
    adapt = ("adapt", *NET, "--reference", "reference.npz")
    cases = {
        (*NET, "--data", "home.npz"): "give --reference",
        (*NET, "--reference", "reference.npz", "--data", "home.npz", "--continue"): "name it by --watch",
        (*NET, "--watch", "none.watch", "--data", "home.npz"): "there is no file none.watch",
        (*NET, "--watch", "home.watch"): "give --data to judge",
        (*NET, "--watch", "home.watch", "--data", "one.npz"): "fills no batch of M = 4",
        (*NET, "--watch", "home.watch", "--data", "wide.npz"): "has 4 columns, the posterior was fitted on 3",
        (*NET, "--watch", "net.mcbn", "--data", "home.npz"): "not an mcbn watch",
        (*NET, "--watch", "home.watch", "--data", "home.npz", "--batch-size", "8"): "has its own batch_size",
        (*NET, "--watch", "home.watch", "--data", "home.npz", "--out", "home.npz"): "is --data home.npz itself",
        (*NET, "--watch", "home.watch", "--data", "home.npz", "--out", "train.csv"): "no old result of this command",
        (*NET, "--watch", "home.watch", "--data", "home.npz", "--page", "p.pdf"): "must end in .html",
        (*NET, "--watch", "home.watch", "--data", "home.npz", "--engine", "spark"): "--engine must be one of",
        (
            *NET,
            *make,
            "--batch-size",
            "64",
        ): "takes 99 held-out batches, which for batches of 64 is a reference of 8448",
        (*NET, *make, "--false-alarms", "2"): "false_alarms must lie between 0 and 1",
        (*CLASSES, "--watch", "home.watch", "--data", "home.npz"): "was fitted on another network",
    }
    for options, words in cases.items():
        assert_refused(invoke("watch", *options), words)
    assert_refused(invoke(*adapt, "--data", "one.npz", "--out", "m.mcbn"), "at least 2 unlabelled inputs, got 1")
    assert_refused(invoke(*adapt, "--data", "away.npz", "--out", "net.mcbn"), "is --posterior net.mcbn itself")
    assert_refused(invoke(*adapt, "--data", "away.npz", "--out", "csv.mcbn"), "--overwrite replaces it")
    assert_refused(invoke(*adapt, "--data", "away.npz", "--out", "m.mcbn", "--strength", "2"), "from 0 to 1")
    assert_refused(predict("--watch", "class.mcbn", "--data", "home.npz", "--out", "p.csv"), "not an mcbn watch")
    assert not Path("new.watch").exists()
