"""S equal networks trained side by side, each on rows of its own, as stacked tensors: hardly dearer than one.

Layers and loss are those of `mcbn.networks` (Teye et al. 2018, Section 4.3): Linear (no bias) -> BN -> ReLU, then
Linear; 1/2 mean squared error or cross-entropy + lambda sum_l 1/2 ||W_l||^2, weight matrices only; Adam.
Symbols: S networks, M rows of a batch, Q inputs, H hidden units, D outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, cross_entropy

from mcbn.networks import BN_EPSILON, RegressionMLP

State = dict[str, Tensor]  # parameters by name, each (S, ...)


class Stack:
    """S networks, their optimiser and the running average of their weights."""

    def __init__(
        self,
        n_inputs: int,
        hidden: Sequence[int],
        n_outputs: int,
        *,
        seeds: Sequence[int],
        weight_decay: float,
        learning_rate: float,
        device: torch.device,
    ) -> None:
        self.sizes = n_inputs, tuple(hidden), n_outputs
        states = [dict(RegressionMLP(*self.sizes, seed=seed).named_parameters()) for seed in seeds]
        self.state = {
            name: torch.stack([state[name].detach() for state in states]).to(device).requires_grad_()
            for name in states[0]
        }
        self.average = {name: value.detach().clone() for name, value in self.state.items()}
        matrices = [value for value in self.state.values() if value.ndim > 2]
        others = [value for value in self.state.values() if value.ndim <= 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]
        self.optimizer = torch.optim.Adam(groups, lr=learning_rate, fused=True)
        self.updates = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one step of every network on its batch: x (S, M, Q), y (S, M, D) or class numbers (S, M)."""
        self.optimizer.zero_grad()
        output = self._forward(x)  # (S, M, D)
        M = x.shape[1]
        if y.is_floating_point():
            loss = 0.5 * (output - y).square().mean(2).sum() / M
        else:
            loss = cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum") / M
        torch.autograd.backward(loss)
        self.optimizer.step()

    @torch.no_grad()
    def update_average(self, most_decay: float) -> None:
        """Take the present weights into the average, which forgets by `most_decay` at most."""
        decay = min(most_decay, self.updates / (self.updates + 10))
        for name, value in self.state.items():
            self.average[name].lerp_(value, 1 - decay)
        self.updates += 1

    def network(self, s: int, state: State) -> RegressionMLP:
        """Return network s of a state as a module of its own; its running statistics are still unset."""
        network = RegressionMLP(*self.sizes, seed=0)
        network.load_state_dict({name: value[s] for name, value in state.items()}, strict=False)
        return network

    def _forward(self, x: Tensor) -> Tensor:
        """Run every network on its own batch with that batch's statistics: (S, M, Q) -> (S, M, D)."""
        S, M = x.shape[:2]
        for i in range(len(self.sizes[1])):
            weight, gamma, beta = (self.state[name] for name in _layer(i))
            h = torch.bmm(x, weight.transpose(1, 2)).transpose(0, 1)  # (M, S, H)
            h = batch_norm(h.reshape(M, -1), None, None, gamma.flatten(), beta.flatten(), True, 0.0, BN_EPSILON)
            x = h.relu().view(M, S, -1).transpose(0, 1)  # (S, M, H)
        weight, bias = (self.state[name] for name in _output(len(self.sizes[1])))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


@torch.no_grad()
def population_output(state: State, s: int, x: Tensor, share: Tensor, new: Tensor) -> Tensor:
    """Run network s on new inputs with the statistics of all training rows x (n, Q) of shares (n,): (N, D)."""
    n, hidden = len(x), (len(state) - 2) // 3
    h = torch.cat([x, new])  # (n + N, Q)
    for i in range(hidden):
        weight, gamma, beta = (state[name][s] for name in _layer(i))
        h = h @ weight.T
        mean = share @ h[:n]  # (H,)
        var = share @ (h[:n] - mean).square()  # (H,)
        h = (gamma * (h - mean) * torch.rsqrt(var + BN_EPSILON) + beta).relu_()
    weight, bias = (state[name][s] for name in _output(hidden))
    return h[n:] @ weight.T + bias


def _layer(i: int) -> tuple[str, str, str]:
    """Names of hidden layer i in `RegressionMLP`: weight, gamma, beta."""
    return f"{3 * i}.weight", f"{3 * i + 1}.weight", f"{3 * i + 1}.bias"


def _output(hidden: int) -> tuple[str, str]:
    return f"{3 * hidden}.weight", f"{3 * hidden}.bias"
