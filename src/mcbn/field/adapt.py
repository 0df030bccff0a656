"""Move a posterior to where the inputs are now: no labels, no gradients, weights untouched.

Draws t of training data, r of the reference (inputs as deployed, before the shift), d of unlabelled inputs now, all in
batches of one size; bars are means over draws, per channel:

    rho = var_d / var_r,    mu'_t = mu_d + (mu_t - mu_r) sqrt(rho),    var'_t = var_t rho.

The training draws get the change that deployment made, so that without a shift (d = r) nothing changes; batch norm by
the statistics of the inputs themselves (Nado et al. 2020) would also drop what training knew. With strengths v, w in
[0, 1] for means and variances of a layer, rho becomes rho^w and mu_d becomes mu_r + v (mu_d - mu_r).

A few inputs move the averages by chance: strength="auto" takes for each layer the share of the squared move that
sampling does not explain (positive-part James-Stein), for means in standard deviations and for log variances,

    v = max(0, 1 - sum_c noise_c / sum_c move_c^2),    noise_c = Var_r(statistic) M (1 / n + 1 / n_r).

Inputs of few classes move them too: the reference is then mixed in the class proportions that are predicted for them.
From where that starts, and when it is kept, stands in docs/field.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn import batches
from mcbn.batching import Take, draw_batches
from mcbn.engine.record import Recorded, Recorder, join, record
from mcbn.errors import MCBNError
from mcbn.field.novelty import centre_of, class_proportions, class_weights, see
from mcbn.field.reference import cut_batches, gather
from mcbn.field.watch import Watch, times
from mcbn.model import MCBN
from mcbn.posterior import Posterior
from mcbn.prediction import entropy
from mcbn.randomness import isolated_random

DEAD = 1e-10  # variance of a channel that is constant in the reference: it has no rho
ROUNDS = 3  # of mixing the reference, at most
REFERENCE_DRAWS = 64
PARTITIONS = 4  # of the unlabelled inputs into batches, where they are few
MANY = 1024  # inputs: one partition will do, and their classes are enough
STEADY, SETTLED = 0.01, 0.05  # largest difference of a class proportion between rounds, and between both starts
FEW = 0.7  # of the entropy of class proportions
CLEARLY = 0.5  # of the squared move from the plain start: classes must explain half of it to be held for the cause


class Averages(NamedTuple):
    """Means over draws of the statistics of one call, and the variance of a draw about them, (C,) each."""

    mean: Tensor
    var: Tensor
    mean_noise: Tensor
    log_var_noise: Tensor


class Move(NamedTuple):
    """How one call's statistics move."""

    offset: float  # of the means, in standard deviations of activations; root mean square over channels
    width: float  # standard deviation of activations over that of the reference, median over channels
    strength: tuple[float, float]  # v and w: the shares of that which are kept
    size: float = 0.0  # sum over channels of squared moves, in standard deviations


@dataclass(frozen=True, eq=False)
class Adaptation:
    """What `adapt` found and did, as `adapted.adaptation`."""

    n_inputs: int  # unlabelled inputs used, those of earlier calls included
    p_value: float  # of the watch, for all of them together
    moves: Mapping[str, Move]  # by call; none where nothing was moved
    classes: Tensor | None  # predicted proportions of the inputs, (K,); None: no classes
    settled: bool  # both starts led to the same proportions
    base: Posterior = field(repr=False)  # before
    pool: Any = field(repr=False)  # the inputs, for a later call with more

    @property
    def moved(self) -> bool:
        """Was anything moved?"""
        return any(max(move.strength) > 0 for move in self.moves.values())

    def explain(self) -> str:
        """Say in a sentence how far the posterior was moved, and how sure that is."""
        if not self.moved:
            return f"not moved: {self.n_inputs} inputs show no shift of the inputs (p = {self.p_value:.2g})"
        name, most = max(self.moves.items(), key=lambda item: item[1].offset ** 2 + np.log(item[1].width) ** 2)
        sizes = torch.tensor([(move.offset**2, np.log(move.width) ** 2) for move in self.moves.values()])
        kept = float((sizes * torch.tensor([move.strength for move in self.moves.values()])).sum() / sizes.sum())
        moved = f"activations {times(most.width)} in the reference, means by {most.offset:.2f} standard deviations"
        sure = f"{kept:.0%} of the change kept, the rest could be chance"
        if self.classes is not None and not (self.settled and float(self.classes.max()) < 0.5):
            seen = f"{float(self.classes.max()):.0%} of the inputs are predicted as class {int(self.classes.argmax())}"
            other = "" if self.settled else ", and another mixture explains them as well"
            sure += f"; {seen}{other}: a shift of inputs and one of classes may not be told apart here"
        return f"moved by {self.n_inputs} inputs (p = {self.p_value:.2g}), most in layer {name}: {moved}; {sure}"


class _Candidate(NamedTuple):
    """A transport, and the classes it was made for."""

    posterior: Posterior
    moves: Mapping[str, Move] = {}
    classes: Any = None  # (K,); None: the network gives none


def adapt(bayes: MCBN[Any], unlabelled: Any, reference: Any, strength: str | float) -> MCBN[Any]:
    """Return a twin with the posterior moved: `MCBN.adapt` says how."""
    number = isinstance(strength, int | float) and not isinstance(strength, bool) and 0 <= strength <= 1
    if strength != "auto" and not number:
        raise MCBNError(f'strength must be "auto" or a number from 0 to 1, got {strength!r}')
    network, earlier = bayes.engine.network, bayes.adaptation
    if bayes.moved_before:
        raise MCBNError("adapt moved this posterior before it was saved: adapt the one of before to all inputs at once")
    pool = gather(batches.by_name(unlabelled, network.columns), bayes.inputs, network.accepted_keys)
    if earlier is not None:
        pool, bayes = batches.concatenate([earlier.pool, pool]), bayes.with_posterior(earlier.base)
    if batches.size_of(pool) < 2:
        raise MCBNError(f"adapt needs at least 2 unlabelled inputs, got {batches.size_of(pool)}; 32 or more do well")
    best, settled = _Candidate(bayes.posterior), True
    with torch.inference_mode(False):
        guard = reference if isinstance(reference, Watch) else bayes.watch(reference)
        guard.require_network_of(bayes)
        guard.require_reference("a repair")
        guard.require_inputs(pool)
        p_value = guard.pool_p_value(pool)
        if strength != "auto" or p_value <= guard.false_alarms:
            best, settled = _Inputs(bayes, pool, guard).moved(strength)
    adapted, n_inputs = bayes.with_posterior(best.posterior), batches.size_of(pool)
    adapted.adaptation = Adaptation(n_inputs, p_value, best.moves, best.classes, settled, bayes.posterior, pool)
    return adapted


class _Inputs:
    """The unlabelled inputs and the reference, in batches of one size: their statistics, and transports between."""

    def __init__(self, bayes: MCBN[Any], pool: Any, guard: Watch) -> None:
        self.drawn, self.pool, self.guard, null = bayes.posterior, pool, guard, guard.input_null
        self.rows, self.probs, self.n_inputs = null.rows, null.probs, batches.size_of(pool)
        self.size = min(self.drawn.fitted_batch_size or self.drawn.batch_size, self.n_inputs)
        self.chance = self.size * (1 / self.n_inputs + 1 / min(len(self.rows), REFERENCE_DRAWS * self.size))
        generator = np.random.Generator(np.random.Philox(key=[guard.seed, 4]))
        often = 1 if self.n_inputs >= MANY else PARTITIONS
        orders = (Take(pool)(generator.permutation(self.n_inputs)) for _ in range(often))
        self.now = averages(guard.recorder, (b for x in orders for b in cut_batches(None, x, self.size)[0]))

    def moved(self, strength: str | float) -> tuple[_Candidate, bool]:
        """Transport as if classes were those of the reference, and mixed from either start; choose, and say if sure."""
        plain = self._transported(None, strength)
        if plain.classes is None:
            return plain, True
        best, other = (self._mixed(start, strength) for start in (plain.classes, self._classes(self.drawn)))
        settled = float((best.classes - other.classes).abs().max()) < SETTLED
        sizes = [sum(move.size for move in mixed.moves.values()) for mixed in (best, other)]
        best = other if sizes[1] < CLEARLY * sizes[0] else best
        few = float(entropy(best.classes, 0)) < FEW * float(entropy(self.probs.double().mean(0), 0))
        return best if few else plain, settled

    def _mixed(self, classes: Tensor, strength: str | float) -> _Candidate:
        """Mix the reference in these proportions, transport, predict the classes of the inputs, and again."""
        for _ in range(ROUNDS):
            last, mixed = classes, self._transported(class_weights(self.probs, classes), strength)
            classes = mixed.classes
            if float((classes - last).abs().max()) < STEADY:
                break
        return mixed

    def _transported(self, weights: Tensor | None, strength: str | float) -> _Candidate:
        """Transport from the reference, its inputs weighted (R,)."""
        reference = self.guard.require_reference("a repair")
        before = averages(self.guard.recorder, reference.weighted(self.rows, weights, self.size, REFERENCE_DRAWS))
        moves = {name: _move(before[name], self.now[name], self.chance, strength) for name in self.now}
        posterior = self.drawn.moved(*_transport(before, self.now, moves))
        return _Candidate(posterior, moves, self._classes(posterior) if self.probs.shape[1] else None)

    def _classes(self, posterior: Posterior) -> Tensor:
        """Estimate the class proportions (K,) of the inputs under a posterior's average statistics, in one pass."""
        some, network = Take(self.pool)(range(min(MANY, self.n_inputs))), self.guard.network
        seen = see(network, "classification", centre_of(posterior), some, classes_only=True)
        return class_proportions(seen.probs, self.probs)


def averages(recorder: Recorder, batch_stream: Iterator[Any]) -> dict[str, Averages]:
    """Record batches and average their statistics, in double precision."""
    with torch.no_grad():
        means, variances = join(recorder.all(batch_stream))
    return {name: _average(means[name].double(), variances[name].double()) for name in means}


def _average(mean: Tensor, var: Tensor) -> Averages:
    free = min(len(mean) - 1, 1)  # one draw alone has no spread
    log_var = var.clamp(min=DEAD).log()
    return Averages(mean.mean(0), var.mean(0), mean.var(0, correction=free), log_var.var(0, correction=free))


def _move(before: Averages, now: Averages, chance: float, strength: str | float) -> Move:
    """Compare averages of the reference and of now; decide how much of the difference is kept."""
    alive = before.var > DEAD
    mean, var, mean_noise, log_var_noise = (values[alive] for values in before)
    offset, log_rho = (now.mean[alive] - mean) / var.sqrt(), (now.var[alive].clamp(min=DEAD) / var).log()
    noises = ((offset, mean_noise / var), (log_rho, log_var_noise))
    shares = (1 - chance * noise.sum() / move.square().sum().clamp(min=1e-30) for move, noise in noises)
    v, w = (max(0.0, float(share)) if isinstance(strength, str) else float(strength) for share in shares)
    if not bool(alive.any()):
        return Move(0.0, 1.0, (v, w))
    width, size = (0.5 * log_rho.median()).exp(), (offset.square() + log_rho.square() / 4).sum()
    return Move(float(offset.square().mean().sqrt()), float(width), (v, w), float(size))


def _transport(
    before: Mapping[str, Averages], now: Mapping[str, Averages], moves: Mapping[str, Move]
) -> tuple[Tensor, Tensor]:
    """Return shift and scale (P,) of s' = shift + scale s, for each call's means, then its standard deviations."""
    shifts, scales = [], []
    for name, (mean, var, *_) in before.items():
        v, w = moves[name].strength
        alive = var > DEAD
        root = torch.where(alive, (now[name].var / var.clamp(min=DEAD)) ** (w / 2), 1.0)  # sqrt(rho)
        shifts += [mean * (1 - root) + v * (now[name].mean - mean), torch.where(alive, 0.0, w * now[name].var.sqrt())]
        scales += [root, torch.where(alive, root, 1 - w)]
    return torch.cat(shifts), torch.cat(scales)


def record_running(bayes: MCBN[Any], data: Any, seed: int) -> Recorded:
    """Run one batch of a fitted network's data: running statistics, and how many values of a channel a batch has."""
    with torch.inference_mode(False), isolated_random(seed):
        one = draw_batches(data, n_samples=1, batch_size=bayes.posterior.batch_size, seed=seed)
        return record(bayes.engine.network, one, bayes.layers, bayes.inputs)


def centre_on_running(drawn: Posterior, recorded: Recorded) -> Posterior:
    """Move draws so that they average to the running statistics: their spread stays that of the data they came from.

    mu'_t = running_mean + (mu_t - mu) sqrt(rho), var'_t = var_t rho, rho = running_var (1 - 1/n) / var; bars over
    draws, n values a channel in a batch: a running variance is unbiased, a draw's is not.
    """
    missing = [name for name in drawn.layers if name not in recorded.running]
    if missing:
        raise MCBNError(f'layer {missing[0]!r} keeps no running statistics, which centre="running" needs')
    averaged = recorded.posterior
    before = {name: _average(averaged.mean[name].double(), averaged.var[name].double()) for name in drawn.layers}
    now = {}
    for name in drawn.layers:
        mean, var = (value.to(before[name].mean) for value in recorded.running[name])
        now[name] = Averages(mean, var * (1 - 1 / recorded.values[name]), mean, var)
    return drawn.moved(*_transport(before, now, {name: Move(0.0, 1.0, (1.0, 1.0)) for name in drawn.layers}))
