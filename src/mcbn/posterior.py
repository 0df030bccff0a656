"""The approximate posterior q(omega): T joint draws of all batch-norm statistics, of training batches or a Gaussian."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches, draws, program, statistics
from mcbn.batches import Picker, pick_inputs
from mcbn.errors import MCBNError
from mcbn.gaussian import Gaussian, from_draws, stretch, stretch_positive
from mcbn.network import Network


@dataclass(frozen=True, eq=False)
class Posterior:
    """T joint draws of the batch-norm statistics omega = {mu_B, sigma^2_B} (Teye et al. 2018, section 3.4).

    `mean[name]` and `var[name]` are (T, C), `var` biased; row t of every layer comes from one training batch of
    `batch_size` examples. A layer called twice in a forward pass has two entries, "name" and "name#2".

    Where `gaussian` is given, the rows are draws of that Gaussian, row t made from (`seed`, t) alone, and
    `sample(n)` makes any number of them without data.
    """

    mean: Mapping[str, Tensor]
    var: Mapping[str, Tensor]
    batch_size: int  # M
    gaussian: Gaussian | None = None
    seed: int = 0  # of the draws of the Gaussian
    fitted_batch_size: int | None = None  # M of the training batches, where `at_batch_size` chose another

    @classmethod
    def from_gaussian(cls, gaussian: Gaussian, n_samples: int, batch_size: int, *, seed: int = 0) -> "Posterior":
        """Draw T sets of statistics from a Gaussian over those of batches of M."""
        return cls(*gaussian.statistics(n_samples, seed), batch_size, gaussian, seed)

    @property
    def family(self) -> str:
        """How draws are modelled: "sample" (training batches themselves), "gaussian", "layerwise" or "diagonal"."""
        return self.gaussian.family if self.gaussian else "sample"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the stochastic batch-norm calls, in the order the network makes them."""
        return tuple(self.mean)

    @property
    def n_samples(self) -> int:
        """T, the number of draws."""
        return len(next(iter(self.mean.values())))

    def draw(self, t: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the statistics of draw t: means and variances, each name -> (C,)."""
        return _each(self.mean, t), _each(self.var, t)

    def sample(self, n_samples: int, *, seed: int = 0) -> "Posterior":
        """Draw n sets of statistics from the Gaussian; draw t depends on (seed, t) alone."""
        n_samples, seed = batches.require_int("n_samples", n_samples, 1), batches.require_int("seed", seed, 0)
        if self.gaussian is None:
            raise MCBNError(
                "a posterior of training batches has only the draws it was fitted with; fit more of them, or draw from "
                'posterior.as_gaussian("gaussian")'
            )
        mean, var = self.gaussian.statistics(n_samples, seed)
        return replace(self, mean=mean, var=var, seed=seed)

    def as_gaussian(self, family: str = "gaussian", *, seed: int = 0) -> "Posterior":
        """Model the drawn training batches as a Gaussian, "gaussian" or "layerwise", and draw T anew (`mcbn.gaussian`).

        `bayes.posterior = bayes.posterior.as_gaussian()` predicts with it: no data is needed.
        """
        seed = batches.require_int("seed", seed, 0)
        if self.gaussian is not None:
            raise MCBNError(f"this posterior is a Gaussian already, of family {self.family!r}; fit again for another")
        model = from_draws(self.mean, self.var, family)
        drawn = Posterior.from_gaussian(model, self.n_samples, self.batch_size, seed=seed)
        return replace(drawn, fitted_batch_size=self.fitted_batch_size)

    def at_batch_size(self, batch_size: int) -> "Posterior":
        """Rescale to batches of M' examples without data: the covariance of batch statistics goes with 1 / M.

        A Gaussian gets M / M' times its covariance; drawn statistics are stretched about their mean by sqrt(M / M'),
        standard deviations in their logarithm so that they stay positive. Back at M it is the same posterior.
        Differs from draws at M': the average statistics stay those the network was trained with, though
        E[sigma^2_B] = sigma^2 (1 - 1/M) moves with M, so that M' is a temperature and nothing else (Boston, trained at
        M = 32: CRPS 1.93 rescaled to M' = 8, 2.69 drawn at 8); and M / M' leaves out that batches of M of N examples,
        drawn without replacement, vary less by 1 - (M - 1) / (N - 1).
        """
        if batch_size == self.batch_size:
            return self
        fitted = self.fitted_batch_size or self.batch_size
        M = batches.require_int("batch_size", batch_size, min(2, fitted))
        ratio = self.batch_size / M
        if self.gaussian is not None:
            scaled = self.gaussian.scaled(ratio)
            drawn = Posterior.from_gaussian(scaled, self.n_samples, M, seed=self.seed)
            return replace(drawn, fitted_batch_size=fitted)
        mean = {name: stretch(value, ratio**0.5) for name, value in self.mean.items()}
        std = {name: stretch_positive(value.sqrt(), ratio**0.5) for name, value in self.var.items()}
        var = {name: value.square() for name, value in std.items()}
        return replace(self, mean=mean, var=var, batch_size=M, fitted_batch_size=fitted)

    def to(self, device: torch.device | str | None) -> "Posterior":
        """Move all statistics to a device."""
        moved = [{name: value.to(device) for name, value in part.items()} for part in (self.mean, self.var)]
        model = self.gaussian.to(device) if self.gaussian else None
        return replace(self, mean=moved[0], var=moved[1], gaussian=model)

    def __repr__(self) -> str:
        channels = sum(value.shape[1] for value in self.mean.values())
        return (
            f"Posterior({f'{self.family}, ' if self.gaussian else ''}n_samples={self.n_samples}, "
            f"batch_size={self.batch_size}, {len(self.layers)} layers, {channels} channels)"
        )


def _each(part: Mapping[str, Tensor], index: Any) -> dict[str, Tensor]:
    return {name: value[index] for name, value in part.items()}


class Recorded(NamedTuple):
    """What one pass over the drawn batches gives: the posterior, and what the drift check compares it with."""

    posterior: Posterior
    running: Mapping[str, tuple[Tensor, Tensor]]  # name -> running mean and variance, each (C,)
    values: Mapping[str, int]  # name -> values per channel in a batch


def record(network: Network, drawn: draws.Draws, layers: statistics.Layers, inputs: Picker) -> Recorded:
    """Run every drawn batch through the network with batch norm as in training; keep the statistics.

    A draw is joint: one batch sets all layers, each seeing inputs already normalised by that batch (Algorithm 1).
    """
    keys = network.accepted_keys()
    recorder: Recorder | None = None
    means: dict[str, list[Tensor]] = {}
    variances: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for batch in drawn.batches:
            x = network.prepare(pick_inputs(batch, inputs, keys))
            if recorder is None:
                recorder = Recorder(network, stochastic_layers(network, x, layers))
            for name, mean, var in recorder(x):
                means.setdefault(name, []).append(mean)
                variances.setdefault(name, []).append(var)
    if recorder is None:
        raise MCBNError("the training data gives no batch at all")
    posterior = Posterior(_stack(means), _stack(variances), drawn.batch_size)
    return Recorded(posterior, recorder.running, recorder.values)


class Recorder:
    """Records batches: the first through the network's own code, those of the same shape as a straight program."""

    def __init__(self, network: Network, chosen: frozenset[str]) -> None:
        self.network, self.chosen = network, chosen
        self.running: Mapping[str, tuple[Tensor, Tensor]] = {}
        self.values: Mapping[str, int] = {}
        self._programs: dict[Any, Callable[..., Any] | None] = {}  # by shape; None: cannot be written down
        self._proven: set[Any] = set()  # shapes whose program repeated a batch it was not traced on

    def __call__(self, x: Any) -> list[tuple[str, Tensor, Tensor]]:
        """Return name, mean and variance, (C,) each, of every stochastic call for one batch."""
        tensors = batches.tensors_of(x)
        shape = tuple((t.shape, t.dtype) for t in tensors)
        if shape not in self._programs:
            return self._first(x, tensors, shape)
        run = self._programs[shape]
        if shape in self._proven and run is not None:
            proven: list[tuple[str, Tensor, Tensor]] = run(*tensors)
            return proven
        recorded = self._plain(x)
        if run is not None and _same_statistics(run(*tensors), recorded):
            self._proven.add(shape)
        else:
            self._programs[shape] = None
        return recorded

    def _plain(self, x: Any) -> list[tuple[str, Tensor, Tensor]]:
        with statistics.Record(self.chosen) as mode:
            self.network(x)
        self.running, self.values = mode.running, mode.values
        return [(name, mode.mean[name], mode.var[name]) for name in mode.mean]

    def _first(self, x: Any, tensors: list[Tensor], shape: Any) -> list[tuple[str, Tensor, Tensor]]:
        """Record a batch of a new shape, and try to write the pass down for the next ones."""
        recorded = self._plain(x)
        writable = batches.is_plain(x) and len(self._programs) < 4
        self._programs[shape] = self._program(x, tensors, recorded) if writable else None
        return recorded

    def _program(self, x: Any, tensors: list[Tensor], recorded: list[tuple[str, Tensor, Tensor]]) -> Any:
        """Trace the pass; keep the program only if it repeats the recorded statistics."""
        versions = [t._version for t in tensors]
        trace = program.TraceRecord(self.network, self.chosen, tensors)
        try:
            with trace:
                self.network(x)
            run = trace.program()
            same = _same_statistics(run(*tensors), recorded)
        except Exception:  # whatever a foreign network does while watched, it can still be run as it is
            return None
        return run if same and [t._version for t in tensors] == versions else None


def _same_statistics(found: list[tuple[str, Tensor, Tensor]], expected: list[tuple[str, Tensor, Tensor]]) -> bool:
    """Compare two recordings of one batch, up to rounding."""
    pairs = list(zip(found, expected, strict=False))
    return len(found) == len(expected) and all(
        a[0] == b[0] and torch.allclose(a[1], b[1], rtol=1e-4, atol=1e-5) and torch.allclose(a[2], b[2], rtol=1e-3)
        for a, b in pairs
    )


def stochastic_layers(network: Network, x: Any, layers: statistics.Layers) -> frozenset[str]:
    """Run the network once as it is to see which layers call batch norm, and choose among them."""
    statistics.refuse_scripted(network.module)
    with torch.no_grad(), statistics.Survey(batches.tensors_of(x)) as survey:
        network(x)
    found = [*survey.layers, *statistics.deaf(network.module, survey)]
    if not found:
        raise MCBNError(
            f"{type(network.module).__name__} ran without a single batch norm call; its layers "
            f"{statistics.candidates(network.module)} are not used in eval mode"
        )
    chosen = statistics.choose(layers, found, network.module)
    for name in chosen:
        if name not in survey.layers:
            raise MCBNError(
                f"layer {name!r} ({type(network.module.get_submodule(name)).__name__}) does its own arithmetic instead "
                "of calling torch.nn.functional.batch_norm, so its statistics cannot be set; leave it out with layers="
            )
    for name, has_running in survey.layers.items():
        if name not in chosen and not has_running:
            warnings.warn(
                f"mcbn: layer {name!r} is not among layers= and has no running statistics, so it goes on using those "
                "of whatever batch it is given",
                stacklevel=4,
            )
    return frozenset(chosen)


def _stack(parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Stack T rows (C,) of each layer into (T, C), refusing what is not one row a draw or not finite."""
    T = max(len(rows) for rows in parts.values())
    stacked = {}
    for name, rows in parts.items():
        if len(rows) != T:
            raise MCBNError(
                f"layer {name!r} was called for {len(rows)} of {T} training batches; the network takes another path "
                "from batch to batch, and a joint draw needs every layer: choose the steady ones with layers="
            )
        stacked[name] = torch.stack(rows)  # (T, C)
        if not bool(torch.isfinite(stacked[name]).all()):
            raise MCBNError(f"layer {name!r} has non-finite statistics; the network overflows on its training data")
    return stacked
