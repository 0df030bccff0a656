"""S networks `RegressionMLP` of one shape as stacked tensors, trained side by side: hardly dearer than one.

The layers and the loss of Teye et al. 2018, Section 4.3: Linear (no bias) -> BN -> ReLU, then Linear; 1/2 mean squared
error, or cross-entropy, + lambda sum_l 1/2 ||W_l||^2, weight matrices only.
Symbols: S networks, M rows of a batch, Q inputs, H hidden units, D outputs, L hidden layers.

Parameters by name, each (S, ...): `weights` holds all matrices in one row, as `matrices` views them;
`gamma1`, `beta1` to `gammaL`, `betaL` are those of batch norm, the last layer's bias is `bias` + str(L + 1).
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot, relu_

from mcbn.networks import BN_EPSILON, RegressionMLP

Values = dict[str, Tensor]  # parameters or gradients by name, each (S, ...)
_norm_backward = torch.ops.aten.native_batch_norm_backward
_relu_backward = torch.ops.aten.threshold_backward


def initial_values(n_inputs: int, hidden: Sequence[int], n_outputs: int = 1, *, seeds: Sequence[int]) -> Values:
    """Stack the initial parameters of `RegressionMLP(n_inputs, hidden, n_outputs, seed=seed)` for every seed."""
    L = len(hidden)
    states = [RegressionMLP(n_inputs, hidden, n_outputs, seed=seed).state_dict() for seed in seeds]
    weights = [torch.cat([state[f"{3 * i}.weight"].T.flatten() for i in range(L + 1)]) for state in states]
    values = {name: torch.stack([state[key] for state in states]) for name, key in _module_names(L).items()}
    return {"weights": torch.stack(weights), **values}


def _module_names(L: int) -> dict[str, str]:
    """Map all but the matrices to what `RegressionMLP` calls them."""
    kinds = {"gamma": "weight", "beta": "bias"}
    norms = {f"{kind}{i + 1}": f"{3 * i + 1}.{name}" for i in range(L) for kind, name in kinds.items()}
    return {f"bias{L + 1}": f"{3 * L}.bias", **norms}


def layer_sizes(values: Values, n_inputs: int) -> list[int]:
    """Return [Q, H_1, ..., H_L, D]."""
    L = (len(values) - 2) // 2
    return [n_inputs, *(values[f"gamma{i + 1}"].shape[1] for i in range(L)), values[f"bias{L + 1}"].shape[1]]


def matrices(weights: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """View weights (S, P) as the matrix (S, in, out) of each layer, which multiplies rows from the right."""
    shapes = list(itertools.pairwise(sizes))
    flat = torch.split(weights, [rows * columns for rows, columns in shapes], 1)
    return [matrix.view(len(weights), *shape) for matrix, shape in zip(flat, shapes, strict=True)]


def network(values: Values, s: int, n_inputs: int) -> RegressionMLP:
    """Return network s as a module of its own, on the CPU; its running statistics are still unset."""
    n_inputs, *hidden, n_outputs = sizes = layer_sizes(values, n_inputs)
    state = {f"{3 * i}.weight": matrix[s].T for i, matrix in enumerate(matrices(values["weights"], sizes))}
    state |= {key: values[name][s] for name, key in _module_names(len(hidden)).items()}
    module = RegressionMLP(n_inputs, hidden, n_outputs, seed=0).to(values["weights"].dtype)
    module.load_state_dict(state, strict=False)
    return module


def gradients(values: Values, x: Tensor, y: Tensor, weight_decay: Tensor) -> Values:
    """Return the gradient of each network's loss on its own batch, written out: without a graph of autograd.

    x (S, M, Q); y (S, M, D), or class numbers (S, M); weight_decay (S,) is lambda.
    Activations lie as (M, S H), so that one batch norm of S H channels serves all networks.
    """
    *hidden, last = range(len(sizes := layer_sizes(values, x.shape[2])) - 1)
    grads = {name: torch.empty_like(value) for name, value in values.items()}
    w, g = matrices(values["weights"], sizes), matrices(grads["weights"], sizes)
    inputs, products, moments = [x], [], []
    for i in hidden:
        products.append(_product(inputs[i], w[i]))  # (S, M, H)
        gamma, beta = (values[f"{kind}{i + 1}"].flatten() for kind in ("gamma", "beta"))
        rows = products[i].transpose(0, 1).flatten(1)  # (M, S H)
        rows, *saved = torch.native_batch_norm(rows, gamma, beta, None, None, True, 0.0, BN_EPSILON)
        inputs.append(relu_(rows.view(len(rows), len(x), -1).transpose(0, 1)))
        moments.append(saved)  # mean and inverse std, (S H,) each

    d = _output_gradient(torch.bmm(inputs[last], w[last]), values[f"bias{last + 1}"], y)  # (S, M, D)
    torch.bmm(inputs[last].transpose(1, 2), d, out=g[last])
    torch.sum(d, 1, out=grads[f"bias{last + 1}"])
    for i in reversed(hidden):
        d = _relu_backward(_product(d, w[i + 1].transpose(1, 2)), inputs[i + 1], 0)
        gamma, rest = values[f"gamma{i + 1}"], (None, None, *moments[i], True, BN_EPSILON, [True, True, True])
        pair = (value.transpose(0, 1).flatten(1) for value in (d, products[i]))  # (M, S H) each
        rows, d_gamma, d_beta = _norm_backward(*pair, gamma.flatten(), *rest)
        grads[f"gamma{i + 1}"], grads[f"beta{i + 1}"] = d_gamma.view_as(gamma), d_beta.view_as(gamma)
        d = rows.view(len(rows), len(x), -1).transpose(0, 1)  # (S, M, H)
        torch.bmm(inputs[i].transpose(1, 2), d, out=g[i])
    grads["weights"].addcmul_(values["weights"], weight_decay[:, None])
    return grads


def _output_gradient(product: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """Return the derivative by f = product + bias, (S, M, D): (f - y) / (M D), or (softmax f - one-hot y) / M."""
    _, M, D = product.shape
    if y.is_floating_point():
        return product.add_(bias.unsqueeze(1) - y).div_(M * D)
    return product.add_(bias.unsqueeze(1)).softmax(2).sub_(one_hot(y, D)).div_(M)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (S, M, K) by (S, K, H) into memory laid out as (M, S, H)."""
    if a.shape[2] == 1:  # an outer product
        return torch.mul(a.transpose(0, 1), b.transpose(0, 1)).transpose(0, 1)
    return torch.bmm(a, b, out=a.new_empty(a.shape[1], a.shape[0], b.shape[2]).transpose(0, 1))
