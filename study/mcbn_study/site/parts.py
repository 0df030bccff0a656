"""Tables and files of the reproduction as parts of HTML pages."""

from collections.abc import Sequence
from pathlib import Path

from mcbn.page.html import MISSING, Markup, element, framed, join, table
from mcbn_study.site.markdown import to_html
from mcbn_study.site.provenance import Provenance
from mcbn_study.tables import Table


def table_part(found: Table) -> Markup:
    """Show a table; where it has rows for ours, the paper's and the difference, they stay together."""
    heading = element("h2", found.title, id=found.label)
    if not any(row[1] == "paper" for row in found.rows):
        return join([heading, table(found.header, found.rows, caption=found.note)])
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in found.header)))
    body = element("tbody", *(_row(row, span) for row, span in zip(found.rows, _spans(found.rows), strict=True)))
    return join([heading, framed(element("table", head, body), found.note)])


def _spans(rows: Sequence[Sequence[str]]) -> list[int]:
    """Count the rows that each row's first cell stands for: itself and those after it without one of their own."""
    starts = [i for i, row in enumerate(rows) if row[0]]
    ends = [*starts[1:], len(rows)]
    spans = dict(zip(starts, (end - start for start, end in zip(starts, ends, strict=True)), strict=True))
    return [spans.get(i, 0) for i in range(len(rows))]


def _row(cells: Sequence[str], span: int) -> Markup:
    kind = {"ours": "within ours", "paper": "within paper"}.get(cells[1])
    first = [element("th", cells[0], scope="rowgroup", rowspan=str(span))] if span else []
    rest = [element("td", cells[1], class_="kind"), *(element("td", cell) for cell in cells[2:])]
    return element("tr", *first, *rest, class_=kind)


def missing_sets(found: Table) -> list[str]:
    """Name the data sets for which a table has nothing of ours."""
    rows = [row for row in found.rows if row[1] == "ours"]
    return [row[0] for row in rows if all(cell == MISSING for cell in row[2:])]


def markdown_part(path: Path, title: str, anchor: str, command: str) -> Markup:
    """Show a Markdown file as the studies write them, under a heading of ours."""
    heading = element("h2", title, id=anchor)
    if not path.exists():
        return join([heading, not_run(command)])
    return join([heading, to_html(path.read_text("utf-8"), path.parent)])


def not_run(command: str) -> Markup:
    """Say that a part is not there yet, and what makes it."""
    return element("p", "Not run yet. ", element("code", command), " makes it.", class_="warning")


def provenance_part(found: Provenance, then: str = "") -> Markup:
    """Say what made the records, on what hardware and how long it took."""
    if not found.records:
        return not_run(found.command)
    count = f"{found.records:,} record{'' if found.records == 1 else 's'}"
    facts = f" on {found.hardware}; {count}, {found.time}; commit {', '.join(found.commits)}."
    more = [" Then ", element("code", then), "."] if then else []
    return element("p", "Made by ", element("code", found.command), facts, *more, class_="muted")
