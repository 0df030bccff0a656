"""A table of plain text, and how it looks in Markdown and in LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise MCBNError(f"{self.label}: {len(row)} cells under {len(self.header)} columns: {row}")


def to_markdown(table: Table) -> str:
    """Lay out with heading and note; cells are escaped, so that stars stay stars and names cannot break it."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [_row_markdown(table.header), "| " + " | ".join(rule) + " |", *map(_row_markdown, table.rows)]
    note = [escape_markdown(table.note), ""] if table.note else []
    return "\n".join([f"## {escape_markdown(table.title)}", "", *note, *lines, ""])


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


def escape_markdown(text: str) -> str:
    """Keep every character as it is, also < and & where Markdown is shown as HTML."""
    text = re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_latex(text: str) -> str:
    """Keep every character as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def _row_markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"


def _row_latex(cells: Sequence[str]) -> str:
    return " & ".join(escape_latex(cell) for cell in cells) + r" \\"
