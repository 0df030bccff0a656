"""Can these draws be trusted? Shape, spread, drift, number and effect of the drawn statistics, layer by layer."""

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import Replay
from mcbn.batching import TrainingBatches, draw_batches
from mcbn.check import advice, drift
from mcbn.check.normality import lilliefors
from mcbn.errors import MCBNError
from mcbn.linear import Linearizer
from mcbn.network import Network, pick_output
from mcbn.population import Averaged
from mcbn.posterior import Posterior
from mcbn.randomness import isolated_random

if TYPE_CHECKING:
    from mcbn.model import MCBN

LEVEL = 0.05  # of the normality tests: an exact Gaussian passes in 95 % of units
ENOUGH_EXAMPLES = 2048  # population moments come from all rows, or from at least so many
SHARE_EXAMPLES = 32  # inputs whose predictive variance is split among layers
SHARE_VALUES = 2**25  # of their Jacobian, at most
MOST_OUTPUTS = 64  # of an input, each of which costs a backward pass; for more stand
SUMS = 16  # random sums of them
SUMMED_EXAMPLES = 2  # inputs in that case


@dataclass(frozen=True, eq=False)
class LayerDiagnosis:
    """What was seen of one batch norm layer with C units."""

    layer: str
    mean_pvalues: Tensor  # (C,), Lilliefors test of the T batch means; NaN for units that never vary
    std_pvalues: Tensor  # (C,), of the batch standard deviations
    mean_spread: float  # std of the batch means over the analytic sigma / sqrt(M), median over units
    std_spread: float  # the same for batch standard deviations
    constant: int  # units that do not vary at all
    sparse: int  # units that are exactly 0 for 9 of 10 inputs
    offset: float  # average drawn mean against that of the data given, in sigma, median over units
    drift: drift.Drift | None  # against the running statistics; None where the layer keeps none
    share: float | None  # of the predictive variance; shares sum to 1 and may be negative
    alone: float | None  # predictive variance with the other layers held at their average, over the whole

    @property
    def units(self) -> int:
        """C."""
        return len(self.mean_pvalues)

    @property
    def mean_gaussian(self) -> float:
        """Share of varying units whose batch means pass as Gaussian at the 5 % level: 0.95 if they are."""
        return _passing(self.mean_pvalues)

    @property
    def std_gaussian(self) -> float:
        """The same for batch standard deviations."""
        return _passing(self.std_pvalues)


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `check` found; `print` it for a table. `warnings` is empty where nothing speaks against the draws."""

    layers: tuple[LayerDiagnosis, ...]
    n_samples: int  # T
    batch_size: int  # M
    n_examples: int | None  # N; None for a stream
    n_compared: int  # examples that the draws were compared with
    n_effective: float  # T / (1 + (T - 1) M / N): independent batches the draws are worth
    variance_factor: float  # (N - M) / (N - 1): what drawing without replacement leaves of the variance
    shift: drift.Shift | None  # of the outputs, by the drift of all layers; None where it cannot be compared
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return advice.table(self)


def check(bayes: "MCBN[Any]", data: Any, *, seed: int = 0, n_examples: int = ENOUGH_EXAMPLES) -> Diagnosis:
    """Examine fitted draws against the training data.

    Shape: Lilliefors' test of the drawn means and standard deviations of each unit, calibrated by simulation.
    Spread: std of the draws over sqrt((N - M) / (N - 1)) times the analytic one (Teye et al. 2018, Eq. (6)), earlier
    layers held at their average. It is 1 in a first layer. Means of later layers vary far less: the layer before has
    normalised the same batch, which the equation leaves out.
    Drift: average drawn against running statistics, and what their difference does to the outputs (`mcbn.check.drift`).
    Number: draws are independent given the N examples, yet two of them share M / N of these, which is the correlation
    of their means over other training sets; T of them are worth n_effective = T / (1 + (T - 1) M / N), at most N / M.
    Effect: with J_l, d_l a layer's block of gradient and deviations (`mcbn.linear`) and V the variance of
    sum_l J_l d_l, share_l = Cov(J_l d_l, sum_k J_k d_k) / V, which sums to 1, and alone_l = Var(J_l d_l) / V; their
    difference is the layer's half of its cross terms. Outputs are those of the network (logits for classes); for
    more than 64 of an input stand a few random sums g . f with g ~ N(0, I), as E[(g . a)(g . b)] = a . b.

    Args:
        bayes: a fitted `mcbn.MCBN`.
        data: the training data, as for `fit`.
        seed: of the batches taken from it.
    """
    posterior, network = bayes.posterior, bayes.engine.network
    with isolated_random(seed), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mcbn:")  # fit said so already; the diagnosis says it again
        drawn = _draw(data, posterior.batch_size, seed, n_examples)
        population = Averaged(posterior)
        first, compared = None, 0
        for x in _inputs(bayes, network, drawn):
            first = x if first is None else first
            population.add(network, x)
            compared += batches.size_of(x)
    if first is None:
        raise MCBNError("the data gives no batch at all")
    shares, failure = _shares(network, posterior, first)
    M, N, T = posterior.batch_size, drawn.n_examples, posterior.n_samples
    factor = 1.0 if N is None else max(N - M, 0) / (N - 1)
    recorded = population.recorded(first)
    drifts, shift = {d.layer: d for d in drift.measure(recorded)}, drift.shift(network, recorded)
    rows = tuple(_layer(name, posterior, population, factor, drifts.get(name), shares) for name in posterior.layers)
    effective = T / (1 + (T - 1) * (0.0 if N is None else min(M / N, 1.0)))
    found = advice.warnings(rows, T, M, N, factor, shift, failure)
    return Diagnosis(rows, T, M, N, compared, effective, factor, shift, found)


def _draw(data: Any, M: int, seed: int, n_examples: int) -> TrainingBatches:
    """Take all rows of small data, else batches of M: about n_examples, and two batches or more."""
    drawn = draw_batches(data, n_samples=max(2, -(-n_examples // M)), batch_size=M, seed=seed)
    if drawn.n_examples is None or drawn.n_examples > n_examples:
        return drawn
    return draw_batches(data, n_samples=1, batch_size=drawn.n_examples, seed=seed)


def _inputs(bayes: "MCBN[Any]", network: Network, drawn: TrainingBatches) -> Iterator[Any]:
    """Yield prepared inputs, all rows cut to about the size of a batch."""
    keys = network.accepted_keys()
    for batch in drawn.batches:
        x = network.prepare(batches.pick_inputs(batch, bayes.inputs, keys))
        N, M = batches.size_of(x), bayes.posterior.batch_size
        even = all(t.ndim and len(t) == N for t in batches.tensors_of(x))
        yield from batches.cut(x, -(-N // max(M, 2))) if even and N > M else [x]


def _layer(
    name: str,
    posterior: Posterior,
    population: Averaged,
    factor: float,
    moved: drift.Drift | None,
    shares: dict[str, tuple[float, float]],
) -> LayerDiagnosis:
    mean, std = posterior.mean[name].cpu().double(), posterior.var[name].cpu().double().sqrt()  # (T, C) each
    model = population.moments(name)
    share, alone = shares.get(name, (None, None))
    scale = model.std.where(model.std > 0, torch.ones_like(model.std))
    return LayerDiagnosis(
        layer=name,
        mean_pvalues=_pvalues(mean),
        std_pvalues=_pvalues(std),
        mean_spread=_spread(mean, model.mean_std * factor**0.5),
        std_spread=_spread(std, model.std_std * factor**0.5),
        constant=int(_constant(mean).sum()),
        sparse=int((population.zeros(name) >= 0.9).sum()),
        offset=float(((mean.mean(0) - model.mean).abs() / scale).median()),
        drift=moved,
        share=share,
        alone=alone,
    )


def _constant(drawn: Tensor) -> Tensor:
    """Tell which units give the same statistic in every draw, up to rounding: (T, C) -> (C,)."""
    return drawn.amax(0) - drawn.amin(0) <= 1e-6 * drawn.abs().amax(0)


def _pvalues(drawn: Tensor) -> Tensor:
    """Test each unit's draws (T, C); NaN where they do not vary or are fewer than 4."""
    unknown = torch.full((drawn.shape[1],), torch.nan, dtype=torch.float64)
    return unknown if len(drawn) < 4 else lilliefors(drawn).where(~_constant(drawn), unknown)


def _passing(pvalues: Tensor) -> float:
    known = pvalues[~pvalues.isnan()]
    return float((known > LEVEL).double().mean()) if len(known) else math.nan


def _spread(drawn: Tensor, modelled: Tensor) -> float:
    known = ~_constant(drawn) & (modelled > 0)
    if len(drawn) < 2 or not bool(known.any()):
        return math.nan
    return float((drawn.std(0)[known] / modelled[known]).median())


def _shares(network: Network, posterior: Posterior, x: Any) -> tuple[dict[str, tuple[float, float]], str]:
    """Split the predictive variance of some inputs among layers; where it cannot be, say why instead."""
    T = posterior.n_samples
    if T < 2:
        return {}, "one draw has no variance"
    try:
        with torch.no_grad(), Replay(*posterior.draw(0)):
            output = network(batches.map_tensors(torch.clone, x))
        sizes = [2 * part.shape[1] for part in posterior.mean.values()]
        D, most = output.numel() // len(output), SHARE_EXAMPLES
        if D > MOST_OUTPUTS:
            network, D, most = _summed(network, output), SUMS, SUMMED_EXAMPLES
        each = sum(sizes) * D
        if each > SHARE_VALUES:
            return {}, f"the gradient of one input's outputs by all statistics has {each:,} values"
        count = min(most, SHARE_VALUES // each, len(output))
        few = batches.map_tensors(lambda t: t[:count] if t.ndim and len(t) == len(output) else t, x)
        expansion = Linearizer(network, posterior)(few, T)
    except MCBNError as error:
        return {}, str(error)
    parts = zip(torch.split(expansion.jacobian, sizes, 2), torch.split(expansion.deviations, sizes, 1), strict=True)
    each_layer = [torch.einsum("nds,ts->tnd", j, d).double().flatten(1) for j, d in parts]  # (T, N D) each
    whole = torch.stack(each_layer).sum(0)  # (T, N D)
    variance = whole.square().sum()
    if not variance > 0:
        return {}, "the predictions do not vary"
    shares = [(float((p * whole).sum() / variance), float(p.square().sum() / variance)) for p in each_layer]
    return dict(zip(posterior.layers, shares, strict=True)), ""


def _summed(network: Network, output: Tensor) -> Network:
    """Return the same network with random sums of its outputs (N, ...) in their place, (N, SUMS)."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output[0].numel(), SUMS, generator=generator).to(output)
    twin = copy.copy(network)
    twin.output = lambda result: pick_output(result, network.output).flatten(1) @ weights
    return twin
