"""One program that trains S networks at once: stacked gradients, one fused Adam, CUDA graphs on a GPU."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from mcbn import data, stacked
from mcbn.engine.capture import capture, warm_up
from mcbn.errors import MCBNError
from mcbn.networks import RegressionMLP, Standardized
from mcbn.saving import read_tensors, write_tensors
from mcbn.stacked import Values
from mcbn_study.regression import fused as fused_steps
from mcbn_study.regression.problem import Problem, row_orders, uniforms
from mcbn_study.regression.profile import Configuration
from mcbn_study.regression.stack import Family, Networks, dropout_gradients, initial_values, take

LEARNING_RATE = 1e-3  # Teye et al. 2018, Section 4.3
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}  # as torch.optim.Adam
BLOCK_STEPS = 32  # at most so many steps in one CUDA graph
FUSED_STEPS = 128  # and in one kernel
BLOCK_NUMBERS = {"cpu": 2**20, "cuda": 2**27}  # that batches and masks of a block may hold
ORDER_NUMBERS = 2**24  # rows permuted at a time
EPOCH_STEPS = 2**16  # more than any epoch has: positions of dropout masks
FORMAT = "mcbn study networks"
Block = tuple[Tensor, Tensor, Tensor]  # what k steps read: x (S, k M, Q), y (S, k M), uniform (R, k M, Q + 2H)
Group = tuple[slice, int]  # consecutive networks whose streams have so many batches in an epoch
GRADIENTS: dict[Family, Callable[..., Values]] = {"bn": stacked.gradients, "dropout": dropout_gradients}


class Trainer:
    """S networks in training: `advance` trains them further, `values` holds their parameters, `keep` drops some.

    What becomes of a network depends on its stream and configuration alone. Networks come in ascending order of their
    number of batches: those that have none left wait, unchanged, until the epoch ends. On a GPU blocks of steps are
    CUDA graphs; fused: one CUDA kernel, where networks fit.
    """

    def __init__(self, problem: Problem, networks: Networks, *, fused: bool = False) -> None:
        self.problem, self.networks, self.epoch = problem, networks.like(problem.train.x), 0
        self._graphs = problem.device.type == "cuda"
        self._fits = fused and fused_steps.fits(networks.family, networks.batch_size, networks.hidden)
        drawn = initial_values(networks.family, problem.streams, problem.train.x.shape[2], networks.hidden)
        values = take({name: value.to(problem.train.x) for name, value in drawn.items()}, self.networks.stream)
        self._row_keys, self._mask_keys = problem.keys("rows"), problem.keys("training dropout")
        self._start(values, *({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2)))

    def advance(self, epochs: int) -> None:
        """Train every network for so many further epochs."""
        chunk, M = max(1, ORDER_NUMBERS // self.problem.train.y.numel()), self.networks.batch_size
        end = self.epoch + epochs
        while self.epoch < end:
            now = torch.arange(self.epoch, min(self.epoch + chunk, end), device=self.problem.device)
            orders = row_orders(self._row_keys, self.problem.train.n, now)  # (R, E, N)
            for rows, positions, active in self._segments(orders, now):
                for start in range(0, len(positions), most := self._block_steps()):
                    steps = positions[start : start + most]
                    self._load(rows[:, start * M : (start + len(steps)) * M], steps)
                    self._run(len(steps), active)
            self.epoch += len(now)

    def keep(self, index: Tensor) -> None:
        """Go on with the networks at `index`, ascending, alone."""
        self.networks = self.networks[index]
        self._start(*(take(tensors, index) for tensors in (self.values, *self.moments)))

    def _start(self, values: Values, first: Values, second: Values) -> None:
        """Go on from parameters and Adam's two moments of them; forget captured graphs."""
        self.values, self.moments = values, (first, second)
        self._groups = _groups((self.problem.train.n // self.networks.batch_size)[self.networks.stream])
        self._fuses = self._fits and len(self._groups) == 1
        taken = [float(self.epoch * steps) for _, steps in self._groups]
        self._taken = [[torch.tensor(steps, device=self.problem.device) for _ in values] for steps in taken]
        self._count = self.epoch * self._groups[0][1]  # without a look at the GPU
        self._blocks: dict[int, Block] = {}
        self._captured: dict[tuple[int, int], Callable[[], None] | None] = {}

    def _segments(self, orders: Tensor, epochs: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield runs of steps: rows (R, k M), positions (k,) and the first group that takes part."""
        M = self.networks.batch_size
        equal = len(self._groups) == 1
        for some in [slice(None)] if equal else [slice(e, e + 1) for e in range(len(epochs))]:
            first = 0
            for active, (_, last) in enumerate(self._groups):
                steps = torch.arange(first, last, device=epochs.device)
                rows = orders[:, some, first * M : last * M].flatten(1)
                yield rows, (epochs[some, None] * EPOCH_STEPS + steps).flatten(), active
                first = last

    def _block_steps(self) -> int:
        S, R = len(self.networks.stream), len(self.problem.streams)
        Q, H = self.problem.train.x.shape[2], self.networks.hidden
        numbers = S * (Q + 1) + (R * (Q + 2 * H) if self.networks.family == "dropout" else 0)
        most = BLOCK_NUMBERS[self.problem.device.type] // (numbers * self.networks.batch_size)
        return max(1, min(FUSED_STEPS if self._fuses else BLOCK_STEPS, most))

    def _load(self, rows: Tensor, positions: Tensor) -> None:
        """Bring the batches of the next steps, and their dropout uniforms, to where the steps read them."""
        train, n = self.problem.train, self.networks
        R, N, Q = train.x.shape
        at = (rows + torch.arange(0, R * N, N, device=rows.device)[:, None])[n.stream]  # (S, k M)
        units = Q + 2 * n.hidden if n.family == "dropout" else 0
        uniform = uniforms(self._mask_keys, positions, n.batch_size, units).flatten(1, 2)
        new = train.x.view(R * N, Q)[at], train.y.view(R * N)[at], uniform
        block = self._blocks.setdefault(len(positions), new)
        if block is not new:  # a captured graph reads from where the first block was
            for target, source in zip(block, new, strict=True):
                target.copy_(source)

    def _run(self, size: int, active: int) -> None:
        """Take the steps of a loaded block: in one kernel, or eagerly the first time, then as a CUDA graph."""
        key = (size, active)
        if self._fuses:
            states = (self.values, *self.moments)
            fused_steps.take_steps(states, self._blocks[size], self.networks, self._count, LEARNING_RATE)
            self._count += size
        elif not self._graphs:
            self._take_steps(size, active)
        elif key not in self._captured:
            self._captured[key] = None
            warm_up(partial(self._take_steps, size, active))
        else:
            steps = self._captured[key] or capture(partial(self._take_steps, size, active), warm_ups=0)
            self._captured[key] = steps
            steps()

    def _take_steps(self, size: int, active: int) -> None:
        (x, y, uniform), M, n = self._blocks[size], self.networks.batch_size, self.networks
        for k in range(size):
            batch = slice(k * M, (k + 1) * M)
            rest = (uniform[:, batch], n.stream, n.rate) if n.family == "dropout" else ()
            every = GRADIENTS[n.family](self.values, x[:, batch], y[:, batch, None], n.weight_decay, *rest)
            values, grads, first, second = (
                [tensors[name][rows] for rows, _ in self._groups[active:] for name in self.values]
                for tensors in (self.values, every, *self.moments)
            )
            taken = [steps for group in self._taken[active:] for steps in group]
            how: dict[str, Any] = {"fused": True, "capturable": self._graphs, "amsgrad": False, "maximize": False}
            adam(values, grads, first, second, [], taken, lr=LEARNING_RATE, **ADAM, **how)


def _groups(steps: Tensor) -> list[Group]:
    """Cut the networks, (S,) batches an epoch, into groups of equal number."""
    numbers, counts = (each.tolist() for each in torch.unique_consecutive(steps, return_counts=True))
    if numbers != sorted(set(numbers)) or numbers[0] < 1:
        cure = "sort them by the size of their training part and leave out batch sizes above it"
        raise MCBNError(f"networks must come in ascending order of batches an epoch, from 1 on; got {numbers}: {cure}")
    ends = accumulate(counts)
    return [(slice(end - count, end), number) for number, count, end in zip(numbers, counts, ends, strict=True)]


def train_streams(
    problem: Problem, chosen: Sequence[tuple[Configuration, int]], family: Family, hidden: int, *, fused: bool = False
) -> list[tuple[Networks, Values]]:
    """Train a network for every stream, each with the configuration and for the epochs chosen for it.

    Those of one batch size train as one stack, which shrinks as networks reach their epochs.
    """
    trained: dict[int, tuple[Networks, Values]] = {}
    for M in sorted({configuration.batch_size for configuration, _ in chosen}):
        streams = [r for r, (configuration, _) in enumerate(chosen) if configuration.batch_size == M]
        networks = networks_of(problem, family, streams, [chosen[r][0] for r in streams], hidden)
        trainer = Trainer(problem, networks[ascending(problem, networks)], fused=fused)
        for end in sorted({chosen[r][1] for r in streams}):
            trainer.advance(end - trainer.epoch)
            present = trainer.networks.stream.tolist()
            for i in (i for i, r in enumerate(present) if chosen[r][1] == end):
                one = torch.tensor([i], device=problem.device)
                trained[present[i]] = trainer.networks[one], take(trainer.values, one)
            if left := [i for i, r in enumerate(present) if chosen[r][1] > end]:
                trainer.keep(torch.tensor(left, device=problem.device))
    return [trained[r] for r in range(len(chosen))]


def networks_of(
    problem: Problem, family: Family, streams: Sequence[int], configurations: Sequence[Configuration], hidden: int
) -> Networks:
    """List one network a stream and configuration, all of one batch size, at most the smallest part (their code)."""
    M = min(configurations[0].batch_size, int(problem.train.n.min()))
    weight_decay = torch.tensor([configuration.weight_decay for configuration in configurations])
    rate = torch.tensor([configuration.rate or 0.0 for configuration in configurations])
    return Networks(family, torch.tensor(streams), weight_decay, rate, M, hidden).like(problem.train.x)


def ascending(problem: Problem, networks: Networks) -> Tensor:
    """Order networks as a trainer takes them, by batches an epoch: (S,) places."""
    return torch.argsort(problem.train.n[networks.stream] // networks.batch_size, stable=True)


def save_networks(path: Path, states: Sequence[dict[str, Tensor]], infos: Sequence[dict[str, Any]]) -> None:
    """Write networks, float32, with one description each: dataset, split, seed or fold, config, tau."""
    tensors = {f"{i}.{name}": value.float() for i, state in enumerate(states) for name, value in state.items()}
    write_tensors(path, tensors, {"format": FORMAT, "networks": json.dumps(list(infos))})


def load_networks(path: str | Path) -> list[tuple[Standardized, dict[str, Any]]]:
    """Read networks as modules that take and give original units, in eval mode, each with its description.

    The description names dataset, split, seed or fold, config, tau, tau_constant, and holds `train`, the row indices
    of its training part in `mcbn.data.load(dataset)`, from which statistics are drawn.
    """
    tensors, metadata = read_tensors(path, hint="run `mcbn reproduce regression`")
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} holds no networks of a study; they are written by `mcbn reproduce regression`")
    infos = json.loads(metadata["networks"])
    sets, networks = {name: data.load(name) for name in {info["dataset"] for info in infos}}, []
    for i, info in enumerate(infos):
        x, y = sets[info["dataset"]]
        state = {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith(f"{i}.")}
        train = data.split(len(y), info["split"]).train
        info["train"] = data.folds(train, info["n_folds"])[info["fold"]].train if "fold" in info else train
        hidden, n_inputs = state["0.weight"].shape
        network = RegressionMLP(n_inputs, (hidden, hidden), seed=0)
        network.load_state_dict(state, strict=False)  # counters of batches are not saved
        networks.append((Standardized(network, x[info["train"]], y[info["train"]]).float().eval(), info))
    return networks
