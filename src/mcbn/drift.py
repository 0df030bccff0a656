"""Do the drawn statistics agree with the running ones? If not, the batches are not those of training."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from mcbn.recording import Recorded

MOMENTUM = 0.1  # PyTorch's default: the running statistics average some 19 batches
# Measured: CIFAR-10 ResNet-32 0.02 as trained, 0.24 without its augmentation; Boston MLPs up to 0.09, their running
# statistics lagging behind the last steps of training.
EFFECT_LIMIT = 0.15
SIGMA_LIMIT = 4.0


class Drift(NamedTuple):
    """How far a layer's average drawn statistics sit from its running statistics."""

    layer: str
    effect: float  # median over channels, in standard deviations of the channel
    sigmas: float  # the same in units of the sampling error of both averages


def measure(recorded: Recorded) -> list[Drift]:
    """Compare drawn and running statistics layer by layer; layers without running statistics have none."""
    mean, var = recorded.posterior.mean, recorded.posterior.var
    drifts = []
    for names in _sharing(recorded):
        means = torch.stack([mean[name].double() for name in names]).mean(0)  # (T, C)
        variances = torch.stack([var[name].double() for name in names]).mean(0)  # (T, C)
        drifts.append(_layer(names[0], means, variances, recorded.running[names[0]], recorded.values[names[0]]))
    return drifts


def _sharing(recorded: Recorded) -> list[list[str]]:
    """Group the calls that feed one pair of running statistics: those average over all of them."""
    groups: dict[int, list[str]] = {}
    for name, (running_mean, _) in recorded.running.items():
        groups.setdefault(running_mean.data_ptr(), []).append(name)
    return list(groups.values())


def _layer(name: str, mean: Tensor, var: Tensor, running: tuple[Tensor, Tensor], n: int) -> Drift:
    T = len(mean)
    std = (var * n / (n - 1)).clamp(min=1e-20).sqrt()  # (T, C), unbiased: what the running variance averages
    running_mean, running_std = running[0].double(), running[1].double().clamp(min=1e-20).sqrt()
    average_std = std.square().mean(0).sqrt()
    scale = running_std.maximum(average_std)
    shift = (mean.mean(0) - running_mean) / scale  # (C,)
    stretch = (average_std.log() - running_std.log()).clamp(-3, 3)  # (C,)
    effect = (shift.square() + stretch.square()).sqrt()  # (C,)
    spread = torch.full_like(effect, 1.5 / n)  # variance of one draw, if its values are independent and Gaussian
    if T > 1:
        spread = mean.var(0) / scale.square() + std.log().var(0)
    error = (spread * (1 / T + MOMENTUM / (2 - MOMENTUM))).sqrt().clamp(min=1e-12)  # (C,)
    return Drift(name, float(effect.median()), float((effect / error).median()))


def warn_if_far(recorded: Recorded) -> None:
    """Warn, naming the worst layer, when drawn and running statistics disagree beyond sampling error."""
    far = [d for d in measure(recorded) if d.effect > EFFECT_LIMIT and d.sigmas > SIGMA_LIMIT]
    if far:
        worst = max(far, key=lambda d: d.effect)
        warnings.warn(
            f"mcbn: drawn batch statistics disagree with the running statistics in {len(far)} layer(s), most in "
            f"{worst.layer!r}: {worst.effect:.2f} channel standard deviations, {worst.sigmas:.0f} times the sampling "
            "error. The usual cause is data not made as in training (augmentation off, other preprocessing); "
            "pass the training loader",
            stacklevel=4,
        )
