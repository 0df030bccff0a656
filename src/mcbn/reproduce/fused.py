"""Training steps as one Triton kernel: a program holds one network and takes all steps of a block.

The same equations as `stack` and torch.optim.Adam. Activations of the batch lie in a scratch memory of the program
that its caches hold; products with the second weights W2 go by blocks of `BLOCK` rows or columns, so that no thread
holds much and several programs share a processor. Gradients are collected in the scratch too, then one pass over all
parameters takes the step. Barriers part what a thread writes from what others read. Sizes are padded to powers of 2.
Products are TF32 in three parts, about as exact as float32, or plain.
"""

# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcbn.networks import BN_EPSILON
from mcbn.reproduce.stack import Family, Values

BETA_1, BETA_2, ADAM_EPSILON = 0.9, 0.999, 1e-8  # torch.optim.Adam
ORDER = {  # of a network's parameters in its row
    "bn": ("weights", "beta1", "beta2", "gamma1", "gamma2", "bias3"),
    "dropout": ("weights", "bias1", "bias2", "bias3"),
}
BLOCK = 16  # rows or columns of W2 at a time
WARPS = 4
TILE = 4096  # activations in the registers of a program
REGISTERS = 168
UPDATED = 8  # parameters that a thread updates at a time


def fits(batch_size: int, hidden: int) -> bool:
    """Tell whether a program can hold a batch."""
    return 16 <= batch_size <= 128 and batch_size & (batch_size - 1) == 0


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
    S, rows, Q = x.shape
    M, H = networks.batch_size, networks.hidden
    k, HP = rows // M, max(16, triton.next_power_of_2(H))
    parts = [[values[n] for n in ORDER[family]], *([moments[n][i] for n in ORDER[family]] for i in range(2))]
    packed = [_pack(part) for part in parts]  # (S, P) each
    P = packed[0].shape[1]
    scratch = x.new_empty(S, 3 * M * HP + 2 * HP + P)
    exact = torch.get_float32_matmul_precision() == "highest"
    _train[(S,)](
        x, y, uniform, networks.stream, networks.rate, networks.weight_decay,
        _corrections(taken, k, learning_rate).to(x), scratch, *packed, k,
        NORMALIZED=family == "bn", EPSILON=BN_EPSILON, Q=Q, H=H, M=M, QP=max(16, triton.next_power_of_2(Q)), HP=HP, P=P,
        C=min(HP, TILE // M), BLOCK=BLOCK, UPDATED=UPDATED * 32 * WARPS, PRECISION="tf32x3" if exact else "tf32",
        num_warps=WARPS, maxnreg=REGISTERS, num_stages=1,  # reads no parameters ahead of the last step's writes
    )  # fmt: skip
    for whole, part in zip(packed, parts, strict=True):
        _unpack(whole, part)


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
    """Return lr / (1 - beta_1^t) and sqrt(1 - beta_2^t) of each step, (k, 2)."""
    t = torch.arange(taken + 1, taken + k + 1, dtype=torch.float64)
    return torch.stack([learning_rate / (1 - BETA_1**t), (1 - BETA_2**t).sqrt()], 1)


@triton.jit
def _at(rows, columns, width):
    """Return the places of a matrix's elements in memory."""
    return rows[:, None] * width + columns[None, :]


@triton.jit
def _load_matrix(at, rows, columns, n_rows, n_columns):
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(at + _at(rows, columns, n_columns), mask=inside, other=0.0)


@triton.jit
def _inputs(x, u, rows, q, rate, NORMALIZED: tl.constexpr, Q: tl.constexpr, U: tl.constexpr):
    """Return the rows of a batch, (M, QP), with inputs dropped in the dropout family."""
    inside = (q < Q)[None, :]
    batch = tl.load(x + _at(rows, q, Q), mask=inside, other=0.0)
    if not NORMALIZED:
        batch = tl.where(tl.load(u + _at(rows, q, U), mask=inside, other=0.0) >= rate, batch / (1 - rate), 0.0)
    return batch


@triton.jit
def _drop(z, u, rate, inside):
    """Rectify z, drop units."""
    return tl.where(tl.load(u, mask=inside[None, :], other=0.0) >= rate, tl.maximum(z, 0.0) / (1 - rate), 0.0)


@triton.jit
def _normalize(z, M: tl.constexpr, EPSILON: tl.constexpr):
    centred = z - tl.sum(z, 0)[None, :] / M
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / M + EPSILON)
    return centred * inverse[None, :], inverse


@triton.jit
def _normalize_backward(d, hat, scale, d_scale, d_shift, M: tl.constexpr):
    return scale[None, :] * (d - d_shift[None, :] / M - hat * (d_scale / M)[None, :])


@triton.jit
def _product(
    a, two, columns, M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return columns (C,) of a @ W2, or of a @ W2^T: (M, C)."""
    z = tl.zeros((M, C), tl.float32)
    for start in range(0, H, BLOCK):
        block = start + tl.arange(0, BLOCK)
        part = tl.load(a + _at(tl.arange(0, M), block, HP))
        if TRANSPOSED:
            matrix = tl.trans(_load_matrix(two, columns, block, H, H))
        else:
            matrix = _load_matrix(two, block, columns, H, H)
        z = tl.dot(part, matrix, z, input_precision=PRECISION)
    return z


@triton.jit
def _outer(
    a, d, gradient, M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store a^T @ d, (H, H)."""
    row = tl.arange(0, M)
    for first in range(0, H, C):
        columns = first + tl.arange(0, C)
        for start in range(0, H, BLOCK):
            block = start + tl.arange(0, BLOCK)
            left, right = tl.load(a + _at(row, block, HP)), tl.load(d + _at(row, columns, HP))
            product = tl.dot(tl.trans(left), right, input_precision=PRECISION)
            inside = (block < H)[:, None] & (columns < H)[None, :]
            tl.store(gradient + _at(block, columns, H), product, mask=inside)


@triton.jit
def _update(
    p, m, v, gradient, decay, size, root, DECAYED: tl.constexpr, N: tl.constexpr, UPDATED: tl.constexpr,
    B1: tl.constexpr = BETA_1, B2: tl.constexpr = BETA_2, EPS: tl.constexpr = ADAM_EPSILON,
):  # fmt: skip
    """Take Adam's step of N parameters, the first DECAYED of which decay."""
    for start in range(0, N, UPDATED):
        at = start + tl.arange(0, UPDATED)
        value = tl.load(p + at, mask=at < N, other=0.0)
        g = tl.load(gradient + at, mask=at < N, other=0.0) + tl.where(at < DECAYED, decay, 0.0) * value
        first = B1 * tl.load(m + at, mask=at < N, other=0.0) + (1 - B1) * g
        second = B2 * tl.load(v + at, mask=at < N, other=0.0) + (1 - B2) * g * g
        tl.store(m + at, first, mask=at < N)
        tl.store(v + at, second, mask=at < N)
        tl.store(p + at, value - size * first / (tl.sqrt(second) / root + EPS), mask=at < N)


@triton.jit
def _train(
    x, y, uniform, streams, rates, decays, corrections, scratch, p, m, v, k,
    NORMALIZED: tl.constexpr, EPSILON: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    QP: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, UPDATED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    s, q, row = tl.program_id(0).to(tl.int64), tl.arange(0, QP), tl.arange(0, M)
    TWO: tl.constexpr = Q * H  # where W2, the last weights, shifts and scales of a network lie in its row
    LAST: tl.constexpr = TWO + H * H
    SHIFT: tl.constexpr = LAST + H
    SCALE: tl.constexpr = SHIFT + 2 * H
    BIAS: tl.constexpr = SCALE + 2 * H if NORMALIZED else SCALE
    U: tl.constexpr = Q + 2 * H
    p, m, v, x, y = p + s * P, m + s * P, v + s * P, x + s * k * M * Q, y + s * k * M
    u = uniform + tl.load(streams + s) * k * M * U
    a1 = scratch + s * (3 * M * HP + 2 * HP + P)  # (M, HP), as are the next two
    hat1, second = a1 + M * HP, a1 + 2 * M * HP
    inverses, gradient = a1 + 3 * M * HP, a1 + 3 * M * HP + 2 * HP
    decay, rate = tl.load(decays + s), tl.load(rates + s)
    i = 0
    while i < k:
        rows = i * M + row
        for first in range(0, H, C):  # units of the first layer
            h = first + tl.arange(0, C)
            batch = _inputs(x, u, rows, q, rate, NORMALIZED, Q, U)
            z = tl.dot(batch, _load_matrix(p, q, h, Q, H), input_precision=PRECISION)  # (M, C)
            shift = tl.load(p + SHIFT + h, mask=h < H, other=0.0)
            if NORMALIZED:
                hat, inverse = _normalize(z, M, EPSILON)
                tl.store(inverses + h, inverse)
                tl.store(hat1 + _at(row, h, HP), hat)
                scale = tl.load(p + SCALE + h, mask=h < H, other=0.0)
                a = tl.maximum(hat * scale[None, :] + shift[None, :], 0.0)
            else:
                a = _drop(z + shift[None, :], u + Q + _at(rows, h, U), rate, h < H)
            tl.store(a1 + _at(row, h, HP), a)
        tl.debug_barrier()

        f = tl.zeros((M,), tl.float32)
        for first in range(0, H, C):  # of the second
            h = first + tl.arange(0, C)
            z = _product(a1, p + TWO, h, M, C, H, HP, BLOCK, False, PRECISION)
            shift = tl.load(p + SHIFT + H + h, mask=h < H, other=0.0)
            if NORMALIZED:
                z, inverse = _normalize(z, M, EPSILON)
                tl.store(inverses + HP + h, inverse)
                scale = tl.load(p + SCALE + H + h, mask=h < H, other=0.0)
                a = tl.maximum(z * scale[None, :] + shift[None, :], 0.0)
            else:
                z = _drop(z + shift[None, :], u + Q + H + _at(rows, h, U), rate, h < H)
                a = z
            tl.store(second + _at(row, h, HP), z)
            f += tl.sum(a * tl.load(p + LAST + h, mask=h < H, other=0.0)[None, :], 1)
        error = (f + tl.load(p + BIAS) - tl.load(y + rows)) / M  # (M,)
        tl.store(gradient + BIAS, tl.sum(error, 0))
        tl.debug_barrier()

        for first in range(0, H, C):  # back through the second
            h = first + tl.arange(0, C)
            a = tl.load(second + _at(row, h, HP))
            last = tl.load(p + LAST + h, mask=h < H, other=0.0)
            if NORMALIZED:
                hat, scale = a, tl.load(p + SCALE + H + h, mask=h < H, other=0.0)
                shift = tl.load(p + SHIFT + H + h, mask=h < H, other=0.0)
                a = tl.maximum(hat * scale[None, :] + shift[None, :], 0.0)
            d = tl.where(a > 0, error[:, None] * last[None, :], 0.0)
            if not NORMALIZED:
                d = d / (1 - rate)
            d_shift = tl.sum(d, 0)
            if NORMALIZED:
                d_scale = tl.sum(d * hat, 0)
                tl.store(gradient + SCALE + H + h, d_scale, mask=h < H)
                d = _normalize_backward(d, hat, scale * tl.load(inverses + HP + h), d_scale, d_shift, M)
            tl.store(gradient + SHIFT + H + h, d_shift, mask=h < H)
            tl.store(gradient + LAST + h, tl.sum(a * error[:, None], 0), mask=h < H)
            tl.store(second + _at(row, h, HP), d)
        tl.debug_barrier()

        for first in range(0, H, C):  # and the first
            h = first + tl.arange(0, C)
            d = _product(second, p + TWO, h, M, C, H, HP, BLOCK, True, PRECISION)
            d = tl.where(tl.load(a1 + _at(row, h, HP)) > 0, d, 0.0)
            if not NORMALIZED:
                d = d / (1 - rate)
            d_shift = tl.sum(d, 0)
            if NORMALIZED:
                hat = tl.load(hat1 + _at(row, h, HP))
                d_scale = tl.sum(d * hat, 0)
                tl.store(gradient + SCALE + h, d_scale, mask=h < H)
                scale = tl.load(p + SCALE + h, mask=h < H, other=0.0) * tl.load(inverses + h)
                d = _normalize_backward(d, hat, scale, d_scale, d_shift, M)
            tl.store(gradient + SHIFT + h, d_shift, mask=h < H)
            batch = _inputs(x, u, rows, q, rate, NORMALIZED, Q, U)
            d_one = tl.dot(tl.trans(batch), d, input_precision=PRECISION)
            tl.store(gradient + _at(q, h, H), d_one, mask=(q < Q)[:, None] & (h < H)[None, :])
        _outer(a1, second, gradient + TWO, M, C, H, HP, BLOCK, PRECISION)
        tl.debug_barrier()

        size, root = tl.load(corrections + 2 * i), tl.load(corrections + 2 * i + 1)
        _update(p, m, v, gradient, decay, size, root, SHIFT, BIAS + 1, UPDATED)
        tl.debug_barrier()
        i += 1
