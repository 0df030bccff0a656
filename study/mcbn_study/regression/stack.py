"""The networks of the study as stacked tensors, in two families, with their gradients and statistics.

Teye et al. 2018, Section 4.3. "bn": the networks of `mcbn.stacked`, two hidden layers. "dropout": dropout before each
of three Linear layers with bias, ReLU between. The loss of one network is 1/2 mean_B (f(x) - y)^2
+ lambda sum_l 1/2 ||W_l||^2. Symbols: S networks, M rows of a batch, Q inputs, H hidden units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu_

from mcbn import stacked
from mcbn.networks import BN_EPSILON, INITIAL_STD
from mcbn.stacked import Values
from mcbn_study.regression.problem import Problem, purpose_key

Family = Literal["bn", "dropout"]
Affine = tuple[Tensor, Tensor]  # scale and shift, (..., H) each
_relu_backward = torch.ops.aten.threshold_backward


@dataclass(frozen=True)
class Networks:
    """S networks to train: the stream of each and its configuration."""

    family: Family
    stream: Tensor  # (S,), of `Problem.streams`
    weight_decay: Tensor  # (S,), lambda
    rate: Tensor  # (S,) of dropout, unused by "bn"
    batch_size: int
    hidden: int = 50

    def __getitem__(self, index: Tensor) -> "Networks":
        return replace(self, stream=self.stream[index], weight_decay=self.weight_decay[index], rate=self.rate[index])

    def like(self, x: Tensor) -> "Networks":
        """Bring the tensors to the device and the precision of x."""
        stream, decay, rate = self.stream.to(x.device), self.weight_decay.to(x), self.rate.to(x)
        return replace(self, stream=stream, weight_decay=decay, rate=rate)


def take(values: Values, index: Tensor) -> Values:
    """Return the parameters of the networks at an index."""
    return {name: value[index] for name, value in values.items()}


def matrices(values: Values, n_inputs: int) -> list[Tensor]:
    """View the weights as (S, Q, H), (S, H, H) and (S, H, 1), which multiply rows from the right."""
    H = values["gamma1" if "gamma1" in values else "bias1"].shape[1]
    return stacked.matrices(values["weights"], (n_inputs, H, H, 1))


def initial_values(family: Family, streams: Sequence[int], n_inputs: int, hidden: int) -> Values:
    """Draw one network a stream: truncated normal, std 0.1; gamma 1, beta 0; biases of dropout's layers positive."""
    seeds = [purpose_key(stream, "weights") for stream in streams]
    values = stacked.initial_values(n_inputs, (hidden, hidden), seeds=seeds)
    if family == "bn":
        return values
    sources, cut = [torch.Generator().manual_seed(purpose_key(seed, "weights")) for seed in seeds], 2 * INITIAL_STD
    drawn = [nn.init.trunc_normal_(torch.empty(2, hidden), 0.0, INITIAL_STD, -cut, cut, g) for g in sources]
    biases = torch.stack(drawn).abs_()  # (S, 2, H)
    shared = {name: values[name] for name in ("weights", "bias3")}
    return shared | {"bias1": biases[:, 0].clone(), "bias2": biases[:, 1].clone()}


def dropout_gradients(
    values: Values, x: Tensor, y: Tensor, weight_decay: Tensor, uniform: Tensor, stream: Tensor, rate: Tensor
) -> Values:
    """Return the gradient of each network's loss; a unit is kept where the uniform number of its stream is >= rate.

    x (S, M, Q), y (S, M, 1), weight_decay, stream, rate (S,); uniform (R, M, Q + 2H): of the inputs, then of both
    hidden layers. Kept units are multiplied by 1 / (1 - rate).
    """
    _, M, Q = x.shape
    H = values["bias1"].shape[1]
    grads = {name: torch.empty_like(value) for name, value in values.items()}
    (w1, w2, w3), (g1, g2, g3) = matrices(values, Q), stacked.matrices(grads["weights"], (Q, H, H, 1))
    rate = rate[:, None, None]
    kept0, kept1, kept2 = torch.split((uniform[stream] >= rate) * (1 / (1 - rate)), [Q, H, H], 2)  # (S, M, Q), ...
    a0 = x * kept0  # (S, M, Q)
    a1 = relu_(torch.bmm(a0, w1).add_(values["bias1"][:, None])).mul_(kept1)  # (S, M, H)
    a2 = relu_(torch.bmm(a1, w2).add_(values["bias2"][:, None])).mul_(kept2)
    error = torch.bmm(a2, w3).add_(values["bias3"][:, None] - y).div_(M)  # (S, M, 1)

    torch.bmm(a2.transpose(1, 2), error, out=g3)
    torch.sum(error, 1, out=grads["bias3"])
    d2 = _relu_backward(error * w3.transpose(1, 2), a2, 0).mul_(kept2)  # a2 > 0: kept, and the rectifier open
    torch.bmm(a1.transpose(1, 2), d2, out=g2)
    torch.sum(d2, 1, out=grads["bias2"])
    d1 = _relu_backward(torch.bmm(d2, w2.transpose(1, 2)), a1, 0).mul_(kept1)
    torch.bmm(a0.transpose(1, 2), d1, out=g1)
    torch.sum(d1, 1, out=grads["bias1"])
    grads["weights"].addcmul_(values["weights"], weight_decay[:, None])
    return grads


def population_statistics(values: Values, networks: Networks, problem: Problem) -> list[tuple[Tensor, Tensor]]:
    """Return mean and biased variance of both BN layers over the whole training part, each (S, H)."""
    x, mask = problem.train.x[networks.stream], problem.train.mask[networks.stream, :, None]  # (S, N, Q), (S, N, 1)
    first, second, _ = matrices(values, x.shape[2])
    z = torch.bmm(x, first)
    statistics = _masked_moments(z, mask)
    scale, shift = fold(*statistics, values, 1)
    a = relu_(torch.addcmul(shift[:, None], z, scale[:, None]))
    return [statistics, _masked_moments(torch.bmm(a, second), mask)]


def _masked_moments(z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of z (S, N, H) over the rows of the mask (S, N, 1)."""
    n = mask.sum(1)  # (S, 1)
    mean = (z * mask).sum(1) / n
    return mean, ((z - mean[:, None]) * mask).square_().sum(1) / n


def fold(mean: Tensor, variance: Tensor, values: Values, layer: int) -> Affine:
    """Return what statistics (S, ..., H) make of a BN layer: z -> scale z + shift."""
    gamma, beta = (values[f"{name}{layer}"].view(len(mean), *[1] * (mean.ndim - 2), -1) for name in ("gamma", "beta"))
    scale = gamma * torch.rsqrt(variance + BN_EPSILON)
    return scale, torch.addcmul(beta, mean, scale, value=-1)


@torch.no_grad()
def network_states(values: Values, networks: Networks, problem: Problem) -> list[dict[str, Tensor]]:
    """Return BN networks as state dicts of `RegressionMLP`, with statistics of the whole training part: plain ones."""
    states = []
    for index in range(len(networks.stream)):
        state = stacked.network(values, index, problem.train.x.shape[2]).state_dict()
        one = torch.tensor([index], device=problem.device)
        statistics = population_statistics(take(values, one), networks[one], problem)
        for layer, (mean, variance) in zip((1, 4), statistics, strict=True):
            del state[f"{layer}.num_batches_tracked"]
            state |= {f"{layer}.running_mean": mean[0].cpu(), f"{layer}.running_var": variance[0].cpu()}
        states.append(state)
    return states
