"""What the zoo holds: networks that others wrote, each with small inputs to run it on."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 12  # examples to draw batches from
NETWORKS = Path(__file__).parent / "networks.toml"


@dataclass(frozen=True)
class Specimen:
    """A network and examples of what it takes: a tensor (N, ...), or a list of single examples with their collate."""

    model: nn.Module
    x: Any
    batch_size: int = 4
    collate: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True)
class Entry:
    """One network of the zoo: who wrote it, what it is for, and how to build it."""

    package: str  # to be imported
    domain: str
    name: str
    build: Callable[[], Specimen]

    @property
    def title(self) -> str:
        """Name the entry in records: package/name."""
        return f"{self.package}/{self.name}"


class GraphNet(nn.Module):
    """A network on nodes, pooled to one output a graph."""

    def __init__(self, nodes: nn.Module, pool: Any) -> None:
        super().__init__()
        self.nodes, self.pool = nodes, pool

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """Return (graphs, outputs) of nodes x (n, F)."""
        result: Tensor = self.pool(self.nodes(x, edge_index), batch, int(batch[-1]) + 1)
        return result


class DeepGraphNet(nn.Module):
    """Residual graph convolutions with PyG's own batch norm module, res+ order."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        layer, norm = package.GENConv, package.BatchNorm
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(
            package.DeepGCNLayer(layer(8, 8, norm="batch"), norm(8), nn.ReLU(), block="res+", dropout=0.1)
            for _ in range(3)
        )
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return (n, 2) of nodes x (n, 5)."""
        h = self.first(x)
        for layer in self.layers:
            h = layer(h, edge_index)
        result: Tensor = self.last(h)
        return result


def all_entries() -> list[Entry]:
    """List every network."""
    entries = []
    for source in tomllib.loads(NETWORKS.read_text())["source"]:
        about, build = (source["package"], source["domain"]), BUILDERS.get(source["package"], _called)
        entries += [Entry(*about, name, partial(build, name, source)) for name in source["names"].split()]
    return entries


def rows(*shape: int, n: int = ROWS) -> Tensor:
    """Draw n random examples of a shape, (n, ...)."""
    return torch.randn(n, *shape)


def _called(name: str, source: dict[str, Any]) -> Specimen:
    """Build a network by the call that its source names, with what it says for this network alone."""
    special = source.get("of", {}).get(name, {})
    call, usual = source | special, _values(source.get("options", {}))
    options = usual | _values(special.get("options", {}))
    build = getattr(import_module(call["module"].replace("NAME", name)), call.get("call", name))
    positional = [arg.replace("NAME", name) if isinstance(arg, str) else arg for arg in call.get("arguments", [])]
    try:
        model = build(*positional, **options)
    except TypeError:
        if "img_size" not in options:
            raise
        model = build(*positional, **usual)  # another version of timm has no such option
    if isinstance(getattr(getattr(model, "features", None), "final_pool", None), nn.AvgPool2d):
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # made for 224 pixels
    return Specimen(model, rows(*call["shape"], n=call.get("rows", ROWS)), call.get("batch_size", 4))


def _values(options: dict[str, Any]) -> dict[str, Any]:
    """Read options as Python has them: lists are tuples, "None" is None."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return {name: None if value == "None" else value for name, value in values.items()}


def _graphs(name: str, _source: dict[str, Any]) -> Specimen:
    """Build a network of torch_geometric on batches of random graphs, each of 6 nodes."""
    package, data = import_module("torch_geometric.nn"), import_module("torch_geometric.data")
    options: dict[str, Any] = {"norm": "batch", "dropout": 0.2}
    if name == "PNA":
        options |= {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8)}
    nodes = DeepGraphNet(package) if name == "DeepGCN" else getattr(package, name)(5, 8, 3, 2, **options)
    graphs = [data.Data(x=torch.randn(6, 5), edge_index=torch.randint(0, 6, (2, 14))) for _ in range(16)]
    return Specimen(GraphNet(nodes, package.global_mean_pool), graphs, collate=_together)


def _together(graphs: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Join graphs to one: nodes (n, F), edges (2, E), the graph of each node (n,)."""
    joined = import_module("torch_geometric.data").Batch.from_data_list(graphs)
    return joined.x, joined.edge_index, joined.batch


def _tabular(name: str, _source: dict[str, Any]) -> Specimen:
    """Build TabNet: batches of its virtual batch size, which is what one draw of its ghost batch norm sees."""
    kind = getattr(import_module("pytorch_tabnet.tab_network"), name)
    model = kind(10, 3, virtual_batch_size=8, group_attention_matrix=torch.eye(10))
    return Specimen(model, rows(10, n=24), batch_size=8)


BUILDERS: dict[str, Callable[[str, dict[str, Any]], Specimen]] = {
    "torch_geometric": _graphs,
    "pytorch_tabnet": _tabular,
}
