"""The documentation: snippets print what the pages show, the site builds strictly, messages are listed."""

import csv
import inspect
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from math import pi
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
import snippets
from mcbn import distributed, ray as mcbn_ray, scale
from mcbn.data import NAMES as DATA_SETS
from snippets import BLOCK, DOCS, blocks

ROOT = Path(__file__).parents[1]
SNIPPETS = sorted(path for path in (ROOT / "docs" / "snippets").glob("*.py") if path.stem != "trained")
NUMBER = re.compile(r"-?\d+\.?\d*")
MEASURED = re.compile(r"\d\.\d|\d (?:%|ms|s|MiB|GiB|MB|GB|times|points?)(?!\w)|\dx\b")
FIGURES = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
NAMES = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
COUNTED = re.compile(  # results told in words: "five of the eight sets", "a fifth of the time"
    rf"\b(?:{'|'.join(NAMES)}|\d+) of (?:the |these )?(?:{'|'.join(NAMES)}|\d+)\b"
    rf"|\ball (?:{'|'.join(NAMES)}) (?:\w+ )?sets|\b(?:{'|'.join(NAMES[2:])}) (?:of them|sets)\b"
    r"|\ba (?:third|quarter|fifth|sixth|seventh|eighth|tenth)\b|\bhalf a \w+",
    re.IGNORECASE,
)
PROSE = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "threads"),
    [*((path, 1) for path in SNIPPETS), (ROOT / "docs" / "snippets" / "classification.py", 2)],
    ids=lambda each: each.stem if isinstance(each, Path) else f"{each} threads",
)
def test_a_snippet_prints_what_its_page_shows(
    path: Path,
    threads: int,
    set_threads: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_threads(threads)
    monkeypatch.syspath_prepend(str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    printed, shown = capsys.readouterr().out, path.with_suffix(".txt").read_text()
    assert printed == shown, f"{path.name} prints what its page does not show"


RUN_ELSEWHERE = {"field.md", "ecosystem.md", "theory.md"}  # by the tests of what they are about


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network with batch norm, inputs and targets: what a page calls the reader's own."""
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(64, 3)
    net(x)
    return net.eval(), x, x.sum(1, keepdim=True)


def own_things(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return what the code of a page takes as given; a cluster is played by this process."""
    net, x, y = regression()
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=100, batch_size=8)
    if page == "solar_cells.md":
        deployed = SimpleNamespace(x=torch.randn(600, 3))
        return {"bayes": bayes, "home": deployed, "tested": SimpleNamespace(x=x), "pool": SimpleNamespace(x=x + 5)}
    if page == "serving.md":
        pytest.importorskip("onnxscript")
        loader = DataLoader(TensorDataset(x, y), 8)
        return {"mcbn": mcbn, "model": net, "train_loader": loader, "val_loader": loader, "example_x": x}
    if page == "scale.md":
        for place, stand_in in ((mcbn_ray, scale.predict), (mcbn_ray, fit_here), (distributed, fit_here)):
            name = "predict" if stand_in is scale.predict else "fit"
            monkeypatch.setattr(place, name, bound(getattr(place, name), stand_in))
        (folder / "rows").mkdir()
        (folder / "rows" / "a.csv").write_text("a,b,c,id\n1,2,3,7\n4,5,6,8\n")
        bayes.tune((x, y))
        shares = [bayes.posterior.select(range(32)), bayes.posterior.select(range(32, 100))]
        return {"bayes": bayes, "train": DataLoader(TensorDataset(x), 8), "parts": shares}
    return {}


def fit_here(bayes: mcbn.MCBN[Any], data: object, **options: Any) -> mcbn.MCBN[Any]:
    return bayes.fit(data, **options)


def bound(real: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what the real function would not take; leave its address out."""

    def call(*arguments: Any, **options: Any) -> Any:
        inspect.signature(real).bind(*arguments, **options)
        return stand_in(*arguments, **{name: value for name, value in options.items() if name != "address"})

    return call


WITH_CODE = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if BLOCK.search(path.read_text()))


@pytest.mark.parametrize("page", [page for page in WITH_CODE if blocks(page) and page not in RUN_ELSEWHERE])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names = own_things(page, tmp_path, monkeypatch)
        for block in blocks(page):
            exec(block, names)


def test_a_block_that_fails_is_named_with_its_page_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("# Page\n\n```python\nx = 1\nx.predict()\n```\n")
    monkeypatch.setattr(snippets, "DOCS", tmp_path)
    with pytest.raises(AttributeError) as failure:
        exec(blocks("page.md")[0], {})
    last = failure.traceback[-1]
    assert (last.path.name, last.lineno + 1) == ("page.md", 5)


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.sub("<[^>]+>", "", (tmp_path / "site" / "quickstart" / "regression" / "index.html").read_text())
    assert "pred = bayes.predict(x)" in shown
    assert "--8" not in shown
    page = (tmp_path / "site" / "guide" / "errors" / "index.html").read_text()
    assert "variance must not be negative" in page
    assert not re.findall(r'(?:src|href)="https?://(?:fonts|cdn|unpkg)', page)


PAGES = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
LINES = tomllib.loads((DOCS / "templates" / "results.toml").read_text())
MADE = {f"results/{study}.md": lines for study, lines in LINES.items()}
MADE |= {"guide/errors.md": (DOCS / "templates" / "errors.md").read_text()}


def test_a_page_of_results_has_a_title_over_its_five_lines() -> None:
    pages = [ROOT / "results" / study / ("tables.md" if study == "regression" else "table.md") for study in LINES]
    assert [page.parent.name for page in pages if not page.read_text().startswith("# ")] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "changelog.md"])
def test_five_lines_stand_at_the_top_of_a_page(page: str) -> None:
    text = MADE[page] if page in MADE else (DOCS / page).read_text()
    assert len(re.findall(r"^\d\. ", text.split("\n## ")[0], re.MULTILINE)) == 5


def test_a_table_of_the_site_can_be_read() -> None:
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/a.md"))
    text = "![a](../../results/x/b.png) [c](../../results/x/table.md) [d](../../src/e.py)\n\n"
    table = "| name | x |\n|---:|---|\n| `a\\|b` | -1 ± 2 |\n| c | |\n"
    shown = hooks["on_page_markdown"](text + table, page=page, config=None)
    assert "[![a](../results/x/b.png)](../results/x/b.png) [c](../results/x.md) d (`src/e.py`)" in shown
    assert shown.endswith("| name | x |\n|---|---:|\n| `a\\|b` | -1 ±\u00a02 |\n| c | |\n")
    words = "| how | seconds |\n|---|---|\n| 2 draws in one pass | 1.4 (cuda) |\n"  # words, though a digit begins them
    assert "|---|---:|" in hooks["on_page_markdown"](words, page=page, config=None)


def test_a_number_stays_on_one_line_with_its_sign_and_a_long_name_in_a_table_does_not() -> None:
    pytest.importorskip("mkdocs")
    laid_out = runpy.run_path(str(DOCS / "hooks.py"))["on_page_content"]
    text = "<p>95{0}% of 3 ±{0}1 a_b</p><pre>95 %</pre><th>9 %</th><td>2E{1}11</td><td>a_{2}b</td> <code>a_b 5 %</code>"
    assert laid_out(text.format(" ", "-", "")) == text.format("\u00a0", "\u2011", "<wbr>")
    option = '<span class="whole">--out-of</span>'
    assert laid_out("<code>mcbn x --out-of a-b</code>") == f"<code>mcbn x {option} a-b</code>"


def test_a_page_of_results_that_is_missing_is_named_with_what_makes_it(tmp_path: Path) -> None:
    exceptions = pytest.importorskip("mkdocs.exceptions")
    on_files = runpy.run_path(str(DOCS / "hooks.py"))["on_files"]
    (tmp_path / "docs" / "templates").mkdir(parents=True)
    (tmp_path / "docs" / "templates" / "results.toml").write_text(
        'precision = """\n5. `mcbn reproduce precision` makes it.\n"""'
    )
    on_files.__globals__["ROOT"] = tmp_path
    with pytest.raises(
        exceptions.PluginError, match=r"precision/table.md is missing; `mcbn reproduce precision` makes it"
    ):
        on_files([], config=SimpleNamespace(nav=["results/precision.md"]))


def test_the_page_of_messages_fills_in_texts_alone() -> None:
    """A number of one module is not what another fills in under the same name."""
    pytest.importorskip("mkdocs")
    page = runpy.run_path(str(DOCS / "hooks.py"))["errors_page"]()
    assert "n\\_samples={T} asked of a posterior of … draws; fit more of them, or a Gaussian, which gives" in page
    assert "one ONNX file holds {MOST\\_BYTES}" in page


def tables(path: Path) -> list[list[dict[str, str]]]:
    """Read the tables of a Markdown page: rows by column."""
    found = re.findall(r"(?:^\|.*\n?)+", path.read_text(), re.MULTILINE)
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()] for text in found]
    return [[dict(zip(head, row, strict=False)) for row in rows] for head, _, *rows in cells]


def number(cell: str) -> float:
    return float(NUMBER.search(cell.replace(",", ""))[0])


@pytest.mark.parametrize("sentence", FIGURES["sentence"], ids=lambda sentence: sentence["says"])
def test_a_figure_in_a_sentence_is_that_of_its_record(sentence: dict[str, str]) -> None:
    path = ROOT / sentence["file"]
    names: dict[str, object] = {"number": number, "fmean": fmean, "pi": pi, "NAMES": NAMES}
    if path.suffix == ".md":
        rows = [row for table in tables(path) for row in table]
        names |= {
            "tables": tables(path),
            "agreeing": [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) cells", path.read_text())],
            "row": lambda start: next(row for row in rows if next(iter(row.values())).startswith(start)),
            "cell": lambda first, second, column: next(
                number(row[column].replace("95 %", "")) for row in rows if [*row.values()][:2] == [first, second]
            ),
        }
    elif path.suffix == ".csv":
        rows = list(csv.DictReader(path.read_text().splitlines()))
        crps = {(row["dataset"], row["method"]): float(row["mean"]) for row in rows if row.get("metric") == "crps"}
        names["better"] = lambda method: sum(crps[place, method] < crps[place, "mcbn"] for place in DATA_SETS)
    else:
        names["records"] = [json.loads(line) for line in path.read_text().splitlines()]
    expected = sentence["says"].format(*eval(sentence["is"], names))
    assert " ".join(expected.split()) in prose(ROOT / sentence["page"])


def prose(path: Path) -> str:
    """Read a page without generated tables, tables that a test of their own holds, code and addresses, in one line."""
    text = re.sub(r"<!-- (\w+)[^>]*-->\n.*?<!-- /\1 -->|```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"^\| +(?:\d|GPUs|as assumed|driver|storage|start|\|).*$", "", text, flags=re.MULTILINE)  # of `sweep`
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("    ", "#")))
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_measured_figure_stands_in_prose_without_its_record(path: Path) -> None:
    page, text = str(path.relative_to(ROOT)), prose(path)
    for sentence in FIGURES["sentence"]:
        if sentence["page"] == page:
            text = re.sub(pattern(sentence["says"]), " ", text)
    for stated in FIGURES["stated"].get(page, []):
        assert stated in text, f"{page} no longer says {stated!r}: take it out of docs/figures.toml"
        text = text.replace(stated, " ")
    hits = [*MEASURED.finditer(text), *COUNTED.finditer(text)]
    unlisted = [text[max(0, hit.start() - 60) : hit.end() + 30] for hit in hits]
    assert not unlisted, f"{page}: list these in docs/figures.toml with their records: {unlisted}"


def pattern(says: str) -> str:
    """Return the expression that finds a sentence whatever its figures are."""
    return r"[-\w.,]+".join(re.escape(piece) for piece in re.split(r"\{[^}]*\}", says))
