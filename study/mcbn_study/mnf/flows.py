"""Masked RealNVP flows, S independent ones as one program (Dinh et al. 2017; Louizos and Welling 2017).

Symbols: S networks in a stack, R rows, I width of z, H hidden width, F steps of a flow.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from mcbn.errors import MCBNError

GATE_BIAS = 2.0  # published code: gates start near 1, the flow near the identity
HALF = 0.5  # masks are Bernoulli(0.5); their mean stands for them in the deterministic pass


def initial(generators: Sequence[torch.Generator], *shape: int, mean: float = 0.0, scale: float = 1.0) -> nn.Parameter:
    """Draw a parameter (S, *shape), network s from generators[s]: N(mean, scale^2 4 / (fan in + fan out)).

    The initialisation of Louizos and Welling's published code ("he2"; a vector has no fan out).
    """
    std = scale * math.sqrt(4 / sum(shape))
    drawn = [torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") for g in generators]
    return nn.Parameter(mean + std * torch.stack(drawn))


def zeros(stack: int, *shape: int) -> nn.Parameter:
    """Make a parameter (S, *shape) of zeros."""
    return nn.Parameter(torch.zeros(stack, *shape))


class FlowStep(nn.Module):
    """One step: the entries that the mask hides are moved, given those that it shows.

    z' = m z + (1 - m) (g z + (1 - g) mu),   log |det dz'/dz| = sum_i (1 - m_i) log g_i,
    (mu, a) = tanh((m z) W_1 + b_1) W_2 + b_2,   g = sigmoid(a).   As in the published code of Louizos and Welling 2017.
    """

    def __init__(self, width: int, hidden: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        S = len(generators)
        self.weight_in = initial(generators, width, hidden)
        self.bias_in = zeros(S, 1, hidden)
        shift, gate = initial(generators, hidden, width), initial(generators, hidden, width)
        self.weight_out = nn.Parameter(torch.cat([shift, gate], 2).detach())  # (S, H, 2 I): one product for both
        self.bias_out = nn.Parameter(torch.cat([torch.zeros(S, 1, width), torch.full((S, 1, width), GATE_BIAS)], 2))

    def forward(self, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Move z (S, R, I) by mask (S, R, I): the new z, and the log-determinant (S, R)."""
        moved: tuple[Tensor, Tensor] = _Move.apply(  # type: ignore[no-untyped-call]
            z, mask, self.weight_in, self.bias_in, self.weight_out, self.bias_out
        )
        return moved


class _Move(torch.autograd.Function):
    """A flow step with its gradient written out: fewer kernels than autograd makes of it."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, mask: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        shown = mask * z
        hidden = torch.tanh(torch.baddbmm(bias_in, shown, weight_in))  # (S, R, H)
        shift, logit = torch.baddbmm(bias_out, hidden, weight_out).chunk(2, 2)  # (S, R, I) each
        gate = torch.sigmoid(logit)
        ctx.save_for_backward(z, mask, weight_in, weight_out, shown, hidden, shift, gate)
        moved = torch.lerp(shift, z, gate)
        return torch.lerp(moved, z, mask), ((1 - mask) * logsigmoid(logit)).sum(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_end, d_log_det = grads  # (S, R, I), (S, R)
        z, mask, weight_in, weight_out, shown, hidden, shift, gate = ctx.saved_tensors
        hide, closed = 1 - mask, 1 - gate
        d_shift = hide * d_end * closed
        d_logit = torch.addcmul(d_shift * gate * (z - shift), closed * hide, d_log_det.unsqueeze(2))
        d_out = torch.cat([d_shift, d_logit], 2)  # (S, R, 2 I)
        d_pre = torch.ops.aten.tanh_backward(torch.bmm(d_out, weight_out.mT), hidden)  # (S, R, H)
        d_z = torch.addcmul(d_end - d_shift, mask, torch.bmm(d_pre, weight_in.mT))
        d_in = torch.bmm(shown.mT, d_pre), d_pre.sum(1, keepdim=True)
        return d_z, None, *d_in, torch.bmm(hidden.mT, d_out), d_out.sum(1, keepdim=True)


class MaskedFlow(nn.Module):
    """F steps, each with masks of its own; the masks are drawn anew for every row of every pass."""

    def __init__(self, width: int, *, hidden: int, n_steps: int = 2, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        if min(width, hidden, n_steps) < 1:
            raise MCBNError(f"a flow needs width, hidden and n_steps of at least 1; got {width}, {hidden}, {n_steps}")
        self.steps = nn.ModuleList(FlowStep(width, hidden, generators) for _ in range(n_steps))

    def forward(self, z: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Send z (S, R, I) through all steps with masks (S, F, R, I): the result and its log-determinant (S, R)."""
        log_det = torch.zeros((), dtype=z.dtype, device=z.device)
        for step, mask in zip(self.steps, masks.unbind(1), strict=True):
            z, change = step(z, mask)
            log_det = log_det + change
        return z, log_det
