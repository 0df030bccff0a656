"""The tree keeps its shape: three roots, imports that point one way, and every public name."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mcbn
from workplace import environment

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mcbn"
ROOTS = {"mcbn": SOURCE, "mcbn_study": ROOT / "study" / "mcbn_study", "mcbn_benchmarks": ROOT / "benchmarks"}


def imports(path: Path, *, inside: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield the modules a file imports at its top, or also inside its functions, as parts of their names."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((*node.module.split("."), alias.name) for alias in node.names)


def test_the_library_never_imports_the_study_nor_both_the_benchmarks() -> None:
    beneath = {"mcbn": {"mcbn_study", "mcbn_benchmarks"}, "mcbn_study": {"mcbn_benchmarks"}}
    for root, forbidden in beneath.items():
        for path in ROOTS[root].rglob("*.py"):
            assert not {name[0] for name in imports(path, inside=True)} & forbidden, path


def test_imports_between_rooms_of_the_library_have_no_cycle() -> None:
    """A room is a file or folder of src/mcbn."""
    rooms: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        needed = {name[1] for name in imports(path) if name[0] == "mcbn" and len(name) > 1}
        rooms.setdefault(room, set()).update(needed - {room})
    order = list(TopologicalSorter(rooms).static_order())
    assert order.index("errors") < order.index("network") < order.index("engine") < order.index("model")


def test_every_public_name_is_there() -> None:
    before = {"MCBN", "ClassificationPrediction", "MCBNError", "Posterior", "RegressionPrediction", "data", "metrics"}
    assert before <= set(mcbn.__all__)
    assert all(hasattr(mcbn, name) for name in mcbn.__all__)


@pytest.mark.slow
def test_importing_the_library_loads_few_modules_and_no_extra() -> None:
    code = "import sys, mcbn; print(*(name for name in sys.modules if name.split('.')[0] == 'mcbn'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert len(loaded) <= 40
    assert len([name for name in loaded if name.startswith("mcbn.data")]) <= 3
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    extras = {"cli", "tables", "scale", "ray", "sklearn", "lightning", "torchmetrics", "distributed", "page", "export"}
    assert not rooms & (extras | {"baselines", "networks", "stacked", "demo"})
