"""Training steps of small networks, and draws of dropout, in one launch of a CUDA kernel each.

The same equations as `stack`, `measure` and torch.optim.Adam, without a launch and a trip through memory for each
operation. The kernels, fused.cu and dropped.cu, are compiled for their sizes when they are first needed.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcbn.engine import kernels
from mcbn.errors import MCBNError
from mcbn.networks import BN_EPSILON
from mcbn.stacked import Values
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.stack import Family, Networks

VECTORS = {"bn": ("beta1", "beta2", "gamma1", "gamma2"), "dropout": ("bias1", "bias2")}  # after the weights, in order
BETA_1, BETA_2 = 0.9, 0.999  # torch.optim.Adam
ROWS = 32  # of a batch that lie in shared memory at a time
THREADS = 128  # of a block of `dropped_moments`, a row each
launch = partial(kernels.launch, package="mcbn_study.regression")


def fits(family: Family, batch_size: int, hidden: int) -> bool:
    """Tell whether a block of threads can hold such a network; there must be a GPU to ask for."""
    if not kernels.available():
        raise MCBNError("a CUDA kernel needs a GPU, CUDA's compiler and PyTorch 2.8 or later; run without --fused")
    return hidden in (50, 100) and batch_size in [2**i for i in range(3, 11 if family == "bn" else 6)]


def take_steps(
    states: Sequence[Values], block: tuple[Tensor, Tensor, Tensor], networks: Networks, taken: int, learning_rate: float
) -> None:
    """Take k steps of every network in place.

    states: values and Adam's two moments of them by name; block: x (S, k M, Q), y (S, k M), uniform (R, k M, Q + 2H);
    taken: steps before.
    """
    x, y, uniform = block
    S, rows, Q = x.shape
    family, M, H = networks.family, networks.batch_size, networks.hidden
    k = rows // M
    packed = [_pack(family, state, Q, H) for state in states]  # (S, P) each
    t = torch.arange(taken + 1, taken + k + 1, dtype=torch.float64)
    corrections = torch.stack([learning_rate / (1 - BETA_1**t), (1 - BETA_2**t).rsqrt()], 1).to(x)  # (k, 2)
    scratch = x.new_empty(S, M * _padded(H) if M > ROWS else 0)
    drawn = uniform if family == "dropout" else x  # the BN family reads none
    rates, decays = networks.rate.contiguous(), networks.weight_decay.contiguous()
    tensors = [x, y, drawn, networks.stream, rates, decays, corrections, scratch, *packed]
    constants, shared = sizes(family, Q, H, M)
    launch("fused", constants, (S, int(constants["THREADS"])), tensors, k, shared=shared)
    for whole, state in zip(packed, states, strict=True):
        _unpack(family, whole, state, Q, H)


def dropped_moments(values: Values, networks: Networks, problem: Problem, draws: range) -> tuple[Tensor, Tensor]:
    """Return mean and variance, (S, n) float64, of what dropout networks say of the query rows."""
    x, S, H = problem.query.x, len(networks.stream), networks.hidden
    (_, n, Q), packed = x.shape, _pack("dropout", values, x.shape[2], H)
    moments = x.new_empty(2, S, n, dtype=torch.float64)
    tensors = [x, problem.keys("dropout draws"), networks.stream, networks.rate.contiguous(), packed, moments]
    constants, grid = {"N_INPUTS": Q, "N_UNITS": H, "THREADS": THREADS}, (S * -(-n // THREADS), THREADS)
    launch("dropped", constants, grid, tensors, S, n, draws.start, len(draws), shared=4 * packed.shape[1])
    return moments[0], moments[1]


def sizes(family: Family, Q: int, H: int, M: int) -> tuple[dict[str, int | str], int]:
    """Return what the kernel of steps is compiled for, BLOCKS as many as fit, and a block's bytes of shared memory."""
    (threads, blocks), normalized = (256, 3) if H > 50 else (128, 5), family == "bn"
    constants: dict[str, int | str] = {"N_INPUTS": Q, "N_UNITS": H, "BATCH": M, "NORMALIZED": int(normalized)}
    L, R = _padded(H), min(ROWS, M)
    small = (Q + (5 if normalized else 3)) * L + 4  # parameters before W2
    rows = max(2 * R * L, -(-(small + Q * Q) // 4) * 4)
    constants |= {"THREADS": threads, "BLOCKS": blocks, "EPSILON": f"{BN_EPSILON}f"}
    return constants, 4 * (L * L + small + rows + R * Q + M + Q + 6)  # W2, ..., inputs, errors, means, 6 numbers


def _padded(H: int) -> int:
    return -(-H // 4) * 4


def _pack(family: Family, state: Values, Q: int, H: int) -> Tensor:
    """Lay the parameters of each network in a row, (S, P): W1, last weights, shifts, scales, bias, W2; padded."""
    first, second, last = torch.split(state["weights"], [Q * H, H * H, H], 1)
    S, gap = len(first), _padded(H) - H
    vectors = [last, *(state[name] for name in VECTORS[family])]
    small = [pad(first.view(S, Q, H), (0, gap)).flatten(1), *(pad(vector, (0, gap)) for vector in vectors)]
    return torch.cat([*small, pad(state["bias3"], (0, 3)), pad(second.view(S, H, H), (0, gap)).flatten(1)], 1)


def _unpack(family: Family, packed: Tensor, state: Values, Q: int, H: int) -> None:
    S, L = len(packed), _padded(H)
    vectors = VECTORS[family]
    first, last, *rows, bias, second = torch.split(packed, [Q * L, *[L] * (1 + len(vectors)), 4, H * L], 1)
    matrices = [first.view(S, Q, L)[..., :H].flatten(1), second.view(S, H, L)[..., :H].flatten(1), last[:, :H]]
    state["weights"].copy_(torch.cat(matrices, 1))
    state["bias3"].copy_(bias[:, :1])
    for name, vector in zip(vectors, rows, strict=True):
        state[name].copy_(vector[:, :H])
