"""Training data of any kind, as examples fetched by index or as a stream of ready batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as loading
from torch.utils.data import DataLoader, IterableDataset

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.randomness import isolated_random

PLAIN_SAMPLERS = (loading.RandomSampler, loading.SequentialSampler, loading.DistributedSampler)  # visit every row
DEFAULT_BATCH_SIZE = 32  # of the paper's CIFAR-10 network, where data comes without a loader


class Source(NamedTuple):
    """Examples that can be fetched by index, as batches of the user's own making."""

    fetch: Callable[[Any], Any]
    population: Sequence[int]
    batch_size: int | None = None
    loader: DataLoader[Any] | None = None  # the user's own, for its workers


def read_source(data: Any) -> "Source | Stream":
    """Read any training data as examples by index, or as a stream of ready batches."""
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        return _from_tensors(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return Source(partial(fetch, data, loading.default_collate), range(len(data)))
    if isinstance(data, Iterable):
        return Stream(data)
    raise MCBNError(f"fit takes a DataLoader, a Dataset or tensors; got {batches.describe(data)}")


def _from_tensors(data: Any) -> Source:
    sizes = {int(t.shape[0]) if t.ndim else 0 for t in batches.tensors_of(data)}
    if len(sizes) != 1:
        raise MCBNError(f"training tensors must share their first axis; got {batches.describe(data)}")
    return Source(Take(data), range(sizes.pop()))


def _from_loader(loader: DataLoader[Any]) -> "Source | Stream":
    """Respect dataset, transforms, collate_fn, batch size and the set of rows of a loader; not its order."""
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, loader.batch_size)
    if loader.batch_sampler is None:  # the dataset hands out ready batches
        return Stream(_Shuffled(loader))
    size = getattr(loader.batch_sampler, "batch_size", None)
    rows = partial(fetch, loader.dataset, loader.collate_fn)
    return Source(rows, _population(loader), size if isinstance(size, int) else None, loader)


def _population(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the rows a loader visits: all, or for a sampler of its own making those of one epoch."""
    N = len(loader.dataset)  # type: ignore[arg-type]
    single = type(loader.batch_sampler) is loading.BatchSampler  # batches what the sampler gives one by one
    if single and isinstance(loader.sampler, PLAIN_SAMPLERS):
        return range(N)
    with isolated_random(0):
        if single:
            return [int(i) for i in islice(loader.sampler, 10 * N)]
        return [int(i) for batch in islice(loader.batch_sampler or [], 10 * N) for i in batch]


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
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(rows))
    return collate([dataset[row] for row in rows])


class Stream:
    """Batches taken as they come: from an IterableDataset or any iterable that has no index."""

    def __init__(self, source: Iterable[Any], batch_size: int | None = None) -> None:
        self.source, self.batch_size = source, batch_size

    def batches(self, n_samples: int, batch_size: int | None, seed: int) -> tuple[Iterator[Any], int]:
        """Take the first T full batches, starting over where the stream ends early; return them with their size M."""
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
            warn("the loader's batches hold one example each; pass the training loader")
        return _full_batches(source, n_samples, M), M


def _full_batches(source: Iterable[Any], n_samples: int, M: int) -> Iterator[Any]:
    """Yield T batches of M examples, leaving out partial ones."""
    yielded = 0
    while True:
        before = yielded
        for batch in source:
            if batches.size_of(batch) != M:
                continue
            if yielded == before and before > 0:
                warn(f"the stream gave {before} full batches and starts over; draws repeat unless it shuffles itself")
            yield batch
            yielded += 1
            if yielded == n_samples:
                return
        if yielded == before:
            raise MCBNError(f"the stream ended after {yielded} full batches of {M}; n_samples={n_samples} need as many")


class _Shuffled:
    """The ready batches of a map-style dataset, in a random order that is new each time round."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        dataset: Any = self.loader.dataset
        for i in np.random.permutation(len(dataset)).tolist():
            yield self.loader.collate_fn(dataset[i])


def warn(message: str) -> None:
    """Warn at the user's own line: three functions of ours lie between."""
    warnings.warn(f"mcbn: {message}", UserWarning, stacklevel=5)
