"""The authors' estimator on CIFAR-10: for each image and pass a fresh training batch sets the statistics.

`MCBN` shares T draws among all images (Algorithm 1). Here image n has T draws of its own: M - 1 augmented training
images; the place of the image itself is left free, it does not enter the statistics (authors' code). Both estimate the
same predictive distribution; sharing makes the errors of images depend on each other, and costs 1 / M of the passes.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from mcbn import batch_norm as statistics
from mcbn.batch_norm import BatchNormCall, BatchNormMode, scale_and_shift
from mcbn.engine.record import Recorder, Statistics
from mcbn.errors import MCBNError
from mcbn.layers import stochastic_layers
from mcbn.network import Network
from mcbn_study.cifar10.augmentation import Augmented, Choices, fresh_choices

BATCHES = 128  # made at once
ROWS = 1024  # (image, draw) pairs in one pass


def fresh_batches(images: Augmented, batch_size: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield independent augmented batches (M, 3, 32, 32); batch b depends on (seed, b) alone."""
    for block in range(0, count, BATCHES):
        generator = np.random.Generator(np.random.Philox(key=[seed, block]))
        chosen = fresh_choices(len(images), batch_size, BATCHES, generator)  # (BATCHES, M) each
        used = Choices(*(part[: count - block].flatten() for part in chosen))
        yield from torch.split(images.batch(used), batch_size)


@torch.no_grad()
def per_query(
    network: nn.Module, images: Augmented, x: Tensor, *, n_samples: int, batch_size: int, seed: int
) -> Tensor:
    """Return logits (T, N, K) of x (N, 3, 32, 32), where draw t of image n has statistics of a batch of its own.

    Statistics are recorded as `MCBN.fit` records them, several batches in a pass; each row of a pass over x then has
    its own scale and shift.

    Args:
        network: trained; it is copied, and not changed.
        images: training images.
        x: standardised images to predict for.
        n_samples: T.
        batch_size: M; M - 1 training images make a batch.
        seed: of the batches.
    """
    if batch_size < 2 or n_samples < 1 or not len(x):
        raise MCBNError(
            f"per_query needs batch_size >= 2 (M - 1 training images), n_samples >= 1 and images to predict for; got "
            f"{batch_size}, {n_samples} and {len(x)}"
        )
    copy = Network(network)
    statistics.watch(copy.module)
    x = copy.prepare(x)
    batches = fresh_batches(images, batch_size - 1, len(x) * n_samples, seed)
    first = next(batches)
    recorder = Recorder(copy, stochastic_layers(copy, copy.prepare(first), None))
    drawn = recorder.all(chain([first], batches))
    logits = [_one_pass(copy, part, rows) for part, rows in _matched(x.repeat_interleave(n_samples, 0), drawn)]
    return torch.cat(logits).reshape(len(x), n_samples, -1).transpose(0, 1)


def _matched(x: Tensor, drawn: Iterator[Statistics]) -> Iterator[tuple[Tensor, Statistics]]:
    """Yield rows of x with as many draws, which come in pieces of any size."""
    waiting: list[Statistics] = []
    for part in torch.split(x, ROWS):
        while sum(map(_count, waiting)) < len(part):
            waiting.append(next(drawn))
        joined = _join(waiting)
        yield part, _slice(joined, slice(0, len(part)))
        waiting = [_slice(joined, slice(len(part), None))]


class _OfRows(BatchNormMode):
    """Normalise every row by statistics of its own, (B, C) each."""

    def __init__(self, drawn: Statistics) -> None:
        super().__init__()
        self.drawn = drawn

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise with biased variances, as recorded."""
        scale, shift = scale_and_shift(*self.drawn[call.name], call.weight, call.bias, call.eps)
        B, C = scale.shape
        scale, shift = (part.reshape(B, C, *(1,) * (call.x.ndim - 2)) for part in (scale, shift))
        return torch.addcmul(shift, call.x, scale)


def _one_pass(network: Network, x: Tensor, drawn: Statistics) -> Tensor:
    with _OfRows(drawn):
        return network(x)


def _count(drawn: Statistics) -> int:
    return len(next(iter(drawn.values()))[0])


def _join(pieces: list[Statistics]) -> Statistics:
    return {
        name: (torch.cat([p[name][0] for p in pieces]), torch.cat([p[name][1] for p in pieces])) for name in pieces[0]
    }


def _slice(drawn: Statistics, rows: slice) -> Statistics:
    return {name: (mean[rows], var[rows]) for name, (mean, var) in drawn.items()}
