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
        raise _fault(point, f"offers a {type(offer).__name__}, which is no command")
    return offer


def load(point: metadata.EntryPoint) -> Any:
    """Import what an entry point names; MCBNError where that fails."""
    try:
        return point.load()
    except Exception as error:  # whatever a foreign module does while it is imported
        raise _fault(point, f"does not load ({one_line(error)})") from error


def _fault(point: metadata.EntryPoint, what: str) -> MCBNError:
    of, home = (f" of {point.dist.name}", point.dist.name) if point.dist else ("", "its distribution")
    return MCBNError(f"the plugin {point.name!r}{of} ({point.value}) {what}; install {home} again, or remove it")


def commands() -> list[str]:
    """Name the commands that are installed, and those that could be."""
    return sorted({*HOMES, *(point.name for point in metadata.entry_points(group=COMMANDS))})


def moved_names(module: str, *names: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module some of whose names have moved to another distribution."""

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        point = next(iter(metadata.entry_points(group=NAMES, name=module)), None)
        if point is None:
            raise AttributeError(f"{module}.{name} has moved: {STUDY}")  # as `hasattr` expects
        return getattr(load(point), name)

    return look_up
