"""The whole predictor, or watch, as one module: inputs in, moments out, or distance and p-value; plain operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcbn import batches
from mcbn.batch_norm import Record
from mcbn.conformal import Calibration
from mcbn.engine.jacobian import Point
from mcbn.export.tracing import OpenProgram, spread_rows, trace_gradient
from mcbn.field.distance import Metric, coordinates
from mcbn.field.novelty import PerInput
from mcbn.field.watch import Watch
from mcbn.linear import Expansion, Linearised
from mcbn.outputs import as_float, as_logits, noise_variance, spread
from mcbn.prediction import SMALLEST, divergence
from mcbn.private_torch import scan

CLASSES = ("probs", "entropy", "mutual_information")
RESULTS = {"regression": ("mean", "variance", "epistemic"), "classification": CLASSES, "multilabel": CLASSES}
PROMISED = {"regression": ("low", "high"), "classification": ("set",)}  # with a calibration
State = tuple[Tensor, ...]


class RegressionSummary(nn.Module):
    """Mean and variance over draws; `aleatoric` is 1/tau, one number or one an output (D, 1, ...)."""

    def __init__(self, aleatoric: Tensor) -> None:
        super().__init__()
        self.aleatoric = nn.Buffer(aleatoric)

    def of(self, outputs: Tensor) -> State:
        """Return mean and biased variance of some draws (t, N, ...)."""
        values = as_float(outputs)
        mean = values.mean(0)
        return mean, (values - mean).square().mean(0)

    def merge(self, state: State, more: State, w: Tensor | float) -> State:
        """Pool moments, w being the share of the draws in `more` (Chan et al. 1979).

        variance = (1 - w) variance_1 + w variance_2 + w (1 - w) (mean_2 - mean_1)^2.
        """
        (mean, variance), (other, spread) = state, more
        difference = other - mean
        return mean + w * difference, (1 - w) * variance + w * spread + w * (1 - w) * difference.square()

    def finish(self, state: State) -> dict[str, Tensor]:
        """Name the results, (N, ...) each."""
        mean, epistemic = state
        return dict(zip(RESULTS["regression"], (mean, epistemic + self.aleatoric, epistemic), strict=True))


class ClassificationSummary(nn.Module):
    """Averaged probabilities, their entropy and the draws' disagreement in it; `tau` multiplies the logits."""

    def __init__(self, tau: Tensor, several: bool) -> None:
        super().__init__()
        self.several = several  # labels that do not exclude each other, a logit each
        self.tau = nn.Buffer(tau)

    def of(self, outputs: Tensor) -> State:
        """Return averaged probabilities and the mutual information of some draws (t, N, ...)."""
        probs = torch.softmax(as_logits(outputs, self.several) * self.tau, 2)  # (t, N, K, ...)
        mean = probs.mean(0)
        return mean, divergence(probs, mean.clamp(min=SMALLEST), 2).mean(0)

    def merge(self, state: State, more: State, w: Tensor | float) -> State:
        """Pool averages, w being the share of the draws in `more`; those of both diverge from the common one.

        information = (1 - w) [information_1 + KL(p_1 || p)] + w [information_2 + KL(p_2 || p)].
        """
        (probs, information), (other, further) = state, more
        mean = probs + w * (other - probs)
        apart = [divergence(p, mean.clamp(min=SMALLEST), 1) for p in (probs, other)]
        return mean, (1 - w) * (information + apart[0]) + w * (further + apart[1])

    def finish(self, state: State) -> dict[str, Tensor]:
        """Name the results: (N, K, ...), (N, ...), (N, ...)."""
        probs, information = state
        entropy = -(probs * probs.clamp(min=SMALLEST).log()).sum(1)
        probs = probs[:, 1] if self.several else probs
        return dict(zip(CLASSES, (probs, entropy, information), strict=True))


Summary = RegressionSummary | ClassificationSummary


def summary_of(task: str, tau: Tensor, output: Tensor) -> Summary:
    """Choose what sums up the draws of outputs like this one, (N, ...)."""
    values = as_float(output)
    if task == "regression":
        return RegressionSummary(noise_variance(spread(tau, values), values))
    return ClassificationSummary(tau.to(values), task == "multilabel")


def _rows(inputs: Any) -> int:
    """Return N as the exporter sees it: `batches.size_of` would make it a number."""
    return next(tensor.shape[0] for tensor in batches.tensors_of(inputs) if tensor.ndim)


def _constants(tensors: Sequence[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor.clone(), requires_grad=False) for tensor in tensors)


class SamplePredictor(nn.Module):
    """Monte Carlo over T draws that are constants, scale and shift (T, C) of every call; `chunk` of them a pass."""

    def __init__(
        self, program: OpenProgram, drawn: Sequence[Tensor], summary: Summary, *, chunk: int, output: Sequence[int]
    ) -> None:
        super().__init__()
        self.program, self.summary, self.chunk, self.output = program, summary, chunk, tuple(output)
        self.steps = len(drawn[0]) // chunk
        self.drawn = _constants([rows.reshape(self.steps, chunk, -1) for rows in drawn])  # (steps, chunk, C) each
        # (steps,), of each chunk among the draws up to it
        self.shares = nn.Buffer(1 / torch.arange(1, self.steps + 1, dtype=drawn[0].dtype))

    def forward(self, inputs: Any) -> State:
        """Map inputs of N rows to the moments over the draws."""
        N, values = _rows(inputs), self.program.shared(*batches.tensors_of(inputs))
        crossing = self.program.tile(values, self.chunk)
        if self.steps == 1:
            return self._pass(crossing, [rows[0] for rows in self.drawn], N)

        def step(state: State, now: tuple[list[Tensor], Tensor]) -> tuple[State, tuple[()]]:
            rows, share = now
            return self.summary.merge(state, self._pass(crossing, rows, N), share), ()

        empty = tuple(torch.zeros_like(value) for value in self.summary.of(self.shares.new_zeros(1, N, *self.output)))
        state, _ = scan(step, empty, (list(self.drawn), self.shares))  # memory grows with the chunk, not with T
        return tuple(state)

    def _pass(self, crossing: Sequence[Tensor], rows: Sequence[Tensor], N: int) -> State:
        outputs = self.program.each(*crossing, *(spread_rows(row, N) for row in rows))  # (chunk * N, ...)
        return self.summary.of(outputs.unflatten(0, (self.chunk, -1)))


class LinearPredictor(nn.Module):
    """First-order moments: one pass, its gradient and K draws, the statistics all constants (`mcbn.linear`).

    `gradient(crossing, parameters, chosen)` gives outputs and gradients, by scales and shifts, of D copies of the
    inputs, copy d of output d; `chosen` holds scale and shift of the K draws, (K, C) each.
    """

    def __init__(
        self, program: OpenProgram, expansion: Expansion, chosen: Sequence[Tensor], summary: Summary, *, n_outputs: int
    ) -> None:
        super().__init__()
        self.program, self.summary, self.D = program, summary, n_outputs
        self.gradient = trace_gradient(program, n_outputs)
        points = [expansion.differentiate.points[name] for name in expansion.centres]
        self.points = nn.ModuleList(_constants(point) for point in points)
        self.chosen, self.factors = _constants(chosen), _constants(expansion.factors)
        self.sizes = [len(point.scale) for point in points for _ in range(2)]
        self.deviations, self.offset = nn.Buffer(expansion.deviations.clone()), nn.Buffer(expansion.offset.clone())
        self.diagonal = None if expansion.diagonal is None else nn.Buffer(expansion.diagonal.clone())  # (S,)

    def forward(self, inputs: Any) -> State:
        """Map inputs of N rows to the moments over the draws."""
        N, values = _rows(inputs), self.program.shared(*batches.tensors_of(inputs))
        jacobian = self._jacobian(values, N)
        mean = self._mean(values, N, jacobian)
        if isinstance(self.summary, RegressionSummary):
            linear = Linearised(mean, jacobian, self.deviations, tuple(self.factors), self.diagonal)
            return mean, linear.projected.square().sum(2).reshape(mean.shape)
        draws = torch.matmul(jacobian, self.deviations.T).permute(2, 0, 1)  # (T, N, D)
        return self.summary.of(mean + draws.reshape(-1, *mean.shape))

    def _jacobian(self, values: Sequence[Tensor], N: int) -> Tensor:
        """Differentiate all outputs by the statistics at the centre, (N, D, S)."""
        points = [Point(*values.parameters()) for values in self.points]
        centre = [row.expand(self.D * N, -1) for point in points for row in (point.scale, point.shift)]
        selected = spread_rows(torch.eye(self.D).to(self.offset), N)
        _, gradient = self.gradient(self.program.tile(values, self.D), centre, selected)
        by = iter(torch.split(gradient, self.sizes, 1))
        pairs = (point.by_statistics(next(by), next(by)) for point in points)
        return torch.cat([column for pair in pairs for column in pair], 1).reshape(self.D, N, -1).transpose(0, 1)

    def _mean(self, values: Sequence[Tensor], N: int, jacobian: Tensor) -> Tensor:
        """1/K sum_k [f_omega_k - J (omega_k - omega_0)], (N, ...)."""
        K = len(self.chosen[0])
        outputs = self.program.each(*self.program.tile(values, K), *(spread_rows(row, N) for row in self.chosen))
        mean = as_float(outputs.unflatten(0, (K, -1))).mean(0)
        return mean - torch.matmul(jacobian, self.offset).reshape(mean.shape)


class WholePredictor(nn.Module):
    """Moments over the draws of one network or several, with the calibrated interval or set of one level, if any."""

    summary: Summary

    def __init__(self, members: Sequence[Any], calibration: Calibration | None, threshold: Tensor | None) -> None:
        super().__init__()
        self.members, self.summary, self.calibration = nn.ModuleList(members), members[0].summary, calibration
        self.threshold = None if threshold is None else nn.Buffer(threshold)

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """Map inputs of N rows to the named results."""
        state, *others = (member(inputs) for member in self.members)
        for number, more in enumerate(others, start=2):
            state = self.summary.merge(state, more, 1 / number)
        results = self.summary.finish(state)
        if self.calibration is None or self.threshold is None:
            return results
        if "probs" in results:
            return results | {"set": self.calibration.score_classes(results["probs"], 0) <= self.threshold}
        half = self.threshold * (results["variance"].sqrt() if self.calibration.score == "std" else 1.0)
        return results | {"low": results["mean"] - half, "high": results["mean"] + half}


class Watcher(nn.Module):
    """Distance and p-value of a batch, (1,) each, or of every input, (N,) each; what is not finite is farthest."""

    held_out: Tensor

    def __init__(self, watch: Watch, inputs: Any, each: bool) -> None:
        super().__init__()
        null = watch.input_null if each else watch.null(batches.size_of(inputs))
        self.module, self.watch, self.each = watch.network.module, watch, each
        for name, value in {**null.metric._asdict(), "held_out": null.held_out}.items():
            self.register_buffer(name, value)

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """Map inputs to the named results."""
        watch = self.watch
        with PerInput(watch.centre, _rows(inputs)) if self.each else Record(watch.recorder.chosen) as mode:
            watch.network.call_module(batches.map_tensors(torch.clone, inputs))
        if isinstance(mode, PerInput):
            z = torch.cat(mode.coordinates, 1)
        else:
            z = coordinates({name: (mean[None], mode.var[name][None]) for name, mean in mode.mean.items()})
        distance = Metric(*(getattr(self, name) for name in Metric._fields))(z)
        distance = torch.where(torch.isfinite(distance), distance, torch.inf)
        larger = (self.held_out >= distance.unsqueeze(1)).sum(1)
        return {"distance": distance, "p_value": (1 + larger) / (1 + len(self.held_out))}
