"""What the zoo holds: networks that others wrote, each with small inputs to run it on.

Small imitations of what the packages do with batch norm are the part of it that needs none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 12  # examples to draw batches from
CIFAR = """resnet20 preresnet20 seresnet20 sepreresnet20 diaresnet20 resnext20_16x4d densenet40_k12_bc
xdensenet40_2_k24_bc pyramidnet110_a48 rir ror3_56 shakeshakeresnet20_2x16d shakedropresnet20 resdropresnet20
fractalnet msdnet22"""
IMAGENET = """mobilenet_wd4 mobilenetv2_wd4 mobilenetv3_small_w7d20 shufflenet_g1_wd4 shufflenetv2_wd2 menet108_8x1_g3
igcv3_wd4 sqnxt23_w1 efficientnet_b0 mixnet_s mnasnet_small ghostnet dicenet_wd5 espnetv2_wd2 condensenet74_c4_g4
channelnet fbnet_cb proxylessnas_mobile spnasnet peleenet hardnet39ds vovnet27s selecsls42 regnetx002 regnety002
bninception octresnet10_ad2 resnestabc14 bam_resnet18 cbam_resnet18 sharesnet18 ibn_resnet50 airnet50_1x64d_r2 sknet50
dla46c drnc26 isqrtcovresnet18 revnet38 hrnet_w18_small_v1 sparsenet121 darts resneta10"""
SEGMENTATION = """enet_cityscapes erfnet_cityscapes dabnet_cityscapes cgnet_cityscapes lednet_cityscapes
linknet_cityscapes fastscnn_cityscapes edanet_cityscapes esnet_cityscapes unet_cityscapes segnet_cityscapes
fpenet_cityscapes simplepose_mobile_resnet18_coco"""
TIMM = """resnet18 resnet18d resnetv2_50 seresnet18 efficientnet_lite0 tf_efficientnetv2_b0 mobilenetv3_small_050
mobilenetv4_conv_small_050 regnety_002 res2net50_14w_8s dla34 ghostnet_050 hrnet_w18_small hardcorenas_a lcnet_050
repvgg_a0 rexnet_100 selecsls42b semnasnet_075 spnasnet_100 tinynet_e xception41 ese_vovnet19b_slim cspresnet50
darknet17 fbnetc_100 mixnet_s mnasnet_small levit_128s fastvit_t8 mobilevit_xxs repvit_m0_9 efficientvit_b0 hgnetv2_b0
nextvit_small resnest14d skresnet18 starnet_s1 swiftformer_xs tresnet_m densenet121 eca_resnet33ts legacy_seresnet18
visformer_tiny shvit_s1"""
SMP = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus UPerNet"
EEG = """EEGNet EEGNeX Deep4Net ShallowFBCSPNet EEGConformer EEGInceptionERP EEGITNet EEGTCNet ATCNet CTNet ContraWR
FBCNet FBMSNet IFNet MSVTNet SCCNet SPARCNet SincShallowNet TIDNet TSception DeepSleepNet AttnSleep
SleepStagerBlanco2020 SleepStagerChambon2018 USleep EEGSimpleConv SSTDPN"""
GRAPHS = "GCN GraphSAGE GIN GAT PNA EdgeCNN DeepGCN"
TSAI = """FCN ResNet InceptionTime XceptionTime OmniScaleCNN ResCNN XCM TST TSTPlus mWDN LSTM_FCN MLSTM_FCN xresnet1d18
InceptionTimePlus ResNetPlus FCNPlus"""
TSAI_MODULES = {"LSTM_FCN": "RNN_FCN", "MLSTM_FCN": "RNN_FCN", "xresnet1d18": "XResNet1d"}
TORCHVISION = """resnet18 resnext50_32x4d mobilenet_v2 mobilenet_v3_small efficientnet_b0 efficientnet_v2_s densenet121
googlenet shufflenet_v2_x0_5 regnet_y_400mf mnasnet0_5 vgg11_bn"""
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
    image = "image classification"
    sources: Sequence[tuple[str, str, Sequence[str], Callable[[str], Specimen]]] = (
        ("mcbn", "imitations", list(IMITATIONS), _imitation),
        ("pytorchcv", image, CIFAR.split(), lambda name: _pytorchcv(f"{name}_cifar10", 32)),
        ("pytorchcv", image, IMAGENET.split(), lambda name: _pytorchcv(name, 64)),
        ("pytorchcv", "segmentation", SEGMENTATION.split(), lambda name: _pytorchcv(name, 64, in_size=(64, 64))),
        ("timm", image, TIMM.split(), _timm),
        ("segmentation_models_pytorch", "segmentation", SMP.split(), _segmentation),
        ("monai", "3-D medical", list(MONAI), _monai),
        ("braindecode", "EEG", EEG.split(), _eeg),
        ("torch_geometric", "graphs", GRAPHS.split(), _graphs),
        ("tsai", "time series", TSAI.split(), _series),
        ("torchtsmixer", "time series", ["TSMixer"], _mixer),
        ("pytorch_tabnet", "tabular", ["TabNet", "TabNetNoEmbeddings"], _tabular),
        ("torchvision", image, TORCHVISION.split(), _torchvision),
    )
    return [
        Entry(package, domain, name, partial(build, name))
        for package, domain, names, build in sources
        for name in names
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
