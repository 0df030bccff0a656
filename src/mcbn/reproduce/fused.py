"""Training steps of small networks in one launch of a Triton kernel: a program takes k steps of one network.

The same equations as `stack` and torch.optim.Adam, without a launch and a trip through memory for each operation.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from mcbn.networks import BN_EPSILON
from mcbn.reproduce.fused_kernel import BETA_1, BETA_2, train
from mcbn.reproduce.stack import Family, Values

ORDER = {  # of a network's parameters in its row
    "bn": ("weights", "beta1", "beta2", "gamma1", "gamma2", "bias3"),
    "dropout": ("weights", "bias1", "bias2", "bias3"),
}
MOST_UNITS, LARGEST_BATCH = 128, 128  # above, separate kernels have enough to do
TILE = 4096  # activations that a program holds in registers: all rows of some units
BLOCK, OUTER, ROWS = 16, 32, 32  # rows or columns of W2 in a product; rows of its gradient, of the batch there
WARPS, REGISTERS = 4, 168  # of a program, of a thread: three programs share a processor of 65,536 registers
UPDATED = 16  # parameters that a thread updates at a time


def fits(batch_size: int, hidden: int) -> bool:
    """Tell whether a program can take the steps of such networks faster than separate kernels do."""
    return hidden <= MOST_UNITS and batch_size in [2**i for i in range(4, 12) if 2**i <= LARGEST_BATCH]


def take_steps(
    family: Family,
    values: Values,
    moments: dict[str, tuple[Tensor, Tensor]],
    x: Tensor,
    y: Tensor,
    uniform: Tensor,
    networks: Any,
    taken: int,
    learning_rate: float,
) -> None:
    """Take k steps of every network in place.

    values, moments (a pair a parameter) by name; x (S, k M, Q), y (S, k M), uniform (R, k M, Q + 2H);
    networks: as `training.Networks`; taken: steps before these.
    """
    S, _, Q = x.shape
    M, H = networks.batch_size, networks.hidden
    parts = [[values[n] for n in ORDER[family]], *([moments[n][i] for n in ORDER[family]] for i in range(2))]
    packed = [_pack(part) for part in parts]  # (S, P) each
    sizes = _sizes(Q, H, M) | {"P": packed[0].shape[1]}
    scratch = x.new_empty(S, (3 * M + 2) * sizes["HP"] + sizes["P"])
    k = x.shape[1] // M
    corrections = _corrections(taken, k, learning_rate).to(x)
    drawn = uniform if family == "dropout" else x  # the BN family reads none
    train[(S,)](
        x, y, drawn, networks.stream, networks.rate, networks.weight_decay, corrections, scratch, *packed, k,
        NORMALIZED=family == "bn", EPSILON=BN_EPSILON, **sizes,
        num_warps=WARPS, maxnreg=REGISTERS, num_stages=1,  # reads no parameters ahead of the last step's writes
    )  # fmt: skip
    for whole, part in zip(packed, parts, strict=True):
        _unpack(whole, part)


def _sizes(Q: int, H: int, M: int) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    exact = torch.get_float32_matmul_precision() == "highest"
    QP, HP = (max(16, triton.next_power_of_2(n)) for n in (Q, H))
    C = max(BLOCK, min(HP, TILE // M))  # at least a block: what a product reads was written
    sizes = {"Q": Q, "H": H, "M": M, "QP": QP, "HP": HP, "C": C, "BLOCK": BLOCK, "OUTER": min(OUTER, HP)}
    sizes |= {"ROWS": min(ROWS, M), "UPDATED": UPDATED * 32 * WARPS}
    return sizes | {"PRECISION": "tf32x3" if exact else "tf32"}


def _pack(parts: list[Tensor]) -> Tensor:
    """Lay the parameters of each network in a row, (S, P); P a multiple of 16, so that a row starts aligned."""
    S, width = len(parts[0]), sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(S, -width % 16)], 1)


def _unpack(packed: Tensor, parts: list[Tensor]) -> None:
    start = 0
    for part in parts:
        part.copy_(packed[:, start : start + part.shape[1]])
        start += part.shape[1]


def _corrections(taken: int, k: int, learning_rate: float) -> Tensor:
    """Return lr / (1 - beta_1^t) and 1 / sqrt(1 - beta_2^t) of each step, (k, 2)."""
    t = torch.arange(taken + 1, taken + k + 1, dtype=torch.float64)
    return torch.stack([learning_rate / (1 - BETA_1**t), (1 - BETA_2**t).rsqrt()], 1)
