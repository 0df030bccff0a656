"""Which columns of a table are inputs and which are targets, at the fit and ever after."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mcbn.errors import MCBNError
from mcbn.tables.tables import Table, name_of


@dataclass(frozen=True)
class Layout:
    """What of a table went to the network: kept with the posterior, so that later tables are read alike."""

    columns: tuple[str, ...] | None = None  # names of the inputs
    width: int | None = None  # number of inputs; None where an input is not a row of a table
    target: str | None = None  # as the option --target named it

    def to_json(self) -> str:
        """Write as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> "Layout":
        """Read what `to_json` wrote; None is an empty layout."""
        stored = json.loads(text) if text else {}
        columns = stored.get("columns")
        return cls(tuple(columns) if columns else None, stored.get("width"), stored.get("target"))


def find_targets(table: Table, target: str | None, fitted: Layout) -> list[int]:
    """Find the target columns: those asked for, else those of the fit where this table has them."""
    if target is not None:
        return [_column(table, part.strip()) for part in target.split(",")]
    if fitted.target is None:
        return []
    parts = [part.strip() for part in fitted.target.split(",")]
    named = table.names and all(part in table.names for part in parts)
    placed = all(_is_place(part) for part in parts) and table.width == (fitted.width or 0) + len(parts)
    return [_column(table, part) for part in parts] if named or placed else []


def _column(table: Table, part: str) -> int:
    if table.names and part in table.names:
        return table.names.index(part)
    if _is_place(part) and -table.width <= int(part) < table.width:
        return int(part) % table.width
    raise MCBNError(f"{table.path} has no column {part!r}; it has {listing(table)}")


def _is_place(part: str) -> bool:
    return re.fullmatch(r"-?\d+", part) is not None


def find_inputs(table: Table, targets: Sequence[int], fitted: Layout) -> list[int]:
    """Find the input columns: by the names of the fit, else all that are no targets."""
    if table.names and fitted.columns:
        lacking = [name for name in fitted.columns if name not in table.names]
        if lacking:
            raise MCBNError(f"{table.path} lacks the input column(s) {', '.join(map(repr, lacking))} of the fit")
        return [table.names.index(name) for name in fitted.columns]
    inputs = [c for c in range(table.width) if c not in targets]
    if fitted.width is not None and len(inputs) != fitted.width:
        raise MCBNError(
            f"{table.path} has {len(inputs)} input columns, the posterior was fitted on {fitted.width}; "
            "give it the same columns (--target leaves targets out)"
        )
    if not inputs:
        raise MCBNError(f"{table.path} has no input columns beside its target(s)")
    return inputs


def listing(table: Table) -> str:
    """Name the columns there are, for error messages."""
    shown = ", ".join(name_of(table.names, c) for c in range(min(table.width, 20)))
    return f"columns {shown}{', ...' if table.width > 20 else ''}" if table.names else f"{table.width} columns"
