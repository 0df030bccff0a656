"""Progress with the time left, on a terminal; silent elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

LAYOUT = "{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}"


class Progress:
    """A bar over cells of work of known weight; none for no work."""

    def __init__(self, total: float = 0.0, title: str = "") -> None:
        self._bar = tqdm(total=total, desc=title, bar_format=LAYOUT, disable=None if total else True)
        self._done, self._weight = 0.0, 0.0

    @contextmanager
    def cell(self, name: str, weight: float) -> Iterator[None]:
        """Count a cell as done on leaving, also one that ended early."""
        self._weight = weight
        self._bar.set_postfix_str(name)
        yield
        self.fraction(1.0)
        self._done, self._weight = self._done + weight, 0.0

    def fraction(self, part: float) -> None:
        """Say how much of the present cell is done, 0 to 1."""
        self._bar.n = self._done + part * self._weight
        self._bar.refresh()

    def close(self) -> None:
        """Leave the terminal as it is."""
        self._bar.close()
