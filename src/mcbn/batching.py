"""Random training batches: draw t depends on (seed, t) alone, whatever the loader's order or whoever computes it."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random
from mcbn.training_data import DEFAULT_BATCH_SIZE, Source, Stream, Take, read_source, warn

GROUP = 32  # draws recorded in one pass (`mcbn.engine.record`): a group not cut has the same bits everywhere
MOST_TAKEN, VALUES_TAKEN = 32, 2**20  # batches, and values, taken from tensors in memory at once
Indices = np.ndarray[Any, np.dtype[np.int64]]


class TrainingBatches(NamedTuple):
    """T training batches to come, each of `batch_size` examples out of `n_examples` (None: a stream)."""

    batches: Iterable[Any]
    batch_size: int
    n_examples: int | None
    seed: int = 0
    numbers: Sequence[int] | None = None  # t of each batch, ascending; None: 0, 1, 2, ...


def draw_batches(
    data: Any, *, n_samples: int, batch_size: int | None, seed: int, numbers: Sequence[int] | None = None
) -> TrainingBatches:
    """Prepare T random batches of M training examples: independent draws, without replacement inside a batch.

    Args:
        data: a DataLoader, a Dataset, tensors, or an iterable of ready batches.
        n_samples: T.
        batch_size: M; None: the loader's.
        seed: batch t depends on (seed, t) alone.
        numbers: only these t of the T, in this order.

    >>> drawn = draw_batches(torch.arange(10.0), n_samples=3, batch_size=4, seed=0)
    >>> [len(batch) for batch in drawn.batches]
    [4, 4, 4]
    """
    source, n_samples, batch_size, seed = _read(data, n_samples, batch_size, seed)
    if isinstance(source, Stream):
        if numbers is not None:
            raise MCBNError(
                "a stream has no draw t to take by itself; give data that can be indexed (a Dataset, tensors, or their "
                "DataLoader) to share draws out, or fit in one process"
            )
        return TrainingBatches(*source.batches(n_samples, batch_size, seed), None, seed)
    M = _batch_size(batch_size, source)
    rows = _Rows(source, n_samples, M, seed)
    return TrainingBatches(_load(rows, source.loader, numbers), M, len(source.population), seed, numbers)


def pass_over(data: Any, *, most: int, batch_size: int | None, seed: int) -> TrainingBatches:
    """Prepare one pass over all training examples: in random order, each once, in batches of M or slightly more.

    A stream has no end to count on: its first `most` full batches make the pass. Arguments as for `draw_batches`.
    """
    source, most, batch_size, seed = _read(data, most, batch_size, seed)
    if isinstance(source, Stream):
        return TrainingBatches(*source.batches(most, batch_size, seed), None, seed)
    N, M = len(source.population), _batch_size(batch_size, source, whole=True)
    rows = _Partition(source, max(1, N // M), M, seed)
    return TrainingBatches(_load(rows, source.loader), M, N, seed)


def _read(data: Any, n_samples: int, batch_size: int | None, seed: int) -> tuple[Source | Stream, int, int | None, int]:
    """Check what was asked and read the data."""
    n_samples, seed = batches.require_int("n_samples", n_samples, 1), batches.require_int("seed", seed, 0)
    if batch_size is not None:
        batch_size = batches.require_int("batch_size", batch_size, 1)
    return read_source(data), n_samples, batch_size, seed


def _batch_size(asked: int | None, source: Source, *, whole: bool = False) -> int:
    """Resolve M: what was asked, else the loader's, else a default; at most N, of which `whole` approves."""
    N = len(source.population)
    if N < 2:
        raise MCBNError(f"the training data holds {N} example(s); batch statistics need at least 2")
    M = asked or source.batch_size
    if M is None:
        M = DEFAULT_BATCH_SIZE
        warn(f"no batch size known; drawing batches of {M}: pass batch_size= as in training, or the training loader")
    if M == 1:
        warn("batch_size is 1, as of a loader for evaluation; pass the training loader or batch_size=")
    if M >= N and not whole:
        warn(
            f"batch_size={M} takes in all {N} examples, so every draw is the same and the variance is zero; "
            "pass a smaller batch_size, as in training"
        )
    return min(M, N)


class _Rows(Dataset[Any]):
    """The T batches as a dataset: item t draws its rows, and runs the transforms, from (seed, t)."""

    def __init__(self, source: Source, n_samples: int, batch_size: int, seed: int) -> None:
        self.fetch, self.population = source.fetch, source.population
        self.n_samples, self.batch_size, self.seed = n_samples, batch_size, seed
        self.generators = Generators(seed)

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, t: int) -> Any:
        chosen = self.chosen(t)
        if isinstance(self.fetch, Take):
            return self.fetch(chosen)
        rows = [int(self.population[i]) for i in chosen]
        with isolated_random(int(np.random.SeedSequence([self.seed, t, 1]).generate_state(1)[0])):
            return self.fetch(rows)

    def chosen(self, t: int) -> Indices:
        """Choose the rows of batch t."""
        return _choose(len(self.population), self.batch_size, self.generators(t))


class _Partition(_Rows):
    """All rows in a random order that depends on the seed alone, cut into batches whose sizes differ by one at most."""

    def __init__(self, source: Source, n_samples: int, batch_size: int, seed: int) -> None:
        super().__init__(source, n_samples, batch_size, seed)
        self.order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(self.population))

    def chosen(self, t: int) -> Indices:
        """Take the rows of piece t."""
        N = len(self.order)
        return np.sort(self.order[t * N // len(self) : (t + 1) * N // len(self)])


class Generators:
    """Generators of (seed, t), one object put to the start of stream t: making a new one costs as much as its use."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.Philox(key=[seed, 0]))  # counter-based: made for many streams
        self.start: Any = self.generator.bit_generator.state

    def __call__(self, t: int) -> np.random.Generator:
        """Return the generator as it starts out for draw t."""
        self.start["state"]["key"][1] = t
        self.generator.bit_generator.state = self.start
        return self.generator


def rows_of_draw(n: int, batch_size: int, seed: int, t: int) -> Indices:
    """Choose the M of N rows of draw t, sorted: in O(M), by a generator of (seed, t) alone.

    >>> rows_of_draw(100, batch_size=4, seed=0, t=7).shape
    (4,)
    """
    return _choose(n, batch_size, Generators(seed)(t))


def _choose(n: int, batch_size: int, generator: np.random.Generator) -> Indices:
    chosen = generator.choice(n, batch_size, replace=False, shuffle=False)
    chosen.sort()
    return chosen


def _load(rows: _Rows, loader: DataLoader[Any] | None, numbers: Sequence[int] | None = None) -> Iterable[Any]:
    """Load the batches of these t, or of all, with the workers of the user's own loader where there is one."""
    chosen = range(len(rows)) if numbers is None else numbers
    if loader is None:
        return _in_turn(rows, chosen)
    options: dict[str, Any] = {}
    if loader.num_workers:
        options = {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    return DataLoader(
        rows,
        batch_size=None,
        sampler=chosen,
        collate_fn=_same,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        pin_memory=loader.pin_memory,
        generator=torch.Generator().manual_seed(rows.seed),
        **options,
    )


def _same(batch: Any) -> Any:
    return batch


def _in_turn(rows: _Rows, numbers: Sequence[int]) -> Iterator[Any]:
    """Yield the batches of these t; of tensors in memory several are taken at once and handed out as views."""
    if not isinstance(rows.fetch, Take):
        yield from (rows[t] for t in numbers)
        return
    values = sum(t[:1].numel() for t in batches.tensors_of(rows.fetch.data)) * rows.batch_size  # of one batch
    step = max(1, min(MOST_TAKEN, VALUES_TAKEN // max(values, 1)))
    for start in range(0, len(numbers), step):
        chosen = [rows.chosen(t) for t in numbers[start : start + step]]
        taken, end = rows.fetch(np.concatenate(chosen)), 0
        for indices in chosen:
            end += len(indices)
            yield batches.map_tensors(operator.itemgetter(slice(end - len(indices), end)), taken)


def require_share(draws: Iterable[int], n_samples: int, family: str = "sample") -> list[int]:
    """Check the t of a share of T draws; return them ascending."""
    n_samples = batches.require_int("n_samples", n_samples, 1)
    numbers = sorted(batches.require_int("a number of draws=", t, 0) for t in draws)
    if not numbers or numbers[-1] >= n_samples or len(set(numbers)) < len(numbers):
        raise MCBNError(f"draws= must name some of the draws 0 to {n_samples - 1}, each once; got {numbers[:8]}")
    if family != "sample":
        raise MCBNError(
            f'draws= goes with posterior="sample", got {family!r}; merge the shares, then take Posterior.as_gaussian'
        )
    return numbers


def shares(n_samples: int, workers: int) -> list[range]:
    """Deal T draws out to workers in whole groups, as even as groups allow; a worker may get none.

    >>> shares(100, workers=3)
    [range(0, 32), range(32, 64), range(64, 100)]
    """
    n_samples, workers = batches.require_int("n_samples", n_samples, 1), batches.require_int("workers", workers, 1)
    groups = -(-n_samples // GROUP)
    edges = [min(n_samples, GROUP * (groups * w // workers)) for w in range(workers + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]
