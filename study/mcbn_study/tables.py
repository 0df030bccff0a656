"""A table of plain text, and how it looks in Markdown, in LaTeX and as comma-separated values."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mcbn.errors import MCBNError

MISSING = "\N{EN DASH}"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    MISSING: "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class Table:
    """Cells of plain text; every row has as many as the header.

    Attributes:
        title: heading in Markdown, start of the caption in LaTeX.
        label: name to refer to it by, the paper's own where the paper has that table.
        header: column names.
        rows: cells; a row that starts with an empty cell continues the one above.
        note: what a reader must know, after the title.
    """

    title: str
    label: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise MCBNError(f"{self.label}: {len(row)} cells under {len(self.header)} columns: {row}")


def to_markdown(table: Table) -> str:
    """Lay out with heading and note; cells are escaped, so that stars stay stars and names cannot break it."""
    header, *rows = [[escape_markdown(cell) for cell in row] for row in (table.header, *table.rows)]
    note = [escape_markdown(table.note), ""] if table.note else []
    return "\n".join([f"## {escape_markdown(table.title)}", "", *note, markdown(header, rows, "lr", padded=False)])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "r", *, padded: bool = True) -> str:
    """Lay out the lines of a table whose cells are Markdown already.

    align: l or r for every column, the last letter for all that follow; padded: columns are straight in the source too.
    """
    lines = [header, *rows]
    sides = align.ljust(len(header), align[-1])
    widths = [max(len(line[i]) for line in lines) if padded else 0 for i in range(len(header))]
    columns = list(zip(widths, sides, strict=True))
    text = [
        " | ".join(f"{cell:{'>' if s == 'r' else '<'}{w}}" for cell, (w, s) in zip(line, columns, strict=True))
        for line in lines
    ]
    rule = "|".join(_rule(width, ":" if side == "r" else "") for width, side in columns)
    return "\n".join([f"| {text[0]} |", f"|{rule}|", *(f"| {line} |" for line in text[1:]), ""])


def _rule(width: int, end: str) -> str:
    return f"{'-' * (width + 2 - len(end))}{end}" if width else f" ---{end} "


def escape_markdown(text: str) -> str:
    """Keep every character as it is, also < and & where Markdown is shown as HTML."""
    text = re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_latex(table: Table) -> str:
    """Lay out as a floating table, for documents with the packages booktabs and graphicx."""
    columns = "l" + "r" * (len(table.header) - 1)
    grouped = any(not row[0] for row in table.rows)
    body: list[str] = []
    for row in table.rows:
        if grouped and row[0] and body:
            body.append(r"\addlinespace[2pt]")
        body.append(_row_latex(row))
    return "\n".join(
        [
            r"\begin{table}[ht]",
            r"\centering",
            rf"\caption{{\textbf{{{escape_latex(table.title)}.}} {escape_latex(table.note)}}}",
            rf"\label{{{table.label}}}",
            rf"\resizebox{{\ifdim\width>\linewidth\linewidth\else\width\fi}}{{!}}{{\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _row_latex(table.header),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _row_latex(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def escape_latex(text: str) -> str:
    """Keep every character as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]], *, digits: int | None = None) -> str:
    """Lay out comma-separated values, floats to that many digits, all by default; None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([f"{v:.{digits}g}" if digits and isinstance(v, float) else v for v in row])
    return text.getvalue()
