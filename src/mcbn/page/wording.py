"""What the user calls things."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """What the user calls things; every word of it is escaped on the page."""

    title: str
    units: str
    names: Sequence[str] | None
    classes: Sequence[str] | None

    def label(self, number: int) -> str:
        """Name a class."""
        return str(self.classes[number]) if self.classes else f"class {number}"
