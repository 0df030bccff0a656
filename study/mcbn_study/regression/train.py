"""One program that trains S networks at once: stacked gradients, one fused Adam, CUDA graphs on a GPU."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn.engine.capture import capture, warm_up
from mcbn.errors import MCBNError
from mcbn.private_torch import allow_steps_before_capture
from mcbn_study.machine import precision
from mcbn_study.regression import fused as fused_steps
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.stack import Family, Values, bn_gradients, dropout_gradients, initial_values
from mcbn_study.regression.streams import Purpose, purpose_key, row_orders, uniforms

LEARNING_RATE = 1e-3  # Teye et al. 2018, Section 4.3
BLOCK_STEPS = 32  # at most so many steps in one CUDA graph
FUSED_STEPS = 128  # and in one kernel
BLOCK_NUMBERS = {"cpu": 2**20, "cuda": 2**27}  # that batches and masks of a block may hold
ORDER_NUMBERS = 2**24  # rows permuted at a time
EPOCH_STEPS = 2**16  # more than any epoch has: positions of dropout masks


@dataclass(frozen=True)
class Networks:
    """S networks to train: the stream of each and its configuration.

    stream (S,) indexes `Problem.streams`; weight_decay (S,) is lambda; rate (S,) of dropout, unused by "bn".
    """

    family: Family
    stream: Tensor
    weight_decay: Tensor
    rate: Tensor
    batch_size: int
    hidden: int = 50

    def __getitem__(self, index: Tensor) -> "Networks":
        chosen = (self.stream[index], self.weight_decay[index], self.rate[index])
        return Networks(self.family, *chosen, self.batch_size, self.hidden)

    def like(self, x: Tensor) -> "Networks":
        """Bring the tensors to the device and the precision of x."""
        moved = (self.stream.to(x.device), self.weight_decay.to(x), self.rate.to(x))
        return Networks(self.family, *moved, self.batch_size, self.hidden)


class _Group(NamedTuple):
    """Consecutive networks whose streams have equally many batches in an epoch."""

    rows: slice
    steps: int


class _Block(NamedTuple):
    """Memory that a block of steps reads its batches from."""

    x: Tensor  # (S, k M, Q)
    y: Tensor  # (S, k M)
    uniform: Tensor  # (R, k M, Q + 2H) of the dropout family


class Trainer:
    """S networks in training: `advance` trains them further, `values` holds their parameters, `keep` drops some.

    What becomes of a network depends on its stream and configuration alone, not on its company. Streams may differ
    in their number of batches: networks that have none left wait, unchanged, until the epoch ends. Networks come in
    ascending order of that number.

    tf32: multiply as TF32; graphs: capture blocks of steps as CUDA graphs (the default on a GPU); compiled: fuse
    elementwise work by torch.compile; fused: whole blocks of steps as one CUDA kernel, where CuPy is and networks fit.
    """

    def __init__(
        self,
        problem: Problem,
        networks: Networks,
        *,
        tf32: bool = False,
        graphs: bool | None = None,
        compiled: bool = False,
        fused: bool = False,
    ) -> None:
        device = problem.device
        self.problem, self.networks, self.tf32, self.epoch = problem, networks.like(problem.train.x), tf32, 0
        self._graphs = device.type == "cuda" if graphs is None else graphs
        self._gradients = _gradients(networks.family, compiled)
        self._kernel: Any = _kernel(networks) if fused else None
        drawn = initial_values(networks.family, problem.streams, problem.train.x.shape[2], networks.hidden)
        self.values: Values = {name: value.to(problem.train.x)[self.networks.stream] for name, value in drawn.items()}
        self._row_keys, self._mask_keys = self._keys("rows"), self._keys("training dropout")
        self._start({})

    def advance(self, epochs: int) -> None:
        """Train every network for so many further epochs."""
        chunk = max(1, ORDER_NUMBERS // self.problem.train.y.numel())
        end = self.epoch + epochs
        with precision(self.tf32):
            while self.epoch < end:
                now = torch.arange(self.epoch, min(self.epoch + chunk, end), device=self.problem.device)
                orders = row_orders(self._row_keys, self.problem.train.n, now)  # (R, E, N)
                for rows, positions, active in self._segments(orders, now):
                    self._train(rows, positions, active)
                self.epoch += len(now)

    def keep(self, index: Tensor) -> None:
        """Go on with the networks at `index`, ascending, alone."""
        moments = {name: [part[index] for part in parts] for name, parts in self._moments().items()}
        self.values = {name: value[index] for name, value in self.values.items()}
        self.networks = self.networks[index]
        self._start(moments)

    def state(self) -> dict[str, Tensor]:
        """Return everything that training goes on from, to be handed to `restore`."""
        state = {f"value.{name}": value for name, value in self.values.items()}
        for name, parts in self._moments().items():
            state |= {f"first.{name}": parts[0], f"second.{name}": parts[1]}
        return state | {"epoch": torch.tensor(self.epoch)}

    def restore(self, state: dict[str, Tensor], index: Tensor) -> None:
        """Go on from a state: that of the networks at `index`, which alone remain."""
        self.networks, self.epoch = self.networks[index], int(state["epoch"])
        like = self.problem.train.x
        self.values = {name: state[f"value.{name}"].to(like) for name in self.values}
        kinds = ("first", "second")
        self._start({n: [state[f"{kind}.{n}"].to(like) for kind in kinds] for n in self.values})

    def _start(self, moments: dict[str, list[Tensor]]) -> None:
        """Make the optimizer of the present networks, with the moments they have, and forget captured graphs."""
        self._groups = _groups((self.problem.train.n // self.networks.batch_size)[self.networks.stream])
        self._parameters = [{n: value[g.rows] for n, value in self.values.items()} for g in self._groups]
        every = [parameter for group in self._parameters for parameter in group.values()]
        self._optimizer = torch.optim.Adam(every, lr=LEARNING_RATE, fused=True, capturable=self._graphs)
        allow_steps_before_capture(self._optimizer)
        for group, parameters in zip(self._groups, self._parameters, strict=True):
            for name, parts in moments.items():
                first, second = (part[group.rows] for part in parts)
                taken = torch.tensor(float(self.epoch * group.steps), device=first.device)
                state = {"step": taken, "exp_avg": first, "exp_avg_sq": second}
                self._optimizer.state[parameters[name]] = state
        self._taken = self.epoch * self._groups[0].steps  # by the first group
        self._blocks: dict[int, _Block] = {}
        self._captured: dict[tuple[int, int], Callable[[], None] | None] = {}

    def _moments(self) -> dict[str, list[Tensor]]:
        """Return Adam's two moments of all networks by parameter; nothing before the first step."""
        if not self._optimizer.state:
            return {}
        states = [{n: self._optimizer.state[p] for n, p in group.items()} for group in self._parameters]
        kinds = ("exp_avg", "exp_avg_sq")
        return {n: [torch.cat([state[n][kind] for state in states]) for kind in kinds] for n in self.values}

    def _segments(self, orders: Tensor, epochs: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield runs of steps: rows (R, k M), positions (k,) and the first group that takes part."""
        M = self.networks.batch_size
        equal = len(self._groups) == 1
        for some in [slice(None)] if equal else [slice(e, e + 1) for e in range(len(epochs))]:
            first = 0
            for active, group in enumerate(self._groups):
                steps = torch.arange(first, group.steps, device=epochs.device)
                rows = orders[:, some, first * M : group.steps * M].flatten(1)
                yield rows, (epochs[some, None] * EPOCH_STEPS + steps).flatten(), active
                first = group.steps

    def _train(self, rows: Tensor, positions: Tensor, active: int) -> None:
        M = self.networks.batch_size
        for start in range(0, len(positions), self._block_steps()):
            now = positions[start : start + self._block_steps()]
            size = len(now)
            self._load(rows[:, start * M : (start + size) * M], now)
            self._run(size, active)

    def _fuses(self) -> bool:
        return self._kernel is not None and len(self._groups) == 1

    def _block_steps(self) -> int:
        S, R = len(self.networks.stream), len(self.problem.streams)
        Q, H = self.problem.train.x.shape[2], self.networks.hidden
        numbers = S * (Q + 1) + (R * (Q + 2 * H) if self.networks.family == "dropout" else 0)
        most = BLOCK_NUMBERS[self.problem.device.type] // (numbers * self.networks.batch_size)
        return max(1, min(FUSED_STEPS if self._fuses() else BLOCK_STEPS, most))

    def _load(self, rows: Tensor, positions: Tensor) -> None:
        """Bring the batches of the next steps, and their dropout uniforms, to where the steps read them."""
        train, n = self.problem.train, self.networks
        R, N, Q = train.x.shape
        at = (rows + torch.arange(0, R * N, N, device=rows.device)[:, None])[n.stream]  # (S, k M)
        units = Q + 2 * n.hidden if n.family == "dropout" else 0
        uniform = uniforms(self._mask_keys, positions, n.batch_size, units).flatten(1, 2)
        new = _Block(train.x.view(R * N, Q)[at], train.y.view(R * N)[at], uniform)
        block = self._blocks.setdefault(len(positions), new)
        if block is not new:  # a captured graph reads from where the first block was
            for target, source in zip(block, new, strict=True):
                target.copy_(source)

    def _run(self, size: int, active: int) -> None:
        """Take the steps of a loaded block: eagerly the first time, then as a CUDA graph."""
        key = (size, active)
        if self._fuses():
            self._take_fused_steps(size)
        elif not self._graphs:
            self._take_steps(size, active)
        elif key not in self._captured:
            self._captured[key] = None
            warm_up(partial(self._take_steps, size, active))
        else:
            steps = self._captured[key] or capture(partial(self._take_steps, size, active), warm_ups=0)
            self._captured[key] = steps
            steps()

    def _take_fused_steps(self, size: int) -> None:
        """Take the steps in one kernel; moments stay where Adam would have them."""
        block, state, n = self._blocks[size], self._optimizer.state, self.networks
        for parameter in self._parameters[0].values():
            if not state[parameter]:
                zeros = [torch.zeros_like(parameter) for _ in range(2)]
                taken = torch.zeros((), device=parameter.device)
                state[parameter] = {"step": taken, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
        moments = {name: (state[p]["exp_avg"], state[p]["exp_avg_sq"]) for name, p in self._parameters[0].items()}
        self._kernel.take_steps(n.family, self.values, moments, *block, n, self._taken, LEARNING_RATE)
        self._taken += size
        for parameter in self._parameters[0].values():
            state[parameter]["step"].fill_(self._taken)

    def _take_steps(self, size: int, active: int) -> None:
        block, M, n = self._blocks[size], self.networks.batch_size, self.networks
        for k in range(size):
            batch = slice(k * M, (k + 1) * M)
            rest = (block.uniform[:, batch], n.stream, n.rate) if n.family == "dropout" else ()
            grads = self._gradients(self.values, block.x[:, batch], block.y[:, batch], n.weight_decay, *rest)
            for i, (group, parameters) in enumerate(zip(self._groups, self._parameters, strict=True)):
                for name, parameter in parameters.items():
                    parameter.grad = grads[name][group.rows] if i >= active else None
            self._optimizer.step()

    def _keys(self, purpose: Purpose) -> Tensor:
        return torch.tensor([purpose_key(s, purpose) for s in self.problem.streams], device=self.problem.device)


@cache
def _gradients(family: Family, compiled: bool) -> Callable[..., Values]:
    function: Callable[..., Values] = bn_gradients if family == "bn" else dropout_gradients
    return torch.compile(function, dynamic=True) if compiled else function


def _kernel(networks: Networks) -> Any:
    """Return the module of fused steps if such networks fit, else None."""
    if importlib.util.find_spec("cupy") is None:
        raise MCBNError(
            "fused steps are a CUDA kernel that CuPy compiles, and CuPy is not installed; install it for your CUDA "
            "(pip install cupy-cuda13x), or run without --fused"
        )
    return fused_steps if fused_steps.fits(networks.family, networks.batch_size, networks.hidden) else None


def _groups(steps: Tensor) -> list[_Group]:
    """Cut the networks, (S,) batches an epoch, into groups of equal number."""
    numbers, counts = (part.tolist() for part in torch.unique_consecutive(steps, return_counts=True))
    if numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise MCBNError(
            f"networks must come in ascending order of batches an epoch, at least 1; got {numbers}: sort them by the "
            "size of their training part and leave out batch sizes above it"
        )
    groups, start = [], 0
    for number, count in zip(numbers, counts, strict=True):
        groups.append(_Group(slice(start, start + count), number))
        start += count
    return groups
