"""Random training batches: draw t depends on (seed, t) alone, whatever the loader's order or workers."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from mcbn import batches
from mcbn.errors import MCBNError

DEFAULT_BATCH_SIZE = 32  # of the paper's CIFAR-10 network, where data comes without a loader
Indices = np.ndarray[Any, np.dtype[np.int64]]


class Draws(NamedTuple):
    """T training batches to come, each of `batch_size` examples out of `n_examples` (None: a stream)."""

    batches: Iterable[Any]
    batch_size: int
    n_examples: int | None


def draw_batches(data: Any, *, n_samples: int, batch_size: int | None, seed: int) -> Draws:
    """Prepare T random batches of M training examples: independent draws, without replacement inside a batch."""
    n_samples = batches.require_int("n_samples", n_samples, 1)
    seed = batches.require_int("seed", seed, 0)
    if batch_size is not None:
        batch_size = batches.require_int("batch_size", batch_size, 1)
    source = _source(data)
    if isinstance(source, _Stream):
        return source.draws(n_samples, batch_size, seed)
    M = _batch_size(batch_size, source)
    rows = _Rows(source.fetch, source.population, n_samples, M, seed)
    loaded = _each(rows) if source.loader is None else _parallel(rows, source.loader)
    return Draws(loaded, M, len(source.population))


def pass_over(data: Any, *, most: int, batch_size: int | None, seed: int) -> Draws:
    """Prepare one pass over all training examples: in random order, each once, in batches of M or slightly more.

    A stream has no end to count on: its first `most` full batches make the pass.
    """
    most, seed = batches.require_int("n_samples", most, 1), batches.require_int("seed", seed, 0)
    if batch_size is not None:
        batch_size = batches.require_int("batch_size", batch_size, 1)
    source = _source(data)
    if isinstance(source, _Stream):
        return source.draws(most, batch_size, seed)
    N = len(source.population)
    M = _batch_size(batch_size, source, whole=True)
    rows = _Partition(source.fetch, source.population, max(1, N // M), M, seed)
    return Draws(_each(rows) if source.loader is None else _parallel(rows, source.loader), M, N)


def _batch_size(asked: int | None, source: "_Source", *, whole: bool = False) -> int:
    """Resolve M: what was asked, else the loader's, else a default; at most N, of which `whole` approves."""
    N = len(source.population)
    if N < 2:
        raise MCBNError(f"the training data holds {N} example(s); batch statistics need at least 2")
    M = asked or source.batch_size
    if M is None:
        M = DEFAULT_BATCH_SIZE
        _warn(f"no batch size known; drawing batches of {M}: pass batch_size= as in training, or the training loader")
    if M == 1:
        _warn("batch_size is 1, as of a loader for evaluation; pass the training loader or batch_size=")
    if M >= N and not whole:
        _warn(
            f"batch_size={M} takes in all {N} examples, so every draw is the same and the variance is zero; "
            "pass a smaller batch_size, as in training"
        )
    return min(M, N)


def _warn(message: str) -> None:
    warnings.warn(f"mcbn: {message}", UserWarning, stacklevel=5)


class _Source(NamedTuple):
    """Examples that can be fetched by index, as batches of the user's own making."""

    fetch: Callable[[Any], Any]
    population: Sequence[int]
    batch_size: int | None
    loader: DataLoader[Any] | None


def _source(data: Any) -> "_Source | _Stream":
    """Read any training data as examples by index, or as a stream of ready batches."""
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        return _from_tensors(data)
    if isinstance(data, IterableDataset):
        return _Stream(data, None)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _Source(_Fetch(data, torch.utils.data.default_collate), range(len(data)), None, None)
    if isinstance(data, Iterable):
        return _Stream(data, None)
    raise MCBNError(f"fit takes a DataLoader, a Dataset or tensors; got {batches.describe(data)}")


def _from_tensors(data: Any) -> _Source:
    tensors = batches.tensors_of(data)
    sizes = {int(t.shape[0]) if t.ndim else 0 for t in tensors}
    if len(sizes) != 1:
        raise MCBNError(f"training tensors must share their first axis; got {batches.describe(data)}")
    return _Source(_Take(data), range(sizes.pop()), None, None)


def _from_loader(loader: DataLoader[Any]) -> "_Source | _Stream":
    """Respect dataset, transforms, collate_fn, batch size and the set of rows of a loader; not its order."""
    if isinstance(loader.dataset, IterableDataset):
        return _Stream(loader, loader.batch_size)
    if loader.batch_sampler is None:  # the dataset hands out ready batches
        return _Stream(_Shuffled(loader), None)
    size = getattr(loader.batch_sampler, "batch_size", None)
    fetch = _Fetch(loader.dataset, loader.collate_fn)
    return _Source(fetch, _population(loader), size if isinstance(size, int) else None, loader)


def _population(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the rows a loader visits: all, or for a sampler of its own making those of one epoch."""
    N = len(loader.dataset)  # type: ignore[arg-type]
    plain = isinstance(loader.sampler, RandomSampler | SequentialSampler | DistributedSampler)
    if type(loader.batch_sampler) is BatchSampler and plain:
        return range(N)
    with isolated_random(0):
        if type(loader.batch_sampler) is BatchSampler:
            return [int(i) for i in islice(loader.sampler, 10 * N)]
        return [int(i) for batch in islice(loader.batch_sampler or [], 10 * N) for i in batch]


class _Take:
    """Fetch rows of tensors."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self, rows: Any) -> Any:
        index = torch.as_tensor(rows)
        return batches.map_tensors(lambda t: t[index.to(t.device)], self.data)


class _Fetch:
    """Fetch rows of a dataset through its own transforms and collate function."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, rows: list[int]) -> Any:
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(rows))
        return self.collate([self.dataset[row] for row in rows])


def _each(rows: "_Rows") -> Iterator[Any]:
    return (rows[t] for t in range(len(rows)))


class _Rows(Dataset[Any]):
    """The T batches as a dataset: item t draws its rows, and runs the transforms, from (seed, t)."""

    def __init__(
        self,
        fetch: Callable[[Any], Any],
        population: Sequence[int],
        n_samples: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.fetch, self.population = fetch, population
        self.n_samples, self.batch_size, self.seed = n_samples, batch_size, seed

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, t: int) -> Any:
        chosen = self.chosen(t)
        if isinstance(self.fetch, _Take):
            return self.fetch(chosen)
        rows = [int(self.population[i]) for i in chosen]
        with isolated_random(int(np.random.SeedSequence([self.seed, t, 1]).generate_state(1)[0])):
            return self.fetch(rows)

    def chosen(self, t: int) -> Indices:
        """Choose the rows of batch t."""
        return rows_of_draw(len(self.population), self.batch_size, self.seed, t)


class _Partition(_Rows):
    """All rows in a random order that depends on the seed alone, cut into batches whose sizes differ by one at most."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.order = np.random.Generator(np.random.Philox(key=self.seed)).permutation(len(self.population))

    def chosen(self, t: int) -> Indices:
        """Take part t."""
        N = len(self.order)
        return np.sort(self.order[t * N // len(self) : (t + 1) * N // len(self)])


def rows_of_draw(n: int, batch_size: int, seed: int, t: int) -> Indices:
    """Choose the M of N rows of draw t, sorted: in O(M), by a generator of (seed, t) alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, t]))  # counter-based: made for many streams
    chosen = generator.choice(n, batch_size, replace=False, shuffle=False)
    chosen.sort()
    return chosen


def _parallel(rows: _Rows, loader: DataLoader[Any]) -> Iterable[Any]:
    """Load draws with the workers of the user's own loader."""
    options: dict[str, Any] = {}
    if loader.num_workers:
        options = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        rows,
        batch_size=None,
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


class _Stream:
    """Batches taken as they come: from an IterableDataset or any iterable that has no index."""

    def __init__(self, source: Iterable[Any], batch_size: int | None) -> None:
        self.source, self.batch_size = source, batch_size

    def draws(self, n_samples: int, batch_size: int | None, seed: int) -> Draws:
        """Take the first T full batches, starting over where the stream ends early."""
        source = self.source
        if isinstance(source, IterableDataset):
            source = DataLoader(source, batch_size=batch_size or DEFAULT_BATCH_SIZE)
        elif batch_size is not None and batch_size != self.batch_size:
            raise MCBNError(
                f"batch_size={batch_size} cannot be drawn from ready batches; build the loader with that batch size"
            )
        with isolated_random(seed):
            iterator = iter(source)
            first = next(iterator, None)
        if first is None:
            raise MCBNError("the training data gives no batch at all")
        if iterator is source:  # a generator: what was taken from it goes back in front
            source = chain([first], iterator)
        M = self.batch_size or batches.size_of(first)
        if M == 1:
            _warn("the loader's batches hold one example each; pass the training loader")
        return Draws(_full_batches(source, n_samples, M), M, None)


def _full_batches(source: Iterable[Any], n_samples: int, M: int) -> Iterator[Any]:
    """Yield T batches of M examples, leaving out partial ones."""
    given = 0
    while True:
        before = given
        for batch in source:
            if batches.size_of(batch) != M:
                continue
            if given == before and before > 0:
                _warn(f"the stream gave {before} full batches and starts over; draws repeat unless it shuffles itself")
            yield batch
            given += 1
            if given == n_samples:
                return
        if given == before:
            raise MCBNError(f"the stream ended after {given} full batches of {M}; n_samples={n_samples} need as many")


class _Shuffled:
    """The ready batches of a map-style dataset, in a random order that is new each time round."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        dataset: Any = self.loader.dataset
        for i in np.random.permutation(len(dataset)).tolist():
            yield self.loader.collate_fn(dataset[i])


@contextmanager
def isolated_random(seed: int | None = None) -> Iterator[None]:
    """Run with the global generators (Python, NumPy, torch) seeded, or as they are, and put them back after."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            if cuda is not None:
                torch.cuda.manual_seed_all(seed)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
