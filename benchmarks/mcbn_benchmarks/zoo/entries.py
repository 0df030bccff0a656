"""What the zoo holds: networks that others wrote, each with small inputs to run it on."""

import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS = 12  # examples to draw batches from
NETWORKS = Path(__file__).parent / "networks.toml"


class Specimen(NamedTuple):
    """A network and examples of what it takes: a tensor (N, ...), or a list of single examples with their collate."""

    model: nn.Module
    x: Any
    batch_size: int = 4
    collate: Callable[[list[Any]], Any] | None = None


class Entry(NamedTuple):
    """One network of the zoo: who wrote it, what it is for, and how to build it."""

    package: str  # to be imported
    domain: str
    name: str
    build: Callable[[], Specimen]

    @property
    def title(self) -> str:
        """Name the entry in records: package/name."""
        return f"{self.package}/{self.name}"


def all_entries() -> list[Entry]:
    """List every network."""
    entries = []
    for source in tomllib.loads(NETWORKS.read_text())["source"]:
        about, build = (source["package"], source["domain"]), BUILDERS.get(source["package"], _called)
        entries += [Entry(*about, name, partial(build, name, source)) for name in source["names"].split()]
    return entries


def _called(name: str, source: dict[str, Any]) -> Specimen:
    """Build a network by the call that its source names, with what it says for this network alone."""
    special = source.get("of", {}).get(name, {})
    call, options = source | special, source.get("options", {}) | special.get("options", {})
    build = getattr(import_module(call["module"].replace("NAME", name)), call.get("call", name))
    positional = [arg.replace("NAME", name) if isinstance(arg, str) else arg for arg in call.get("arguments", [])]
    read = {key: tuple(v) if isinstance(v, list) else None if v == "None" else v for key, v in options.items()}
    model = build(*positional, **read)
    if isinstance(getattr(getattr(model, "features", None), "final_pool", None), nn.AvgPool2d):
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # made for 224 pixels
    return Specimen(model, torch.randn(call.get("rows", ROWS), *call["shape"]), call.get("batch_size", 4))


def _graphs(name: str, _source: dict[str, Any]) -> Specimen:
    """Build a network of torch_geometric, pooled to one output a graph, on batches of random graphs of 6 nodes."""
    package, data = import_module("torch_geometric.nn"), import_module("torch_geometric.data")
    options: dict[str, Any] = {"norm": "batch", "dropout": 0.2}
    if name == "PNA":
        options |= {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8)}
    nodes = _deep(package) if name == "DeepGCN" else getattr(package, name)(5, 8, 3, 2, **options)
    pooled = [(nodes, "x, edge_index -> x"), (package.global_mean_pool, "x, batch -> x")]
    graphs = [data.Data(x=torch.randn(6, 5), edge_index=torch.randint(0, 6, (2, 14))) for _ in range(16)]
    return Specimen(package.Sequential("x, edge_index, batch", pooled), graphs, collate=_together)


def _deep(package: Any) -> Any:
    """Stack residual graph convolutions with PyG's own batch norm module, res+ order."""
    first, residual = nn.Linear(5, 8), partial(package.DeepGCNLayer, block="res+", dropout=0.1)
    layers = [residual(package.GENConv(8, 8, norm="batch"), package.BatchNorm(8), nn.ReLU()) for _ in range(3)]
    steps = [(first, "x -> x"), *((layer, "x, edge_index -> x") for layer in layers), (nn.Linear(8, 2), "x -> x")]
    return package.Sequential("x, edge_index", steps)


def _together(graphs: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Join graphs to one: nodes (n, F), edges (2, E), the graph of each node (n,)."""
    joined = import_module("torch_geometric.data").Batch.from_data_list(graphs)
    return joined.x, joined.edge_index, joined.batch


def _tabular(name: str, _source: dict[str, Any]) -> Specimen:
    """Build TabNet: batches of its virtual batch size, which is what one draw of its ghost batch norm sees."""
    kind = getattr(import_module("pytorch_tabnet.tab_network"), name)
    model = kind(10, 3, virtual_batch_size=8, group_attention_matrix=torch.eye(10))
    return Specimen(model, torch.randn(24, 10), batch_size=8)


BUILDERS: dict[str, Callable[..., Specimen]] = {"torch_geometric": _graphs, "pytorch_tabnet": _tabular}
