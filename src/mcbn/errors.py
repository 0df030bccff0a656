"""The one exception type for every mistake a user can make, and others said in one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class MCBNError(ValueError):
    """Something the caller can mend: the message says what was wrong, what came, and what to do."""


class MissingExtraError(MCBNError, ImportError):
    """A package that an extra brings is not installed."""


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Say of what is imported inside which extra brings it, where it is missing."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{what}: pip install 'mcbn[{name}]' ({error})") from error


def require_choice(name: str, value: str, known: Sequence[str], where: str = "") -> str:
    """Refuse an argument that is not one of the known words."""
    if value not in known:
        raise MCBNError(f"{name} must be one of {list(known)}{where}, got {value!r}")
    return value


def require_number(name: str, value: Any, most: float = 1) -> float:
    """Check a number between 0 and `most`."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # of NumPy or torch
    if not isinstance(number, int | float) or not 0 < number < most:
        raise MCBNError(f"{name} must lie between 0 and {most:g}, got {value!r}")
    return float(number)


def one_line(error: BaseException) -> str:
    """Say an error in one line, and its kind where it is not ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MCBNError) else f"{type(error).__name__}: {text}".removesuffix(": ")
