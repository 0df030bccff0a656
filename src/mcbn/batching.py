"""Training data of any kind, and random batches of it: draw t depends on (seed, t) alone.

Whatever the loader's order or whoever computes it. Data are examples fetched by index, or a stream of ready batches.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data as loading
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.randomness import Undisturbed, iterate

Philox = np.random.Philox  # by its name: NumPy loads random numbers at their first use, 8 ms amid the first `fit`
PLAIN_SAMPLERS = (loading.RandomSampler, loading.SequentialSampler, loading.DistributedSampler)  # visit every row
DEFAULT_BATCH_SIZE = 32  # of the paper's CIFAR-10 network, where data comes without a loader
GROUP = 32  # draws recorded in one pass (`mcbn.engine.record`): a group not cut has the same bits everywhere
Indices = np.ndarray[Any, np.dtype[np.int64]]
Numbers = Sequence[int] | None  # t of each batch, ascending; None: 0, 1, 2, ...


class Source(NamedTuple):
    """Examples that can be fetched by index, as batches of the user's own making."""

    fetch: Callable[[Any], Any]
    population: Sequence[int]
    batch_size: int | None = None
    loader: DataLoader[Any] | None = None  # the user's own, for its workers


def read_source(data: Any) -> "Source | Stream":
    """Read any training data as examples by index, or as a stream of ready batches."""
    if isinstance(data, DataLoader):  # its order is not trusted; all else is respected
        if isinstance(data.dataset, IterableDataset):
            return Stream(data, data.batch_size)
        if data.batch_sampler is None:  # the dataset hands out ready batches; a sampler of its own making orders them
            dataset, collate, plain = data.dataset, data.collate_fn, isinstance(data.sampler, PLAIN_SAMPLERS)
            return Stream(DataLoader(dataset, batch_size=None, shuffle=True, collate_fn=collate) if plain else data)
        size = getattr(data.batch_sampler, "batch_size", None)
        rows = partial(fetch, data.dataset, data.collate_fn)
        return Source(rows, _population(data), size if isinstance(size, int) else None, data)
    if batches.is_table(data) or isinstance(data, tuple | Mapping):
        data = batches.map_tensors(_same, data)
        sizes = {int(t.shape[0]) if t.ndim else 0 for t in batches.tensors_of(data)}
        if len(sizes) != 1:
            raise MCBNError(f"training tensors must share their first axis; got {batches.describe(data)}")
        return Source(Take(data), range(sizes.pop()))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return Source(partial(fetch, data, loading.default_collate), range(len(data)))
    if isinstance(data, Iterable):
        return Stream(data)
    raise MCBNError(f"data must be a DataLoader, a Dataset, tensors, arrays or a table; got {batches.describe(data)}")


def _population(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the rows a loader visits: all, or for a sampler of its own making those of one epoch."""
    N = len(loader.dataset)  # type: ignore[arg-type]
    if type(loader.batch_sampler) is loading.BatchSampler and isinstance(loader.sampler, PLAIN_SAMPLERS):
        return range(N)
    return [int(i) for batch in islice(iterate(loader.batch_sampler or [], 0), 10 * N) for i in batch]


class Take:
    """Fetch rows of tensors."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self, rows: Any) -> Any:
        """Return these rows of every tensor."""
        index = torch.as_tensor(rows)
        return batches.map_tensors(lambda t: t[index.to(t.device)], self.data)


def fetch(dataset: Any, collate: Callable[[list[Any]], Any], rows: list[int]) -> Any:
    """Fetch rows of a dataset through its own transforms and collate function, as one batch."""
    return collate(dataset.__getitems__(rows) if hasattr(dataset, "__getitems__") else [dataset[row] for row in rows])


class Stream(NamedTuple):
    """Batches taken as they come: from an IterableDataset or any iterable that has no index."""

    source: Iterable[Any]
    batch_size: int | None = None

    def batches(self, n_samples: int, batch_size: int | None, seed: int) -> tuple[Iterator[Any], int]:
        """Take the first T full batches, starting over where the stream ends early; return them with their size M."""
        source = self.source
        if isinstance(source, IterableDataset):
            source = DataLoader(source, batch_size=batch_size or DEFAULT_BATCH_SIZE)
        elif batch_size is not None and batch_size != self.batch_size:
            raise MCBNError(f"batch_size={batch_size} cannot be drawn from ready batches; build the loader with it")
        first = batches.copied(next(iterate(source, seed), None))
        if first is None:
            raise MCBNError("the training data gives no batch at all; give it afresh, with one example or more")
        if isinstance(source, Iterator):  # a generator: what was taken from it goes back in front
            source = chain([first], source)
        M = self.batch_size or batches.size_of(first)
        if M == 1:
            warn("the loader's batches hold one example each; pass the training loader")
        return _full_batches(source, n_samples, M, seed), M


def _full_batches(source: Iterable[Any], n_samples: int, M: int, seed: int) -> Iterator[Any]:
    """Yield T batches of M examples, leaving out partial ones."""
    count = 0
    while count < n_samples:
        before, full = count, (b for b in iterate(source, seed + count) if batches.size_of(b) == M)
        for batch in islice(full, n_samples - count):
            if count == before > 0:
                warn(f"the stream gave {before} full batches and starts over; draws repeat unless it shuffles itself")
            yield batches.copied(batch)  # several are held at once, and a stream may reuse its memory
            count += 1
        if count == before:
            raise MCBNError(f"the stream ended after {count} full batches of {M}; n_samples={n_samples} need as many")


def warn(message: str) -> None:
    """Warn at the user's own line: three functions of ours lie between."""
    warnings.warn(f"mcbn: {message}", UserWarning, stacklevel=5)


class TrainingBatches(NamedTuple):
    """T training batches to come, each of `batch_size` examples out of `n_examples` (None: a stream)."""

    batches: Iterable[Any]
    batch_size: int
    n_examples: int | None
    seed: int = 0
    numbers: Numbers = None


def draw_batches(
    data: Any, *, n_samples: int, batch_size: int | None, seed: int, numbers: Numbers = None, once: bool = False
) -> TrainingBatches:
    """Prepare T random batches of M training examples: independent draws, without replacement inside a batch.

    Batch t depends on (seed, t) alone. numbers: only these t of the T, in this order. once: all examples once instead,
    in random order, in batches of M or slightly more; of a stream T full ones.

    >>> drawn = draw_batches(torch.arange(10.0), n_samples=3, batch_size=4, seed=0)
    >>> [len(batch) for batch in drawn.batches]
    [4, 4, 4]
    """
    n_samples, seed = batches.require_int("n_samples", n_samples, 1), batches.require_int("seed", seed, 0)
    if batch_size is not None:
        batch_size = batches.require_int("batch_size", batch_size, 1)
    source = read_source(data)
    if isinstance(source, Stream):
        if numbers is not None:
            raise MCBNError("a stream has no draw t to take by itself; give a Dataset or tensors, or fit it whole")
        return TrainingBatches(*source.batches(n_samples, batch_size, seed), None, seed)
    N, M = len(source.population), _batch_size(batch_size, source, whole=once)
    chosen: Callable[[int], Indices] = partial(Generators(seed).rows, N, M)
    if once:
        order, n_samples = np.random.Generator(Philox(key=seed)).permutation(N), max(1, N // M)
        edges = [t * N // n_samples for t in range(n_samples + 1)]
        chosen = [np.sort(order[start:stop]) for start, stop in pairwise(edges)].__getitem__
    loaded = _load(_Rows(source, chosen, seed), source.loader, range(n_samples) if numbers is None else numbers)
    return TrainingBatches(loaded, M, N, seed, numbers)


def _batch_size(asked: int | None, source: Source, *, whole: bool) -> int:
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
        why = f"batch_size={M} takes in all {N} examples, so every draw is the same and the variance is zero"
        warn(f"{why}; pass a smaller batch_size, as in training")
    return min(M, N)


class _Rows(Dataset[Any]):
    """Batches as a dataset: item t has the rows `chosen(t)`, and runs the transforms from (seed, t)."""

    def __init__(self, source: Source, chosen: Callable[[int], Indices], seed: int) -> None:
        self.fetch, self.population, self.chosen = source.fetch, source.population, chosen
        self.seed, self.undisturbed = seed, Undisturbed()

    def __getitem__(self, t: int) -> Any:
        chosen = self.chosen(t)
        if isinstance(self.fetch, Take):
            return self.fetch(chosen)
        rows = [int(self.population[i]) for i in chosen]
        seed = int(np.random.SeedSequence([self.seed, t, 1]).generate_state(1)[0])
        return self.undisturbed(partial(self.fetch, rows), seed, batches.same)


class Generators:
    """Generators of (seed, t), one object put to the start of stream t: making a new one costs as much as its use."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(Philox(key=[seed, 0]))  # counter-based: made for many streams
        self.start: Any = self.generator.bit_generator.state

    def rows(self, n: int, batch_size: int, t: int) -> Indices:
        """Choose the M of N rows of draw t, sorted, in O(M)."""
        self.start["state"]["key"][1] = t
        self.generator.bit_generator.state = self.start
        return np.sort(self.generator.choice(n, batch_size, replace=False, shuffle=False))


def _load(rows: _Rows, loader: DataLoader[Any] | None, numbers: Sequence[int]) -> Iterable[Any]:
    """Load the batches of these t, with the workers of the user's own loader where there is one."""
    if loader is None:
        return map(rows.__getitem__, numbers)
    kept = ("num_workers", "worker_init_fn", "timeout", "pin_memory", "prefetch_factor", "multiprocessing_context")
    options: dict[str, Any] = {name: getattr(loader, name) for name in kept}
    generator = torch.Generator().manual_seed(rows.seed)
    return DataLoader(rows, batch_size=None, sampler=numbers, collate_fn=_same, generator=generator, **options)


def _same(batch: Any) -> Any:
    return batch


def require_share(draws: Iterable[int], n_samples: int, family: str = "sample") -> list[int]:
    """Check the t of a share of T draws; return them ascending."""
    n_samples = batches.require_int("n_samples", n_samples, 1)
    numbers = sorted(batches.require_int("a number of draws=", t, 0) for t in draws)
    if not numbers or numbers[-1] >= n_samples or len(set(numbers)) < len(numbers):
        raise MCBNError(f"draws= must name some of the draws 0 to {n_samples - 1}, each once; got {numbers[:8]}")
    if family != "sample":
        raise MCBNError(f'draws= goes with posterior="sample", got {family!r}; merge the shares, then as_gaussian()')
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
