"""Examples in docstrings do what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import mcbn

SOURCE = Path(mcbn.__file__).parent
SHOWN = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(SOURCE)))
def test_examples_run_as_printed(path: Path) -> None:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    try:
        module = importlib.import_module(name)
    except mcbn.MCBNError as error:  # an extra is not installed
        pytest.skip(str(error))
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed
