"""Reference inputs, as deployed: some fit the distance, the others are held out to rank against, none is both."""

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mcbn import batches
from mcbn.batching import Source, Stream, Take, read_source
from mcbn.errors import MCBNError
from mcbn.network import Network, as_loader
from mcbn.randomness import Undisturbed, iterate

FITTING_SHARE = 1 / 4  # of the inputs: batches to fit overlap, held-out ones must not, so these need more
STREAM_BATCHES = 4096  # that are read of a reference without an index, and kept
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Reference:
    """Inputs by row, cut at random by `seed` into two parts: to fit with, and held out.

    data is what `MCBN.fit` takes, of which `picker` chooses what goes to the network; of an iterable the inputs are
    kept in memory. Inputs that come in runs of `run` neighbours (frames of a video) stay together, in order.
    """

    def __init__(self, data: Any, network: Network, picker: batches.Picker, *, run: int = 1, seed: int = 0) -> None:
        self.keys, self.picker, self.run, self.seed = network.accepted_keys, picker, run, seed
        self.source, self.undisturbed = _by_row(batches.by_name(data, network.columns)), Undisturbed()
        if isinstance(self.source.fetch, Take):  # read again for every size of batches: the caller may reuse its memory
            self.source = self.source._replace(fetch=Take(batches.copied(self.source.fetch.data)))
        self.n_inputs = len(self.source.population)
        if self.n_inputs < 2:
            raise MCBNError(f"the reference holds {self.n_inputs} input(s); give inputs as deployed, hundreds or more")
        if not isinstance(self.source.fetch, Take):
            self._warn_if_random()
        self.shapes = shapes_of(self.take(np.arange(1)))
        runs = self._generator(0).permutation(self.n_inputs // run)
        fitting = max(1, round(len(runs) * FITTING_SHARE))
        self.fitting, self.held_out = runs[:fitting], runs[fitting:]

    def take(self, rows: Rows) -> Any:
        """Return these inputs as one batch."""
        chosen = rows if isinstance(self.source.fetch, Take) else [int(self.source.population[i]) for i in rows]
        batch = self.undisturbed(partial(self.source.fetch, chosen), self.seed, batches.same)
        return batches.pick_inputs(batch, self.picker, self.keys)

    def overlapping(self, size: int, count: int) -> Iterator[Any]:
        """Yield random batches of inputs to fit with; two of them may share inputs."""
        runs, generator = -(-size // self.run), self._generator(1)
        for _ in range(count):
            yield self.take(self._rows(generator.choice(self.fitting, runs, replace=runs > len(self.fitting)))[:size])

    def disjoint(self, size: int, most: int) -> Iterator[Any]:
        """Yield batches of held-out inputs, no input twice: exchangeable with any later batch of inputs alike."""
        runs = -(-size // self.run)
        for number in range(self.count(size, most)):
            yield self.take(self._rows(self.held_out[number * runs : (number + 1) * runs])[:size])

    def count(self, size: int, most: int) -> int:
        """Say how many disjoint batches of this size the held-out inputs give."""
        return min(most, len(self.held_out) // -(-size // self.run))

    def largest(self, count: int) -> int:
        """Say how large as many disjoint batches can be; 0: not even of one input."""
        return len(self.held_out) // count * self.run

    def needed(self, size: int, count: int) -> int:
        """Say how many inputs a reference has that gives as many disjoint batches."""
        return int(np.ceil(count * -(-size // self.run) * self.run / (1 - FITTING_SHARE)))

    def rows_to_fit(self, most: int) -> Rows:
        """Return rows to fit with, at most so many."""
        return self._rows(self.fitting)[:most]

    def weighted(self, rows: Tensor, weights: Tensor | None, size: int, count: int) -> Iterator[Any]:
        """Yield random batches of these rows, chosen with weights (R,) that sum to 1; None: all alike."""
        generator, chances = self._generator(3), None if weights is None else weights.numpy()
        available = len(rows) if chances is None else int((chances > 0).sum())
        for _ in range(count):
            yield self.take(generator.choice(rows.numpy(), size, replace=available < size, p=chances))

    def _rows(self, runs: Rows) -> Rows:
        return (runs[:, None] * self.run + np.arange(self.run)).reshape(-1)

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, stream]))

    def _warn_if_random(self) -> None:
        """Warn where the same row comes out in two ways: transforms of training are at work."""
        rows = [int(row) for row in self.source.population[:4]]
        twice = [self.undisturbed(partial(self.source.fetch, rows), seed, batches.same) for seed in (0, 1)]
        if not batches.same(*twice):
            fault = "the reference gives other values each time a row is read, as training augmentation does"
            cure = "that is not the null of deployment: give the inputs as the network meets them in use"
            warnings.warn(f"mcbn: {fault}; {cure}", stacklevel=5)


def shapes_of(x: Any) -> list[tuple[int, ...]]:
    """Return the shapes of inputs but for their number."""
    return [tuple(t.shape[1:]) for t in batches.tensors_of(x)]


def _by_row(data: Any) -> Source:
    """Read data as rows; what has no index is read once and kept."""
    source = read_source(data)
    if not isinstance(source, Stream):
        return source
    loader = as_loader(source.source) if isinstance(source.source, IterableDataset) else source.source
    blocks = [*map(batches.copied, islice(iterate(loader, 0), STREAM_BATCHES))]  # which may reuse its memory
    if not blocks:
        raise MCBNError("the data gives no batch at all; give it afresh, with one example or more")
    kept = batches.concatenate(blocks)
    return Source(Take(kept), range(batches.size_of(kept)))


def gather(data: Any, picker: batches.Picker, keys: tuple[list[str], list[str]]) -> Any:
    """Read all inputs of some data into one batch."""
    source = _by_row(data)
    rows: Any = np.array(source.population, int) if isinstance(source.fetch, Take) else [*map(int, source.population)]
    return batches.pick_inputs(Undisturbed()(partial(source.fetch, rows), 0, batches.same), picker, keys)


def cut_batches(waiting: Any, x: Any, size: int) -> tuple[Iterator[Any], Any]:
    """Cut inputs, after those that wait, into batches of one size; return these, and what waits now (or None)."""
    inputs = x if waiting is None else batches.concatenate([waiting, x])
    N, take = batches.size_of(inputs), Take(inputs)
    whole = (take(range(start, start + size)) for start in range(0, N - size + 1, size))
    return whole, take(range(N - N % size, N)) if N % size else None


def finite(x: Any) -> Any:
    """Put zeros where a batch holds NaN or infinity."""
    return batches.map_tensors(lambda t: t.nan_to_num(0, 0, 0) if t.is_floating_point() else t, x)


def not_finite(x: Any) -> Tensor:
    """Tell which inputs of a batch hold NaN or infinity, (N,)."""
    N = batches.size_of(x)
    spoiled = torch.zeros(N, dtype=torch.bool)
    for t in batches.tensors_of(x):
        if t.is_floating_point() and t.ndim:
            spoiled |= ~torch.isfinite(t.reshape(N, -1)).all(1).cpu()
    return spoiled
