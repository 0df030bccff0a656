"""Class probabilities of many places on a GPU, the pixels of a segmentation say: moments and entropies in one kernel.

Softmax, differences, squares, logarithms and sums are a dozen passes over memory as operations of their own. The
kernel is probabilities.cu.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mcbn.engine import kernels

MOST_CLASSES = 32  # registers of a thread
LEAST_PLACES = 2**13  # a thread each: fewer leave the GPU idle
THREADS = 128


class Sums(NamedTuple):
    """Over draws: the first one's probabilities, sums of differences from them and of their squares, of entropies."""

    pivot: Tensor  # (N, K, ...)
    sum: Tensor
    squares: Tensor
    entropies: Tensor  # (N, ...)


def suits(logits: Tensor, tau: Tensor) -> bool:
    """Tell whether the kernel takes logits (t, N, K, ...) and their inverse temperature."""
    if not kernels.available() or not logits.is_cuda or logits.dtype != torch.float32 or logits.requires_grad:
        return False
    K = logits.shape[2]
    many = logits[0].numel() >= K * LEAST_PLACES and logits.numel() < 2**31
    if K > MOST_CLASSES or not many or tau.ndim or tau.is_cuda:
        return False
    return kernels.compiles("probabilities", (("CLASSES", K),), logits.device.index)


def add(logits: Tensor, tau: Tensor, sums: Sums | None) -> Sums:
    """Add the draws of logits (t, N, K, ...) in place; None: begin with them."""
    t, N, K, *size = logits.shape
    flat = logits.reshape(t, N, K, -1)  # a copy only where the pixels do not lie in steps of one length
    begin, pixels = sums is None, flat.shape[3]
    if sums is None:
        pivot, total, squares = (logits.new_empty(N, K, *size) for _ in range(3))
        sums = Sums(pivot, total, squares, logits.new_empty(N, *size))
    blocks = -(-N * pixels // THREADS)
    numbers = (t, N * pixels, pixels, *flat.stride(), int(begin), float(tau))
    kernels.launch("probabilities", {"CLASSES": K}, (blocks, THREADS), [flat, *sums], *numbers)
    return sums
