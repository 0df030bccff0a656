"""Two pools of actors that work on items one at a time: our own, and that of Ray Data, which its dashboard shows."""

import logging
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mcbn.ray.cluster import require_ray

TRIES = 4  # of one item, or of starting one actor, before its loss is an error
PATIENCE = 60.0  # seconds without any actor before a warning
LOST = ("RayActorError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError", "ObjectLostError")  # not the item's


class _Seat(NamedTuple):
    """An actor, and the item it is at work on; None while it starts."""

    number: int
    actor: Any
    item: str | None = None


def run_actors(
    ray: Any, kind: type, arguments: Sequence[Any], resources: dict[str, Any], items: Sequence[str], size: int
) -> Iterator[str]:
    """Yield what `kind(*arguments).work(item)` returns for every item once, in the order they end.

    An actor that has not started holds no item, so that one without room in the cluster holds nothing up. Which actor
    is lost, and how often, changes nothing as long as the same item ends the same.
    """
    pool = _Pool(ray, ray.remote(scheduling_strategy="SPREAD", max_restarts=0, **resources)(kind), arguments)
    try:
        yield from pool.run(items, size)
    finally:  # none outlives the job
        for seat in (*pool.seats.values(), *pool.idle):
            ray.kill(seat.actor)


class _Pool:
    def __init__(self, ray: Any, kind: Any, arguments: Sequence[Any]) -> None:
        self.ray, self.kind, self.arguments = ray, kind, arguments
        self.seats: dict[Any, _Seat] = {}  # by the reference to what is awaited
        self.idle: list[_Seat] = []
        self.lost: Counter[str | int] = Counter()
        self.patient = True

    def run(self, items: Sequence[str], size: int) -> Iterator[str]:
        todo = deque(items)
        for number in range(size):
            self._start(number)
        while todo or any(seat.item is not None for seat in self.seats.values()):
            reference, seat = self._next()
            try:
                answer = self.ray.get(reference)
            except tuple(getattr(self.ray.exceptions, name) for name in LOST) as error:
                self._replace(seat, error)
                todo.extendleft([seat.item] if seat.item is not None else [])
                answer = None
            else:
                self.idle.append(seat)
            while todo and self.idle:
                free, item = self.idle.pop(), todo.popleft()
                self.seats[free.actor.work.remote(item)] = free._replace(item=item)
            if answer is not None:  # an actor that has started answers None
                yield answer

    def _start(self, number: int) -> None:
        actor = self.kind.remote(*self.arguments)
        self.seats[actor.ready.remote()] = _Seat(number, actor)

    def _next(self) -> tuple[Any, _Seat]:
        """Wait for an actor to start, to end an item, or to be lost."""
        while True:
            ended, _ = self.ray.wait(list(self.seats), timeout=PATIENCE)
            if ended:
                self.patient = False
                return ended[0], self.seats.pop(ended[0])
            if self.patient:
                self.patient = False
                warnings.warn(
                    f"mcbn: no actor has started in {PATIENCE:.0f} seconds; the cluster has "
                    f"{self.ray.available_resources()} free: ask for fewer threads=, or wait for others to end",
                    stacklevel=2,
                )

    def _replace(self, seat: _Seat, error: Exception) -> None:
        """Start another actor where one was lost, unless the same item or place has lost too many."""
        lost = seat.number if seat.item is None else seat.item
        self.lost[lost] += 1
        if self.lost[lost] >= TRIES:
            raise error
        self.ray.kill(seat.actor)
        self._start(seat.number)


def run_data(
    ray: Any, kind: type, arguments: Sequence[Any], resources: dict[str, Any], items: Sequence[str], size: int
) -> Iterator[str]:
    """Yield what `kind(*arguments)` answers for every item once, in the order they end; as `run_actors`."""
    data = require_ray("ray.data")
    listed = data.from_items([{"item": item} for item in items], override_num_blocks=len(items))
    listed.context.enable_progress_bars = False  # the context of this data set alone
    listed.context.execution_options.preserve_order = False
    each = {"num_cpus": resources["num_cpus"], "num_gpus": resources["num_gpus"] or None, "batch_size": 1}
    done = listed.map_batches(
        kind, compute=data.ActorPoolStrategy(size=size), fn_constructor_args=tuple(arguments), **each
    )
    logger = logging.getLogger("ray.data")  # it reports every plan it runs: leave the terminal to the caller
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield from (row["answer"] for row in done.iter_rows())
    finally:
        logger.setLevel(before)
