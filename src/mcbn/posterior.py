"""The approximate posterior q(omega): T joint draws of all batch-norm statistics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Posterior:
    """T joint draws of the batch-norm statistics omega = {mu_B, sigma^2_B} (Teye et al. 2018, section 3.4).

    `mean[name]` and `var[name]` are (T, C), `var` biased; row t of every layer comes from one training batch of
    `batch_size` examples. A layer called twice in a forward pass has two entries, "name" and "name#2".
    """

    mean: Mapping[str, Tensor]
    var: Mapping[str, Tensor]
    batch_size: int

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

    def to(self, device: torch.device | str | None) -> "Posterior":
        """Move all statistics to a device."""
        moved = [{name: value.to(device) for name, value in part.items()} for part in (self.mean, self.var)]
        return Posterior(moved[0], moved[1], self.batch_size)

    def __repr__(self) -> str:
        channels = sum(value.shape[1] for value in self.mean.values())
        return (
            f"Posterior(n_samples={self.n_samples}, batch_size={self.batch_size}, "
            f"{len(self.layers)} layers, {channels} channels)"
        )


def _each(part: Mapping[str, Tensor], index: Any) -> dict[str, Tensor]:
    return {name: value[index] for name, value in part.items()}
