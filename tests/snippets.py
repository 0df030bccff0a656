"""Code that stands in pages of the documentation, ready to run: a fault is named with its page and line."""

import re
from pathlib import Path
from types import CodeType

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[CodeType]:
    """Compile the Python blocks of a page, but for those that are files of docs/snippets; lines count in the page."""
    path, compiled = DOCS / page, []
    text = path.read_text()
    for found in BLOCK.finditer(text):
        if not text[: found.start()].endswith("-->\n"):
            above = text[: found.start(1)].count("\n")
            compiled.append(compile("\n" * above + found[1], str(path), "exec"))
    return compiled
