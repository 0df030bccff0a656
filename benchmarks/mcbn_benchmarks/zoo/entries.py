"""What the zoo holds: networks that others wrote, each with small inputs to run it on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 12  # examples to draw batches from


@dataclass(frozen=True)
class Case:
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
    build: Callable[[], Case]

    @property
    def title(self) -> str:
        """Name the entry in records: package/name."""
        return f"{self.package}/{self.name}"


def all_entries() -> list[Entry]:
    """List every network, own imitations first."""
    from mcbn_benchmarks.zoo import imitations, others

    return [*imitations.entries(), *pytorchcv(), *timm(), *segmentation(), *monai(), *eeg(), *others.entries()]


def rows(*shape: int, n: int = ROWS) -> Tensor:
    """Draw n random examples of a shape, (n, ...)."""
    return torch.randn(n, *shape)


def named(package: str, domain: str, names: str, build: Callable[[str], Case]) -> Iterator[Entry]:
    """Make one entry of each name, built by it."""
    for name in names.split():
        yield Entry(package, domain, name, lambda name=name: build(name))  # type: ignore[misc]


CIFAR = """resnet20 preresnet20 seresnet20 sepreresnet20 diaresnet20 resnext20_16x4d densenet40_k12_bc
xdensenet40_2_k24_bc pyramidnet110_a48 rir ror3_56 shakeshakeresnet20_2x16d shakedropresnet20
resdropresnet20 fractalnet msdnet22"""
IMAGENET = """mobilenet_wd4 mobilenetv2_wd4 mobilenetv3_small_w7d20 shufflenet_g1_wd4 shufflenetv2_wd2 menet108_8x1_g3
igcv3_wd4 sqnxt23_w1 efficientnet_b0 mixnet_s mnasnet_small ghostnet dicenet_wd5 espnetv2_wd2 condensenet74_c4_g4
channelnet fbnet_cb proxylessnas_mobile spnasnet peleenet hardnet39ds vovnet27s selecsls42 regnetx002 regnety002
bninception octresnet10_ad2 resnestabc14 bam_resnet18 cbam_resnet18 sharesnet18 ibn_resnet50
airnet50_1x64d_r2 sknet50 dla46c drnc26 isqrtcovresnet18 revnet38 hrnet_w18_small_v1 sparsenet121
darts resneta10"""
SEGMENTATION = """enet_cityscapes erfnet_cityscapes dabnet_cityscapes cgnet_cityscapes lednet_cityscapes
linknet_cityscapes fastscnn_cityscapes edanet_cityscapes esnet_cityscapes
unet_cityscapes segnet_cityscapes fpenet_cityscapes simplepose_mobile_resnet18_coco"""


def pytorchcv() -> Iterator[Entry]:
    """Families of pytorchcv: CIFAR-10 at 32 pixels, ImageNet and Cityscapes at 64."""

    def get(name: str, size: int, **options: Any) -> Case:
        model = import_module("pytorchcv.model_provider").get_model(name, pretrained=False, **options)
        if isinstance(getattr(getattr(model, "features", None), "final_pool", None), nn.AvgPool2d):
            model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # made for 224 pixels
        return Case(model, rows(3, size, size, n=8))

    def segmenter(name: str) -> Case:
        return get(name, 64, in_size=(64, 64))

    image = "image classification"
    yield from named("pytorchcv", image, CIFAR, lambda name: get(f"{name}_cifar10", 32))
    yield from named("pytorchcv", image, IMAGENET, lambda name: get(name, 64))
    yield from named("pytorchcv", "segmentation", SEGMENTATION, segmenter)


TIMM = """resnet18 resnet18d resnetv2_50 seresnet18 efficientnet_lite0 tf_efficientnetv2_b0 mobilenetv3_small_050
mobilenetv4_conv_small_050 regnety_002 res2net50_14w_8s dla34 ghostnet_050 hrnet_w18_small hardcorenas_a lcnet_050
repvgg_a0 rexnet_100 selecsls42b semnasnet_075 spnasnet_100 tinynet_e xception41 ese_vovnet19b_slim
cspresnet50 darknet17 fbnetc_100 mixnet_s mnasnet_small levit_128s fastvit_t8 mobilevit_xxs
repvit_m0_9 efficientvit_b0 hgnetv2_b0 nextvit_small resnest14d skresnet18 starnet_s1 swiftformer_xs
tresnet_m densenet121 eca_resnet33ts legacy_seresnet18 visformer_tiny shvit_s1"""


def timm() -> Iterator[Entry]:
    """Networks of timm at 64 pixels: BatchNormAct2d, reparameterised branches, convolutional transformers."""

    def get(name: str) -> Case:
        options = {"img_size": 64} if name in ("levit_128s", "visformer_tiny") else {}
        try:
            model = import_module("timm").create_model(name, pretrained=False, num_classes=10, **options)
        except TypeError:
            model = import_module("timm").create_model(name, pretrained=False, num_classes=10)
        return Case(model, rows(3, 64, 64, n=8))

    return named("timm", "image classification", TIMM, get)


def segmentation() -> Iterator[Entry]:
    """Decoders of segmentation_models_pytorch on a small encoder."""

    def get(name: str) -> Case:
        package = import_module("segmentation_models_pytorch")
        return Case(getattr(package, name)("tu-resnet18", encoder_weights=None, classes=3), rows(3, 64, 64, n=8))

    names = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus UPerNet"
    return named("segmentation_models_pytorch", "segmentation", names, get)


def monai() -> Iterator[Entry]:
    """Networks of MONAI: most of them on volumes of 32 voxels a side."""
    norm = {"norm": "batch"}
    unet = {"channels": (4, 8, 16), "strides": (2, 2)}
    builds: dict[str, tuple[str, dict[str, Any], int]] = {
        "UNet": ("UNet", {"out_channels": 2, "num_res_units": 2, **unet, **norm}, 16),
        "BasicUNet": ("BasicUNet", {"out_channels": 2, "features": (4, 4, 8, 8, 16, 4), **norm}, 16),
        "BasicUNetPlusPlus": ("BasicUNetPlusPlus", {"out_channels": 2, "features": (4, 4, 8, 8, 16, 4), **norm}, 16),
        "AttentionUnet": ("AttentionUnet", {"out_channels": 2, **unet}, 16),
        "VNet": ("VNet", {"out_channels": 2}, 16),
        "SegResNet": ("SegResNet", {"out_channels": 2, "init_filters": 8, **norm}, 16),
        "SegResNetDS": ("SegResNetDS", {"out_channels": 2, "init_filters": 8, **norm}, 16),
        "HighResNet": ("HighResNet", {"out_channels": 2, "norm_type": "batch"}, 8),
        "DenseNet121": ("DenseNet121", {"out_channels": 2}, 32),
        "FlexibleUNet": ("FlexibleUNet", {"out_channels": 2, "backbone": "resnet18"}, 32),
        "resnet18": ("resnet18", {"n_input_channels": 1, "num_classes": 2}, 32),
        "DynUNet": (
            "DynUNet",
            {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "out_channels": 2}
            | {"filters": [4, 8, 16], "norm_name": "batch"},
            16,
        ),
    }
    for name, (function, options, size) in builds.items():
        yield Entry("monai", "3-D medical", name, lambda b=(function, options, size): _monai(*b))  # type: ignore[misc]


def _monai(name: str, options: dict[str, Any], size: int) -> Case:
    if not name.startswith("resnet") and "in_channels" not in options:
        options = {"in_channels": 1} | options
    model = getattr(import_module("monai.networks.nets"), name)(spatial_dims=3, **options)
    return Case(model, rows(1, size, size, size, n=6), batch_size=3)


EEG = """EEGNet EEGNeX Deep4Net ShallowFBCSPNet EEGConformer EEGInceptionERP EEGITNet EEGTCNet ATCNet
CTNet ContraWR FBCNet FBMSNet IFNet MSVTNet SCCNet SPARCNet SincShallowNet TIDNet TSception DeepSleepNet
AttnSleep SleepStagerBlanco2020 SleepStagerChambon2018 USleep EEGSimpleConv SSTDPN"""


def eeg() -> Iterator[Entry]:
    """Networks of braindecode on 8 channels of EEG: 4 s at 125 Hz, or 30 s at 100 Hz for sleep stages."""

    def get(name: str) -> Case:
        sleep = "Sleep" in name
        channels, times, rate = (1 if name == "AttnSleep" else 2, 3000, 100) if sleep else (8, 500, 125)
        options = {"apply_batch_norm": True} if name.startswith("SleepStager") else {}
        kind = getattr(import_module("braindecode.models"), name)
        model = kind(n_chans=channels, n_outputs=3, n_times=times, sfreq=rate, **options)
        return Case(model, rows(channels, times))

    return named("braindecode", "EEG", EEG, get)
