"""Tables and files of the reproduction as parts of HTML pages."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from mcbn.page.html import MISSING, Markup, element, framed, join, table
from mcbn.report.layout import Table
from mcbn.report.provenance import Provenance


def table_part(found: Table) -> Markup:
    """Show a table; where it has rows for ours, the paper's and the difference, they stay together."""
    heading = element("h2", found.title, id=found.label)
    if not any(row[1] == "paper" for row in found.rows):
        return join([heading, table(found.header, found.rows, caption=found.note)])
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in found.header)))
    body = element("tbody", *(_row(row) for row in found.rows))
    return join([heading, framed(element("table", head, body), found.note)])


def _row(cells: Sequence[str]) -> Markup:
    kind = {"ours": "within ours", "paper": "within paper"}.get(cells[1])
    first = element("th", cells[0], scope="row") if cells[0] else element("td", "")
    return element("tr", first, *(element("td", cell) for cell in cells[1:]), class_=kind)


def missing_sets(found: Table) -> list[str]:
    """Name the data sets for which a table has nothing of ours."""
    rows = [row for row in found.rows if row[1] == "ours"]
    return [row[0] for row in rows if all(cell == MISSING for cell in row[2:])]


def markdown_part(path: Path, title: str, anchor: str, command: str) -> Markup:
    """Show a Markdown file of paragraphs and tables, as the studies write them."""
    parts = [element("h2", title, id=anchor)]
    if not path.exists():
        return join([*parts, not_run(command)])
    for block in re.split(r"\n\s*\n", path.read_text("utf-8").strip()):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            header, _, *rows = [_cells(line) for line in lines]
            parts.append(table(header, rows, text=(len(header) - 1,) if not header[-1] else ()))
        elif lines[0].startswith("- "):
            parts.append(element("details", element("summary", f"{len(lines)} further values"), _list(lines)))
        else:
            parts.append(element("p", *_code(" ".join(lines)), class_="muted"))
    return join(parts)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _list(lines: Sequence[str]) -> Markup:
    return element("ul", *(element("li", line.removeprefix("- ")) for line in lines), class_="muted")


def _code(text: str) -> list[str]:
    return [element("code", part) if i % 2 else part for i, part in enumerate(text.split("`"))]


def not_run(command: str) -> Markup:
    """Say that a part is not there yet, and what makes it."""
    return element("p", "Not run yet. ", element("code", command), " makes it.", class_="warning")


def provenance_part(found: Provenance, then: str = "") -> Markup:
    """Say what made the records, on what hardware and how long it took."""
    if not found.records:
        return not_run(found.command)
    facts = f" on {found.hardware}; {found.records:,} records, {found.time}; commit {', '.join(found.commits)}."
    more = [" Then ", element("code", then), "."] if then else []
    return element("p", "Made by ", element("code", found.command), facts, *more, class_="muted")


def image_part(path: Path, alt: str) -> Markup:
    """Embed a PNG."""
    address = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return element("figure", element("img", src=address, alt=alt), element("figcaption", alt))
