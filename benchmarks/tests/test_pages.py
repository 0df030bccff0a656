"""Tables of README and documentation are those that the committed records give."""

import shutil
from pathlib import Path

import pytest

from mcbn.errors import MCBNError
from mcbn_benchmarks import pages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the pages beside the committed records."""
    for path in (path for pattern in pages.PAGES for path in ROOT.glob(pattern)):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for folder in ("docs/snippets", "src"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for folder in ("results", "results/solar_cells"):  # a page of the latter was copied
        for path in (path for path in (ROOT / folder).iterdir() if not (tmp_path / folder / path.name).exists()):
            (tmp_path / folder / path.name).symlink_to(path)
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
    return tmp_path


def test_every_table_is_that_of_the_records(checkout: Path) -> None:
    assert pages.pages(checkout) == ["every table is that of the records"]
    text = "".join(path.read_text() for pattern in pages.PAGES for path in ROOT.glob(pattern))
    assert [name for name in pages.TABLES if f"<!-- {name}" not in text] == []


def test_a_number_that_rotted_is_written_anew(checkout: Path) -> None:
    page = checkout / "README.md"
    text = page.read_text()
    page.write_text(text.replace("| 1 ", "| 2 ", 1))
    assert page.read_text() != text
    assert pages.pages(checkout) == [page]
    assert page.read_text() == text


def test_a_table_nobody_makes_is_named(checkout: Path) -> None:
    (checkout / "README.md").write_text("<!-- weather -->\n<!-- /weather -->")
    with pytest.raises(MCBNError, match=r"README\.md asks for a table 'weather'; there are quote, file, entries, "):
        pages.pages(checkout)


def test_a_table_is_quoted_by_its_heading() -> None:
    place = "results/shift/table.md"
    assert pages.quote(ROOT, place, "Draws", "of", "other").startswith("| Batches of | Accuracy")
    assert pages.quote(ROOT, place) == pages.quote(ROOT, place, "False", "alarms")
    with pytest.raises(MCBNError, match=r"results/shift/table\.md has no table under 'Weather'"):
        pages.quote(ROOT, place, "Weather")


def test_parameters_of_an_estimator_are_a_row_each() -> None:
    table = pages.entries(ROOT, "src/mcbn/sklearn/parameters.txt", "Attributes")
    assert "| `n_iter_` | epochs of training. |" in table
    assert "none below 4 rows. |" in table  # of two lines
    assert "patience" not in table
