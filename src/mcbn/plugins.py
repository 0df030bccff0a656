"""What other distributions add to mcbn through entry points: commands, reports, and names that moved to them."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mcbn.errors import MCBNError

COMMANDS, REPORTS, NAMES = "mcbn.commands", "mcbn.reports", "mcbn.names"
STUDY = "the reproduction of the paper is a distribution of its own: pip install mcbn-study"
CHECKOUT = "benchmarks are in no release; run `make bench` in a checkout of the repository"
HOMES = {"reproduce": STUDY, "data": STUDY, "playground": STUDY, "bench": CHECKOUT}  # commands that lie elsewhere


def load(point: EntryPoint) -> Any:
    """Import what an entry point names; MCBNError where that fails."""
    try:
        return point.load()
    except Exception as error:  # whatever a foreign module does while it is imported
        whose = f" of {point.dist.name}" if point.dist else ""
        raise MCBNError(
            f"the plugin {point.name!r}{whose} ({point.value}) does not load ({type(error).__name__}: {error}); "
            "install that distribution again, or remove it"
        ) from error


def find(group: str, name: str) -> Any:
    """Load what is installed under a name; MCBNError says what to install where nothing is."""
    for point in entry_points(group=group, name=name):
        return load(point)
    raise MCBNError(HOMES.get(name, STUDY))


def commands() -> list[str]:
    """Name the commands that are installed, and those that could be."""
    return sorted({*HOMES, *(point.name for point in entry_points(group=COMMANDS))})


def moved_names(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module some of whose names have moved to another distribution."""

    def look_up(name: str) -> Any:
        for point in entry_points(group=NAMES, name=module) if not name.startswith("_") else ():
            home = load(point)
            if name in home.__all__:
                return getattr(home, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}; of what it had before, {STUDY}")

    return look_up
