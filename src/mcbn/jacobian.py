"""Outputs and their gradients by batch-norm statistics, input by input.

Batch norm with statistics (mu, sigma) is h * scale + shift. Every input gets a scale and a shift of its own, all equal,
so that one backward pass an output gives the gradients of all inputs; those by the statistics follow from

    df/dmu = -scale df/dshift,    df/dsigma = slope (df/dscale - mu df/dshift),    slope = dscale/dsigma.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches, rewriting
from mcbn.errors import MCBNError
from mcbn.network import Network
from mcbn.program import follow
from mcbn.statistics import BatchNormCall, BatchNormMode, scale_and_shift, statistics_dtype

MOST_OUTPUTS = 4096  # of one example: each costs a backward pass
WAYS_KEPT = 16
Centres = Mapping[str, tuple[Tensor, Tensor]]  # call name -> mean and standard deviation, each (C,)
Leaves = dict[str, tuple[Tensor, Tensor]]  # call name -> scale and shift of every input, each (N, C)
Way = Callable[[Any, int], tuple[Tensor, Leaves]]  # inputs and their number -> output, leaves


class Point(NamedTuple):
    """One batch-norm call at given statistics, each (C,)."""

    scale: Tensor
    shift: Tensor
    slope: Tensor  # -gamma sigma (sigma^2 + eps)^-3/2
    minus_mean: Tensor
    minus_scale: Tensor

    @classmethod
    def of(cls, call: BatchNormCall, mean: Tensor, std: Tensor) -> "Point":
        """Work out a call at a mean and a standard deviation."""
        var, dtype = std.square(), statistics_dtype(call.x)
        scale, shift = scale_and_shift(mean, var, call.weight, call.bias, call.eps)
        slope = -scale * std / (var + call.eps)
        return cls(*(part.detach().to(dtype) for part in (scale, shift, slope, -mean, -scale)))

    def leaves(self, N: int) -> tuple[Tensor, Tensor]:
        """Return scale and shift for each of N inputs, (N, C), that gradients can be taken for."""
        return self.scale.expand(N, -1).requires_grad_(), self.shift.expand(N, -1).requires_grad_()

    def by_statistics(self, by_scale: Tensor, by_shift: Tensor) -> tuple[Tensor, Tensor]:
        """Turn gradients (..., C) by scale and shift into those by mean and standard deviation."""
        return by_shift * self.minus_scale, torch.addcmul(by_scale, by_shift, self.minus_mean).mul_(self.slope)


class Differentiator:
    """Differentiates one network at one set of statistics; a pass that comes again is written down."""

    def __init__(self, network: Network, centres: Centres) -> None:
        self.network, self.centres = network, centres
        self.points: dict[str, Point] = {}
        self._ways: dict[Any, Way | None] = {}  # by shape of the inputs; None: seen once

    def __call__(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (N, ...) and Jacobian (N, D, S); S runs over mean, then std, of every call."""
        key = batches.key_of(inputs)
        if key not in self._ways:
            while len(self._ways) >= WAYS_KEPT:
                del self._ways[next(iter(self._ways))]
            self._ways[key] = None
            return self._differentiate(inputs, self._plain)
        way = self._ways[key] = self._ways[key] or self._fastest(inputs)
        return self._differentiate(inputs, way)

    def _fastest(self, inputs: Any) -> Way:
        """Write the pass down where that can be done and gives the same numbers."""
        expected = self._differentiate(inputs, self._plain)
        try:
            written = self._write_down(inputs)
            return written if _close(self._differentiate(inputs, written), expected) else self._plain
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a foreign network does while watched, it can still be run as it is
            return self._plain

    def _differentiate(self, inputs: Any, run: Way) -> tuple[Tensor, Tensor]:
        N = batches.size_of(inputs)
        with torch.enable_grad():
            output, leaves = run(inputs, N)
            flat = output.reshape(N, -1)  # (N, D)
            if flat.shape[1] > MOST_OUTPUTS:
                raise MCBNError(
                    "method='linear' takes one backward pass an output and this network has "
                    f"{flat.shape[1]} for each input; use method='sample'"
                )
            rows = [self._gradient(flat, d, leaves) for d in range(flat.shape[1])]  # (N, S) each
            jacobian = torch.stack(rows, 1) if len(rows) > 1 else rows[0].unsqueeze(1)
        return output.detach().to(jacobian.dtype), jacobian

    def _gradient(self, flat: Tensor, d: int, leaves: Leaves) -> Tensor:
        """Differentiate output d of every input, (N, S)."""
        N, D = flat.shape
        chosen = torch.eye(D, dtype=flat.dtype, device=flat.device)[d].expand(N, D)
        sources = [leaf for pair in leaves.values() for leaf in pair]
        found = iter(torch.autograd.grad(flat, sources, chosen, retain_graph=d < D - 1, materialize_grads=True))
        by_call = {name: self.points[name].by_statistics(next(found), next(found)) for name in leaves}
        parts: list[Tensor] = []
        for name, (mean, _) in self.centres.items():
            parts += by_call.get(name) or (flat.new_zeros(N, len(mean)),) * 2  # zero: these inputs do not reach it
        return torch.cat(parts, 1)

    def _plain(self, inputs: Any, N: int) -> tuple[Tensor, Leaves]:
        """Run the network's own code."""
        with PerExample(self.centres, N) as mode:
            output = self.network(batches.map_tensors(lambda t: t.detach().clone(), inputs))  # (N, ...)
        self.points |= mode.points
        return output, mode.leaves

    def _write_down(self, inputs: Any) -> Way:
        """Make a list of operations of the pass, what no statistics reach apart."""
        with torch.no_grad():
            mode, changed, _ = follow(
                self.network,
                {name: mean for name, (mean, _) in self.centres.items()},
                {name: std.square() for name, (_, std) in self.centres.items()},
                inputs,
            )
        depends = rewriting.depends_on_draw(mode.graph)
        shared, each, order = rewriting.split(mode, depends, normalize_each)

        def run(inputs: Any, N: int) -> tuple[Tensor, Leaves]:
            tensors = batches.tensors_of(inputs)
            with torch.no_grad():
                values = shared.forward(*([t.clone() for t in tensors] if changed else tensors))
            leaves = {name: self.points[name].leaves(N) for name in order}
            output: Tensor = each.forward(*values, *(leaf for pair in leaves.values() for leaf in pair))
            return output, leaves

        return run


class PerExample(BatchNormMode):
    """Give every example a scale and a shift of its own, all at the centre, so that gradients come apart."""

    def __init__(self, centres: Centres, n_examples: int) -> None:
        super().__init__()
        self.centres, self.N = centres, n_examples
        self.points: dict[str, Point] = {}
        self.leaves: Leaves = {}

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise with per-example parameters that require grad."""
        if call.name not in self.centres:
            return call.unchanged()
        if call.x.shape[0] != self.N:
            raise MCBNError(
                f"layer {call.name!r} sees {call.x.shape[0]} rows for {self.N} inputs, so its statistics have no "
                "gradient per input; use method='sample'"
            )
        self.points[call.name] = Point.of(call, *self.centres[call.name])
        self.leaves[call.name] = self.points[call.name].leaves(self.N)
        return normalize_each(call.x, *self.leaves[call.name])


def normalize_each(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply scales and shifts (N, C) to x (N, C, ...), in their dtype; x's dtype returns."""
    if x.ndim > 2:
        shape = (*scale.shape, *(1,) * (x.ndim - 2))
        scale, shift = scale.reshape(shape), shift.reshape(shape)
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)


def _close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Compare two ways to the same numbers, up to rounding."""
    for a, b in zip(found, expected, strict=True):
        tolerance = (1e-9 if b.dtype == torch.float64 else 1e-3) * b.abs().max().clamp(min=1e-6)
        if a.shape != b.shape or not bool(((a - b).abs() <= tolerance).all()):
            return False
    return True
