"""Training batches: right rows, right size, the user's own loader machinery, and a seed that decides all."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import mcbn
from drawn import rows_of_draw
from mcbn.batching import draw_batches
from untouched import generators

N = 40
ROWS = torch.arange(N)


def drawn(data: Any, **options: Any) -> list[Any]:
    return list(draw_batches(data, **{"n_samples": 6, "batch_size": None, "seed": 0, **options}).batches)


def first(batch: Any) -> Tensor:
    return batch[0] if isinstance(batch, tuple | list) else batch


class Noisy(Dataset[Tensor]):
    """Examples with a random transform that uses all three global generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64)


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        ROWS.numpy(),
        (ROWS, ROWS),
        TensorDataset(ROWS, ROWS),
        DataLoader(TensorDataset(ROWS, ROWS), batch_size=7),
        DataLoader(ROWS, batch_size=7, shuffle=True),
        [int(i) for i in ROWS],
    ],
    ids=["tensor", "array", "tuple", "dataset", "loader", "shuffled", "list"],
)
def test_batches_hold_m_different_rows_and_draws_differ(data: Any) -> None:
    got = [first(batch).tolist() for batch in drawn(data, batch_size=7, n_samples=30)]
    assert all(len(set(rows)) == 7 for rows in got)
    assert len({tuple(rows) for rows in got}) == 30
    assert {row for rows in got for row in rows} == set(range(N))


def test_every_batch_is_equally_likely() -> None:
    T = 6000
    count = Counter(tuple(rows_of_draw(5, 2, 0, t)) for t in range(T))
    expected = T / 10
    assert set(count) == set(combinations(range(5), 2))
    chi_square = sum((value - expected) ** 2 / expected for value in count.values())
    assert chi_square < 27.9  # 99.9 % of chi-square with 9 degrees of freedom


def test_draw_depends_on_seed_and_number_alone() -> None:
    few, many = drawn(ROWS, batch_size=4), drawn(ROWS, batch_size=4, n_samples=20)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))
    assert not all(torch.equal(a, b) for a, b in zip(few, drawn(ROWS, batch_size=4, seed=1), strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_are_seeded_per_draw_whatever_the_workers(workers: int) -> None:
    reference = drawn(Noisy(), batch_size=5)
    state = generators()
    again = drawn(DataLoader(Noisy(), batch_size=5, num_workers=workers))
    assert all(torch.equal(a, b) for a, b in zip(reference, again, strict=True))
    assert generators() == state
    assert len({float(b[0, column]) for b in reference for column in (1, 2, 3)}) == 18


def test_loader_gives_batch_size_and_collate_function() -> None:
    loader = DataLoader(TensorDataset(ROWS), batch_size=6, collate_fn=lambda rows: ("mine", len(rows)))
    assert drawn(loader) == [("mine", 6)] * 6
    assert drawn(loader, batch_size=3) == [("mine", 3)] * 6


def test_dataset_that_fetches_many_rows_at_once() -> None:
    class Many(Dataset[Tensor]):
        def __len__(self) -> int:
            return N

        def __getitems__(self, rows: list[int]) -> list[Tensor]:
            return [ROWS[row] + 100 for row in rows]

    assert all((batch >= 100).all() and len(batch) == 5 for batch in drawn(Many(), batch_size=5))


def test_last_partial_batch_of_a_loader_never_becomes_a_draw() -> None:
    loader = DataLoader(TensorDataset(ROWS[:33]), batch_size=8)  # leaves one row over
    assert all(len(first(batch)) == 8 for batch in drawn(loader, n_samples=50))


@pytest.mark.parametrize(
    ("sampler", "allowed"),
    [
        (SubsetRandomSampler([1, 2, 3, 5, 8]), {1, 2, 3, 5, 8}),
        (WeightedRandomSampler([0.0] * 30 + [1.0] * 10, 40), set(range(30, 40))),
        (SequentialSampler(ROWS), set(range(N))),
        (RandomSampler(ROWS, replacement=True, num_samples=3), set(range(N))),
    ],
)
def test_rows_a_sampler_leaves_out_are_never_drawn(sampler: Any, allowed: set[int]) -> None:
    loader = DataLoader(TensorDataset(ROWS), batch_size=4, sampler=sampler)
    rows = {row for batch in drawn(loader, n_samples=60) for row in first(batch).tolist()}
    assert rows <= allowed
    assert len(rows) > 0.8 * len(allowed)


def test_batch_sampler_of_ones_own() -> None:
    class Pairs(Sampler[list[int]]):
        batch_size = 2

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [4, 5]])

    loader = DataLoader(TensorDataset(ROWS), batch_sampler=Pairs())
    rows = {row for batch in drawn(loader, n_samples=20) for row in first(batch).tolist()}
    assert rows == {0, 1, 4, 5}


def test_ready_batches_are_drawn_whole_in_random_order() -> None:
    class Ready(Dataset[Tensor]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> Tensor:
            return ROWS[i * 8 : i * 8 + 8]

    loader = DataLoader(Ready(), batch_size=None)
    with pytest.warns(UserWarning, match="starts over"):
        got = [int(batch[0]) // 8 for batch in drawn(loader, n_samples=10)]
    assert sorted(got[:5]) == sorted(got[5:]) == list(range(5))
    with pytest.raises(mcbn.MCBNError, match="cannot be drawn from ready batches"):
        drawn(loader, batch_size=3)


def test_ready_batches_of_a_sampler_are_those_it_names() -> None:
    sampler = BatchSampler(RandomSampler(range(N)), 8, drop_last=True)
    batches = drawn(DataLoader(ROWS, batch_size=None, sampler=sampler), n_samples=N // 8)
    assert [len(set(batch.tolist())) for batch in batches] == [8] * (N // 8)


class Stream(IterableDataset[Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.n))


def test_stream_is_taken_as_it_comes_without_partial_batches() -> None:
    got = drawn(DataLoader(Stream(100), batch_size=8), n_samples=12)
    assert torch.equal(torch.cat(got), torch.arange(96))
    assert [len(batch) for batch in drawn(Stream(100), batch_size=10, n_samples=3)] == [10] * 3
    assert len(drawn((ROWS[:4] for _ in range(6)), n_samples=6)) == 6


def test_stream_that_ends_early_starts_over_and_says_so() -> None:
    with pytest.warns(UserWarning, match="gave 2 full batches and starts over"):
        got = drawn(DataLoader(Stream(17), batch_size=8), n_samples=4)
    assert torch.equal(got[0], got[2])


def test_generator_that_ends_early_is_an_error() -> None:
    with pytest.raises(mcbn.MCBNError, match="ended after 3 full batches of 4"):
        drawn((ROWS[:4] for _ in range(3)), n_samples=6)


def test_stream_of_single_examples_warns() -> None:
    with pytest.warns(UserWarning, match="one example each"):
        draw_batches(DataLoader(Stream(9), batch_size=1), n_samples=2, batch_size=None, seed=0)


def test_data_without_a_batch_size_gets_one_and_a_warning() -> None:
    with pytest.warns(UserWarning, match="drawing batches of 32"):
        assert len(drawn(ROWS)[0]) == 32


def test_rows_of_tensors_are_those_of_each_draw() -> None:
    got = drawn((ROWS, ROWS + 1), batch_size=7, n_samples=70, seed=3)
    for t, (x, y) in enumerate(got):
        assert x.tolist() == rows_of_draw(N, 7, 3, t).tolist()
        assert torch.equal(y, x + 1)
