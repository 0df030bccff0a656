"""Many batches of one size in one pass: every batch norm normalises each of them by its own statistics."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, BatchNormMode, scale_and_shift, statistics_dtype
from mcbn.engine.record import Recorder, Statistics, statistics_agree

AT_ONCE = {"cpu": 256, "cuda": 4096}  # inputs in one pass


class Grouped(BatchNormMode):
    """Record G batches of M inputs that come as G M rows, one after the other."""

    def __init__(self, chosen: frozenset[str], groups: int) -> None:
        super().__init__()
        self.chosen, self.groups = chosen, groups
        self.statistics: dict[str, tuple[Tensor, Tensor]] = {}  # (G, C) each

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise each batch as training does."""
        if call.layer not in self.chosen:
            return call.unchanged()
        G, C = self.groups, call.x.shape[1]
        x = call.x.reshape(G, len(call.x) // G, C, -1)  # (G, M, C, positions)
        var, mean = torch.var_mean(x.to(statistics_dtype(x)), (1, 3), correction=0)
        self.statistics[call.name] = mean, var
        scale, shift = scale_and_shift(mean, var, call.weight, call.bias, call.eps)  # (G, C)
        normal = torch.addcmul(shift[:, None, :, None], x, scale[:, None, :, None])
        return normal.to(call.x.dtype).reshape(call.x.shape)


def record_all(recorder: Recorder, batch_stream: Iterable[Any]) -> Iterator[Statistics]:
    """Yield the statistics of batches of one size, (t, C) each, as `Recorder.all` does, many in one pass.

    Where the first batch alone does not give the same, its rows are mixed in another way: the recorder does the rest.
    """
    remaining = iter(batch_stream)
    first = next(remaining, None)
    if first is None:
        return
    alone, M = recorder(first), batches.size_of(first)
    device = recorder.network.device
    G = max(1, AT_ONCE["cpu" if device is None else device.type] // M)
    group, proven = [first, *islice(remaining, G - 1)], False
    while group:
        together = _together(recorder, group) if len(group) > 1 else None
        if not proven and together is not None:
            proven = statistics_agree({n: (m[:1], v[:1]) for n, (m, v) in together.items()}, alone)
        if together is None or not proven:
            yield from recorder.all(iter(group))
        else:
            yield together
        group = list(islice(remaining, G))


def _together(recorder: Recorder, group: list[Any]) -> Statistics | None:
    """Record a group in one pass; None where the network cannot take it so."""
    x = recorder.network.prepare(batches.concatenate(group))
    try:
        with Grouped(recorder.chosen, len(group)) as mode:
            recorder.network.run_copy(x)
    except Exception:  # whatever a foreign network does with more rows than it was made for
        return None
    return mode.statistics
