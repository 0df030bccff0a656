"""Moments over T draws of stacked networks in one Triton kernel each: activations never leave the chip.

What `evaluation` computes with batched products, which move every draw's activations through memory. One program
holds a network and a block of its query rows and goes through all draws. CUDA only; sizes are padded to powers of 2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcbn_study.regression.stack import Matrices

ROWS = 64  # query rows of one program
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64, as in `streams`


def batch_statistics(
    x: Tensor, rows: Tensor, stream: Tensor, w: Matrices, values: dict[str, Tensor], eps: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return scale and shift of both BN layers from T batches, (S, T, H) each: layer 2 sees layer 1 normalised by them.

    x (R, N, Q), rows (R, T, M) of the batches, stream (S,); gammas and betas in `values`, (S, H) each.
    """
    S, _, H = w.first.shape
    T, M = rows.shape[1:]
    norms = [values[name].contiguous() for name in ("gamma1", "beta1", "gamma2", "beta2")]
    made = [x.new_empty(S, T, H) for _ in range(4)]
    sizes = {**_sizes(x, H), "ROWS": min(ROWS, max(16, triton.next_power_of_2(M)))}
    _statistics[(S, T)](x, rows, stream, *_contiguous(w)[:2], *norms, *made, x.shape[1], eps, T=T, M=M, **sizes)
    return (made[0], made[1]), (made[2], made[3])


def bn_moments(
    x: Tensor, stream: Tensor, w: Matrices, bias: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return sum and sum of squares about the first draw, with that draw: mean and variance over T, each (S, n).

    x (R, n, Q), stream (S,), bias (S, 1); first and second: scale and shift of both BN layers, (S, T, H) each.
    """
    S, T, H = first[0].shape
    sums = _empty_sums(x, S)
    layers = [part.contiguous() for part in (*first, *second)]
    _bn[_grid(x, S)](x, stream, *_contiguous(w), bias, *layers, *sums, x.shape[1], T=T, **_sizes(x, H))
    return _moments(sums, T)


def dropout_moments(
    x: Tensor, stream: Tensor, keys: Tensor, w: Matrices, biases: tuple[Tensor, Tensor, Tensor], rate: Tensor, T: int
) -> tuple[Tensor, Tensor]:
    """Return mean and variance over T draws of dropped units, each (S, n); keys (R,) of `uniforms`, rate (S,)."""
    S, _, H = w.first.shape
    sums = _empty_sums(x, S)
    parts = [part.contiguous() for part in (*w, *biases)]
    _dropout[_grid(x, S)](x, stream, keys, rate, *parts, *sums, x.shape[1], T=T, **_sizes(x, H))
    return _moments(sums, T)


def _grid(x: Tensor, S: int) -> tuple[int, int]:
    return S, triton.cdiv(x.shape[1], ROWS)


def _contiguous(w: Matrices) -> list[Tensor]:
    return [part.contiguous() for part in w]


def _sizes(x: Tensor, H: int) -> dict[str, Any]:
    Q = x.shape[2]
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "Q": Q,
        "H": H,
        "QP": max(16, triton.next_power_of_2(Q)),
        "HP": max(16, triton.next_power_of_2(H)),
        "ROWS": ROWS,
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": 4 if H <= 64 else 8,
    }


def _empty_sums(x: Tensor, S: int) -> tuple[Tensor, Tensor, Tensor]:
    first, total, squares = (x.new_empty(S, x.shape[1]) for _ in range(3))
    return first, total, squares


def _moments(sums: tuple[Tensor, Tensor, Tensor], T: int) -> tuple[Tensor, Tensor]:
    first, total, squares = (part.double() for part in sums)  # (S, n)
    mean = total / T
    return first + mean, (squares / T - mean.square()).clamp_(min=0)


@triton.jit
def _uniform(key, counter, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    z = key + (counter + 1).to(tl.uint64) * GOLDEN
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _load_matrix(at, rows, columns, n_rows, n_columns):
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(at + rows[:, None] * n_columns + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _merge(z, inside, count, mean, squares):
    """Add rows z (ROWS, HP) to a mean and a sum of squared deviations over `count` rows (Chan et al. 1983)."""
    own = tl.sum(inside.to(tl.float32), 0)
    z = tl.where(inside[:, None], z, 0.0)
    own_mean = tl.sum(z, 0) / own
    deviation = tl.where(inside[:, None], z - own_mean[None, :], 0.0)
    delta, whole = own_mean - mean, count + own
    squares += tl.sum(deviation * deviation, 0) + delta * delta * (count * own / whole)
    return whole, mean + delta * (own / whole), squares


@triton.jit
def _batch_moments(
    x, batches, one, two, scale, shift,
    M: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return mean and sum of squared deviations over a batch of the first layer, or where there is `two` the second."""
    k, q = tl.arange(0, ROWS), tl.arange(0, QP)
    count, mean, squares = 0.0, tl.zeros((HP,), tl.float32), tl.zeros((HP,), tl.float32)
    for start in range(0, M, ROWS):
        inside = start + k < M
        rows = tl.load(batches + start + k, mask=inside, other=0)
        chosen = tl.load(x + rows[:, None] * Q + q[None, :], mask=inside[:, None] & (q < Q)[None, :], other=0.0)
        z = tl.dot(chosen, one, input_precision=PRECISION)
        if two is not None:
            z = tl.dot(tl.maximum(z * scale[None, :] + shift[None, :], 0.0), two, input_precision=PRECISION)
        count, mean, squares = _merge(z, inside, count, mean, squares)
    return mean, squares


@triton.jit
def _store_layer(mean, squares, gamma, beta, scale_at, shift_at, unit, eps, M: tl.constexpr):
    """Store and return the scale and shift of a layer under the moments of a batch."""
    scale = tl.load(gamma, mask=unit, other=0.0) / tl.sqrt(squares / M + eps)
    shift = tl.load(beta, mask=unit, other=0.0) - mean * scale
    tl.store(scale_at, scale, mask=unit)
    tl.store(shift_at, shift, mask=unit)
    return scale, shift


@triton.jit
def _statistics(
    x, batches, stream, w1, w2, gamma1, beta1, gamma2, beta2, scale1, shift1, scale2, shift2, n, eps,
    T: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, QP: tl.constexpr, HP: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q, h = tl.arange(0, QP), tl.arange(0, HP)
    r, unit, own, at = tl.load(stream + s), h < H, s * H + h, (s * T + t) * H + h
    x += r * n * Q
    batches += (r * T + t) * M
    one = _load_matrix(w1 + s * Q * H, q, h, Q, H)
    mean, squares = _batch_moments(x, batches, one, None, None, None, M, Q, QP, HP, ROWS, PRECISION)
    scale, shift = _store_layer(mean, squares, gamma1 + own, beta1 + own, scale1 + at, shift1 + at, unit, eps, M)
    two = _load_matrix(w2 + s * H * H, h, h, H, H)
    mean, squares = _batch_moments(x, batches, one, two, scale, shift, M, Q, QP, HP, ROWS, PRECISION)
    _store_layer(mean, squares, gamma2 + own, beta2 + own, scale2 + at, shift2 + at, unit, eps, M)


@triton.jit
def _bn(
    x, stream, w1, w2, w3, bias, scale1, shift1, scale2, shift2, first, total, squares, n,
    T: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, QP: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    rows, q, h = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, QP), tl.arange(0, HP)
    batch = _load_matrix(x + tl.load(stream + s) * n * Q, rows, q, n, Q)
    z1 = tl.dot(batch, _load_matrix(w1 + s * Q * H, q, h, Q, H), input_precision=PRECISION)  # (ROWS, HP)
    second = _load_matrix(w2 + s * H * H, h, h, H, H)
    unit = h < H
    last, b = tl.load(w3 + s * H + h, mask=unit, other=0.0), tl.load(bias + s)
    start = tl.zeros((ROWS,), tl.float32)
    sums, square_sums = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for t in range(T):
        at = (s * T + t) * H + h
        a = z1 * tl.load(scale1 + at, mask=unit, other=0.0)[None, :]
        a = tl.maximum(a + tl.load(shift1 + at, mask=unit, other=0.0)[None, :], 0.0)
        z2 = tl.dot(a, second, input_precision=PRECISION)
        z2 = z2 * tl.load(scale2 + at, mask=unit, other=0.0)[None, :]
        z2 = tl.maximum(z2 + tl.load(shift2 + at, mask=unit, other=0.0)[None, :], 0.0)
        f = tl.sum(z2 * last[None, :], 1) + b
        start = tl.where(t == 0, f, start)
        sums += f - start
        square_sums += (f - start) * (f - start)
    at = s * n + rows
    tl.store(first + at, start, mask=rows < n)
    tl.store(total + at, sums, mask=rows < n)
    tl.store(squares + at, square_sums, mask=rows < n)


@triton.jit
def _dropout(
    x, stream, keys, rates, w1, w2, w3, b1, b2, b3, first, total, squares, n,
    T: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, QP: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    GOLDEN: tl.constexpr = GOLDEN, MIX_1: tl.constexpr = MIX_1, MIX_2: tl.constexpr = MIX_2,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    rows, q, h = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, QP), tl.arange(0, HP)
    r, rate = tl.load(stream + s), tl.load(rates + s)
    key, kept = tl.load(keys + r).to(tl.uint64), 1.0 / (1.0 - rate)
    batch = _load_matrix(x + r * n * Q, rows, q, n, Q)
    one = _load_matrix(w1 + s * Q * H, q, h, Q, H) * kept
    two = _load_matrix(w2 + s * H * H, h, h, H, H) * kept
    unit = h < H
    three = tl.load(w3 + s * H + h, mask=unit, other=0.0) * kept
    bias1, bias2 = tl.load(b1 + s * H + h, mask=unit, other=0.0), tl.load(b2 + s * H + h, mask=unit, other=0.0)
    bias3 = tl.load(b3 + s)
    start = tl.zeros((ROWS,), tl.float32)
    sums, square_sums = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for t in range(T):
        base = (tl.full((ROWS,), 0, tl.int64) + t) * 4294967296 + rows.to(tl.int64) * 1024
        u = _uniform(key, base[:, None] + q[None, :], GOLDEN, MIX_1, MIX_2)
        a = tl.where(u >= rate, batch, 0.0)
        a = tl.maximum(tl.dot(a, one, input_precision=PRECISION) + bias1[None, :], 0.0)
        u = _uniform(key, base[:, None] + (Q + h)[None, :], GOLDEN, MIX_1, MIX_2)
        a = tl.where(u >= rate, a, 0.0)
        a = tl.maximum(tl.dot(a, two, input_precision=PRECISION) + bias2[None, :], 0.0)
        u = _uniform(key, base[:, None] + (Q + H + h)[None, :], GOLDEN, MIX_1, MIX_2)
        f = tl.sum(tl.where(u >= rate, a, 0.0) * three[None, :], 1) + bias3
        start = tl.where(t == 0, f, start)
        sums += f - start
        square_sums += (f - start) * (f - start)
    at = s * n + rows
    tl.store(first + at, start, mask=rows < n)
    tl.store(total + at, sums, mask=rows < n)
    tl.store(squares + at, square_sums, mask=rows < n)
