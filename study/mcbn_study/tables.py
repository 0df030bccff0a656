"""A table of plain text, and how it looks in Markdown, in LaTeX and as comma-separated values; figures as small PNG."""

import csv
import io
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import replacing, write_text

MISSING = "\N{EN DASH}"
PLOT, PHOTOGRAPH = 48, 256  # colours; a plot has a handful and their edges
Words = Mapping[str, Any]  # of one table: title, label, header, note
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_LATEX |= {sign: f"${sign}$" for sign in "<>|"} | {MISSING: "--"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


@dataclass(frozen=True)
class Table:
    """Cells of plain text; every row has as many as the header."""

    title: str  # heading in Markdown, start of the caption in LaTeX
    label: str  # name to refer to it by, the paper's own where the paper has that table
    header: Sequence[str]
    rows: Sequence[Sequence[str]]  # one that starts with an empty cell continues the one above
    note: str = ""  # what a reader must know, after the title

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise MCBNError(f"{self.label}: {len(row)} cells under {len(self.header)} columns: {row}")

    @property
    def groups(self) -> list[Sequence[Sequence[str]]]:
        """Rows with those that continue them."""
        starts = [i for i, row in enumerate(self.rows) if row[0]]
        return [self.rows[start:end] for start, end in pairwise([*starts, len(self.rows)])]


def read_words(package: str) -> dict[str, Any]:
    """Read the report.toml of a package: what its tables are called, their columns and notes, and names of methods."""
    return tomllib.loads(resources.files(package).joinpath("report.toml").read_text("utf-8"))


def table(words: Words, rows: Sequence[Sequence[str]], header: Sequence[str] = (), **fields: Any) -> Table:
    """Lay out rows under the words of a table with these fields filled in; `header` follows the columns they name."""
    title, label, note = (words.get(name, "").format(**fields) for name in ("title", "label", "note"))
    return Table(title, f"table:{label}", (*words.get("header", ()), *header), rows, note)


def render(package: str, template: str = "report.md.j2", /, **content: Any) -> str:
    """Fill in a template of a package, where text is Markdown already and the filter `plain` escapes it.

    The filter `table` lays out lines of cells, which stand between bars; the first is the header.
    """
    loader = PackageLoader(package, "")
    page = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"plain": escape_markdown, "markdown": to_markdown, "table": _straighten, "latex": escape_latex}
    return page.get_template(template).render(markdown=markdown, **content).rstrip() + "\n"


def write_tables(out: Path, package: str, name: str, **content: Any) -> None:
    """Write table.md and table.csv by the templates of that name."""
    for ending in ("md", "csv"):
        write_text(out / f"table.{ending}", render(package, f"{name}.{ending}.j2", **content))


def _straighten(text: str, align: str = "r", *, padded: bool = True) -> str:
    header, *rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return markdown(header, rows, align, padded=padded)


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
    widths = [max(map(len, column)) if padded else 0 for column in zip(*lines, strict=True)]
    columns = list(zip(widths, (side == "r" for side in align.ljust(len(header), align[-1])), strict=True))
    rule = ["-" * (w + 2 - right) + ":" * right if padded else f" ---{':' * right} " for w, right in columns]
    text = [
        " | ".join(cell.rjust(w) if right else cell.ljust(w) for cell, (w, right) in zip(line, columns, strict=True))
        for line in lines
    ]
    return "\n".join([f"| {text[0]} |", f"|{'|'.join(rule)}|", *(f"| {line} |" for line in text[1:]), ""])


def escape_markdown(text: str) -> str:
    """Keep every character as it is, also < and & where Markdown is shown as HTML."""
    text = re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_latex(table: Table) -> str:
    """Lay out as a floating table, for documents with the packages booktabs and graphicx."""
    return render(__package__, "table.tex.j2", table=table)


def escape_latex(text: str) -> str:
    """Keep every character as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]], *, digits: int | None = None) -> str:
    """Lay out comma-separated values, floats to that many digits, all by default; None is empty."""
    text = io.StringIO()
    shown = [[f"{v:.{digits}g}" if digits and isinstance(v, float) else v for v in row] for row in rows]
    csv.writer(text, lineterminator="\n").writerows([header, *shown])
    return text.getvalue()


def save_figure(
    figure: "plots.Figure", path: Path, colours: int = PLOT, exact: Sequence[tuple[int, int, int]] = ()
) -> Path:
    """Write a PNG with a palette of that many colours, a third of the size; `exact` ones are kept as they are."""
    from PIL import Image  # matplotlib depends on it

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png")
    full = Image.open(pixels).convert("RGB")
    image = full.quantize(colours - len(exact), dither=Image.Dither.NONE)
    if exact:
        few = np.array(image.getpalette() or [], np.uint8).reshape(-1, 3)
        palette = np.pad(few, ((0, 256 - len(few)), (0, 0)))
        index, rgb = np.array(image), np.asarray(full)
        for place, colour in enumerate(exact, colours - len(exact)):
            palette[place] = colour
            index[(rgb == colour).all(2)] = place
        image = Image.fromarray(index)
        image.putpalette(palette.tobytes())
    with replacing(path) as temporary:
        image.save(temporary, format="png", optimize=True)
    return path
