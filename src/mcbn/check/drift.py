"""Do the drawn statistics agree with the running ones? If not, the batches are not those of training.

Compared layer by layer, and by what the differences of all layers together do to the outputs: small ones add up.
The limits were chosen by hand, above what networks show as trained, with room for running statistics that lag.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn.batch_norm import Replay
from mcbn.engine.record import Recorded
from mcbn.errors import MCBNError
from mcbn.network import Network

LAG = 0.1 / (2 - 0.1)  # m / (2 - m), PyTorch's momentum m: variance of a running average to that of one batch
EFFECT_LIMIT = 0.15
SHIFT_LIMIT = 0.5
SIGMA_LIMIT = 4.0
YOUNG = 200  # batches of training: until then running statistics lag behind the weights, outputs hardly vary
CURE = "draw from data made as in training, with its preprocessing and augmentation: pass the training loader; "
CURE += 'where nobody has that data, fit(data, centre="running")'
SCATTER_DRAWS = 4  # that tell how single draws scatter the outputs; below that chance alone can look far


class Drift(NamedTuple):
    """How far average drawn statistics sit from the running ones: those of a layer, or by what all do to outputs."""

    layer: str | None  # None: all layers together
    effect: float  # median over channels or outputs, in standard deviations of channel or output
    sigmas: float  # the same in units of the sampling error; NaN where not measured: a small shift, or too few draws

    @property
    def far(self) -> bool:
        """Too far for chance, and for running statistics that lag behind."""
        return self.effect > (SHIFT_LIMIT if self.layer is None else EFFECT_LIMIT) and self.sigmas > SIGMA_LIMIT


def measure(recorded: Recorded) -> Iterator[Drift]:
    """Compare drawn and running statistics layer by layer; layers without running statistics have none."""
    for (name, *_), mean, var in _sharing(recorded):
        T, n, running = len(mean), recorded.values[name], recorded.running[name]
        std = var.clamp(min=1e-20).sqrt()  # (T, C)
        running_mean, running_std = running[0].double(), running[1].double().clamp(min=1e-20).sqrt()
        average_std = std.square().mean(0).sqrt()
        scale = running_std.maximum(average_std)
        shift = (mean.mean(0) - running_mean) / scale  # (C,)
        stretch = (average_std.log() - running_std.log()).clamp(-3, 3)  # (C,)
        effect = (shift.square() + stretch.square()).sqrt()  # (C,)
        alone = torch.full_like(effect, 1.5 / n)  # variance of one draw, if its values are independent and Gaussian
        spread = mean.var(0) / scale.square() + std.log().var(0) if T > 1 else alone
        error = (spread * (1 / T + LAG)).sqrt().clamp(min=1e-12)  # (C,)
        yield Drift(name, float(effect.median()), float((effect / error).median()))


def _sharing(recorded: Recorded) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """Yield calls that feed one pair of running statistics with what those average: means and variances, (T, C)."""
    groups: dict[int, list[str]] = {}
    for name, (running_mean, _) in recorded.running.items():
        groups.setdefault(running_mean.data_ptr(), []).append(name)
    for names in groups.values():
        drawn = recorded.posterior.mean, recorded.posterior.var
        mean, var = (torch.stack([kind[name].double() for name in names]).mean(0) for kind in drawn)
        n = recorded.values[names[0]]
        yield names, mean, var * n / (n - 1)  # unbiased: what the running variance averages


def shift(network: Network, recorded: Recorded) -> Drift | None:
    """Compare outputs f for one batch under the average drawn statistics with outputs r under the running ones.

    effect^2 = |f - r|^2 = median_d mean((f_d - r_d)^2) / Var(r_d), over inputs and positions, d the outputs (axis 1).
    With f_t under draw t and m the momentum, error^2 = T / (T - 1) mean_t |f_t - f|^2 (1 / T + m / (2 - m)) is what
    sampling explains. None without running statistics, where they come from fewer than `YOUNG` batches (zero: not
    counted), or where other statistics lead the network another way.
    """
    x, T = recorded.first, recorded.posterior.n_samples
    counts = (value for name, value in network.module.named_buffers() if name.endswith("num_batches_tracked"))
    drawn = {name: statistics for names, *statistics in _sharing(recorded) for name in names}
    if not drawn or any(0 < int(count) < YOUNG for count in counts):
        return None

    def under(draws: slice) -> Tensor:
        mean, var = ({name: pair[kind][draws].mean(0) for name, pair in drawn.items()} for kind in (0, 1))
        return _outputs(network, x, Replay(mean, var))

    try:
        running, average = _outputs(network, x, Replay({}, {})), under(slice(T))  # (N, D) each
        spread = running.std(0, correction=0)  # (D,)
        effect, sigmas = _size((average - running) / spread), math.nan
        if effect > SHIFT_LIMIT and T >= SCATTER_DRAWS:
            scatter = [_size((under(slice(t, t + 1)) - average) / spread) ** 2 for t in range(T)[-SCATTER_DRAWS:]]
            error = math.sqrt(T / (T - 1) * sum(scatter) / SCATTER_DRAWS * (1 / T + LAG))
            sigmas = effect / max(error, 1e-12)
    except MCBNError:  # a layer without draws was called: no reason for fit to fail
        return None
    return Drift(None, effect, sigmas)


def _outputs(network: Network, x: Any, mode: Replay) -> Tensor:
    """Run a batch; inputs and positions become rows, (N, D)."""
    with torch.no_grad(), network.undisturbed(0), mode:  # one seed: what is random in the network is so alike
        output = network.run_copy(x).double()
    return output.reshape(-1, 1) if output.ndim < 2 else output.movedim(1, -1).flatten(0, -2)


def _size(deviation: Tensor) -> float:
    """Root mean square over rows, median over outputs; outputs that never differ (0 / 0) are left out."""
    return float(deviation.square().mean(0).nanmedian().sqrt())


def describe(*far: Drift) -> str:
    """Say what layers that are far, or the shift of all together, are, and what to do."""
    worst = max(far, key=lambda drift: drift.effect)
    if worst.layer is None:
        moved = f"move the outputs by {worst.effect:.2f} of their standard deviation over inputs (limit {SHIFT_LIMIT})"
        return f"the average drawn statistics {moved}, {worst.sigmas:.0f} times the sampling error; {CURE}"
    most = f"{worst.effect:.2f} channel standard deviations, {worst.sigmas:.0f} times the sampling error"
    where = f"in {len(far)} layer(s), most in {worst.layer!r}: {most}"
    return f"drawn batch statistics disagree with the running statistics {where}; {CURE}"


def warn_if_far(network: Network, recorded: Recorded) -> None:
    """Warn when drawn and running statistics disagree beyond sampling error: in a layer, or else in what they give."""
    if far := [drift for drift in measure(recorded) if drift.far]:
        warnings.warn(f"mcbn: {describe(*far)}", stacklevel=3)
    elif (moved := shift(network, recorded)) and moved.far:
        by_little = f"running statistics by little in every layer, but these differences add up: {describe(moved)}"
        warnings.warn(f"mcbn: drawn batch statistics disagree with the {by_little}", stacklevel=3)
