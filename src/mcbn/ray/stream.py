"""The pool of Ray Data: items as a data set, mapped by its actors."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcbn.ray.cluster import require_ray


def run(
    ray: Any, kind: type, arguments: Sequence[Any], resources: dict[str, Any], items: Sequence[str], size: int
) -> Iterator[str]:
    """Yield what `kind(*arguments).work(item)` returns for every item once, in the order they end; as `actors.run`."""
    data = require_ray("ray.data")
    listed = data.from_items([{"item": item} for item in items], override_num_blocks=len(items))
    listed.context.enable_progress_bars = False  # the context of this data set alone
    listed.context.execution_options.preserve_order = False
    done = listed.map_batches(
        _Mapper,
        batch_size=1,
        compute=data.ActorPoolStrategy(size=size),
        fn_constructor_args=(kind, arguments),
        num_cpus=resources["num_cpus"],
        num_gpus=resources["num_gpus"] or None,
    )
    with _quiet():
        for row in done.iter_rows():
            yield row["answer"]


class _Mapper:
    def __init__(self, kind: type, arguments: Sequence[Any]) -> None:
        self.worker = kind(*arguments)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"answer": [self.worker.work(str(item)) for item in batch["item"]]}


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave the terminal to the caller: Ray Data reports every plan it runs."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
