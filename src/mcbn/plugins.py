"""What other distributions add to mcbn through entry points: commands, reports, and names that moved to them."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

from mcbn.errors import MCBNError, one_line

COMMANDS, REPORTS, NAMES = "mcbn.commands", "mcbn.reports", "mcbn.names"
STUDY = "the reproduction of the paper is a distribution of its own: pip install mcbn-study"
CHECKOUT = "benchmarks are in no release; run `make bench` in a checkout of the repository"
HOMES = {"reproduce": STUDY, "data": STUDY, "playground": STUDY, "bench": CHECKOUT}  # commands that lie elsewhere


def find(group: str, name: str) -> Any:
    """Load what is installed under a name, which is something to call; MCBNError says what to install or mend."""
    point = next(iter(metadata.entry_points(group=group, name=name)), None)
    if point is None:
        raise MCBNError(HOMES.get(name, STUDY))
    offer = load(point)
    if not callable(offer):
        raise MCBNError(f"{_whose(point)} offers a {type(offer).__name__}, which is no command; {_cure(point)}")
    return offer


def load(point: metadata.EntryPoint) -> Any:
    """Import what an entry point names; MCBNError where that fails."""
    try:
        return point.load()
    except Exception as error:  # whatever a foreign module does while it is imported
        raise MCBNError(f"{_whose(point)} does not load ({one_line(error)}); {_cure(point)}") from error


def _whose(point: metadata.EntryPoint) -> str:
    return f"the plugin {point.name!r}{f' of {point.dist.name}' if point.dist else ''} ({point.value})"


def _cure(point: metadata.EntryPoint) -> str:
    return f"install {point.dist.name if point.dist else 'its distribution'} again, or remove it"


def commands() -> list[str]:
    """Name the commands that are installed, and those that could be."""
    return sorted({*HOMES, *(point.name for point in metadata.entry_points(group=COMMANDS))})


def moved_names(module: str, *names: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module some of whose names have moved to another distribution.

    Where that is not installed, they say so: as AttributeError, as `hasattr` expects.
    """

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        point = next(iter(metadata.entry_points(group=NAMES, name=module)), None)
        if point is None:
            raise AttributeError(f"{module}.{name} has moved: {STUDY}")
        return getattr(load(point), name)

    return look_up
