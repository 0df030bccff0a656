"""What a posterior costs: seconds, and bytes on disk."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcbn.model import MCBN

R = TypeVar("R")


def timed(function: Callable[[], R]) -> tuple[R, float]:
    """Return what a function returns, and the seconds it took."""
    started = time.perf_counter()
    value = function()
    return value, time.perf_counter() - started


def saved_bytes(bayes: MCBN[Any]) -> int:
    """Return the size of the file that `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.mcbn"
        bayes.save(path)
        return path.stat().st_size


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
