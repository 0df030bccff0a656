"""How torch computes while a study runs; what was set before comes back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(device: str) -> Iterator[None]:
    """Run small CPU tensors on one thread: a second one mostly waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN time its kernels once for each shape and take the fastest; they run as TF32, torch's default."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
