"""A progress bar on a terminal for what takes longer than a second; elsewhere nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mcbn import batches
from mcbn.network import Network

Tick = Callable[[int], object]
SHOW_AFTER = 1.0  # seconds


@contextmanager
def bar(title: str, total: int | None, unit: str) -> Iterator[Tick]:
    """Give a function that counts what is done; without tqdm, or without a terminal, it shows nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _: None
        return
    look = {"unit": unit, "unit_scale": unit == "B", "disable": None, "delay": SHOW_AFTER, "leave": False}
    with tqdm(total=total, desc=title, **look) as shown:
        yield shown.update


@contextmanager
def counting(bayes: Any, tick: Tick) -> Iterator[None]:
    """Call tick(1) for every batch that reaches the network of an `MCBN`, whichever process put it together."""
    before, names = bayes.inputs, (bayes.network or Network(bayes.model)).accepted_keys

    def pick_and_tick(batch: Any) -> Any:
        tick(1)
        return batches.pick_inputs(batch, before, names)

    bayes.inputs = pick_and_tick
    try:
        yield
    finally:
        bayes.inputs = before
