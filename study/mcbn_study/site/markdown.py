"""The Markdown that studies leave in folders, as blocks for templates: headings, tables, lists, pictures, text."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from markupsafe import Markup, escape

_PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")
_NUMBER = re.compile(r"[-+]?[\d.,]*\d")


def read_blocks(text: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the blocks of Markdown; pictures it names are embedded from `folder`, links keep their words alone."""
    for node in SyntaxTreeNode(_PARSER.parse(text)).children:
        if node.type == "heading":
            yield {"kind": "heading", "level": "h2" if node.tag in ("h1", "h2") else "h3", "text": _inline(node)}
        elif node.type == "bullet_list":
            yield {"kind": "list", "points": [_inline(point) for point in node.children]}
        elif node.type == "table":
            lines = (row for part in node.children for row in part.children)
            header, *rows = [[_inline(cell) for cell in row.children] for row in lines]
            words = [i for i in range(1, len(header)) if not any(_NUMBER.match(row[i]) for row in rows)]
            yield {"kind": "table", "header": header, "rows": rows, "words": words}  # words: columns beside the first
        elif (named := _pictures(node)) and (path := folder / str(named[0].attrs["src"])).is_file():
            yield {"kind": "picture", **embed(path, named[0].content)}
        else:
            yield {"kind": "paragraph", "text": _inline(node)}


def pictures_of(text: str) -> set[str]:
    """Return the files of the pictures that Markdown names."""
    return {str(picture.attrs["src"]) for picture in _pictures(SyntaxTreeNode(_PARSER.parse(text)))}


def embed(path: Path, alt: str) -> dict[str, str]:
    """Hold a PNG in an address of its own, with the words that stand for it."""
    return {"address": "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode(), "alt": alt}


def _pictures(node: SyntaxTreeNode) -> list[SyntaxTreeNode]:
    return [inner for inner in node.walk() if inner.type == "image"]


def _inline(node: SyntaxTreeNode) -> Markup:
    """Show what a block holds, escaped, in one line, with code and strong words marked."""
    if node.type in ("text", "softbreak", "code_inline"):
        words = escape(node.content or " ")
    else:
        words = Markup().join(map(_inline, node.children))
    if node.markup in ("_", "__"):  # of a name such as __init__
        return Markup("{0}{1}{0}").format(node.markup, words)
    tag = {"code_inline": "code", "strong": "strong"}.get(node.type)
    return Markup("<{0}>{1}</{0}>").format(tag, words) if tag else words
