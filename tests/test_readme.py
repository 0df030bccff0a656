"""The README's code runs as it stands, its links lead somewhere, and its study tables are those of the records."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(page for part in ("*.md", "docs/*.md", "examples/*.md", "benchmarks/*.md") for page in ROOT.glob(part))
COLUMNS = [("mcbn", "rmse"), ("mcbn", "crps"), *((name, "crps_normalized") for name in ("mcbn", "mcdo", "mnf"))]


def test_first_call_runs_within_25_lines(capsys) -> None:  # type: ignore[no-untyped-def]
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len(block.splitlines()) <= 25
    exec(compile(block, "README.md", "exec"), {})
    covered = float(re.search(r"interval: tensor\((.*)\)", capsys.readouterr().out).group(1))  # type: ignore[union-attr]
    assert 0.8 < covered <= 1


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


def cells(first: str, page: str = README) -> list[str]:
    """Return the cells behind the first one, of the first table row that begins with it."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("name", ["boston", "concrete", "energy", "kin8nm", "power", "wine", "yacht"])
def test_the_regression_table_is_that_of_the_records(name: str) -> None:
    with (ROOT / "results" / "regression" / "summary.csv").open() as file:
        found = {(r["method"], r["metric"]): r for r in csv.DictReader(file) if r["dataset"] == name}
    for cell, column in zip(cells(name.capitalize()), COLUMNS, strict=True):
        row, both = found[column], column[1] == "crps_normalized"
        fields = ("mean", "standard_error") if both else ("mean",)
        assert_rounded(cell, [float(row[prefix + field]) for prefix in ("", "paper_") for field in fields])


def test_the_cifar10_row_is_that_of_the_records() -> None:
    table = (ROOT / "results" / "cifar10" / "table.md").read_text()
    means = [value.split(" ±")[0] for value in cells("ours", table)]
    recorded = dict(zip(cells("PLL", table), means, strict=True))
    assert cells("ours") == [recorded[title] for title in ("Plain", *(f"T = {T}" for T in (1, 2, 4, 8, 32, 128)))]
