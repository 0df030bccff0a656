"""Peak memory of `fit` by the number of draws, beside a plain loop over as many batches; each in a process of its own.

It may not grow with T: statistics kept where they were made hold apart the memory of the passes between them.
"""

import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mcbn import MCBN, algorithm
from mcbn_benchmarks.zoo.standin import standing_in

FEW, MANY = 5, 100  # draws
CASES = (("resnet18", 224, 32), ("efficientnet_b0", 96, 16), ("unet", 48, 8))  # network, pixels, M


def _network(name: str) -> nn.Module:
    with standing_in():
        if name == "unet":
            unet = importlib.import_module("segmentation_models_pytorch").Unet
            return unet("tu-resnet18", encoder_weights=None, classes=5).eval()  # type: ignore[no-any-return]
        return importlib.import_module("timm").create_model(name, num_classes=10).eval()  # type: ignore[no-any-return]


def _fit(network: nn.Module, x: torch.Tensor, M: int, T: int) -> None:
    MCBN(network, "classification").fit(x, n_samples=T, batch_size=M)


def _loop(network: nn.Module, x: torch.Tensor, M: int, T: int) -> None:
    """Run T batches as Algorithm 1 does, and keep nothing."""
    for _ in range(T):
        algorithm.record(network, x[torch.randperm(len(x))[:M]])


WAYS: dict[str, Callable[..., None]] = {"fit": _fit, "loop": _loop}


def peak(way: str, name: str, pixels: int, M: int, T: int) -> float:
    """Return the most memory this process ever had, in MB, after T batches of M pictures."""
    torch.set_num_threads(1)
    x = torch.randn(2 * M, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    WAYS[way](_network(name), x, M, T)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(only: str) -> Iterator[dict[str, Any]]:
    """Yield a record for each network: peaks of few and many draws, of the loop, and their ratios."""
    for name, pixels, M in CASES:
        if only not in name:
            continue
        few, many, loop = (_apart(way, name, pixels, M, T) for way, T in (("fit", FEW), ("fit", MANY), ("loop", MANY)))
        ratios = {"ratio_few": many / few, "ratio_loop": many / loop}
        peaks = {"fit_few_mb": few, "fit_many_mb": many, "loop_many_mb": loop}
        yield {"case": f"memory of fit, {name}", "pixels": pixels, "M": M, "T": [FEW, MANY], **peaks, **ratios}


def _apart(*arguments: Any) -> float:
    code = f"from mcbn_benchmarks.memory import peak; print(peak(*{json.dumps(arguments)}))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)
