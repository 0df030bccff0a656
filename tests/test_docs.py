"""The documentation: snippets print what the pages show, the site builds strictly, messages are listed."""

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

import pytest
import torch

ROOT = Path(__file__).parents[1]
SNIPPETS = sorted(path for path in (ROOT / "docs" / "snippets").glob("*.py") if path.stem != "trained")
NUMBER = re.compile(r"-?\d+\.?\d*")
MEASURED = re.compile(r"\d\.\d|\d (?:%|ms|s|MiB|GiB|MB|GB|times|points?)(?!\w)|\dx\b")
FIGURES = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
    names: dict[str, object] = {"number": number, "fmean": fmean, "pi": pi}
    if path.suffix == ".md":
        rows = [row for table in tables(path) for row in table]
        names |= {
            "tables": tables(path),
            "row": lambda start: next(row for row in rows if next(iter(row.values())).startswith(start)),
            "cell": lambda first, second, column: next(
                number(row[column].replace("95 %", "")) for row in rows if [*row.values()][:2] == [first, second]
            ),
        }
    else:
        names["records"] = [json.loads(line) for line in path.read_text().splitlines()]
    expected = sentence["says"].format(*eval(sentence["is"], names))
    assert " ".join(expected.split()) in prose(ROOT / sentence["page"])


def prose(path: Path) -> str:
    """Read a page without generated tables, tables, code and addresses, in one line."""
    text = re.sub(r"<!-- (\w+)[^>]*-->\n.*?<!-- /\1 -->|```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "    ", "#")))
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
    unlisted = [text[max(0, hit.start() - 60) : hit.end() + 30] for hit in MEASURED.finditer(text)]
    assert not unlisted, f"{page}: list these in docs/figures.toml with their records: {unlisted}"


def pattern(says: str) -> str:
    """Return the expression that finds a sentence whatever its figures are."""
    return r"[-\d.,]+".join(re.escape(piece) for piece in re.split(r"\{[^}]*\}", says))
