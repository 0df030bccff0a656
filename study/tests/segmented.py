"""Segmentation in small: a profile of a few steps, random scenes, a narrow SegNet."""

import pytest
import torch

from mcbn_study.data.scenes import CAMVID, Scenes
from mcbn_study.networks import SegNet
from mcbn_study.segmentation import train as training
from mcbn_study.segmentation.profile import SceneProfile

TINY = SceneProfile(
    "tiny",
    "camvid",
    "test",
    batch_size=3,
    epochs=3,
    widths=(4, 4, 4, 4, 4),
    n_samples=3,
    memory_samples=(2, 4),
    check_every=2,
    save_every=1,
    tuned_batch_sizes=(2, 3),
    examples=2,
    size=(36, 48),
)
UNSETTLED = pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics disagree")  # trained for a few steps


def scenes(n: int = 6, size: tuple[int, int] = (36, 48), seed: int = 0) -> Scenes:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 11, (n, size[0] // 6, size[1] // 6), generator=generator)
    y = y.repeat_interleave(6, 1).repeat_interleave(6, 2)
    noise = torch.randint(0, 40, (n, 3, *size), generator=generator)
    x = (y.unsqueeze(1) * 18 + noise).byte()
    return Scenes(x, y.byte(), tuple(f"s{i}" for i in range(n)), CAMVID)


def segnet(classes: int = 11) -> SegNet:
    network = SegNet(classes, widths=(4, 4, 4, 4, 4), seed=1).double()
    data = training.normalize(scenes(8).x).double()
    network.train()
    with torch.no_grad():
        for _ in range(30):
            network(data)
    return network.eval()
