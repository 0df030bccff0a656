"""Training of S independent MNF networks as one program: one network of a stack is what it is alone.

Loss of each: 1/2 mean squared error + KL / N; Adam. Batches are drawn with replacement, as in the
published script; noise and rows of network s come from a generator of its own. On a GPU a step is one CUDA graph.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from mcbn.engine.capture import capture
from mcbn_study.mnf.layers import MNFNetwork

BLOCK = 2**20  # normal numbers drawn at once for a network: depends on nothing else in the stack
BLOCK_STEPS = 64
COMPILE_FROM = 50_000  # steps from which fusing kernels pays for the time to compile
WATCH_EVERY = 20  # epochs between looks at whether all networks have stopped: each look waits for the GPU
CHUNK = {"cpu": 2**21, "cuda": 2**26}  # numbers of the widest layer in one pass over draws
LEARNING_RATE = 1e-3  # of Adam, in the published script
INITIAL, TRAINING, VALIDATION, DRAWS = range(4)  # purposes of the streams of one network
Keys = Sequence[Sequence[int]]  # what the streams of each network are called


def generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for the stream called `key`."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


def draw_noise(keys: Keys, start: int, stop: int, size: int) -> Tensor:
    """Return the normal numbers of draws start..stop-1 of each network, (S, T, size): draw t by (key, t) alone."""

    def draw(*key: int) -> Tensor:
        return torch.randn(size, generator=generator(*key), dtype=torch.float32, device="cpu")

    return torch.stack([torch.stack([draw(*key, t) for t in range(start, stop)]) for key in keys])


class Stack:
    """S networks in training on x (S, N, Q), y (S, N, D); `keys[s]` names the streams of each."""

    def __init__(
        self, network: MNFNetwork, x: Tensor, y: Tensor, keys: Keys, *, batch_size: int = 100, max_steps: int = 0
    ) -> None:
        (S, N), M = x.shape[:2], min(batch_size, x.shape[1])
        self.network, self.x, self.y, self.device = network, x, y, x.device
        self.steps_per_epoch, size = max(1, N // batch_size), network.noise_size(M)
        self.generators = [generator(*key, TRAINING, device=x.device) for key in keys]
        self.rows = torch.arange(S, device=x.device).unsqueeze(1)  # (S, 1)
        self.index = torch.zeros(S, M, dtype=torch.int64, device=x.device)
        self.noise = torch.zeros(S, size, dtype=x.dtype, device=x.device)
        steps = max(1, min(BLOCK_STEPS, BLOCK // size))
        self.blocks, self.used = (self.index.new_zeros(S, steps, M), self.noise.new_zeros(S, steps, size)), steps
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True, capturable=on_gpu)
        self.loss: Callable[..., Tensor]
        self.step = self._prepared_step(compiled=max_steps >= COMPILE_FROM)

    def epoch(self) -> None:
        """Train all networks for one epoch: N // M steps, one at least."""
        for _ in range(self.steps_per_epoch):
            self._next_batch()
            self.step()

    def losses(self, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Sum over networks of 1/2 mean_B (f(x) - y)^2 + KL / N, x (S, B, Q), y (S, B, D).

        Gradients do not mix: each network's parameters enter its own term alone.
        """
        output, kl = self.network(x, noise)  # (S, B, D), (S,)
        total: Tensor = 0.5 * (output - y).square().mean((1, 2)).sum() + kl.sum() / self.x.shape[1]
        return total

    def _next_batch(self) -> None:
        """Put the rows and the noise of the next step in place; draw a new block where the last is used up."""
        index, noise = self.blocks
        if self.used == noise.shape[1]:
            for s, source in enumerate(self.generators):
                index[s].random_(0, self.x.shape[1], generator=source)
                noise[s].normal_(generator=source)
            self.used = 0
        self.index.copy_(index[:, self.used])
        self.noise.copy_(noise[:, self.used])
        self.used += 1

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.loss(self.x[self.rows, self.index], self.y[self.rows, self.index], self.noise))
        self.optimizer.step()

    def _prepared_step(self, *, compiled: bool) -> Callable[[], None]:
        """Make the step, its kernels fused if asked; run once, so that what cannot compile fails here, and undone."""
        if compiled:
            torch.compiler.reset()  # each stack compiles anew; past a few versions of one function torch gives up
        self.loss = torch.compile(self.losses, dynamic=False) if compiled else self.losses
        try:
            if self.device.type == "cuda":
                return capture(self._step, around=self.unchanged())
            with self.unchanged():
                self._step()
        except Exception as error:
            if not compiled:
                raise
            warnings.warn(f"mcbn: training runs uncompiled ({type(error).__name__}: {error})", stacklevel=2)
            return self._prepared_step(compiled=False)
        return self._step

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back what steps inside change, and start the optimizer anew."""
        parameters = [*self.network.parameters()]
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            yield
        finally:
            put_back(parameters, before)
            for moments in self.optimizer.state.values():
                put_back(moments.values(), map(torch.zeros_like, moments.values()))  # Adam's begin at zero


def train_until_best(
    stack: Stack, x: Tensor, y: Tensor, noise: Tensor | None, *, max_epochs: int, patience: int, apart: int = 0
) -> list[int]:
    """Train until every network has stopped; leave each at the epoch of its best validation RMSE, and return those.

    A network that has found no new best for `patience` epochs has stopped, and what it would find later does not count;
    nor does what it finds within `apart` epochs of its last best. x (S, n, Q), y (S, n, D) for validation; noise
    (S, T, draw_size) of the draws whose mean is judged, or None for a pass without noise.
    """
    network, parameters = stack.network, [parameter.detach() for parameter in stack.network.parameters()]
    kept = [parameter.clone() for parameter in parameters]
    best = x.new_full((len(x),), torch.inf)
    best_epoch = torch.zeros_like(best, dtype=torch.int64)
    stopped = torch.zeros_like(best, dtype=torch.bool)
    for epoch in range(1, max_epochs + 1):
        stack.epoch()
        with torch.no_grad():
            mean = network.centre(x) if noise is None else network.sample(x, noise).sum(1) / noise.shape[1]  # (S, n, D)
        rmse = (mean - y).square().mean((1, 2)).sqrt()  # (S,)
        improved = (rmse < best) & ((best_epoch == 0) | (epoch - best_epoch > apart)) & ~stopped
        best = torch.where(improved, rmse, best)
        best_epoch = torch.where(improved, epoch, best_epoch)
        stopped = stopped | (epoch - best_epoch >= patience)
        keep_where(improved, parameters, kept)
        if epoch % WATCH_EVERY == 0 and bool(stopped.all()):
            break
    put_back(parameters, kept)
    return [int(epoch) for epoch in best_epoch.tolist()]


def train_for(stack: Stack, epochs: Sequence[int]) -> None:
    """Train until the longest is done, and leave network s as it was after epochs[s]."""
    parameters = [parameter.detach() for parameter in stack.network.parameters()]
    kept = [parameter.clone() for parameter in parameters]
    for epoch in range(1, max(epochs) + 1):
        stack.epoch()
        if epoch in epochs:
            keep_where(torch.tensor([count == epoch for count in epochs], device=stack.device), parameters, kept)
    put_back(parameters, kept)


@torch.no_grad()
def put_back(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Fill tensors in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def keep_where(chosen: Tensor, values: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Copy the values of chosen networks (S,) into `kept`."""
    for value, target in zip(values, kept, strict=True):
        target.copy_(torch.where(chosen.reshape(-1, *(1,) * (value.ndim - 1)), value, target))


@torch.no_grad()
def drawn(network: MNFNetwork, x: Tensor, keys: Keys, n_samples: int) -> Iterator[Tensor]:
    """Draw T networks of each, by the streams called `keys`, and run them on x (S, n, Q): (S, t, n, D) at a time."""
    step = max(1, CHUNK.get(x.device.type, CHUNK["cpu"]) // (x.shape[0] * max(1, x.shape[1]) * max(network.sizes)))
    purposes = [(*key, DRAWS) for key in keys]
    for start in range(0, n_samples, step):
        yield network.sample(x, draw_noise(purposes, start, min(start + step, n_samples), network.draw_size).to(x))
