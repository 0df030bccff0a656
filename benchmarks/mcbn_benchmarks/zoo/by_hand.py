"""What mcbn is compared with: training passes made by hand, and draws run one by one through the network's own code."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mcbn import batch_norm as statistics
from mcbn import batches
from mcbn.batching import rows_of_draw
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn_benchmarks.zoo.entries import Case

SETTLING = 2  # training passes before the check, so that running statistics are not those of no data


def settle(case: Case) -> None:
    """Run batches with batch norm in train mode, so that running statistics fit the examples; end in eval mode."""
    norms_in_training(case.model)
    with torch.no_grad():
        for t in range(SETTLING):
            call(case.model, batch(case, rows_of_draw(len(case.x), case.batch_size, 1, t)))
    case.model.eval()


def norms_in_training(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Put batch norm modules alone into train mode; return them."""
    model.eval()
    norms: list[tuple[str, nn.Module]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    for _, module in norms:
        module.training = True
    return norms


def batch(case: Case, rows: Any) -> Any:
    """Take examples by number: one tensor, or what their collate makes of them."""
    return case.x[rows] if case.collate is None else case.collate([case.x[int(row)] for row in rows])


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Run a network as its author does; its first tensor is its output."""
    return first_tensor(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor of whatever a network gives."""
    return batches.tensors_of(result)[0]


def hand_made(case: Case, rows: Any) -> tuple[Any, dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Run a training pass by hand: the batch, mean and biased variance at each call of a batch norm module, output."""
    model, seen = copy.deepcopy(case.model), dict[str, tuple[Tensor, Tensor]]()

    def look(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            x, number = args[0], 1 + sum(statistics.layer_of(key) == name for key in seen)
            if x.shape[1] != module.num_features:  # a layer that puts time steps and channels into one axis
                x = x.reshape(len(x), module.num_features, -1)
            axes = [axis for axis in range(x.ndim) if axis != 1]
            seen[name if number == 1 else f"{name}#{number}"] = x.mean(axes), x.var(axes, correction=0)

        return hook

    for name, module in norms_in_training(model):
        module.register_forward_pre_hook(look(name))
    inputs = batch(case, rows)
    with torch.no_grad():
        output = call(model, batches.copied(inputs))
    return inputs, seen, output


def plain_loop(bayes: MCBN[Any], query: Any) -> Tensor:
    """Run the network once a draw, with nothing traced, folded or shared: (T, N, ...)."""
    network = Network(bayes.model, first_tensor)
    statistics.watch(network.module)
    outputs = []
    for t in range(bayes.posterior.n_samples):
        with statistics.Replay(*bayes.posterior.draw(t)):
            outputs.append(network(batches.copied(query)))
    return torch.stack(outputs)
