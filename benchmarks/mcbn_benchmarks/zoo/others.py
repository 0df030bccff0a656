"""Graphs, time series and tables: networks of the zoo whose inputs are no images."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mcbn_benchmarks.zoo.entries import Case, Entry, named, rows


def entries() -> list[Entry]:
    """List them, and torchvision's where it is installed."""
    return [*graphs(), *series(), *tables(), *torchvision()]


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


def graphs() -> Iterator[Entry]:
    """Networks of torch_geometric on batches of random graphs, each of 6 nodes."""

    def get(name: str) -> Case:
        package = import_module("torch_geometric.nn")
        options: dict[str, Any] = {"norm": "batch", "dropout": 0.2}
        if name == "PNA":
            options |= {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8)}
        nodes = DeepGraphNet(package) if name == "DeepGCN" else getattr(package, name)(5, 8, 3, 2, **options)
        data = import_module("torch_geometric.data")
        made = [data.Data(x=torch.randn(6, 5), edge_index=torch.randint(0, 6, (2, 14))) for _ in range(16)]
        return Case(GraphNet(nodes, package.global_mean_pool), made, collate=_together)

    return named("torch_geometric", "graphs", "GCN GraphSAGE GIN GAT PNA EdgeCNN DeepGCN", get)


def _together(graphs: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Join graphs to one: nodes (n, F), edges (2, E), the graph of each node (n,)."""
    joined = import_module("torch_geometric.data").Batch.from_data_list(graphs)
    return joined.x, joined.edge_index, joined.batch


def series() -> Iterator[Entry]:
    """Networks of tsai and TSMixer on 4 series of 64 steps."""
    plain = "FCN ResNet InceptionTime XceptionTime OmniScaleCNN"
    modules = {"LSTM_FCN": "RNN_FCN", "MLSTM_FCN": "RNN_FCN", "xresnet1d18": "XResNet1d"}

    def get(name: str) -> Case:
        kind = getattr(import_module(f"tsai.models.{modules.get(name, name)}"), name)
        options: dict[str, Any] = (
            {"seq_len": 64} if name in ("LSTM_FCN", "MLSTM_FCN", "TST", "XCM", "TSTPlus", "mWDN") else {}
        )
        if name == "OmniScaleCNN":
            return Case(kind(4, 3, 64), rows(4, 64))
        return Case(kind(4, 3, **options), rows(4, 64))

    def mixer(name: str) -> Case:
        kind = getattr(import_module("torchtsmixer"), name)
        return Case(kind(16, 8, input_channels=4, output_channels=4, norm_type="batch"), rows(16, 4))

    names = f"{plain} ResCNN XCM TST TSTPlus mWDN LSTM_FCN MLSTM_FCN xresnet1d18 InceptionTimePlus ResNetPlus FCNPlus"
    yield from named("tsai", "time series", names, get)
    yield from named("torchtsmixer", "time series", "TSMixer", mixer)


def tables() -> Iterator[Entry]:
    """TabNet: batches of its virtual batch size, which is what one draw of its ghost batch norm sees."""

    def get(name: str) -> Case:
        kind = getattr(import_module("pytorch_tabnet.tab_network"), name)
        options: dict[str, Any] = {"virtual_batch_size": 8, "group_attention_matrix": torch.eye(10)}
        return Case(kind(10, 3, **options), rows(10, n=24), batch_size=8)

    return named("pytorch_tabnet", "tabular", "TabNet TabNetNoEmbeddings", get)


TORCHVISION = """resnet18 resnext50_32x4d mobilenet_v2 mobilenet_v3_small efficientnet_b0 efficientnet_v2_s densenet121
googlenet shufflenet_v2_x0_5 regnet_y_400mf mnasnet0_5 vgg11_bn"""


def torchvision() -> Iterator[Entry]:
    """Classifiers of torchvision at 64 pixels."""

    def get(name: str) -> Case:
        options = {"init_weights": False} if name == "googlenet" else {}
        return Case(
            import_module("torchvision.models").get_model(name, num_classes=10, **options), rows(3, 64, 64, n=8)
        )

    return named("torchvision", "image classification", TORCHVISION, get)
