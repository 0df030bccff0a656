"""The Markdown that studies write, as HTML: headings, paragraphs, tables, lists, pictures; everything else is text."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from mcbn.page.html import Markup, element, join, table
from mcbn_study.site.pictures import image_part

MOST_OPEN = 12  # lines of a list that is shown without a click
_PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<file>[^)\s]+)\)")
_INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>.+?)\*\*|\[(?P<text>[^\]]+)\]\([^)]*\)")


def to_html(text: str, folder: Path | None = None) -> Markup:
    """Turn Markdown into HTML; pictures it names are embedded from `folder`, links keep their words alone."""
    return join(_block(block.splitlines(), folder) for block in re.split(r"\n\s*\n", text.strip()) if block.strip())


def pictures_of(text: str) -> dict[str, str]:
    """Return the files of the pictures that Markdown names, with their alternative texts."""
    return {found["file"]: found["alt"] for found in _PICTURE.finditer(text)}


def _block(lines: Sequence[str], folder: Path | None) -> Markup:
    first = lines[0].strip()
    if heading := re.match(r"(#+)\s+(.*)", first):
        shown = element("h2" if len(heading[1]) <= 2 else "h3", *_inline(heading[2]))
        return join([shown, _block(lines[1:], folder)]) if len(lines) > 1 else shown
    if first.startswith("|"):
        return _table(lines)
    if first.startswith(("- ", "* ")):
        return _list(lines)
    if (named := _PICTURE.fullmatch(first)) and folder and (folder / named["file"]).is_file():
        return image_part(folder / named["file"], _plain(named["alt"]))
    return element("p", *_inline(" ".join(line.strip() for line in lines)), class_="muted")


def _table(lines: Sequence[str]) -> Markup:
    header, _, *rows = [_cells(line) for line in lines if line.strip().startswith("|")]
    width = len(header)
    even = [[*row, *[""] * (width - len(row))][:width] for row in rows]
    return table([_plain(head) for head in header], even, text=_texts(header, even))


def _texts(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Name the columns that hold words; the first always does."""
    columns = range(1, len(header))
    return [c for c in columns if not any(re.match(r"[-+]?[\d.,]*\d", row[c]) for row in rows if row[c])]


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [join(_inline(cell.strip())) for cell in cells]


def _list(lines: Sequence[str]) -> Markup:
    points: list[str] = []
    for line in lines:
        if line.startswith(("- ", "* ")):
            points.append(line[2:])
        elif points:
            points[-1] += f" {line.strip()}"
    shown = element("ul", *(element("li", *_inline(point)) for point in points), class_="muted")
    if len(points) <= MOST_OPEN:
        return shown
    return element("details", element("summary", f"{len(points)} further values"), shown)


def _inline(text: str) -> list[str]:
    parts: list[str] = []
    end = 0
    for found in _INLINE.finditer(text):
        parts.append(_plain(text[end : found.start()]))
        if found["code"]:
            parts.append(element("code", found["code"]))
        else:
            parts.append(element("strong", _plain(found["bold"])) if found["bold"] else _plain(found["text"]))
        end = found.end()
    return [*parts, _plain(text[end:])]


def _plain(text: str) -> str:
    """Take back the escapes of Markdown; the result is escaped as HTML where it enters a page."""
    if isinstance(text, Markup):
        return text
    return html.unescape(re.sub(r"\\([\\`*_{}\[\]|~#$<>&])", r"\1", text))
