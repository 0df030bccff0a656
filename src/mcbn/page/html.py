"""HTML in which text cannot become markup, and documents that fetch nothing."""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.files import write_text

MISSING = "\N{EN DASH}"


class Markup(str):
    """Text that is HTML already; any other string is escaped where it enters."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str | bool | None) -> Markup:
    """Make an element; `class_` stands for class, underscores in names for hyphens, True for a bare attribute.

    >>> element("p", "a < b", element("b", "c"), class_="note")
    '<p class="note">a &lt; b<b>c</b></p>'
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in ("img", "meta", "link", "input", "br"):
        return Markup(f"<{name}{opening}>")
    return Markup(f"<{name}{opening}>{join(content)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """Put parts one after another, those that are not markup escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | float]],
    *,
    caption: str = "",
    text: Sequence[int] = (),
) -> Markup:
    """Lay out rows under a header; numbers are rounded for show and sorted by their full value.

    Columns of text beside the first one are named by their place.
    """
    heads = [element("button", title, type="button") if title else title for title in header]
    kinds = ["text" if i in text else None for i in range(len(header))]
    cells = [element("th", head, scope="col", class_=kind) for head, kind in zip(heads, kinds, strict=True)]
    body = [element("tr", *(_cell(c, k) for c, k in zip(row, kinds, strict=True))) for row in rows]
    parts = [element("thead", element("tr", *cells)), element("tbody", *body)]
    return framed(element("table", *parts, class_="sortable"), caption)


def framed(laid_out: Markup, caption: str = "") -> Markup:
    """Let a wide table scroll by itself, under its caption, which stays in view."""
    frame = element("div", laid_out, class_="scroll", tabindex="0", role="group", aria_label="table")
    return join([element("p", caption, class_="muted"), frame]) if caption else frame


def _cell(value: str | float, kind: str | None) -> Markup:
    if isinstance(value, str):
        return element("td", value, class_=kind)
    return element("td", number(value), data_value=repr(float(value)) if math.isfinite(value) else "")


def number(value: float | None, digits: int = 4) -> str:
    """Show a number with so many significant digits; what is not finite is a dash."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value and (abs(value) >= 1e6 or abs(value) < 1e-4):
        return f"{value:.{digits - 2}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, decimals)}f}"


def figure(name: str, title: str, spec: Mapping[str, Any], note: str = "") -> Markup:
    """Make an interactive chart with its caption; `spec` is documented in chart.js."""
    return element(
        "figure",
        element("figcaption", element("strong", title), note),
        element("div", data_chart=name),
        data_block(name, spec),
    )


def data_block(name: str, value: Any) -> Markup:
    """Embed data for scripts; no text in it can end the block, and what is not finite becomes null."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{html.escape(name)}">{safe}</script>')


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    """Keep so many significant digits: what an eye can tell apart, in a third of the bytes."""
    return [float(f"{value:.{digits}g}") for value in values]


@cache
def asset(name: str) -> str:
    """Read one of the files beside this module."""
    return resources.files("mcbn.page").joinpath("assets", name).read_text("utf-8")


def document(
    title: str,
    *body: str,
    lead: str = "",
    nav: str = "",
    scripts: Sequence[str] = (),
    connect: str = "'none'",
) -> str:
    """Make a whole document around the body; `scripts` are sources to run after that of the charts.

    Its content policy lets it fetch nothing (but from `connect`) and run no script but its own, known by its hash: a
    last line of defence should anything of the user's ever come through unescaped.
    """
    sources = [asset("chart.js"), *scripts]
    hashes = " ".join(f"'sha256-{_digest(source)}'" for source in sources)
    policy = f"default-src 'none'; img-src data: 'self'; style-src 'unsafe-inline'; connect-src {connect}"
    policy += f"; script-src {hashes}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(asset("page.css"))),
    )
    top = element("div", element("h1", title), lead)
    switch = element("button", "Light / dark", type="button", id="theme")
    content = [element("header", top, switch)]
    content += [element("nav", nav, aria_label="pages")] if nav else []
    content += [element("main", *body), element("noscript", element("p", "The charts need JavaScript."))]
    content += [element("script", Markup(source)) for source in sources]
    return "<!doctype html>\n" + element("html", head, element("body", *content), lang="en") + "\n"


def save(path: Path, text: str) -> Path:
    """Write a document, whole or not at all."""
    try:
        return write_text(path, text)
    except OSError as error:
        raise MCBNError(f"cannot write {path} ({error.strerror or error}); choose another place") from error


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
