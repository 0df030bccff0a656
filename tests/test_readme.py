"""The README's code runs as it stands, its links lead somewhere, and its study tables are those of the records."""

import csv
import importlib
import math
import re
from pathlib import Path
from statistics import median

import pytest

from mcbn.data import NAMES, describe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    page for part in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md") for page in ROOT.glob(part)
)
COLUMNS = [("mcbn", "rmse"), ("mcbn", "crps"), ("mcbn", "crps_normalized")]


@pytest.mark.parametrize(("block", "trained"), [(0, "digits"), (1, "diabetes")])
def test_six_lines_run_as_they_stand(block: int, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "snippets"))
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[block]
    assert len([line for line in code.splitlines() if line]) <= 6
    net, train_loader, val, (x, _) = getattr(importlib.import_module("trained"), trained)()
    names = {"net": net, "train_loader": train_loader, "x": x}
    names |= {"val": (val[0][:32], val[1][:32]), "held_out": (val[0][32:], val[1][32:])}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["pred"].std if trained == "diabetes" else names["pred"].label) == len(x)  # type: ignore[attr-defined]


def test_the_readme_is_short() -> None:
    shown = re.sub(r"```.*?```|^\|[-|: ]+\|$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"[\w'./%-]*\w[\w'./%-]*", shown)) <= 900


def test_the_readme_names_the_commands_of_a_checkout() -> None:
    assert all(command in README for command in ("make demo", "make test"))


def read_prose(page: Path) -> str:
    """Read a page without code, comments, headings and tables, those from records too."""
    outside = re.sub(r"<!-- (\w+)[^>]*-->\n.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"```.*?```|<!--.*?-->|^(?:\||#|    )[^\n]*$", "", outside, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "results").glob("*/*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_paragraphs_are_short(page: Path) -> None:
    paragraphs = re.split(r"\n\s*\n|\n(?=\d\. |- )", read_prose(page))
    assert [" ".join(paragraph.split()) for paragraph in paragraphs if len(paragraph.split()) > 90] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs" / "quickstart").glob("*.md"))], ids=str)
def test_sentences_are_short(page: Path) -> None:
    sentences = re.split(r"(?<=[.:;?!])\s+", read_prose(page))
    assert median(len(sentence.split()) for sentence in sentences if sentence.split()) < 16


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


def assert_rounded(printed: str, values: list[float]) -> None:
    """Every number of a cell is the value, to the digits printed."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", printed)
    assert len(numbers) == len(values), printed
    for number, value in zip(numbers, values, strict=True):
        half_a_unit = 0.5 * 10.0 ** -len(number.partition(".")[2])
        assert abs(float(number) - value) <= half_a_unit + 1e-9, f"{printed}: {number} for {value}"


def cells(first: str) -> list[str]:
    """Return the cells behind the first one, of the first table row that begins with it."""
    line = next(line for line in README.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("name", NAMES)
def test_the_regression_table_is_that_of_the_records(name: str) -> None:
    with (ROOT / "results" / "regression" / "summary.csv").open() as file:
        found = {(r["method"], r["metric"]): r for r in csv.DictReader(file) if r["dataset"] == name}
    for cell, column in zip(cells(describe(name).title), COLUMNS, strict=True):
        row, both = found[column], column[1] == "crps_normalized"
        fields = ("mean", "standard_error") if both else ("mean",)
        row["standard_error"] = str(math.hypot(float(row["standard_error"]), float(row["search"] or 0)))  # of both
        assert_rounded(cell, [float(row[prefix + field]) for prefix in ("", "paper_") for field in fields])
