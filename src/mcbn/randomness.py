"""The global random generators: left alone where nothing draws from them, else borrowed and given back.

Other threads draw from them too, and a generator that is put back repeats what they drew meanwhile.
"""

import random
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch

R = TypeVar("R")


def get_state() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and torch's global generators, as values that compare."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy: Any = np.random.get_state()
    of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)]
    return random.getstate(), (numpy[0], numpy[1].tobytes(), *numpy[2:]), of_torch


def set_state(state: tuple[Any, ...]) -> None:
    """Put the global generators into these states."""
    random.setstate(state[0])
    name, keys, *rest = state[1]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    cpu, *cuda = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in state[2])
    torch.set_rng_state(cpu)
    for device, of_device in enumerate(cuda):
        torch.cuda.set_rng_state(of_device, device)


@contextmanager
def isolated_random(seed: int | None = None) -> Iterator[None]:
    """Run with the global generators seeded, by their own state where no seed is given, and put them back after."""
    before = get_state()
    seed = zlib.crc32(before[2][0]) if seed is None else seed
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if len(before[2]) > 1:
            torch.cuda.manual_seed_all(seed)
        yield
    finally:
        set_state(before)


def iterate(source: Iterable[R], seed: int | None = None) -> Iterator[R]:
    """Yield the items of what may draw, each from a seed of its own; put back its generators, and the global ones."""
    generators = (getattr(holder, "generator", None) for holder in (source, getattr(source, "sampler", None)))
    held = {generator: generator.get_state() for generator in generators if isinstance(generator, torch.Generator)}
    with isolated_random(seed):
        iterator, first = iter(source), torch.initial_seed() + 1
    try:
        for number in count(first):
            with isolated_random(number):
                item = next(iterator, held)  # which no source gives
            if item is held:
                return
            yield item  # type: ignore[misc]
    finally:
        for generator, state in held.items():
            generator.set_state(state)


class Undisturbed:
    """Calls functions that may draw from the global generators, from a seed once one did; these stay as they were."""

    draws = False  # whether one did

    def __call__(self, function: Callable[[], R], seed: int, same: Callable[[R, R], bool]) -> R:
        """Return what a function gives; `same` tells whether two of its results are alike."""
        if not self.draws:
            before, alone = get_state(), threading.active_count() == 1
            try:
                result = function()
                if before == get_state() or (not alone and same(result, function())):  # another thread drew
                    return result
            except BaseException:
                set_state(before)  # it may have drawn; what others drew meanwhile comes again, which an error may cost
                raise
            self.draws = True
            set_state(before)
        with isolated_random(seed):
            return function()
