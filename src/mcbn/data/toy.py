"""A one-dimensional regression set for pictures of predictive uncertainty."""

import torch
from torch import Tensor

from mcbn.data.catalog import Regression
from mcbn.errors import MCBNError

LOW, HIGH = -5.0, 5.0  # the range of the ConvNetJS regression demo
GAP = (0.5, 2.5)  # no inputs here: a peak of the curve that no model has seen
NOISE_STD = 0.1


def toy(n: int = 100, *, seed: int = 0) -> Regression:
    """Draw y = x sin(x) + noise, x uniform on [-5, 5] without the gap (0.5, 2.5).

    In the style of the ConvNetJS regression demo, which the toy figure of Teye et al. 2018 (Figure 1)
    follows. Good uncertainty is small on the data, larger in the gap and grows beyond both ends.
    Differs: the paper's own points are not published; gap, noise (std 0.1) and n are ours.

    Arguments:
        n: number of points.
        seed: of a generator of its own; the global ones are left alone.

    Returns:
        `Regression` with x (n, 1) and y (n,), float64.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise MCBNError(f"n must be a whole number of points, 1 or more, got {n!r}")
    generator = torch.Generator().manual_seed(seed)
    x = _draw_inputs(n, generator)  # (n,)
    noise = NOISE_STD * torch.randn(n, generator=generator, dtype=torch.float64)  # (n,)
    return Regression(x[:, None], x * x.sin() + noise)


def _draw_inputs(n: int, generator: torch.Generator) -> Tensor:
    """Uniform on the range less the gap: draw on a shorter range, then move the upper part past the gap."""
    start, end = GAP
    width = HIGH - LOW - (end - start)
    x = LOW + width * torch.rand(n, generator=generator, dtype=torch.float64)  # (n,)
    return torch.where(x < start, x, x + (end - start))
