"""Training steps as one Triton kernel: a program holds one network and takes all steps of a block.

The same equations as `stack` and torch.optim.Adam. Activations never leave the chip; parameters and moments are read
and written once a step, with a barrier between steps. Sizes are padded to powers of 2. For batches of few rows, where
separate kernels mostly wait for one another. Products are TF32 in three parts, about as exact as float32, or plain.
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
LARGEST_BATCH = 32  # above, a program's activations no longer fit its registers
ORDER = {
    "bn": ("weights", "gamma1", "beta1", "gamma2", "beta2", "bias3"),
    "dropout": ("weights", "bias1", "bias2", "bias3"),
}


def fits(batch_size: int) -> bool:
    """Tell whether a program can hold a batch."""
    return batch_size <= LARGEST_BATCH and batch_size >= 16 and batch_size & (batch_size - 1) == 0


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

    values, moments (a pair a parameter) by name, contiguous; x (S, k M, Q), y (S, k M), uniform (R, k M, Q + 2H);
    networks: as `training.Networks`; taken: steps before these.
    """
    S, rows, Q = x.shape
    M, H = networks.batch_size, networks.hidden
    k = rows // M
    state = [part for name in ORDER[family] for part in (values[name], *moments[name])]
    corrections = _corrections(taken, k, learning_rate).to(x)
    sizes = {"Q": Q, "H": H, "M": M, "QP": max(16, triton.next_power_of_2(Q)), "HP": max(16, triton.next_power_of_2(H))}
    exact = torch.get_float32_matmul_precision() == "highest"
    options = {"PRECISION": "tf32x3" if exact else "tf32", "num_warps": 8 if H <= 64 else 16}
    options["num_stages"] = 1  # a step must not read parameters ahead of the last one's writes
    if family == "bn":
        _train_bn[(S,)](x, y, networks.weight_decay, corrections, *state, k, EPSILON=BN_EPSILON, **sizes, **options)
    else:
        arguments = (uniform, networks.stream, networks.rate, networks.weight_decay, corrections)
        _train_dropout[(S,)](x, y, *arguments, *state, k, **sizes, **options)


def _corrections(taken: int, k: int, learning_rate: float) -> Tensor:
    """Return lr / (1 - beta_1^t) and sqrt(1 - beta_2^t) of each step, (k, 2)."""
    t = torch.arange(taken + 1, taken + k + 1, dtype=torch.float64)
    return torch.stack([learning_rate / (1 - BETA_1**t), (1 - BETA_2**t).sqrt()], 1)


@triton.jit
def _update(at, m_at, v_at, p, g, inside, size, root, B1: tl.constexpr, B2: tl.constexpr, EPS: tl.constexpr):
    m = B1 * tl.load(m_at, mask=inside, other=0.0) + (1 - B1) * g
    v = B2 * tl.load(v_at, mask=inside, other=0.0) + (1 - B2) * g * g
    tl.store(m_at, m, mask=inside)
    tl.store(v_at, v, mask=inside)
    tl.store(at, p - size * m / (tl.sqrt(v) / root + EPS), mask=inside)


@triton.jit
def _normalize(z, gamma, beta, M: tl.constexpr, EPSILON: tl.constexpr):
    centred = z - tl.sum(z, 0)[None, :] / M
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / M + EPSILON)
    hat = centred * inverse[None, :]
    return hat, inverse, tl.maximum(hat * gamma[None, :] + beta[None, :], 0.0)


@triton.jit
def _normalize_backward(d, hat, inverse, gamma, M: tl.constexpr):
    d_gamma, d_beta = tl.sum(d * hat, 0), tl.sum(d, 0)
    dz = (gamma * inverse)[None, :] * (d - d_beta[None, :] / M - hat * (d_gamma / M)[None, :])
    return dz, d_gamma, d_beta


@triton.jit
def _train_bn(
    x, y, decays, corrections,
    w, w_m, w_v, g1, g1_m, g1_v, b1, b1_m, b1_v, g2, g2_m, g2_v, b2, b2_m, b2_v, b3, b3_m, b3_v, k,
    EPSILON: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, M: tl.constexpr, QP: tl.constexpr, HP: tl.constexpr,
    PRECISION: tl.constexpr, B1: tl.constexpr = BETA_1, B2: tl.constexpr = BETA_2, EPS: tl.constexpr = ADAM_EPSILON,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row, q, h = tl.arange(0, M), tl.arange(0, QP), tl.arange(0, HP)
    unit, in_one, in_two = h < H, (q < Q)[:, None] & (h < H)[None, :], (h < H)[:, None] & (h < H)[None, :]
    own = s * (Q * H + H * H + H)  # a network's parameters lie together: from there 32-bit offsets do
    w, w_m, w_v, decay = w + own, w_m + own, w_v + own, tl.load(decays + s)
    at1, at2 = q[:, None] * H + h[None, :], Q * H + h[:, None] * H + h[None, :]
    at3 = Q * H + H * H + h
    for i in range(k):
        size, root = tl.load(corrections + 2 * i), tl.load(corrections + 2 * i + 1)
        rows = s * k * M + i * M + row
        one = tl.load(w + at1, mask=in_one, other=0.0)
        two = tl.load(w + at2, mask=in_two, other=0.0)
        last, bias = tl.load(w + at3, mask=unit, other=0.0), tl.load(b3 + s)
        gamma1, beta1 = tl.load(g1 + s * H + h, mask=unit, other=0.0), tl.load(b1 + s * H + h, mask=unit, other=0.0)
        gamma2, beta2 = tl.load(g2 + s * H + h, mask=unit, other=0.0), tl.load(b2 + s * H + h, mask=unit, other=0.0)
        batch = tl.load(x + rows[:, None] * Q + q[None, :], mask=(q < Q)[None, :], other=0.0)  # (M, QP)
        hat1, inverse1, a1 = _normalize(tl.dot(batch, one, input_precision=PRECISION), gamma1, beta1, M, EPSILON)
        hat2, inverse2, a2 = _normalize(tl.dot(a1, two, input_precision=PRECISION), gamma2, beta2, M, EPSILON)
        error = (tl.sum(a2 * last[None, :], 1) + bias - tl.load(y + rows)) / M  # (M,)

        d_last = tl.sum(a2 * error[:, None], 0) + decay * last
        d2 = tl.where(a2 > 0, error[:, None] * last[None, :], 0.0)
        d2, d_gamma2, d_beta2 = _normalize_backward(d2, hat2, inverse2, gamma2, M)
        d1 = tl.where(a1 > 0, tl.dot(d2, tl.trans(two), input_precision=PRECISION), 0.0)
        d1, d_gamma1, d_beta1 = _normalize_backward(d1, hat1, inverse1, gamma1, M)
        d_two = tl.dot(tl.trans(a1), d2, input_precision=PRECISION) + decay * two
        d_one = tl.dot(tl.trans(batch), d1, input_precision=PRECISION) + decay * one

        tl.debug_barrier()
        _update(w + at2, w_m + at2, w_v + at2, two, d_two, in_two, size, root, B1, B2, EPS)
        _update(w + at1, w_m + at1, w_v + at1, one, d_one, in_one, size, root, B1, B2, EPS)
        _update(w + at3, w_m + at3, w_v + at3, last, d_last, unit, size, root, B1, B2, EPS)
        _update(g1 + s * H + h, g1_m + s * H + h, g1_v + s * H + h, gamma1, d_gamma1, unit, size, root, B1, B2, EPS)
        _update(b1 + s * H + h, b1_m + s * H + h, b1_v + s * H + h, beta1, d_beta1, unit, size, root, B1, B2, EPS)
        _update(g2 + s * H + h, g2_m + s * H + h, g2_v + s * H + h, gamma2, d_gamma2, unit, size, root, B1, B2, EPS)
        _update(b2 + s * H + h, b2_m + s * H + h, b2_v + s * H + h, beta2, d_beta2, unit, size, root, B1, B2, EPS)
        _update(b3 + s, b3_m + s, b3_v + s, bias, tl.sum(error, 0), True, size, root, B1, B2, EPS)
        tl.debug_barrier()


@triton.jit
def _train_dropout(
    x, y, uniform, streams, rates, decays, corrections,
    w, w_m, w_v, b1, b1_m, b1_v, b2, b2_m, b2_v, b3, b3_m, b3_v, k,
    Q: tl.constexpr, H: tl.constexpr, M: tl.constexpr, QP: tl.constexpr, HP: tl.constexpr,
    PRECISION: tl.constexpr, B1: tl.constexpr = BETA_1, B2: tl.constexpr = BETA_2, EPS: tl.constexpr = ADAM_EPSILON,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row, q, h = tl.arange(0, M), tl.arange(0, QP), tl.arange(0, HP)
    unit, in_one, in_two = h < H, (q < Q)[:, None] & (h < H)[None, :], (h < H)[:, None] & (h < H)[None, :]
    own = s * (Q * H + H * H + H)  # a network's parameters lie together: from there 32-bit offsets do
    w, w_m, w_v, decay = w + own, w_m + own, w_v + own, tl.load(decays + s)
    at1, at2 = q[:, None] * H + h[None, :], Q * H + h[:, None] * H + h[None, :]
    at3 = Q * H + H * H + h
    rate, r = tl.load(rates + s), tl.load(streams + s)
    kept = 1 / (1 - rate)
    for i in range(k):
        size, root = tl.load(corrections + 2 * i), tl.load(corrections + 2 * i + 1)
        rows = s * k * M + i * M + row
        u = uniform + ((r * k + i) * M + row[:, None]) * (Q + 2 * H)
        one = tl.load(w + at1, mask=in_one, other=0.0)
        two = tl.load(w + at2, mask=in_two, other=0.0)
        last, bias = tl.load(w + at3, mask=unit, other=0.0), tl.load(b3 + s)
        bias1, bias2 = tl.load(b1 + s * H + h, mask=unit, other=0.0), tl.load(b2 + s * H + h, mask=unit, other=0.0)
        batch = tl.load(x + rows[:, None] * Q + q[None, :], mask=(q < Q)[None, :], other=0.0)  # (M, QP)
        a0 = tl.where(tl.load(u + q[None, :], mask=(q < Q)[None, :], other=0.0) >= rate, batch * kept, 0.0)
        z = tl.dot(a0, one, input_precision=PRECISION) + bias1[None, :]
        open1 = (tl.load(u + Q + h[None, :], mask=unit[None, :], other=0.0) >= rate) & (z > 0)
        a1 = tl.where(open1, z * kept, 0.0)
        z = tl.dot(a1, two, input_precision=PRECISION) + bias2[None, :]
        open2 = (tl.load(u + Q + H + h[None, :], mask=unit[None, :], other=0.0) >= rate) & (z > 0)
        a2 = tl.where(open2, z * kept, 0.0)
        error = (tl.sum(a2 * last[None, :], 1) + bias - tl.load(y + rows)) / M  # (M,)

        d_last = tl.sum(a2 * error[:, None], 0) + decay * last
        d2 = tl.where(open2, error[:, None] * (last * kept)[None, :], 0.0)
        d1 = tl.where(open1, tl.dot(d2, tl.trans(two), input_precision=PRECISION) * kept, 0.0)
        d_two = tl.dot(tl.trans(a1), d2, input_precision=PRECISION) + decay * two
        d_one = tl.dot(tl.trans(a0), d1, input_precision=PRECISION) + decay * one

        tl.debug_barrier()
        _update(w + at2, w_m + at2, w_v + at2, two, d_two, in_two, size, root, B1, B2, EPS)
        _update(w + at1, w_m + at1, w_v + at1, one, d_one, in_one, size, root, B1, B2, EPS)
        _update(w + at3, w_m + at3, w_v + at3, last, d_last, unit, size, root, B1, B2, EPS)
        _update(b1 + s * H + h, b1_m + s * H + h, b1_v + s * H + h, bias1, tl.sum(d1, 0), unit, size, root, B1, B2, EPS)
        _update(b2 + s * H + h, b2_m + s * H + h, b2_v + s * H + h, bias2, tl.sum(d2, 0), unit, size, root, B1, B2, EPS)
        _update(b3 + s, b3_m + s, b3_v + s, bias, tl.sum(error, 0), True, size, root, B1, B2, EPS)
        tl.debug_barrier()
