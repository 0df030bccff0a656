"""The tree keeps its shape: three roots, imports that point one way, sizes, and every public name and command."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

import mcbn
from mcbn.cli import app
from workplace import environment

ROOT = Path(__file__).parents[1]
SOURCE, STUDY = ROOT / "src" / "mcbn", ROOT / "study" / "mcbn_study"
ROOTS = {"mcbn": SOURCE, "mcbn_study": STUDY, "mcbn_benchmarks": ROOT / "benchmarks" / "mcbn_benchmarks"}
MODULES, LINES, ALL_LINES = 110, 17_000, 29_000
LOADED, CROSSED = 40, 22
BODY_MEDIAN, BODY_NINETIETH = 5, 15
STUDIES = (
    *("regression", "sensitivity", "statistics", "objective", "regularizer", "toy", "estimators", "posteriors"),
    *("tables", "cifar10", "alternatives", "segmentation", "coverage", "shift", "comparison", "labels"),
)

USE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, mcbn
print(sum(name.split(".")[0] == "mcbn" for name in sys.modules))
network = {network}
x = torch.randn(64, {shape}, generator=torch.Generator().manual_seed(0))
network(x)
crossed = set()
def note(frame, event, argument):
    if "/mcbn/" in frame.f_code.co_filename and frame.f_code.co_name != "<module>":
        crossed.add(frame.f_code.co_filename)
sys.setprofile(note)
mcbn.MCBN(network.eval(), "regression").fit(x, n_samples=20, batch_size=8).predict(x[:4])
sys.setprofile(None)
print(len(crossed))
"""
MLP = "torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))"
CNN = "torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())"


def python_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if not {"tests", ".venv", ".venv-zoo"} & set(path.parts)]


def count_lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def nodes(folder: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    for path in python_files(folder):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


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
        for path in python_files(ROOTS[root]):
            assert not {name[0] for name in imports(path, inside=True)} & forbidden, path


def test_imports_between_rooms_of_the_library_have_no_cycle() -> None:
    """A room is a file or folder of src/mcbn."""
    rooms: dict[str, set[str]] = {}
    for path in python_files(SOURCE):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        needed = {name[1] for name in imports(path) if name[0] == "mcbn" and len(name) > 1}
        rooms.setdefault(room, set()).update(needed - {room})
    order = list(TopologicalSorter(rooms).static_order())
    assert order.index("errors") < order.index("network") < order.index("engine") < order.index("model")


def test_the_library_is_small() -> None:
    modules = python_files(SOURCE)
    assert len(modules) <= MODULES
    assert count_lines(modules) <= LINES
    folders = [*ROOTS.values(), ROOT / "examples", ROOT / "docs"]
    assert count_lines([path for folder in folders for path in python_files(folder)]) <= ALL_LINES


@pytest.mark.parametrize("root", ROOTS)
def test_function_bodies_are_short(root: str) -> None:
    lengths = []
    for function in nodes(ROOTS[root], ast.FunctionDef, ast.AsyncFunctionDef):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lengths += [function.end_lineno - body[0].lineno + 1] if body else []
    assert median(lengths) <= BODY_MEDIAN
    assert sorted(lengths)[int(0.9 * len(lengths))] <= BODY_NINETIETH


@pytest.mark.parametrize("root", ROOTS)
def test_no_class_name_occurs_twice_in_a_distribution(root: str) -> None:
    names = Counter(node.name for node in nodes(ROOTS[root], ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_uses_private_parts_of_mcbn() -> None:
    own = {
        node.attr
        for node in ast.walk(ast.parse((SOURCE / "model.py").read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    assert "_engine" in own
    for root in ROOTS.values():
        for path in python_files(root):
            if path == SOURCE / "model.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                of_another = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls")
                assert not (of_another and node.attr in own), f"{path}:{node.lineno} uses {node.attr}"


@pytest.mark.parametrize(("network", "shape"), [(MLP, "3"), (CNN, "3, 8, 8")], ids=["mlp", "cnn"])
def test_few_modules_are_loaded_and_crossed(network: str, shape: str) -> None:
    script = USE.format(network=network, shape=shape)
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    loaded, crossed = map(int, done.stdout.split())
    assert loaded <= LOADED
    assert crossed <= CROSSED


def test_the_wheel_holds_the_library_alone() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/mcbn"]
    needed = {name.split(">")[0] for name in settings["project"]["dependencies"]}
    assert needed == {"torch", "numpy", "safetensors"}


def test_every_public_name_is_there() -> None:
    names = {"MCBN", "ClassificationPrediction", "MCBNError", "Posterior", "RegressionPrediction", "data", "metrics"}
    assert names | {"algorithm"} <= set(mcbn.__all__)
    assert all(hasattr(mcbn, name) for name in mcbn.__all__)
    from mcbn import baselines, networks, theory

    moved = {
        mcbn.data: ["CIFAR10_CLASSES", "Images", "cifar10"],
        networks: ["CifarResNet", "standardize"],
        baselines: ["MNF", "MNFLinear", "MNFNetwork"],
        theory: ["kl_regularizer", "implied_prior", "objective_gap", "lilliefors", "kolmogorov_smirnov"],
    }
    for module, gone in moved.items():
        assert all(hasattr(module, name) for name in gone), module


def test_every_command_is_there() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for command in ("fit", "predict", "evaluate", "report", "demo", "bench", "data", "playground", "reproduce"):
        assert f"  {command} " in listed
    studies = CliRunner().invoke(app, ["reproduce", "--help"]).stdout
    for study in STUDIES:
        assert f"  {study} " in studies


@pytest.mark.slow
def test_importing_the_library_loads_few_modules_and_no_extra() -> None:
    code = "import sys, mcbn; print(*(name for name in sys.modules if name.split('.')[0] == 'mcbn'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert len([name for name in loaded if name.startswith("mcbn.data")]) <= 3
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    extras = {"cli", "tables", "scale", "ray", "sklearn", "lightning", "torchmetrics", "distributed", "page", "export"}
    assert not rooms & (extras | {"baselines", "networks", "stacked", "demo"})
