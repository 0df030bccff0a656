"""The Triton kernel of `fused`: a program holds one network and takes all steps of a block.

Activations of the batch lie in a scratch memory of the program that the caches hold. The program works on C units at
a time, with all rows of the batch, which is all that batch normalisation needs; products with the second weights W2 go
by blocks, so that a thread holds little and several programs share a processor. Gradients go to the scratch too, then
one pass over all parameters takes Adam's step. Barriers part what a thread writes from what others read.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from mcbn.reproduce.kernels import _load_matrix

BETA_1, BETA_2, ADAM_EPSILON = 0.9, 0.999, 1e-8  # torch.optim.Adam


@triton.jit
def _at(rows, columns, width):
    """Return the places of a matrix's elements in memory."""
    return rows[:, None] * width + columns[None, :]


@triton.jit
def _load_vector(at, h, n):
    return tl.load(at + h, mask=h < n, other=0.0)


@triton.jit
def _inputs(x, u, rows, q, rate, kept, NORMALIZED: tl.constexpr, Q: tl.constexpr, U: tl.constexpr):
    """Return the rows of a batch, (M, QP), with inputs dropped in the dropout family."""
    inside = (q < Q)[None, :]
    batch = tl.load(x + _at(rows, q, Q), mask=inside, other=0.0)
    if not NORMALIZED:
        batch = tl.where(tl.load(u + _at(rows, q, U), mask=inside, other=0.0) >= rate, batch * kept, 0.0)
    return batch


@triton.jit
def _drop(z, u, rate, kept, inside):
    """Rectify z, drop units."""
    return tl.where(tl.load(u, mask=inside[None, :], other=0.0) >= rate, tl.maximum(z, 0.0) * kept, 0.0)


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
    a, d, gradient, M: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store a^T @ d, (H, H)."""
    h = tl.arange(0, HP)
    for start in range(0, H, BLOCK):
        block = start + tl.arange(0, BLOCK)
        product = tl.zeros((BLOCK, HP), tl.float32)
        for top in range(0, M, ROWS):
            row = top + tl.arange(0, ROWS)
            left = tl.load(a + _at(row, block, HP), mask=(block < H)[None, :], other=0.0)
            right = tl.load(d + _at(row, h, HP), mask=(h < H)[None, :], other=0.0)
            product = tl.dot(tl.trans(left), right, product, input_precision=PRECISION)
        tl.store(gradient + _at(block, h, H), product, mask=(block < H)[:, None] & (h < H)[None, :])


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
        tl.store(p + at, value - size * first / (tl.sqrt(second) * root + EPS), mask=at < N)


@triton.jit
def train(
    x, y, uniform, streams, rates, decays, corrections, scratch, p, m, v, k,
    NORMALIZED: tl.constexpr, EPSILON: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    QP: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr,
    ROWS: tl.constexpr, UPDATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take k steps of network s = program_id(0).

    x (S, k M, Q), y (S, k M), uniform (R, k M, Q + 2H); streams, rates, decays (S,); corrections (k, 2); parameters p
    and their moments m, v (S, P); scratch (S, (3M + 2) HP + P). C units, blocks of BLOCK: see `fused`.
    """
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
    kept = 1 / (1 - rate)
    i = 0
    while i < k:
        rows = i * M + row
        for first in range(0, H, C):  # units of the first layer
            h = first + tl.arange(0, C)
            batch = _inputs(x, u, rows, q, rate, kept, NORMALIZED, Q, U)
            z = tl.dot(batch, _load_matrix(p, q, h, Q, H), input_precision=PRECISION)  # (M, C)
            shift = _load_vector(p + SHIFT, h, H)
            if NORMALIZED:
                hat, inverse = _normalize(z, M, EPSILON)
                tl.store(inverses + h, inverse)
                tl.store(hat1 + _at(row, h, HP), hat)
                scale = _load_vector(p + SCALE, h, H)
                a = tl.maximum(hat * scale[None, :] + shift[None, :], 0.0)
            else:
                a = _drop(z + shift[None, :], u + Q + _at(rows, h, U), rate, kept, h < H)
            tl.store(a1 + _at(row, h, HP), a)
        tl.debug_barrier()

        f = tl.zeros((M,), tl.float32)
        for first in range(0, H, C):  # of the second
            h = first + tl.arange(0, C)
            z = _product(a1, p + TWO, h, M, C, H, HP, BLOCK, False, PRECISION)
            shift = _load_vector(p + SHIFT + H, h, H)
            if NORMALIZED:
                z, inverse = _normalize(z, M, EPSILON)
                tl.store(inverses + HP + h, inverse)
                scale = _load_vector(p + SCALE + H, h, H)
                a = tl.maximum(z * scale[None, :] + shift[None, :], 0.0)
            else:
                z = _drop(z + shift[None, :], u + Q + H + _at(rows, h, U), rate, kept, h < H)
                a = z
            tl.store(second + _at(row, h, HP), z)
            f += tl.sum(a * _load_vector(p + LAST, h, H)[None, :], 1)
        error = (f + tl.load(p + BIAS) - tl.load(y + rows)) / M  # (M,)
        tl.store(gradient + BIAS, tl.sum(error, 0))
        tl.debug_barrier()

        for first in range(0, H, C):  # back through the second
            h = first + tl.arange(0, C)
            a = tl.load(second + _at(row, h, HP))
            tl.debug_barrier()  # these places are written below
            last = _load_vector(p + LAST, h, H)
            if NORMALIZED:
                hat, scale = a, _load_vector(p + SCALE + H, h, H)
                shift = _load_vector(p + SHIFT + H, h, H)
                a = tl.maximum(hat * scale[None, :] + shift[None, :], 0.0)
            d = tl.where(a > 0, error[:, None] * last[None, :], 0.0)
            if not NORMALIZED:
                d = d * kept
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
                d = d * kept
            d_shift = tl.sum(d, 0)
            if NORMALIZED:
                hat = tl.load(hat1 + _at(row, h, HP))
                d_scale = tl.sum(d * hat, 0)
                tl.store(gradient + SCALE + h, d_scale, mask=h < H)
                scale = _load_vector(p + SCALE, h, H) * tl.load(inverses + h)
                d = _normalize_backward(d, hat, scale, d_scale, d_shift, M)
            tl.store(gradient + SHIFT + h, d_shift, mask=h < H)
            batch = _inputs(x, u, rows, q, rate, kept, NORMALIZED, Q, U)
            d_one = tl.dot(tl.trans(batch), d, input_precision=PRECISION)
            tl.store(gradient + _at(q, h, H), d_one, mask=(q < Q)[:, None] & (h < H)[None, :])
        _outer(a1, second, gradient + TWO, M, H, HP, OUTER, ROWS, PRECISION)
        tl.debug_barrier()

        size, root = tl.load(corrections + 2 * i), tl.load(corrections + 2 * i + 1)
        _update(p, m, v, gradient, decay, size, root, SHIFT, BIAS + 1, UPDATED)
        tl.debug_barrier()
        i += 1
