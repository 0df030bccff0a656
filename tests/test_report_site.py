"""The reproduction as a site: whole, offline, and honest about what is missing."""

import json
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mcbn.errors import MCBNError
from mcbn.report import paper
from mcbn.report.catalogue import ITEMS, PAGES
from mcbn.report.commands import report
from mcbn.report.parts import markdown_part
from mcbn.report.provenance import total_seconds, trace
from mcbn.report.site import site

RESULTS = Path(__file__).resolve().parents[1] / "results"


def text_of(path: Path) -> str:
    class Text(HTMLParser):
        def handle_data(self, data):
            words.append(data)

    words: list[str] = []
    reader = Text()
    reader.feed(re.sub("(?s)<(script|style).*?</\\1>", "", path.read_text()))
    return " ".join(" ".join(words).split())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return report(RESULTS, tmp_path_factory.mktemp("site")).parent


def test_every_page_is_written_and_loads_nothing_from_elsewhere(built: Path):
    assert sorted(path.name for path in built.iterdir()) == sorted(PAGES)
    for path in built.iterdir():
        text = path.read_text()
        assert not re.search(r"(?i)(src|href)=\"?(https?:)?//", text)
        assert "http" not in re.sub("http-equiv", "", re.sub("(?s)<script.*?</script>", "", text))


def test_every_link_leads_somewhere(built: Path):
    for path in built.iterdir():
        for address in re.findall(r'href="([^"]*)"', path.read_text()):
            if address == "data:,":
                continue
            page, _, anchor = address.partition("#")
            assert page in PAGES, address
            assert not anchor or f'id="{anchor}"' in (built / page).read_text(), address


def test_index_names_every_table_and_figure_of_the_paper(built: Path):
    text = text_of(built / "index.html")
    for item in ITEMS:
        assert item.where in text
        assert item.what in text
    printed = {number.table for number in paper.numbers()}
    assert printed <= {item.anchor for item in ITEMS}
    assert "Not run yet. The paper: PLL -.36 at T = 1" in text  # CIFAR-10
    assert "Not run yet. The paper: CamVid pictures" in text


def test_tables_show_ours_the_papers_and_the_difference_with_what_made_them(built: Path):
    text = text_of(built / "regression.html")
    boston = paper.find("boston", "mcbn", "crps_normalized")
    assert f"paper {boston.mean:.2f} ± {boston.standard_error:.2f}" in text
    for words in ("ours", "difference", "mcbn reproduce regression --profile paper --device cuda", "NVIDIA H200"):
        assert words in text
    assert "506" in text  # the sizes of the data sets


def test_figures_hold_the_saved_errors(built: Path):
    block = re.search(r'id="mcbn-boston">(.*?)</script>', (built / "figures.html").read_text())[1]
    chart = json.loads(block)
    dots = next(series for series in chart["series"] if series["kind"] == "dots")
    with np.load(RESULTS / "regression" / "predictions" / "boston-mcbn-1.npz") as saved:
        error = np.abs(saved["error"][0].astype(float))[np.argsort(saved["std"][0], kind="stable")]
    assert dots["y"] == pytest.approx(error.tolist(), rel=1e-3)


def test_only_what_was_run_is_shown(tmp_path: Path):
    run = {
        "kind": "test",
        "dataset": "boston",
        "method": "mcbn",
        "split": 1,
        "seed": 1,
        "device": "cpu",
        "seconds": 2.0,
    }
    scores = dict.fromkeys(("rmse", "crps", "pll", "crps_normalized", "pll_normalized"), 1.25)
    scores |= {"crps_constant": 1.5, "pll_constant": -2.0}
    (tmp_path / "regression").mkdir()
    (tmp_path / "regression" / "records.jsonl").write_text(json.dumps(run | scores | {"device": "<b>cpu</b>"}) + "\n")
    files = site(tmp_path, tmp_path / "out")
    text = text_of(tmp_path / "out" / "index.html")
    assert "Not run yet: Concrete Compressive Strength" in text
    assert "<b>cpu" not in files[0].read_text()
    for page, command in (
        ("statistics", "statistics"),
        ("theory", "objective"),
        ("speed", "bench"),
        ("figures", "toy"),
    ):
        assert f"Not run yet. mcbn {'reproduce ' if command != 'bench' else ''}{command} makes it." in text_of(
            tmp_path / "out" / f"{page}.html"
        )


def test_a_folder_without_records_is_refused(tmp_path: Path, monkeypatch):
    with pytest.raises(MCBNError, match="holds no records"):
        site(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"mcbn: .* holds no records"):
        runpy.run_module("mcbn.report", run_name="__main__")


@pytest.mark.slow
def test_an_unwritable_place_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(MCBNError, match=r"cannot write .*index\.html"):
        site(RESULTS, tmp_path / "file")


def test_the_module_runs_as_a_command(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(RESULTS), "--out", str(tmp_path / "out")])
    runpy.run_module("mcbn.report", run_name="__main__")
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "index.html")


def test_time_shared_by_records_is_counted_once():
    selection = [{"kind": "selection", "cell": cell, "seconds": 10.0} for cell in ("a", "a", "b")]
    tests = [{"kind": "test", "seconds": 2.0}] * 3
    assert total_seconds("regression", [*selection, *tests]) == 26.0
    assert total_seconds("statistics", [{"config_hash": "x", "seconds": 7.0}] * 4) == 7.0
    assert total_seconds("objective", [{"seconds": 1.0}] * 4) == 4.0
    found = trace("regression", [{"profile": "quick", "device": "cpu", "seconds": 3725.0}], "mcbn reproduce regression")
    assert found.command == "mcbn reproduce regression --profile quick"
    assert found.time == "1 h 2 min"


def test_markdown_of_the_studies_becomes_tables_and_is_escaped(tmp_path: Path):
    path = tmp_path / "table.md"
    path.write_text("About `x` <i>\n\n| a | b |\n|---|--:|\n| <b>1</b> | 2 |\n\n- one\n- two\n")
    text = markdown_part(path, "T", "t", "c")
    assert "<td>&lt;b&gt;1&lt;/b&gt;</td><td>2</td>" in text
    assert "About <code>x</code> &lt;i&gt;" in text
    assert "<li>one</li><li>two</li>" in text
