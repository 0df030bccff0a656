"""`mcbn report` on real files: one network as a page, the reproduction as a site."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import mcbn
from command_line import CLASSES, FIT, MODEL, MODULE, arrays, assert_refused, invoke, network
from mcbn import metrics
from mcbn.page import templates
from workplace import NAMES, run, write_csv

REPORT = ("report", "--posterior", "csv.mcbn", *MODEL)
RESULTS = Path(__file__).resolve().parents[1] / "results"
pytestmark = pytest.mark.usefixtures("at_work")


def words(path: str) -> str:
    text = re.sub(r"(?s)<(script|style).*?</\1>", "", Path(path).read_text())
    return " ".join(re.sub("<[^>]*>", " ", text).split())


def test_a_page_from_a_model_file_and_a_table() -> None:
    done = invoke(*REPORT, "--data", "test.csv", "--train", "train.csv", "--units", "euro", "--out", "page.html")
    assert (done.exit_code, done.output) == (0, "page.html\n")
    text = words("page.html")
    bayes = mcbn.MCBN.load("csv.mcbn", network())  # what the page should say, in Python
    x, y = arrays("test.npz")
    assert f"RMSE lower {templates.number(metrics.rmse(bayes.predict(x).mean, y).item())}" in text
    assert "Where the uncertainty comes from" in text
    assert "as given" in text  # the constant twin is that of the fit
    assert "euro" in Path("page.html").read_text()
    for name in NAMES[:3]:  # columns by their names
        assert name in text


def test_the_twin_comes_from_the_data_of_tune_where_given() -> None:
    assert invoke(*REPORT, "--data", "test.csv", "--out", "a.html").exit_code == 0
    assert invoke(*REPORT, "--data", "test.csv", "--tune", "test.csv", "--out", "b.html").exit_code == 0
    stds = [re.search(r"one std, ([\d.]+),", words(name)) for name in ("a.html", "b.html")]
    assert stds[0]
    assert stds[1]
    assert stds[0][1] != stds[1][1]


def test_a_page_of_classes_from_arrays_and_from_a_loader() -> None:
    names = "no,maybe,<b>yes</b>,always"
    done = invoke("report", *CLASSES, "--data", "test_labels.npz", "--classes", names, "--title", "<i>T</i>")
    assert (done.exit_code, done.output) == (0, "report.html\n")
    page = Path("report.html").read_text()
    assert "<b>yes" not in page
    assert "<i>T" not in page
    assert "maybe" in page
    assert "of all 50 points are wrong" in words("report.html")


def test_names_of_columns_are_escaped() -> None:
    x, y = (np.load("train.npz")[key] for key in ("x", "y"))
    evil = ["<script>alert(1)</script>", "height", "weight", "price"]
    write_csv(Path("evil.csv"), evil, np.column_stack([x, y]).tolist())
    tables = ("--data", "evil.csv", "--tune", "evil.csv", "--target", "price", "--out", "evil.mcbn")
    assert invoke("fit", *FIT, *tables).exit_code == 0
    options = ("--posterior", "evil.mcbn", *MODEL, "--data", "evil.csv", "--out", "evil.html")
    assert invoke("report", *options).exit_code == 0
    page = Path("evil.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_seed_chooses_the_examples_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = mcbn.MCBN.check

    def check(self: mcbn.MCBN, data: object, **options: int) -> object:
        seen.append(options["seed"])
        return real(self, data, **options)

    monkeypatch.setattr(mcbn.MCBN, "check", check)
    options = ("--data", "test.csv", "--train", "train.csv", "--out", "page.html", "--seed", "7")
    assert invoke(*REPORT, *options).exit_code == 0
    assert seen == [7]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*REPORT, "--data", "nowhere.csv"), ("no file nowhere.csv",)),
        ((*REPORT, "--data", "test_x.npy"), ("--target",)),
        ((*REPORT, "--data", "wide.csv"), ("lacks", "'age'")),
        ((*REPORT, "--data", "cell.csv"), ("row 2 (line 3)", "column 'height'", "'tall' is not a number")),
        ((*REPORT, "--data", "test.csv", "--model", "no.such:make"), ("cannot import", "no.such")),
        ((*REPORT, "--data", "test.csv", "--model", f"{MODULE}:pair", "--weights", "pair.pt"), ("another network",)),
        ((*REPORT, "--data", "test.csv", "--out", "page.pdf"), ("must end in .html",)),
        ((*REPORT, "--data", "test.csv", "--out", "nowhere/page.html"), ("folder nowhere does not exist",)),
        ((*REPORT,), ("needs --model and --data",)),
        ((*REPORT, "results", "--data", "test.csv"), ("give one of",)),
        (
            ("report", "--predictions", "nowhere.csv", "--data", "test.csv", "--target", "price"),
            ("no file nowhere.csv",),
        ),
        (("report", "--predictions", "pred.csv"), ("needs --data",)),
        (("report", "--predictions", "pred.csv", "--data", "test.csv", *MODEL), ("--model, --weights without",)),
        (("report", "--predictions", "pred.csv", "--data", "train.csv", "--target", "price"), ("equally many",)),
        (
            ("report", "--predictions", "wide.csv", "--data", "test.csv", "--target", "price"),
            ("holds a, price", "mean"),
        ),
        (("report", "--predictions", "flat.csv", "--data", "test.csv", "--target", "price"), ("every std must be",)),
        (("report", "--predictions", "make.pt", "--data", "test.csv", "--target", "price"), (".csv, .parquet, .npz",)),
        (("report", "--data", "test.csv", *MODEL), ("--model, --weights, --data without --posterior",)),
        (("report", "nowhere"), ("nowhere holds no records",)),
        (("report", *CLASSES, "--data", "test_labels.npz", "--classes", "a"), ("classes holds 1 names",)),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    write_csv(Path("wide.csv"), ["a", "price"], [[1, 2]])
    write_csv(Path("cell.csv"), NAMES, [[1, 2, 3, 4], [1, "tall", 3, 4]])
    write_csv(Path("pred.csv"), ["mean", "std"], [[1.0, 1.0]] * 50)
    write_csv(Path("flat.csv"), ["mean", "std"], [[1.0, 0.0]] * 50)
    before = sorted(os.listdir())
    assert_refused(invoke(*arguments), *words)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
def test_a_page_from_predictions_says_what_the_networks_page_says(suffix: str) -> None:
    held_out = ("--data", "test.csv", "--target", "price")
    predict = ("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "test.csv", "--out", f"pred.{suffix}")
    assert invoke(*predict).exit_code == 0
    done = invoke("report", "--predictions", f"pred.{suffix}", *held_out, "--out", "page.html")
    assert (done.exit_code, done.output) == (0, "page.html\n")
    assert invoke(*REPORT, "--data", "test.csv", "--out", "whole.html").exit_code == 0
    ours, whole = words("page.html"), words("whole.html")
    for pattern in (r"Errors in the most .*? uncertain\.", r"Mean absolute error: .*? points\.", r"RMSE lower [\d.]+"):
        found = re.search(pattern, ours)
        assert found
        assert found[0] in whole
    for name in (*NAMES[:3], "50 predictions held against their targets", "tuned on the data shown"):
        assert name in ours
    assert "plain network" not in ours


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_a_page_from_predicted_classes(suffix: str) -> None:
    assert invoke("predict", *CLASSES, "--data", "test_x.npy", "--out", f"pred.{suffix}").exit_code == 0
    held_out = ("--predictions", f"pred.{suffix}", "--data", "test_labels.npz")
    assert invoke("report", *held_out, "--out", "page.html").exit_code == 0
    assert invoke("report", *CLASSES, "--data", "test_labels.npz", "--out", "whole.html").exit_code == 0
    ours, whole = words("page.html"), words("whole.html")
    for pattern in (
        r"of all 50 points are wrong; .*? least certain\.",
        r"Accuracy higher [\d.]+",
        r"AUROC of mut.*?[\d.]+",
    ):
        found = re.search(pattern, ours)
        assert found
        assert found[0] in whole
    assert "plain network" not in ours.lower()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that even root cannot write to")
def test_a_place_that_cannot_be_written_is_named() -> None:
    assert_refused(invoke(*REPORT, "--data", "test.csv", "--out", "/proc/page.html"), "cannot write /proc/page.html")
    assert_refused(invoke("report", str(RESULTS), "--out", "/proc/site"), "cannot write /proc/site/index.html")


@pytest.mark.slow
def test_the_site_by_command(tmp_path: Path) -> None:
    done = run(tmp_path, "report", str(RESULTS), "--out", "site")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "site/index.html\n")  # no bar where nobody looks
    assert (tmp_path / "site" / "regression.html").is_file()


@pytest.mark.parametrize("place", ["mcbn.page.render", "os.replace"])
def test_ctrl_c_leaves_no_half_page(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    Path("page.html").write_text("Made by mcbn earlier")
    before = sorted(os.listdir())
    monkeypatch.setattr(place, interrupt)
    done = invoke(*REPORT, "--data", "test.csv", "--out", "page.html", "--overwrite")
    assert (done.exit_code, done.stderr) == (130, "mcbn: interrupted\n")
    assert sorted(os.listdir()) == before
    assert Path("page.html").read_text() == "Made by mcbn earlier"
