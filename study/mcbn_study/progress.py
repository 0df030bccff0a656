"""Progress with the time left, on a terminal that has tqdm; silent elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """A bar over cells of work of known weight."""

    def __init__(self, total: float, title: str = "") -> None:
        self._bar = _bar(total, title)
        self._done, self._weight = 0.0, 0.0

    @contextmanager
    def cell(self, name: str, weight: float) -> Iterator[None]:
        """Count a cell as done on leaving, also one that ended early."""
        self._weight = weight
        if self._bar is not None:
            self._bar.set_postfix_str(name)
        yield
        self.fraction(1.0)
        self._done, self._weight = self._done + weight, 0.0

    def fraction(self, part: float) -> None:
        """Say how much of the present cell is done, 0 to 1."""
        if self._bar is not None:
            self._bar.n = self._done + part * self._weight
            self._bar.refresh()

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
