"""What the zoo holds: networks that others wrote, each with small inputs to run it on.

Small imitations of what the packages do with batch norm are the part of it that needs none of them.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 12  # examples to draw batches from
NETWORKS = Path(__file__).parent / "networks.toml"
TSAI_MODULES = {"LSTM_FCN": "RNN_FCN", "MLSTM_FCN": "RNN_FCN", "xresnet1d18": "XResNet1d"}
_UNET = {"channels": (4, 8, 16), "strides": (2, 2)}
_FEATURES = {"features": (4, 4, 8, 8, 16, 4), "norm": "batch"}
MONAI: dict[str, tuple[int, dict[str, Any]]] = {  # voxels a side, and options
    "UNet": (16, {"out_channels": 2, "num_res_units": 2, "norm": "batch", **_UNET}),
    "BasicUNet": (16, {"out_channels": 2, **_FEATURES}),
    "BasicUNetPlusPlus": (16, {"out_channels": 2, **_FEATURES}),
    "AttentionUnet": (16, {"out_channels": 2, **_UNET}),
    "VNet": (16, {"out_channels": 2}),
    "SegResNet": (16, {"out_channels": 2, "init_filters": 8, "norm": "batch"}),
    "SegResNetDS": (16, {"out_channels": 2, "init_filters": 8, "norm": "batch"}),
    "HighResNet": (8, {"out_channels": 2, "norm_type": "batch"}),
    "DenseNet121": (32, {"out_channels": 2}),
    "FlexibleUNet": (32, {"out_channels": 2, "backbone": "resnet18"}),
    "resnet18": (32, {"n_input_channels": 1, "num_classes": 2}),
    "DynUNet": (
        16,
        {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "out_channels": 2}
        | {"filters": [4, 8, 16], "norm_name": "batch"},
    ),
}


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


class BatchNormAct2d(nn.BatchNorm2d):
    """Batch norm, dropout and activation in one module, in the manner of timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.2), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then activate."""
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        result: Tensor = self.act(self.drop(x))
        return result


class GhostBatchNorm(nn.Module):
    """Batch norm of pieces of a batch, at most `virtual` rows each, in the manner of TabNet (arXiv 1705.08741)."""

    def __init__(self, channels: int, virtual: int) -> None:
        super().__init__()
        self.virtual, self.bn = virtual, nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise piece by piece."""
        return torch.cat([self.bn(piece) for piece in x.chunk(-(-len(x) // self.virtual), 0)])


class Reparameterised(nn.Module):
    """Parallel branches, one of them batch norm alone, in the manner of RepVGG and MobileOne."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.point = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.identity = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branches."""
        return F.relu(self.wide(x) + self.point(x) + self.identity(x))


class Recurrent(nn.Module):
    """An LSTM beside convolutions with batch norm, in the manner of LSTM-FCN."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.conv = nn.Sequential(
            nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)
        )
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify series (N, 4, L)."""
        last = self.rnn(x.transpose(1, 2))[0][:, -1]  # (N, 6)
        result: Tensor = self.head(torch.cat([last, self.conv(x).relu().mean(2)], 1))
        return result


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


IMITATIONS: dict[str, tuple[tuple[int, ...], Callable[[], list[nn.Module]]]] = {  # the shape of an input, and modules
    "BatchNormAct": ((3, 8, 8), lambda: [nn.Conv2d(3, 6, 3), BatchNormAct2d(6), nn.Conv2d(6, 4, 3), BatchNormAct2d(4)]),
    "reparameterised": ((3, 8, 8), lambda: [nn.Conv2d(3, 6, 3), Reparameterised(6), Reparameterised(6), nn.Flatten()]),
    "ghost batch norm": (
        (5,),
        lambda: [nn.Linear(5, 8), GhostBatchNorm(8, 4), nn.ReLU(), nn.Linear(8, 8), GhostBatchNorm(8, 4)],
    ),
    "volume": (
        (1, 6, 6, 6),
        lambda: [nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.PReLU(), nn.ConvTranspose3d(4, 2, 2)],
    ),
    "LSTM and convolutions": ((4, 20), lambda: [Recurrent()]),
}


def all_entries() -> list[Entry]:
    """List every network, own imitations first."""
    sources = tomllib.loads(NETWORKS.read_text())["source"]
    imitations = [Entry("mcbn", "imitations", name, partial(_imitation, name)) for name in IMITATIONS]
    return imitations + [
        Entry(source["package"], source["domain"], name, partial(BUILDERS[source["build"]], name))
        for source in sources
        for name in source["names"].split()
    ]


def rows(*shape: int, n: int = ROWS) -> Tensor:
    """Draw n random examples of a shape, (n, ...)."""
    return torch.randn(n, *shape)


def _imitation(name: str) -> Specimen:
    shape, modules = IMITATIONS[name]
    return Specimen(nn.Sequential(*modules()), rows(*shape))


def _pytorchcv(name: str, size: int, **options: Any) -> Specimen:
    model = import_module("pytorchcv.model_provider").get_model(name, pretrained=False, **options)
    if isinstance(getattr(getattr(model, "features", None), "final_pool", None), nn.AvgPool2d):
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # made for 224 pixels
    return Specimen(model, rows(3, size, size, n=8))


def _timm(name: str) -> Specimen:
    """Build a network of timm: BatchNormAct2d, reparameterised branches, convolutional transformers."""
    options = {"img_size": 64} if name in ("levit_128s", "visformer_tiny") else {}
    try:
        model = import_module("timm").create_model(name, pretrained=False, num_classes=10, **options)
    except TypeError:
        model = import_module("timm").create_model(name, pretrained=False, num_classes=10)
    return Specimen(model, rows(3, 64, 64, n=8))


def _torchvision(name: str) -> Specimen:
    options = {"init_weights": False} if name == "googlenet" else {}
    model = import_module("torchvision.models").get_model(name, num_classes=10, **options)
    return Specimen(model, rows(3, 64, 64, n=8))


def _segmentation(name: str) -> Specimen:
    """Build a decoder of segmentation_models_pytorch on a small encoder."""
    kind = getattr(import_module("segmentation_models_pytorch"), name)
    return Specimen(kind("tu-resnet18", encoder_weights=None, classes=3), rows(3, 64, 64, n=8))


def _monai(name: str) -> Specimen:
    size, options = MONAI[name]
    channels = {} if name.startswith("resnet") else {"in_channels": 1}
    model = getattr(import_module("monai.networks.nets"), name)(spatial_dims=3, **channels, **options)
    return Specimen(model, rows(1, size, size, size, n=6), batch_size=3)


def _eeg(name: str) -> Specimen:
    """Build a network of braindecode on 8 channels of EEG: 4 s at 125 Hz, or 30 s at 100 Hz for sleep stages."""
    sleep = "Sleep" in name
    channels, times, rate = (1 if name == "AttnSleep" else 2, 3000, 100) if sleep else (8, 500, 125)
    options = {"apply_batch_norm": True} if name.startswith("SleepStager") else {}
    kind = getattr(import_module("braindecode.models"), name)
    model = kind(n_chans=channels, n_outputs=3, n_times=times, sfreq=rate, **options)
    return Specimen(model, rows(channels, times))


def _graphs(name: str) -> Specimen:
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


def _series(name: str) -> Specimen:
    """Build a network of tsai on 4 series of 64 steps."""
    kind = getattr(import_module(f"tsai.models.{TSAI_MODULES.get(name, name)}"), name)
    if name == "OmniScaleCNN":
        return Specimen(kind(4, 3, 64), rows(4, 64))
    sized = name in ("LSTM_FCN", "MLSTM_FCN", "TST", "XCM", "TSTPlus", "mWDN")
    return Specimen(kind(4, 3, seq_len=64) if sized else kind(4, 3), rows(4, 64))


def _mixer(name: str) -> Specimen:
    kind = getattr(import_module("torchtsmixer"), name)
    return Specimen(kind(16, 8, input_channels=4, output_channels=4, norm_type="batch"), rows(16, 4))


def _tabular(name: str) -> Specimen:
    """Build TabNet: batches of its virtual batch size, which is what one draw of its ghost batch norm sees."""
    kind = getattr(import_module("pytorch_tabnet.tab_network"), name)
    model = kind(10, 3, virtual_batch_size=8, group_attention_matrix=torch.eye(10))
    return Specimen(model, rows(10, n=24), batch_size=8)


BUILDERS: dict[str, Callable[[str], Specimen]] = {
    "cifar10": lambda name: _pytorchcv(f"{name}_cifar10", 32),
    "imagenet": lambda name: _pytorchcv(name, 64),
    "cityscapes": lambda name: _pytorchcv(name, 64, in_size=(64, 64)),
    "timm": _timm,
    "torchvision": _torchvision,
    "segmentation": _segmentation,
    "monai": _monai,
    "eeg": _eeg,
    "graphs": _graphs,
    "series": _series,
    "mixer": _mixer,
    "tabular": _tabular,
}
