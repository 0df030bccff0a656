"""Can these draws be trusted? Shape, spread, drift, number and effect of the drawn statistics, layer by layer."""

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import Replay
from mcbn.batching import TrainingBatches, draw_batches
from mcbn.check import drift
from mcbn.diagonal import Averaged
from mcbn.engine.record import Recorded
from mcbn.errors import MCBNError
from mcbn.linear import Linearizer
from mcbn.metrics import worse_mean, worse_probs
from mcbn.network import Network
from mcbn.noise import explain_bound
from mcbn.outputs import match_shape
from mcbn.posterior import Posterior

if TYPE_CHECKING:
    from mcbn.model import MCBN

LEVEL = 0.05  # of the normality tests: an exact Gaussian passes in 95 % of units
REPLICATES = 5000  # of their calibration; p-values are steps of 1 / 5001
CALIBRATION_VALUES = 2**22  # simulated at most, so that many draws get fewer replicates
ENOUGH_EXAMPLES = 2048  # population moments come from all rows, or from at least so many
SHARE_EXAMPLES = 32  # inputs whose predictive variance is split among layers
SHARE_VALUES = 2**25  # of their Jacobian, at most
MOST_OUTPUTS = 64  # of an input, each of which costs a backward pass; for more stand
SUMS = 16  # random sums of them
SUMMED_EXAMPLES = 2  # inputs in that case
FEW_DRAWS = 50  # the standard error of a variance from T draws is sqrt(2 / (T - 1)): 20 % here
LEAST_FACTOR = 0.5  # of the variance left by drawing M of N without replacement
LEAST_GAUSSIAN = 0.8  # share of units that pass; 0.95 if all are Gaussian
SPREAD_LIMIT = 1.25  # ratio of drawn to analytic std, either way, and not what chance does with so few draws
MEAN_EXAMPLES = 256  # predicted to compare the mean with the plain network's
HEAD = ("layer", "units", "means Gaussian", "stds Gaussian", "mean spread", "std spread", "drift", "share", "alone")
LEGEND = "Gaussian: share of units that pass at the 5 % level, 95 % if exact; spread: drawn over analytic std"


@dataclass(frozen=True, eq=False)
class LayerDiagnosis:
    """What was seen of one batch norm layer with C units."""

    layer: str
    units: int  # C
    mean_gaussian: float  # share of varying units whose T batch means pass Lilliefors' test at 5 %: 0.95 if Gaussian
    std_gaussian: float  # the same for batch standard deviations
    mean_spread: float  # std of the batch means over the analytic sigma / sqrt(M), median over units
    std_spread: float  # the same for batch standard deviations
    constant: int  # units that do not vary at all
    offset: float  # average drawn mean against that of the data given, in sigma, median over units
    drift: drift.Drift | None  # against the running statistics; None where the layer keeps none
    share: float | None  # of the predictive variance; shares sum to 1 and may be negative
    alone: float | None  # predictive variance with the other layers held at their average, over the whole

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table, below `HEAD`."""
        spreads = (f"{value:.2f}" for value in (self.mean_spread, self.std_spread))
        effect = "-" if self.drift is None else f"{self.drift.effect:.2f}"
        shares = ("-" if value is None else f"{value:.0%}" for value in (self.share, self.alone))
        gaussian = ("-" if math.isnan(v) else f"{v:.0%}" for v in (self.mean_gaussian, self.std_gaussian))
        return (self.layer or "(network)", str(self.units), *gaussian, *spreads, effect, *shares)


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `check` found; `print` it for a table. `warnings` is empty where nothing speaks against the draws."""

    layers: tuple[LayerDiagnosis, ...]
    n_samples: int  # T
    batch_size: int  # M
    n_examples: int | None  # N; None for a stream
    n_compared: int  # examples that the draws were compared with
    variance_factor: float  # (N - M) / (N - 1): what drawing without replacement leaves of the variance
    shift: drift.Drift | None  # of the outputs, by the drift of all layers; None where it cannot be compared
    no_shares: str = ""  # why layers have no share of the variance
    rescaled: int | None = None  # M that the draws are rescaled to
    at_bound: str = ""  # what a tau at its bound means
    worse_mean: str = ""  # where the mean over the draws is worse than the plain network's, on the data given

    @property
    def n_effective(self) -> float:
        """T / (1 + (T - 1) M / N): independent batches the draws are worth."""
        T, M, N = self.n_samples, self.batch_size, self.n_examples
        return T / (1 + (T - 1) * (0.0 if N is None else min(M / N, 1.0)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the draws, in plain words."""
        lines = [text for text in (self.worse_mean, self.at_bound) if text]
        lines += [*self._of_numbers(), *self._of_drift(), *self._of_spread(), *self._of_constant_units()]
        lines += [*self._of_shape("mean", "means"), *self._of_shape("std", "standard deviations")]
        if self.no_shares:
            lines.append(f"the share of each layer in the variance is not known: {self.no_shares}")
        return tuple(lines)

    def __str__(self) -> str:
        N = "a stream" if self.n_examples is None else f"{self.n_examples:,} examples"
        worth = f"worth {self.n_effective:.1f} independent batches"
        scaled = f", rescaled to batches of {self.rescaled}" if self.rescaled else ""
        lines = [f"{self.n_samples} draws of batches of {self.batch_size} from {N}{scaled}, {worth}"]
        lines += [f"! {self.worse_mean}", ""] if self.worse_mean else [""]
        rows = [HEAD, *(row.cells() for row in self.layers)]
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            lines.append("  ".join([name.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]))
        lines += ["", LEGEND]
        lines += [f"! {text}" for text in self.warnings if text != self.worse_mean]
        lines += [] if self.warnings else ["nothing speaks against these draws"]
        return "\n".join(lines)

    def _of_numbers(self) -> Iterator[str]:
        T, M, N = self.n_samples, self.batch_size, self.n_examples
        if T < FEW_DRAWS:
            error = math.sqrt(2 / (T - 1)) if T > 1 else math.inf
            yield f"few draws: of n_samples={T} a predictive variance is known to {error:.0%}; fit {FEW_DRAWS} or more"
        if self.variance_factor < LEAST_FACTOR:
            left = f"{self.variance_factor:.0%} of the variance of independent batches; pass a smaller batch_size"
            yield f"batch_size={M} is close to the {N} training examples: draws share them, which leaves {left}"

    def _of_drift(self) -> Iterator[str]:
        if far := [row.drift for row in self.layers if row.drift and row.drift.far]:
            yield f"drift: {drift.describe(*far)}"
        if self.shift and self.shift.far:
            yield f"drift of all layers together: {drift.describe(self.shift)}"
        if (other := max(self.layers, key=lambda row: row.offset)).offset > drift.EFFECT_LIMIT:
            apart = f"the data given lies {other.offset:.2f} standard deviations from the draws"
            yield f"other data: in layer {other.layer!r} {apart}; check with the data that fit was given"

    def _of_spread(self) -> Iterator[str]:
        """Judge the first layer: there the analytic spread holds for any data; few draws see little of heavy tails."""
        first, k = self.layers[0], max(self.n_samples - 1, 1)
        # (T - 1) s^2 / sigma^2 is chi-squared; its 0.1 and 99.9 % quantiles by Wilson and Hilferty 1931
        low, high = (max(1 - 2 / (9 * k) + z * math.sqrt(2 / (9 * k)), 0.0) ** 1.5 for z in (-3.09, 3.09))
        largest = max(first.mean_spread, first.std_spread)
        if largest > max(high, SPREAD_LIMIT) or first.mean_spread < min(low, 1 / SPREAD_LIMIT):
            ratios = f"{first.mean_spread:.2f} (means) and {first.std_spread:.2f} (standard deviations)"
            more = f"vary {ratios} times as much as those of random batches of this data"
            cure = "draw from shuffled data, the same as given here"
            yield f"spread: statistics of the first layer, {first.layer!r}, {more}; {cure}"

    def _of_constant_units(self) -> Iterator[str]:
        if counts := {row.layer: row.constant for row in self.layers if row.constant}:
            layers = ", ".join(f"{layer!r} {count}" for layer, count in counts.items())
            share = f"{sum(counts.values())} of {sum(row.units for row in self.layers)}"
            yield f"constant units: {share} never vary over the draws ({layers}): no uncertainty there (dead units?)"

    def _of_shape(self, statistic: str, name: str) -> Iterator[str]:
        """Say where draws are not Gaussian, beyond what chance does with so few units."""
        passing = {row.layer: getattr(row, f"{statistic}_gaussian") for row in self.layers}
        limits = {row.layer: 0.95 - 3 * math.sqrt(0.95 * 0.05 / row.units) for row in self.layers}
        if odd := [layer for layer in passing if passing[layer] < min(LEAST_GAUSSIAN, limits[layer])]:
            worst = min(odd, key=passing.__getitem__)
            share = f"{passing[worst]:.0%} of units pass (95 % if Gaussian) at batch_size={self.batch_size}"
            where = f"batch {name} fail the test in {len(odd)} layer(s), most in {worst!r}, where {share}"
            yield f"not Gaussian: {where}; sampled predictions stand, Gaussian models of the statistics are approximate"


def check(bayes: "MCBN[Any]", data: Any, *, seed: int = 0, n_examples: int = ENOUGH_EXAMPLES) -> Diagnosis:
    """Examine fitted draws against the training data.

    Shape: Lilliefors' test of the drawn means and standard deviations of each unit, calibrated by simulation.
    Spread: std of the draws over sqrt((N - M) / (N - 1)) times the analytic one (Teye et al. 2018, Eq. (6)), earlier
    layers held at their average. It is 1 in a first layer. Means of later layers vary far less: the layer before has
    normalised the same batch, which the equation leaves out.
    Drift: average drawn against running statistics, and what their difference does to the outputs (`mcbn.check.drift`).
    Number: draws are independent given the N examples, yet two of them share M / N of these, which is the correlation
    of their means over other training sets; T of them are worth n_effective = T / (1 + (T - 1) M / N), at most N / M.
    Effect: each layer's share of the predictive variance (`mcbn.linear.Linearised.shares`). Outputs are those of the
    network (logits for classes); for more than 64 of an input stand a few random sums g . f with g ~ N(0, I), as
    E[(g . a)(g . b)] = a . b. `MCBN.check` documents the arguments.
    """
    rescaled, network = bayes.posterior, bayes.engine.network
    data = batches.by_name(data, network.columns)
    posterior = rescaled.at_batch_size(rescaled.fitted_batch_size or rescaled.batch_size)  # as they were drawn
    with network.undisturbed(seed), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mcbn:")  # fit said so already; the diagnosis says it again
        drawn = _draw(data, posterior.batch_size, seed, n_examples)
        population = Averaged(posterior)
        first, compared = None, 0
        for batch in drawn.batches:
            x = network.prepare(batches.pick_inputs(batch, bayes.inputs, network.accepted_keys))
            if first is None:
                first = x
                network.run_copy(x)  # the first pass of a network just loaded is watched, which no mode may count
            population.add(network, x)
            compared += batches.size_of(x)
        worse_mean = _compare_means(bayes, data, seed)
    recorded = Recorded(posterior, population.running, population.values, first)
    drifts = {moved.layer: moved for moved in drift.measure(recorded)}
    shares, failure = _shares(network, posterior, first)
    M, N = posterior.batch_size, drawn.n_examples
    factor = 1.0 if N is None else max(N - M, 0) / (N - 1)
    return Diagnosis(
        tuple(_layer(n, population, factor, drifts.get(n), shares.get(n)) for n in posterior.layers),
        n_samples=posterior.n_samples,
        batch_size=M,
        n_examples=N,
        n_compared=compared,
        variance_factor=factor,
        shift=drift.shift(network, recorded),
        no_shares=failure,
        rescaled=None if rescaled is posterior else rescaled.batch_size,
        at_bound=explain_bound(bayes.task, rescaled.batch_size) if bayes.tau_at_bound else "",
        worse_mean=worse_mean,
    )


def _compare_means(bayes: "MCBN[Any]", data: Any, seed: int) -> str:
    """Say where the mean over the draws is worse than the plain network's on examples that come with targets."""
    keys, M = bayes.engine.network.accepted_keys, MEAN_EXAMPLES
    try:
        batch = next(iter(draw_batches(data, n_samples=1, batch_size=M, seed=seed).batches))
        x, y = batches.pick_inputs(batch, bayes.inputs, keys), batches.pick_targets(batch, None)
        pred, plain = bayes.predict(x), bayes.plain_mean(x)
        if bayes.task == "regression":
            y = match_shape(y, plain)
            return worse_mean((pred.mean - y).square(), (plain - y).square(), "RMSE")
        shape = pred.mutual_information.shape
        return worse_probs(pred.probs, plain, y.reshape(shape).long() if y.numel() == math.prod(shape) else y)
    except MCBNError:  # a stream, no targets, or targets of another kind
        return ""


def _draw(data: Any, M: int, seed: int, n_examples: int) -> TrainingBatches:
    """Take all rows of small data once, else batches of M: about n_examples, and two batches or more."""
    how: dict[str, Any] = {"n_samples": max(2, -(-n_examples // M)), "batch_size": M, "seed": seed}
    drawn = draw_batches(data, **how)
    return drawn if (drawn.n_examples or math.inf) > n_examples else draw_batches(data, **how, once=True)


def _layer(
    name: str, population: Averaged, factor: float, moved: drift.Drift | None, share: tuple[float, float] | None
) -> LayerDiagnosis:
    posterior, model = population.posterior, population.moments(name)
    mean, std = posterior.mean[name].cpu().double(), posterior.var[name].cpu().double().sqrt()  # (T, C) each
    scale = model.std.where(model.std > 0, torch.ones_like(model.std))
    return LayerDiagnosis(
        layer=name,
        units=mean.shape[1],
        mean_gaussian=_gaussian(mean),
        std_gaussian=_gaussian(std),
        mean_spread=_spread(mean, model.mean_std * factor**0.5),
        std_spread=_spread(std, model.std_std * factor**0.5),
        constant=int(_constant(mean).sum()),
        offset=float(((mean.mean(0) - model.mean).abs() / scale).median()),
        drift=moved,
        share=share[0] if share else None,
        alone=share[1] if share else None,
    )


def _constant(drawn: Tensor) -> Tensor:
    """Tell which units give the same statistic in every draw, up to rounding: (T, C) -> (C,)."""
    return drawn.amax(0) - drawn.amin(0) <= 1e-6 * drawn.abs().amax(0)


def _gaussian(drawn: Tensor) -> float:
    """Count which of the varying units pass as Gaussian, (T, C) -> their share; NaN without any, or of few draws."""
    pvalues = lilliefors(drawn) if len(drawn) >= 4 else drawn[0, :0]
    return float((pvalues[~pvalues.isnan()] > LEVEL).double().mean())


def _spread(drawn: Tensor, modelled: Tensor) -> float:
    known = ~_constant(drawn) & (modelled > 0)
    if len(drawn) < 2 or not bool(known.any()):
        return math.nan
    return float((drawn.std(0)[known] / modelled[known]).median())


def _shares(network: Network, posterior: Posterior, x: Any) -> tuple[dict[str, tuple[float, float]], str]:
    """Split the predictive variance of some inputs among layers; where it cannot be, say why instead."""
    try:
        with torch.no_grad(), Replay(*posterior.draw(0)):
            output = network.run_copy(x)
        D, most, twin = output.numel() // len(output), SHARE_EXAMPLES, network
        if D > MOST_OUTPUTS:
            weights = torch.randn(D, SUMS, generator=torch.Generator().manual_seed(0)).to(output)
            twin = copy.copy(network)  # with random sums of its outputs (N, ...) in their place, (N, SUMS)
            twin.output, twin.reading = lambda result: network.read(result).flatten(1) @ weights, None
            D, most = SUMS, SUMMED_EXAMPLES
        count = min(most, max(1, SHARE_VALUES // (2 * sum(posterior.channels.values()) * D)), len(output))
        few = batches.map_tensors(lambda t: t[:count] if t.ndim and len(t) == len(output) else t, x)
        shares = Linearizer(twin, posterior)(few, posterior.n_samples).shares(posterior.channels)
    except MCBNError as error:
        return {}, str(error)
    return shares, "" if shares else "the predictions do not vary"


def lilliefors(values: Tensor) -> Tensor:
    """Test T values for a Gaussian of any mean and std: (T, C) -> p-values (C,); NaN for columns that do not vary.

    Mean and std come from the same values, which pulls D (`ks_distance`) down: p-values of Kolmogorov's distribution
    would be far too large. So D is compared with that of simulated Gaussian columns treated alike (Lilliefors 1967),
    p = (1 + #{D_r >= D}) / (1 + R). The simulation has a generator of its own.
    """
    if values.ndim != 2 or len(values) < 4:
        raise MCBNError(f"values must be (T, C) with T at least 4 to judge their shape; got {tuple(values.shape)}")
    values, constant = values.double(), _constant(values)
    distance = ks_distance(values, values.mean(0), values.std(0).masked_fill(constant, 1.0))  # (C,)
    null = _null_distances(len(values)).to(values.device)  # (R,), ascending
    larger = len(null) - torch.searchsorted(null, distance)
    return ((1 + larger.double()) / (1 + len(null))).masked_fill(constant, torch.nan)


def ks_distance(values: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Return D = max_z |F_T(z) - Phi(z)| of T values standardised by mean and std: (T, C) -> (C,)."""
    if values.ndim != 2 or len(values) < 1:
        raise MCBNError(f"values must be (T, C), one column a unit; got {tuple(values.shape)}")
    z = ((values.double() - mean) / std).sort(0).values  # (T, C)
    T, expected = len(z), torch.special.ndtr(z)
    step = torch.arange(T + 1, dtype=z.dtype, device=z.device)[:, None] / T
    return torch.maximum(step[1:] - expected, expected - step[:-1]).amax(0)


@lru_cache(maxsize=8)
def _null_distances(T: int) -> Tensor:
    """Simulate D of Gaussian columns of T values standardised by their own mean and std, sorted."""
    R = max(500, min(REPLICATES, CALIBRATION_VALUES // T))
    values = torch.randn(T, R, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ks_distance(values, values.mean(0), values.std(0)).sort().values
