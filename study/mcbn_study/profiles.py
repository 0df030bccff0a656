"""How large experiments are, by name: `paper`, the whole protocol, and `quick`, minutes on two cores. profiles.toml."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

P = TypeVar("P")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_WRITTEN = tomllib.loads(Path(__file__).with_name("profiles.toml").read_text())
TAU_RANGES: dict[str, tuple[float, float]] = {dataset: _tuples(ends) for dataset, ends in _WRITTEN["tau"].items()}


def read_profiles(experiment: str, kind: type[P], *words: str) -> dict[str, P]:
    """Read the profiles of an experiment by title, whose words are these fields."""
    profiles = {}
    for title, written in _WRITTEN[experiment].items():
        named = dict(zip(words, title.split(), strict=True))
        profiles[title] = kind(**named, **{field: _tuples(value) for field, value in written.items()})
    return profiles
