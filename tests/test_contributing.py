"""CONTRIBUTING.md tells the truth: it names every module, and imports point one way."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mcbn

SOURCE = Path(mcbn.__file__).parent
PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def rows() -> dict[str, int]:
    """Return the row of the table that each module or folder stands in."""
    table = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {name: row for row, cell in enumerate(table) for name in re.findall(r"`(\w+)/?`", cell)}


def modules() -> set[str]:
    files = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def imports() -> Iterator[tuple[str, str]]:
    """Yield who imports whom at the top of a file, by module or folder."""
    for path in SOURCE.rglob("*.py"):
        importer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mcbn":
                inner = (node.module or "").split(".")[1:2]
                yield from ((importer, name) for name in inner or [alias.name for alias in node.names])


def test_every_module_has_its_row() -> None:
    assert set(rows()) == modules()


def test_imports_point_from_lower_rows_to_higher_ones() -> None:
    row = rows()
    known = [(a, b) for a, b in imports() if a in row and b in row]
    assert len(known) > 300
    assert [(a, b) for a, b in known if row[b] > row[a]] == []
