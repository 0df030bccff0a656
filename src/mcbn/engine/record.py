"""Training batches through the network, batch norm as in training: the statistics of every draw.

The first batches run through the network's own code. A program traced on them that repeated their statistics takes
the rest; where one batch is little work, a group of them goes in one pass (`torch.vmap`). Why draw t has the same bits
whatever T is, and in every share of the draws, stands in `graph.md`.
"""

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import Record
from mcbn.batches import Picker, pick_inputs
from mcbn.batching import GROUP, TrainingBatches
from mcbn.engine import constants
from mcbn.engine.agree import MEANS, VARIANCES, agree, is_tf32
from mcbn.engine.trace import RecordTracer, state_of
from mcbn.errors import MCBNError
from mcbn.layers import Layers, stochastic_layers
from mcbn.network import Network
from mcbn.posterior import Posterior

ROWS = 128  # draws that there is room for at first: more than the default T; unused rows take no memory
DECIDING = 2  # first draws, by which it is decided how the rest run
Statistics = Mapping[str, tuple[Tensor, Tensor]]  # call name -> mean and variance, in calling order


class Recorded(NamedTuple):
    """What one pass over the drawn batches gives: the posterior, and what the drift check compares it with."""

    posterior: Posterior
    running: Mapping[str, tuple[Tensor, Tensor]]  # name -> running mean and variance, each (C,)
    values: Mapping[str, int]  # name -> values per channel in a batch
    first: Any  # one batch of the data, as the network takes it


def record(network: Network, drawn: TrainingBatches, layers: Layers, inputs: Picker) -> Recorded:
    """Run every drawn batch through the network with batch norm as in training; keep the statistics.

    A draw is joint: one batch sets all layers, each seeing inputs already normalised by that batch (Algorithm 1).
    """
    keys = network.accepted_keys
    picked = (pick_inputs(batch, inputs, keys) for batch in drawn.batches)
    first = next(picked)  # there is one, or `draw_batches` would have refused the data
    with torch.no_grad():
        x = network.prepare(first)
        recorder = Recorder(network, stochastic_layers(network, x, layers))
        with network.undisturbed(drawn.seed):
            mean, var = join(recorder.all(chain([first], picked), drawn.numbers))
    numbers = None if drawn.numbers is None else tuple(drawn.numbers)
    posterior = Posterior(mean, var, drawn.batch_size, seed=drawn.seed, numbers=numbers)
    return Recorded(posterior, recorder.running, recorder.values, x)


class Recorder:
    """Records batches; knows from earlier ones of the same shape how to do it fast."""

    def __init__(self, network: Network, chosen: frozenset[str]) -> None:
        self.network, self.chosen = network, chosen
        self.running: Mapping[str, tuple[Tensor, Tensor]] = {}
        self.values: Mapping[str, int] = {}
        # By shape: the trace of the first batch, whose program the second proves; None: there is none
        self._traces: dict[Any, RecordTracer | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.network, self.chosen)  # programs are found again

    def all(self, picked: Iterator[Any], numbers: Sequence[int] | None = None) -> Iterator[Statistics]:
        """Yield the statistics of one or more batches at a time, (t, C) each, in order; `numbers` are their t."""
        first = list(islice(picked, DECIDING))
        alone = [self(x) for x in first]
        tracer = self._traces.get(batches.key_of(self.network.prepare(first[-1])))
        on_gpu = self.network.device is not None and self.network.device.type == "cuda"
        most = constants.GPU_GROUP_WIDTH if on_gpu else constants.CPU_GROUP_WIDTH
        if tracer is None or tracer.forward is None or tracer.width > most:  # one by one is faster
            yield from chain(alone, map(self, picked))
            return
        numbered = zip(count() if numbers is None else numbers, chain(first, picked), strict=False)
        shape, proven = batches.key_of(first[-1]), None  # whether groups give what their batches give alone
        for _, members in groupby(numbered, lambda pair: pair[0] // GROUP):
            group, together = [x for _, x in members], None
            if proven is not False and all(batches.key_of(x) == shape for x in group):
                together = self._together(tracer.forward, group)
                proven = together is not None and (proven or statistics_agree(_first(together), self(group[0])))
            yield from [together] if together is not None and proven else map(self, group)

    def __call__(self, x: Any) -> Statistics:
        """Return the statistics of one batch, (1, C) each."""
        x = self.network.prepare(x)
        shape = batches.key_of(x)
        tracer = self._traces.get(shape)
        recorded: Statistics | None = None
        if tracer is not None and tracer.forward is not None:
            with suppress(Exception):  # an operation that fails on this batch alone: the network may know what to do
                recorded = tracer.forward(*batches.tensors_of(x))
        elif tracer is not None or shape not in self._traces:
            recorded = self._trace(x, shape)
        if recorded is None:
            with Record(self.chosen) as mode:
                self.network.run_copy(x)
            recorded = self._seen(mode)
            if sum(tensor.numel() for tensor in batches.tensors_of(x)) >= constants.CPU_RELEASED_FROM:
                release_memory()
        return {name: (mean.unsqueeze(0), var.unsqueeze(0)) for name, (mean, var) in recorded.items()}

    def _seen(self, mode: Record) -> Statistics:
        self.running, self.values = mode.running, mode.values
        return {name: (mode.mean[name], mode.var[name]) for name in mode.mean}

    def _trace(self, x: Any, shape: Any) -> Statistics | None:
        """Record the first or second batch of a shape and trace it; the program of both takes the next ones."""
        network, tracer, first = self.network, RecordTracer(self.chosen), self._traces.get(shape)
        state = state_of(network)
        self._traces[shape] = None
        if len(self._traces) > constants.PROGRAMS_KEPT:
            return None
        try:
            tracer.trace_once(network, x, watched=first is None)
        except Exception:  # whatever a foreign network does while watched, its own code can still be run
            return None
        recorded = self._seen(tracer)
        most = math.inf if tracer.on_gpu else constants.CPU_TRACED_WIDTH
        if first is None and not tracer.changes_inputs and tracer.width <= most:
            self._traces[shape] = tracer
        elif first is not None and (first.steps(), state) == (tracer.steps(), state_of(network)):
            program = first.program()
            with suppress(Exception):  # an operation that cannot be repeated outside the network
                if statistics_agree(program(*batches.tensors_of(x)), recorded):
                    self._traces[shape], first.forward = first, program
        return recorded

    def _together(self, program: Callable[..., Any], group: Sequence[Any]) -> Statistics | None:
        """Record up to a whole group in one pass of a whole group, (t, C) each; None where that cannot be done."""
        rows = [batches.tensors_of(x) for x in group]
        rows += rows[-1:] * (GROUP - len(rows))
        try:
            stacked = self.network.prepare([torch.stack(column) for column in zip(*rows, strict=True)])
            return _first(torch.vmap(program)(*stacked), len(group))
        except Exception:  # no memory, or an operation without a batching rule
            return None


def release_memory() -> None:
    """Give free memory back to the system: glibc keeps the holes between values that passes keep, ever more of them."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _first(recorded: Statistics, count: int = 1) -> Statistics:
    return {name: (mean[:count], var[:count]) for name, (mean, var) in recorded.items()}


def statistics_agree(recorded: Statistics, expected: Statistics) -> bool:
    """Tell whether two recordings of one batch hold the same numbers, channel by channel."""
    if list(recorded) != list(expected):
        return False
    for name, (mean, var) in expected.items():
        mean_again, var_again = recorded[name]
        # a mean is as exact as its values: in TF32 relative to their spread, else to its own size, 0.1 at least
        scales = (var.sqrt(), var) if is_tf32(mean) else (mean.abs() + 0.1, var + 1e-5)
        if not agree(mean_again, mean, MEANS, scale=scales[0]) or not agree(var_again, var, VARIANCES, scale=scales[1]):
            return False
    return True


def join(blocks: Iterable[Statistics]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Join blocks (t, C) of each layer into (T, C), refusing what is not one row a draw or not finite.

    Into one buffer a layer, large from the start: small results kept between the large ones of a pass keep the
    allocator from using that memory again (ResNet-18, T = 100: 270 MB).
    """
    buffers, counts, T = dict[str, Tensor](), Counter[str](), 0  # (capacity, 2, C)
    for block in blocks:
        T += len(next(iter(block.values()))[0])
        for name, pair in block.items():
            rows = torch.stack(pair, 1)  # (t, 2, C)
            start, counts[name] = counts[name], counts[name] + len(rows)
            held = buffers.get(name, rows[:0])
            if counts[name] > len(held):
                kept, held = held, rows.new_empty(max(ROWS, 2 * counts[name]), *rows.shape[1:])
                held[:start] = kept[:start]
            held[start : counts[name]] = rows
            buffers[name] = held
    for name, calls in counts.items():
        if calls != T:
            raise MCBNError(f"layer {name!r} was called for {calls} of {T} training batches: leave it out with layers=")
        if not bool(torch.isfinite(buffers[name][:T]).all()):
            raise MCBNError(f"layer {name!r} has non-finite statistics; the network overflows on its training data")
    mean, var = ({name: held[:T, kind].clone() for name, held in buffers.items()} for kind in (0, 1))
    return mean, var
