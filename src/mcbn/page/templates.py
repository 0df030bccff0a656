"""Pages from templates, in which text cannot become markup; numbers as they are shown."""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import to_json, write_text

MISSING = "\N{EN DASH}"


def render(template: str, *, package: str = "mcbn.page", scripts: Sequence[str] = (), **content: Any) -> str:
    """Fill in a template of the `assets` of a package, or of this one, all escaped; `scripts` lie beside it."""
    return environment(package).get_template(template).render(scripts=("chart.js", *scripts), **content)


@cache
def environment(package: str = "mcbn.page") -> Environment:
    """Make the environment for the templates of a package and of this one."""
    loader = ChoiceLoader([PackageLoader(name, "assets") for name in (package, "mcbn.page")])
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"number": number, "percent": percent}
    templates.filters["each"] = lambda words, *columns: [words.format(*each) for each in zip(*columns, strict=True)]
    templates.filters["asset"] = lambda name: loader.get_source(templates, name)[0]
    templates.filters["sha256"] = lambda source: base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    templates.globals |= {"series": series, "plots": plots}
    # flags of an axis are `percent` and `flag`, which marks what lies above it
    templates.globals["axis"] = lambda label, top, low=0, **flags: {"label": label, "min": low, "max": top, **flags}
    templates.tests["finite"] = math.isfinite
    templates.policies["json.dumps_function"] = lambda value, **_: to_json(value)
    return templates


def series(kind: str, name: str, color: str, x: Any, y: Any, *, dash: bool = False) -> dict[str, Any]:
    """Describe one series, a band, a line, dots or bars, as chart.js takes it."""
    return {"name": name, "kind": kind, "color": color, "dash": dash, "x": rounded(x, 6), "y": rounded(y)}


def number(value: float | None, digits: int = 4) -> str:
    """Show a number with so many significant digits; what is not finite is a dash."""
    if value is None or not math.isfinite(value):
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    if value and (abs(value) >= 1e6 or abs(value) < 1e-4):
        return f"{value:.{digits - 2}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, decimals)}f}"


def percent(share: float, decimals: int = 0) -> str:
    """Show a share of one in percent; what is not finite is a dash."""
    return f"{share:.{decimals}%}" if math.isfinite(share) else MISSING


def rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    """Keep so many significant digits: what an eye can tell apart, in a third of the bytes."""
    return [float(f"{value:.{digits}g}") for value in values]


def save(path: Path, text: str) -> Path:
    """Write a document, whole or not at all."""
    try:
        return write_text(path, text)
    except OSError as error:
        raise MCBNError(f"cannot write {path} ({error.strerror or error}); choose another place") from error
