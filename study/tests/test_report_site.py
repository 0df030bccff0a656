"""The reproduction as a site: whole, offline, and honest about what is missing."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mcbn.cli import app
from mcbn.errors import MCBNError
from mcbn.page import examples, templates
from mcbn_study import paper
from mcbn_study.commands.reproduce import reproduce
from mcbn_study.journal import total_seconds, trace
from mcbn_study.site.markdown import read_blocks
from mcbn_study.site.write import COMMANDS, ITEMS, PAGES, find_folders, report

ROOT = Path(__file__).parents[2]

RESULTS = Path(__file__).resolve().parents[2] / "results"


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
    folders = [f"{name}.html" for name in find_folders(RESULTS)]
    assert "posteriors.html" in folders
    assert sorted(path.name for path in built.iterdir()) == sorted([*PAGES, *folders])
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
            assert (built / page).is_file(), address
            assert not anchor or f'id="{anchor}"' in (built / page).read_text(), address


def test_index_names_every_table_and_figure_of_the_paper(built: Path):
    text = text_of(built / "index.html")
    for item in ITEMS:
        assert item["where"] in text
        assert item["what"] in text
    assert "20 tables and figures 20 are reproduced whole" in text
    printed = {number.table for number in paper.numbers()}
    assert printed <= {item["anchor"] for item in ITEMS}


def test_tables_show_ours_the_papers_and_the_difference_with_what_made_them(built: Path):
    text = text_of(built / "regression.html")
    boston = paper.find("boston", "mcbn", "crps_normalized")
    assert f"paper {boston.mean:.2f} ± {boston.standard_error:.2f}" in text
    for words in ("ours", "difference", "mcbn reproduce regression --profile paper --device cuda", "NVIDIA H200"):
        assert words in text
    assert "506" in text  # the sizes of the data sets


def test_figures_are_those_of_the_regression_study(built: Path):
    page = (built / "figures.html").read_text()
    files = sorted((RESULTS / "regression" / "figures").glob("*.png"))
    assert page.count("<img") == len(files)
    assert all(base64.b64encode(file.read_bytes()).decode() in page for file in files)


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
    index = report(tmp_path, tmp_path / "out")
    text = text_of(index)
    assert "Not run yet: Concrete Compressive Strength" in text
    assert "Not run yet. The paper: Histograms" in text
    assert "mcbn reproduce statistics" in text
    assert "<b>cpu" not in index.read_text()
    for page, study in (("figures", "toy"), ("sensitivity", "sensitivity")):
        assert f"Not run yet. {COMMANDS[study]} makes it." in text_of(tmp_path / "out" / f"{page}.html")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*PAGES}


def test_a_folder_without_records_is_refused(tmp_path: Path):
    with pytest.raises(MCBNError, match="holds no records"):
        report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    told = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 2
    assert "holds no records" in told.stderr


@pytest.mark.slow
def test_an_unwritable_place_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(MCBNError, match=r"cannot write .*index\.html"):
        report(RESULTS, tmp_path / "file")


def test_time_shared_by_records_is_counted_once():
    selection = [{"kind": "selection", "cell": cell, "seconds": 10.0} for cell in ("a", "a", "b")]
    tests = [{"kind": "test", "seconds": 2.0}] * 3
    assert total_seconds("regression", [*selection, *tests]) == 26.0
    assert total_seconds("statistics", [{"config_hash": "x", "seconds": 7.0}] * 4) == 7.0
    assert total_seconds("objective", [{"seconds": 1.0}] * 4) == 4.0
    clock = [{"kind": "score", "method": m, "seed": 1, "seconds": s} for m in ("plain", "mcbn") for s in (1.0, 3.0)]
    assert total_seconds("alternatives", clock) == 6.0  # each row has the time since its method began
    found = trace("regression", [{"profile": "quick", "device": "cpu", "seconds": 3725.0}], "mcbn reproduce regression")
    assert found.command == "mcbn reproduce regression --profile quick"
    assert found.time == "1 h 2 min"
    assert trace("precision", [{"hardware": "cpu"}], "mcbn reproduce precision").time == "time not on record"
    assert trace("precision", [], "mcbn reproduce precision").time == "\N{EN DASH}"


def test_markdown_of_the_studies_becomes_tables_and_is_escaped(tmp_path: Path):
    blocks = read_blocks(
        "# Top\n\nAbout `x` <i> and **so** on,\nsee [there](http://nowhere.org)\n\n"
        "## Sub\n| a | b | c |\n|---|--:|---|\n| <b>1</b> | 2 | w\\_x \\| __y__ &lt; z |\n\n- one\n- two\n",
        tmp_path,
    )
    shown = templates.environment("mcbn_study.site").get_template("shown.html.j2").module
    text = str(shown.markdown(list(blocks)))
    assert '<td>&lt;b&gt;1&lt;/b&gt;</td><td>2</td><td class="text">w_x | __y__ &lt; z</td>' in text
    assert "About <code>x</code> &lt;i&gt; and <strong>so</strong> on, see there</p>" in text
    assert "<li>one</li><li>two</li>" in text
    assert "<h2>Top</h2>" in text
    assert "<h2>Sub</h2>" in text
    assert "http" not in text


PNG = base64.b64decode(examples.tile(np.zeros((2, 3), np.uint8))["address"].partition(",")[2])
CIFAR = {"kind": "evaluation", "seed": 0, "seconds": 75.5, "hardware": "Some GPU", "commit": "abcdef"}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Results as studies of images leave them: tables, pictures and records, and one folder nobody knows of."""
    results = tmp_path / "results"
    for name in ("cifar10", "segmentation", "zoo", "own_study", "empty"):
        (results / name).mkdir(parents=True)
    (results / "cifar10" / "table.md").write_text(
        "# CIFAR-10\n\n![PLL over T, one line a seed](curve.png)\n\n"
        "| T | PLL | paper |\n|--|--|--|\n| 1 | -0.35 | -0.36 |\n"
    )
    for name in ("cifar10/curve.png", "segmentation/camvid_map-1.png", "segmentation/voc.png"):
        (results / name).write_bytes(PNG)
    (results / "cifar10" / "summary.csv").write_text("network,metric,value\na,pll,1\na,ece,2\n")
    lines = [CIFAR, CIFAR | {"metric": "ece"}, CIFAR | {"seed": 1, "seconds": 44.5}]
    (results / "cifar10" / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (results / "segmentation" / "table.md").write_text("| dataset | mIoU |\n|--|--|\n| camvid | 55.1 |\n")
    (results / "zoo" / "table.md").write_text("| network | <i>ECE</i> |\n|--|--|\n| a | 0.02 |\n")
    (results / "own_study" / "notes.md").write_text("Words `only`")
    return results


def test_folders_of_other_studies_become_pages(folders: Path, tmp_path: Path):
    report(folders, tmp_path / "out")
    shown = {"cifar10.html", "segmentation.html", "zoo.html", "own_study.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*PAGES, *shown}
    page = (tmp_path / "out" / "cifar10.html").read_text()
    text = text_of(tmp_path / "out" / "cifar10.html")
    assert "Made by mcbn reproduce cifar10 on Some GPU; 3 records, 2 min 0 s; commit abcdef." in text
    assert "-0.35 -0.36" in text
    assert "cifar10/summary.csv in the folder of results." in text
    assert page.count('alt="PLL over T, one line a seed"') == page.count("<img") == 1  # once, with its own words
    assert base64.b64encode(PNG).decode() in page
    maps = (tmp_path / "out" / "segmentation.html").read_text()
    assert 'alt="Camvid map 1"' in maps
    assert maps.count("<img") == 2
    assert "Made by mcbn reproduce segmentation . Hardware and time are not on record." in text_of(
        tmp_path / "out" / "segmentation.html"
    )
    assert "<i>ECE" not in (tmp_path / "out" / "zoo.html").read_text()


def test_index_counts_such_folders_among_what_is_done(folders: Path, tmp_path: Path):
    text = report(folders, tmp_path / "out").read_text()
    for address in ("cifar10.html#table:cifar_results", "segmentation.html#top", "zoo.html#top", "own_study.html#top"):
        assert f'href="{address}"' in text
        page, _, anchor = address.partition("#")
        assert f'id="{anchor}"' in (tmp_path / "out" / page).read_text()
    assert "Own study" in text
    assert "empty.html" not in text
    (folders / "cifar10" / "table.md").unlink()
    (folders / "cifar10" / "curve.png").unlink()
    index = text_of(report(folders, tmp_path / "again"))
    assert "Not run yet. The paper: PLL -.36 at T = 1" in index


def test_commands_that_pages_name_exist(built: Path):
    known = {command.name or command.callback.__name__ for command in reproduce.registered_commands}
    text = " ".join(map(text_of, built.glob("*.html")))
    named = set(re.findall(r"mcbn reproduce (\w+)", text)) | {"foreign"}
    assert named <= known
    assert "\nzoo:" in (ROOT / "Makefile").read_text()
    assert "examples/solar_cells.py" in re.findall(r"python (examples/\S+\.py)", text)
    assert all((ROOT / place).is_file() for place in re.findall(r"python (examples/\S+\.py)", text))
