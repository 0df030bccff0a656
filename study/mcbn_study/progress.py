"""Items that are worked through under a progress bar."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from mcbn.progress import bar

Item = TypeVar("Item")


def tracked(items: Iterable[Item], title: str, unit: str) -> Iterator[Item]:
    """Pass items on one by one, each counted once the caller is done with it."""
    work = list(items)
    with bar(title, len(work), unit) as tick:
        for item in work:
            yield item
            tick(1)
