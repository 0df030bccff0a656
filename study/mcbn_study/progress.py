"""Progress with the time left, on a terminal that has tqdm; silent elsewhere."""

import sys
from typing import Any


class Progress:
    """A bar over work of known weight. Work that ends early counts as done."""

    def __init__(self, total: float, title: str = "") -> None:
        self._bar = _bar(total, title)
        self._done, self._cell = 0.0, 0.0

    def start(self, cell: str, weight: float) -> None:
        """Begin a cell."""
        self._cell = weight
        if self._bar is not None:
            self._bar.set_postfix_str(cell)

    def fraction(self, part: float) -> None:
        """Say how much of the present cell is done, 0 to 1."""
        if self._bar is not None:
            self._bar.n = self._done + part * self._cell
            self._bar.refresh()

    def end(self) -> None:
        """Count the present cell as done."""
        self.fraction(1.0)
        self._done, self._cell = self._done + self._cell, 0.0

    def close(self) -> None:
        """Leave the terminal as it is."""
        if self._bar is not None:
            self._bar.close()


def _bar(total: float, title: str) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    layout = "{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}"
    return tqdm(total=total, desc=title, bar_format=layout)
