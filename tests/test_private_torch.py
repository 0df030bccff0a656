"""Private names of torch stand in one module, and do there what they are taken for."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx

from mcbn import private_torch

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "src" / "mcbn", ROOT / "study" / "mcbn_study", ROOT / "benchmarks" / "mcbn_benchmarks")
OF_TENSORS = {"_version", "_cdata", "_is_view"}  # and of storages
OF_MODULES = {"_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_orig_mod"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_torch(path: Path) -> Iterator[str]:
    """Yield the dotted names of torch that a file imports or reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            of_modules = node.attr in OF_MODULES and not dotted.startswith("self.")
            if of_modules or node.attr in OF_TENSORS or re.fullmatch(r"(torch|nn|F|fx)(\.\w+)+", dotted):
                yield dotted
        elif isinstance(node, ast.Constant) and str(node.value).strip(".") in OF_MODULES:
            yield node.value


def test_no_other_module_uses_private_names_of_torch() -> None:
    used = {
        f"{path.name}: {name}"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        if path.name != "private_torch.py"
        for name in names_of_torch(path)
        if any(map(private, name.split(".")))
    }
    assert not used


def test_changes_in_place_are_counted() -> None:
    x = torch.zeros(3)
    before = private_torch.version_of(x)
    x[:2].add_(1)
    assert private_torch.version_of(x) > before


def test_views_share_a_storage_and_wrapped_tensors_have_none() -> None:
    x = torch.zeros(4, 2)
    assert private_torch.is_view(x[1:])
    assert not private_torch.is_view(x.clone())
    assert private_torch.storage_of(x[1:]) == private_torch.storage_of(x) != private_torch.storage_of(x.clone())
    storages = []
    torch.vmap(lambda row: storages.append(private_torch.storage_of(row)) or row)(x)
    assert storages == [0]


def test_operations_in_place_of_an_exported_graph_are_told() -> None:
    class InPlace(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone().add_(1) * 2

    graph = torch.export.export(InPlace(), (torch.zeros(2),)).graph
    changing = [node for node in graph.nodes if private_torch.works_in_place(node)]
    assert [str(node.target) for node in changing] in ([], ["aten.add_.Tensor"])  # older versions take them apart
    assert not private_torch.works_in_place(fx.Graph().placeholder("x"))
