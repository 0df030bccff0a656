"""Many small networks as stacked tensors, and the gradients of their losses without a graph of autograd.

Symbols: S networks, M rows of a batch, Q inputs, H hidden units. Two families (Teye et al. 2018, Section 4.3):
"bn": Linear (no bias) -> BN -> ReLU, twice, then Linear; "dropout": dropout before each of three Linear layers
with bias. The loss of one network is 1/2 mean_B (f(x) - y)^2 + lambda sum_l 1/2 ||W_l||^2.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu_

from mcbn.networks import BN_EPSILON, INITIAL_STD, RegressionMLP
from mcbn_study.regression.streams import purpose_key

Family = Literal["bn", "dropout"]
Values = dict[str, Tensor]  # parameters or gradients by name, each (S, ...)
_backward = torch.ops.aten.native_batch_norm_backward
_relu_backward = torch.ops.aten.threshold_backward


class Matrices(NamedTuple):
    """The weight matrices of S networks, as they multiply rows from the right."""

    first: Tensor  # (S, Q, H)
    second: Tensor  # (S, H, H)
    last: Tensor  # (S, H, 1)


def matrices(weights: Tensor, n_inputs: int, hidden: int) -> Matrices:
    """View weights (S, QH + HH + H) as the three matrices of each network."""
    S = len(weights)
    first, second, last = torch.split(weights, [n_inputs * hidden, hidden * hidden, hidden], 1)
    return Matrices(first.view(S, n_inputs, hidden), second.view(S, hidden, hidden), last.view(S, hidden, 1))


def initial_values(family: Family, streams: Sequence[int], n_inputs: int, hidden: int) -> Values:
    """Draw the initial parameters of one network a stream: truncated normal, std 0.1; gamma 1, beta 0.

    Biases of the dropout family's ReLU layers are absolute values.
    """
    networks = [_initial(family, purpose_key(stream, "weights"), n_inputs, hidden) for stream in streams]
    return {name: torch.stack([network[name] for network in networks]) for name in networks[0]}


def _initial(family: Family, seed: int, n_inputs: int, hidden: int) -> Values:
    state = RegressionMLP(n_inputs, (hidden, hidden), seed=seed).state_dict()
    values = {"weights": _flatten(state), "bias3": state["6.bias"]}
    if family == "bn":
        norms = {"gamma1": "1.weight", "beta1": "1.bias", "gamma2": "4.weight", "beta2": "4.bias"}
        return values | {name: state[key] for name, key in norms.items()}
    generator = torch.Generator().manual_seed(purpose_key(seed, "weights"))
    for name in ("bias1", "bias2"):
        cut = 2 * INITIAL_STD
        bias = nn.init.trunc_normal_(torch.empty(hidden), std=INITIAL_STD, a=-cut, b=cut, generator=generator)
        values[name] = bias.abs_()
    return values


def _flatten(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[key].T.flatten() for key in ("0.weight", "3.weight", "6.weight")])


def module_state(values: Values, index: int, n_inputs: int, hidden: int) -> dict[str, Tensor]:
    """Return the parameters of one network of the BN family as `RegressionMLP` names them."""
    first, second, last = matrices(values["weights"][index : index + 1].cpu(), n_inputs, hidden)
    state = {"0.weight": first[0].T, "3.weight": second[0].T, "6.weight": last[0].T}
    state |= {f"{layer}.weight": values[f"gamma{i}"][index].cpu() for i, layer in ((1, 1), (2, 4))}
    state |= {f"{layer}.bias": values[f"beta{i}"][index].cpu() for i, layer in ((1, 1), (2, 4))}
    state |= {"6.bias": values["bias3"][index].cpu()}
    return {name: value.clone().contiguous() for name, value in state.items()}


def bn_gradients(values: Values, x: Tensor, y: Tensor, weight_decay: Tensor) -> Values:
    """Return the gradient of each network's loss; x (S, M, Q), y (S, M), weight_decay (S,).

    Activations lie as (M, S H), so that one batch norm of S H channels serves all networks.
    """
    _, _, Q = x.shape
    H = values["gamma1"].shape[1]
    w = matrices(values["weights"], Q, H)
    grads = {name: torch.empty_like(value) for name, value in values.items()}
    g = matrices(grads["weights"], Q, H)
    z1 = _product(x, w.first)  # (S, M, H), as are the others
    a1, saved1 = _normalize(z1, values["gamma1"], values["beta1"])
    z2 = _product(relu_(a1), w.second)
    a2, saved2 = _normalize(z2, values["gamma2"], values["beta2"])
    error = _error(relu_(a2), w.last, values["bias3"], y)  # (S, M, 1)

    torch.bmm(a2.transpose(1, 2), error, out=g.last)
    torch.sum(error, 1, out=grads["bias3"])
    d2 = _normalize_backward(_through_last(error, w.last, a2), z2, values["gamma2"], saved2, grads, 2)
    torch.bmm(a1.transpose(1, 2), d2, out=g.second)
    d1 = _relu_backward(_product(d2, w.second.transpose(1, 2)), a1, 0)
    d1 = _normalize_backward(d1, z1, values["gamma1"], saved1, grads, 1)
    torch.bmm(x.transpose(1, 2), d1, out=g.first)
    grads["weights"].addcmul_(values["weights"], weight_decay[:, None])
    return grads


def dropout_gradients(
    values: Values, x: Tensor, y: Tensor, weight_decay: Tensor, uniform: Tensor, stream: Tensor, rate: Tensor
) -> Values:
    """Return the gradient of each network's loss; a unit is kept where the uniform number of its stream is >= rate.

    uniform (R, M, Q + 2H): of the inputs, then of both hidden layers; stream, rate (S,). Kept units are multiplied
    by 1 / (1 - rate).
    """
    _, _, Q = x.shape
    H = values["bias1"].shape[1]
    w = matrices(values["weights"], Q, H)
    grads = {name: torch.empty_like(value) for name, value in values.items()}
    g = matrices(grads["weights"], Q, H)
    rate = rate[:, None, None]
    masks = (uniform[stream] >= rate) * (1 / (1 - rate))  # (S, M, Q + 2H)
    kept0, kept1, kept2 = torch.split(masks, [Q, H, H], 2)
    a0 = x * kept0  # (S, M, Q)
    a1 = relu_(torch.bmm(a0, w.first).add_(values["bias1"][:, None])).mul_(kept1)  # (S, M, H)
    a2 = relu_(torch.bmm(a1, w.second).add_(values["bias2"][:, None])).mul_(kept2)
    error = _error(a2, w.last, values["bias3"], y)

    torch.bmm(a2.transpose(1, 2), error, out=g.last)
    torch.sum(error, 1, out=grads["bias3"])
    d2 = _relu_backward(error * w.last.transpose(1, 2), a2, 0).mul_(kept2)  # a2 > 0: kept, and the rectifier open
    torch.bmm(a1.transpose(1, 2), d2, out=g.second)
    torch.sum(d2, 1, out=grads["bias2"])
    d1 = _relu_backward(torch.bmm(d2, w.second.transpose(1, 2)), a1, 0).mul_(kept1)
    torch.bmm(a0.transpose(1, 2), d1, out=g.first)
    torch.sum(d1, 1, out=grads["bias1"])
    grads["weights"].addcmul_(values["weights"], weight_decay[:, None])
    return grads


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (S, M, K) by (S, K, H) into memory laid out as (M, S, H)."""
    result = a.new_empty(a.shape[1], a.shape[0], b.shape[2]).transpose(0, 1)
    return torch.bmm(a, b, out=result)


def _channels(a: Tensor) -> Tensor:
    """See (S, M, H) that lies as (M, S, H) as the rows of one batch with S H channels."""
    return a.transpose(0, 1).flatten(1)


def _networks(a: Tensor, S: int) -> Tensor:
    return a.view(len(a), S, -1).transpose(0, 1)


def _normalize(z: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    flat, mean, inverse_std = torch.native_batch_norm(
        _channels(z), gamma.flatten(), beta.flatten(), None, None, True, 0.0, BN_EPSILON
    )
    return _networks(flat, len(z)), (mean, inverse_std)


def _normalize_backward(
    d: Tensor, z: Tensor, gamma: Tensor, saved: tuple[Tensor, Tensor], grads: Values, layer: int
) -> Tensor:
    d, d_gamma, d_beta = _backward(
        _channels(d), _channels(z), gamma.flatten(), None, None, *saved, True, BN_EPSILON, [True, True, True]
    )
    grads[f"gamma{layer}"], grads[f"beta{layer}"] = d_gamma.view_as(gamma), d_beta.view_as(gamma)
    return _networks(d, len(z))


def _error(a: Tensor, last: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """Return the derivative of 1/2 mean_B (f - y)^2 by f, (f - y) / M: (S, M, 1)."""
    return torch.bmm(a, last).add_((bias - y).unsqueeze(2)).div_(a.shape[1])


def _through_last(error: Tensor, last: Tensor, a: Tensor) -> Tensor:
    """Return the derivative by the second layer's normalised values, laid out like `a`."""
    d = torch.mul(error.transpose(0, 1), last.transpose(1, 2).transpose(0, 1)).transpose(0, 1)  # (S, M, H)
    result: Tensor = _relu_backward(d, a, 0)
    return result
