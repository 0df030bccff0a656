"""The Markdown that studies leave in folders, as blocks for templates: headings, tables, lists, pictures, text."""

import base64
import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

_PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<file>[^)\s]+)\)")
_NUMBER = re.compile(r"[-+]?[\d.,]*\d")
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>.+?)\*\*|\[(?P<link>[^\]]+)\]\([^)]*\)|(?P<plain>(?:\\.|[^\\`*\[])+|.)"
)


def read_blocks(text: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the blocks of Markdown; pictures it names are embedded from `folder`, links keep their words alone."""
    for lines in (block.splitlines() for block in re.split(r"\n\s*\n", text.strip())):
        while lines and (heading := re.match(r"\s*(#+)\s+(.*)", lines[0])):
            yield {"kind": "heading", "level": "h2" if len(heading[1]) <= 2 else "h3", "text": _inline(heading[2])}
            del lines[0]
        if lines:
            yield _read_block(lines, folder)


def pictures_of(text: str) -> set[str]:
    """Return the files of the pictures that Markdown names."""
    return {named["file"] for named in _PICTURE.finditer(text)}


def embed(path: Path, alt: str) -> dict[str, str]:
    """Hold a PNG in an address of its own, with the words that stand for it."""
    return {"address": "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode(), "alt": alt}


def _read_block(lines: Sequence[str], folder: Path) -> dict[str, Any]:
    first = lines[0].strip()
    if first.startswith("|"):
        return _read_table(lines)
    if first.startswith(("- ", "* ")):
        points = re.split(r"(?m)^[-*] ", "\n".join(lines))[1:]
        return {"kind": "list", "points": [_inline(" ".join(point.split())) for point in points]}
    if (named := _PICTURE.fullmatch(first)) and (folder / named["file"]).is_file():
        return {"kind": "picture", **embed(folder / named["file"], _plain(named["alt"]))}
    return {"kind": "paragraph", "text": _inline(" ".join(line.strip() for line in lines))}


def _read_table(lines: Sequence[str]) -> dict[str, Any]:
    """Return header, rows, and the columns that hold words (beside the first, which always does)."""
    inner = [line.strip().removeprefix("|").removesuffix("|") for line in lines if line.strip().startswith("|")]
    header, _, *rows = [[_inline(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)] for line in inner]
    words = [i for i in range(1, len(header)) if not any(_NUMBER.match(row[i]) for row in rows)]
    return {"kind": "table", "header": header, "rows": rows, "words": words}


def _inline(text: str) -> Markup:
    pieces = [(str(piece.lastgroup), piece[piece.lastgroup or 0]) for piece in _INLINE.finditer(text)]
    shown = [(kind, words if kind == "code" else _plain(words)) for kind, words in pieces]
    return Markup().join(Markup("<{0}>{1}</{0}>").format(*p) if p[0] in ("code", "strong") else p[1] for p in shown)


def _plain(text: str) -> str:
    """Take back the escapes of Markdown; the result is escaped as HTML where it enters a page."""
    return html.unescape(re.sub(r"\\([\\`*_{}\[\]|~#$<>&])", r"\1", text))
