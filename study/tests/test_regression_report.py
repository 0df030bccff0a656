import csv
import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import synthetic
from mcbn.cli import app
from mcbn.errors import MCBNError
from mcbn_study.regression import figures, report as regression
from mcbn_study.tables import MISSING


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Results of all sets and methods, with everything written once."""
    results = tmp_path_factory.mktemp("complete")
    synthetic.write(results / "regression" / "records.jsonl", synthetic.study())
    synthetic.write(results / "sensitivity" / "records.jsonl", synthetic.sensitivity())
    predictions = results / "regression" / "predictions"
    synthetic.predictions(predictions, n=60)
    synthetic.predictions(predictions, datasets=("boston", "yacht"), methods=("mcdo",))
    return results, regression.write(results)


def test_all_files_are_written_where_they_belong(complete):
    results, written = complete
    out = results / "regression"
    names = ["summary.csv", "tables.tex", "tables.md"]
    names += [f"figures/uncertainty_error_{method}.png" for method in ("mcbn", "mcdo")]
    assert written == [out / name for name in names]
    kept = {"records.jsonl", "predictions", "figures"}
    assert {path.name for path in out.iterdir()} == kept | set(names[:3])  # nothing temporary stays


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(complete):
    results, written = complete
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in regression.write(results)] == before


def test_markdown_shows_every_table_and_figure(complete):
    _, written = complete
    text = written[2].read_text("utf-8")
    assert text.count("\n## ") == 20
    for figure in written[3:]:
        assert f"(figures/{figure.name})" in text
    assert "The runs are of the profile paper." in text


def test_repeated_searches_are_laid_out_with_their_spread(tmp_path):
    synthetic.write(tmp_path / "regression" / "records.jsonl", synthetic.study(("boston",), ("mcbn",)))
    for seed, shift in ((2, 1.0), (3, 2.0)):
        again = [r | {"rmse": r["rmse"] + shift} for r in synthetic.study(("boston",), ("mcbn",))]
        synthetic.write(tmp_path / "search" / str(seed) / "records.jsonl", iter(again))
    mean = np.mean([r["rmse"] for r in synthetic.study(("boston",), ("mcbn",))])
    regression.write(tmp_path)
    text = (tmp_path / "regression" / "tables.md").read_text("utf-8")
    section = text.split("## The search repeated")[1].split("## ")[0]
    assert f"| mean of 3 searches | {mean + 1:.3f}, standard deviation 1.000 |" in section
    assert "| paper | 2.75 ± 0.05 |" in section
    table = text.split("## Prediction accuracy measured by RMSE")[1].split("## ")[0]
    assert f"| ours | {mean + 1:.3f} ± " in table  # the mean over searches is the row that counts


def test_a_small_spread_of_searches_shows_two_digits(tmp_path):
    runs = [r | {"rmse": 0.0723} for r in synthetic.study(("kin8nm",), ("mcbn",))]
    synthetic.write(tmp_path / "regression" / "records.jsonl", iter(runs))
    synthetic.write(tmp_path / "search" / "2" / "records.jsonl", (r | {"rmse": 0.0733} for r in runs))
    rows = regression.read(tmp_path).repeats[0].rows
    assert rows[2][:3] == ("", "mean of 2 searches", "0.07280, standard deviation 0.00071")
    assert rows[2][3].endswith("standard deviation 0.000")  # the CRPS was the same


def test_boston_searched_as_published_is_set_beside_ours(tmp_path):
    synthetic.write(tmp_path / "regression" / "records.jsonl", synthetic.study(("boston",), ("mcbn",)))
    for variant, seed, rmse in (("fresh", 1, 2.5), ("fresh", 2, 3.5), ("all", 1, 2.75)):
        runs = [r | {"rmse": rmse} for r in synthetic.study(("boston",), ("mcbn",))]
        synthetic.write(tmp_path / "boston" / variant / str(seed) / "records.jsonl", iter(runs))
    table = regression.read(tmp_path).repeats[-1]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["fresh draws"] == ("2", "3.000", "0.707", "2.500", "0.4", "1")
    assert rows["all three"] == ("1", "2.750", MISSING, "2.750", MISSING, "1")
    assert f"Of 4 searches, {2 + int(rows['ours'][-1])} has the paper's 2.75 or less" in table.note
    moved = max(abs(float(mean) - float(rows["ours"][1])) for _, mean, *_ in rows.values())
    assert f"by {moved:.3f} at most" in table.note
    assert list(rows) == ["ours", "all three", "fresh draws"]


def size(path):
    with Image.open(path) as image:
        return image.size


def test_figures_are_large_enough_to_read(complete):
    _, written = complete
    assert [size(path) for path in written[3:]] == [(1500, 680)] * 2


@pytest.mark.slow
def test_figures_are_small_with_as_many_points_as_the_largest_set_has(tmp_path):
    synthetic.predictions(tmp_path, n=9146)  # the test part of Protein
    (path,) = figures.write_figures(tmp_path, tmp_path)
    assert path.stat().st_size < 300_000


def test_the_command_prints_what_it_wrote(tmp_path):
    synthetic.write(tmp_path / "regression" / "records.jsonl", synthetic.study(["boston"], ["mcbn"]))
    printed = CliRunner().invoke(app, ["reproduce", "tables", "--results", str(tmp_path)]).output
    names = ("summary.csv", "tables.tex", "tables.md")
    assert printed.splitlines() == [str(tmp_path / "regression" / name) for name in names]


def test_part_of_the_records_gives_dashes_and_no_error(tmp_path):
    synthetic.write(tmp_path / "regression" / "records.jsonl", synthetic.study(["boston"], ["mcbn"]))
    written = regression.write(tmp_path)
    assert [path.name for path in written] == ["summary.csv", "tables.tex", "tables.md"]
    rows = list(csv.DictReader(io.StringIO(written[0].read_text())))
    assert {(row["dataset"], row["method"]) for row in rows} == {("boston", "mcbn"), ("boston", "cubn")}
    assert f"| Yacht Hydrodynamics | ours | {MISSING} |" in written[2].read_text("utf-8")


def test_one_record_is_enough(tmp_path):
    synthetic.write(tmp_path / "regression" / "records.jsonl", iter(list(synthetic.study(["wine"], ["mcdo"]))[:1]))
    assert "2.65" in regression.write(tmp_path)[2].read_text("utf-8")


def test_sensitivity_alone_gives_its_tables(tmp_path):
    synthetic.write(tmp_path / "sensitivity" / "records.jsonl", synthetic.sensitivity(["boston"]))
    assert "incomplete" in regression.write(tmp_path)[2].read_text("utf-8")


@pytest.mark.parametrize("content", [None, b"", b'{"kind": "selection", "dataset": "boston"}\n'])
def test_no_runs_at_all_names_the_command(tmp_path, content):
    if content is not None:
        (tmp_path / "regression").mkdir()
        (tmp_path / "regression" / "records.jsonl").write_bytes(content)
    with pytest.raises(MCBNError, match="`mcbn reproduce regression`"):
        regression.write(tmp_path)
    assert not (tmp_path / "regression" / "summary.csv").exists()


def test_a_cut_off_record_is_left_out_with_a_warning(tmp_path):
    path = tmp_path / "regression" / "records.jsonl"
    synthetic.write(path, synthetic.study(["boston"], ["mcbn"]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="cut off"):
        rows = csv.DictReader(io.StringIO(regression.write(tmp_path)[0].read_text()))
    assert {row["n"] for row in rows} == {"24"}


def panels(folder, monkeypatch):
    """Draw without saving; return the figures' panels by method."""
    drawn = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.setdefault(path.stem, figure.axes))
    figures.write_figures(folder, folder)
    return drawn


def test_panels_show_the_errors_of_the_first_seed_of_the_lowest_split(tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    saved = {}
    for split in (10, 2):
        saved[split] = {
            "error": rng.normal(size=(5, 30)),
            "std": rng.uniform(1, 2, (5, 30)),
            "constant_std": np.ones(5),
        }
        np.savez(tmp_path / f"wine-mcbn-{split}.npz", **saved[split])
    np.savez(tmp_path / "wine-mcbn_linear-1.npz", **saved[10])
    drawn = panels(tmp_path, monkeypatch)
    assert list(drawn) == ["uncertainty_error_mcbn", "uncertainty_error_mcbn_linear"]
    (ax,) = [ax for ax in drawn["uncertainty_error_mcbn"] if ax.lines]
    assert ax.get_title() == "Wine Quality (Red), split 2"
    (dots,) = [line for line in ax.lines if line.get_label() == "absolute error"]
    order = np.argsort(saved[2]["std"][0])
    np.testing.assert_allclose(dots.get_ydata(), np.abs(saved[2]["error"][0])[order])


def test_without_a_constant_twin_nothing_is_dashed(tmp_path, monkeypatch):
    arrays = {"error": np.ones((1, 9)), "std": np.ones((1, 9)), "constant_std": np.full(1, np.nan)}
    np.savez(tmp_path / "boston-ensemble-1.npz", **arrays)
    (ax,) = [ax for ax in panels(tmp_path, monkeypatch)["uncertainty_error_ensemble"] if ax.lines]
    assert not [line for line in ax.lines if line.is_dashed()]


def test_a_run_that_diverged_leaves_its_panel_empty(tmp_path, monkeypatch):
    arrays = {"error": np.full((1, 9), np.inf), "std": np.ones((1, 9)), "constant_std": np.ones(1)}
    np.savez(tmp_path / "boston-mnf-1.npz", **arrays)
    first, second, *_ = panels(tmp_path, monkeypatch)["uncertainty_error_mnf"]
    assert first.get_title() == "Boston Housing, split 1: not finite"
    assert second.get_title() == f"Concrete Compressive Strength: {MISSING}"
    assert not first.lines


def test_toy_figure_is_drawn_where_its_predictions_are(tmp_path):
    grid = np.linspace(-2, 2, 50)
    vectors = {"x_train": grid[::5], "y_train": grid[::5], "x_grid": grid, "mean": grid, "std": 1 + grid**2}
    np.savez(tmp_path / "toy.npz", constant_std=np.float32(0.5), **vectors)
    assert figures.write_figures(tmp_path, tmp_path / "out") == [tmp_path / "out" / "toy.png"]
    assert size(tmp_path / "out" / "toy.png") == (650, 420)


def test_no_predictions_make_no_figures(tmp_path):
    assert figures.write_figures(tmp_path / "none", tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"error": np.ones((1, 4)), "std": np.ones((1, 4))}, "no whole predictions file"),
        ({"error": np.ones(4), "std": np.ones((1, 4)), "constant_std": np.ones(1)}, r"error should have 2 .*\(4,\)"),
        ({"error": np.ones((0, 4)), "std": np.ones((1, 4)), "constant_std": np.ones(1)}, r"\(0, 4\)"),
    ],
)
def test_bad_predictions_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "boston-mcbn-1.npz", **arrays)
    with pytest.raises(MCBNError, match=rf"boston-mcbn-1\.npz.*{message}"):
        figures.write_figures(tmp_path, tmp_path)


@pytest.mark.parametrize("length", [0, 10, 500])
def test_cut_off_predictions_are_named(tmp_path, length):
    synthetic.predictions(tmp_path, ["boston"])
    path = tmp_path / "boston-mcbn-1.npz"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(MCBNError, match=r"boston-mcbn-1\.npz is no whole predictions file"):
        figures.write_figures(tmp_path, tmp_path)


def test_missing_matplotlib_names_the_extra_after_the_numbers_are_written(tmp_path, no_matplotlib):
    synthetic.write(tmp_path / "regression" / "records.jsonl", synthetic.study(["boston"], ["mcbn"]))
    synthetic.predictions(tmp_path / "regression" / "predictions", ["boston"])
    with pytest.raises(MCBNError, match=r"pip install 'mcbn\[plots\]'"):
        regression.write(tmp_path)
    assert (tmp_path / "regression" / "summary.csv").exists()


@pytest.mark.slow
def test_importing_the_report_needs_neither_matplotlib_nor_pillow():
    script = "import sys, mcbn_study.regression.report; assert not {'matplotlib', 'PIL'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
