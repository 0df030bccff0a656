"""Outputs and their gradients by batch-norm statistics, input by input.

Batch norm with statistics (mu, sigma) is h * scale + shift. Every input gets a scale and a shift of its own, all equal,
so that one backward pass an output gives the gradients of all inputs; those by the statistics follow from

    df/dmu = -scale df/dshift,    df/dsigma = slope (df/dscale - mu df/dshift),    slope = dscale/dsigma.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, BatchNormMode
from mcbn.engine import reverse
from mcbn.engine import rewrite as rewriting
from mcbn.engine.program import follow
from mcbn.engine.reverse import Point
from mcbn.engine.run import keep
from mcbn.engine.trace import Trace
from mcbn.errors import MCBNError
from mcbn.network import Network

MOST_OUTPUTS = 4096  # of one example: each costs a backward pass
WAYS_KEPT = 16
Centres = Mapping[str, tuple[Tensor, Tensor]]  # call name -> mean and standard deviation, each (C,)
Leaves = dict[str, tuple[Tensor, Tensor]]  # call name -> scale and shift of every input, each (N, C)
Run = Callable[[Any, int], tuple[Tensor, Leaves]]  # inputs and their number -> output, leaves
Way = Callable[[Any], tuple[Tensor, Tensor]]  # inputs -> output, Jacobian


class Differentiator:
    """Differentiates one network at one set of statistics; a pass that comes again is written down."""

    def __init__(self, network: Network, centres: Centres) -> None:
        self.network, self.centres = network, centres
        self.points: dict[str, Point] = {}
        self._ways: dict[Any, Way | None] = {}  # by shape of the inputs; None: seen once
        self._lock = threading.Lock()
        self._one_by_one = False  # inputs were seen not to reach each other's outputs

    def __call__(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (N, ...) and Jacobian (N, D, S); S runs over mean, then std, of every call."""
        key = batches.key_of(inputs)
        with self._lock:
            seen, way = key in self._ways, self._ways.get(key)
            if not seen:
                keep(self._ways, key, None, WAYS_KEPT)
        if not seen:
            return self.plain(inputs)
        if way is None:
            way = self._fastest(inputs)
            with self._lock:
                keep(self._ways, key, way, WAYS_KEPT)
        return way(inputs)

    def plain(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Differentiate the network's own code."""
        return self._differentiate(inputs, self._plain)

    def _fastest(self, inputs: Any) -> Way:
        """Write the pass down where that can be done and gives the same numbers."""
        expected = self.plain(inputs)
        for write in (self._reversed, self._write_down):
            try:
                way = write(inputs)
                if _close(way(inputs), expected):
                    return way
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a foreign network does while watched, it can still be run as it is
                continue
        return self.plain

    def _differentiate(self, inputs: Any, run: Run) -> tuple[Tensor, Tensor]:
        N = batches.size_of(inputs)
        with torch.enable_grad():
            output, leaves = run(inputs, N)
            if output.shape[:1] != (N,):
                raise MCBNError(
                    f"the network gives {tuple(output.shape)} for {N} inputs, not one row an input, so outputs have no "
                    "gradient per input; use method='sample'"
                )
            flat = output.flatten(1) if output.ndim > 1 else output.unsqueeze(1)  # (N, D)
            if flat.shape[1] > MOST_OUTPUTS:
                raise MCBNError(
                    "method='linear' takes one backward pass an output and this network has "
                    f"{flat.shape[1]} for each input; use method='sample'"
                )
            try:
                self._require_one_by_one(flat, leaves)
                rows = [self._gradient(flat, d, leaves) for d in range(flat.shape[1])]  # (N, S) each
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a value that the gradient needs was changed in place
                raise MCBNError(f"the network cannot be differentiated ({error}); use method='sample'") from error
            jacobian = torch.stack(rows, 1) if len(rows) > 1 else rows[0].unsqueeze(1)
        return output.detach().to(jacobian.dtype), jacobian

    def _require_one_by_one(self, flat: Tensor, leaves: Leaves) -> None:
        """Refuse, on the first inputs, a network whose outputs (N, D) depend on the statistics of other inputs."""
        N, D = flat.shape
        if self._one_by_one or N < 2 or not leaves:
            return
        weights = torch.arange(1, D + 1, dtype=flat.dtype, device=flat.device).expand(N // 2, D)  # so that none cancel
        sources = [leaf for pair in leaves.values() for leaf in pair]
        found = torch.autograd.grad(flat[: N // 2], sources, weights, retain_graph=True, materialize_grads=True)
        if any(bool((part[N // 2 :].abs() > 1e-6 * part.abs().max()).any()) for part in found):
            raise MCBNError(
                "the output of an input depends on the inputs beside it, so it has no gradient by its own statistics "
                "alone; use method='sample'"
            )
        self._one_by_one = True

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
        mode, changed = self._follow(inputs)
        depends = rewriting.depends_on_draw(mode.graph)
        shared, each, order = rewriting.split(mode, depends, normalize_each)

        def run(inputs: Any, N: int) -> tuple[Tensor, Leaves]:
            tensors = batches.tensors_of(inputs)
            with torch.no_grad():
                values = shared.forward(*([t.clone() for t in tensors] if changed else tensors))
            leaves = {name: self.points[name].leaves(N) for name in order}
            output: Tensor = each.forward(*values, *(leaf for pair in leaves.values() for leaf in pair))
            return output, leaves

        return lambda inputs: self._differentiate(inputs, run)

    def _reversed(self, inputs: Any) -> Way:
        """Make a list of operations of the pass and of its gradient."""
        mode, changed = self._follow(inputs)
        written = reverse.write_down(mode, {name: self.points[name] for name in self.centres})

        def run(inputs: Any) -> tuple[Tensor, Tensor]:
            tensors = batches.tensors_of(inputs)
            with torch.no_grad():
                output, gradient = written.forward(*([t.clone() for t in tensors] if changed else tensors))
            return output, gradient.unsqueeze(1)

        return run

    def _follow(self, inputs: Any) -> tuple[Trace, bool]:
        """Trace the pass at the centre; tell whether the network changes its inputs."""
        means, variances = {n: m for n, (m, _) in self.centres.items()}, {n: s**2 for n, (_, s) in self.centres.items()}
        with torch.no_grad():
            mode, changed, _ = follow(self.network, means, variances, inputs)
        return mode, changed


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
