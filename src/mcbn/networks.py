"""The regression network of Teye et al. 2018, Section 4.3, and its training.

Symbols: N points, Q inputs, D outputs, M `batch_size`, lambda `weight_decay`. What the text leaves open
follows the authors' published code.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mcbn.errors import MCBNError
from mcbn.plugins import moved_names

BN_EPSILON = 1e-10  # authors' code; PyTorch's default is 1e-5
INITIAL_STD = 0.1  # authors' code: truncated normal, cut at two standard deviations


class RegressionMLP(nn.Sequential):
    """Hidden layers Linear (no bias) -> BatchNorm1d -> ReLU, then Linear with bias: (N, Q) -> (N, D).

    Teye et al. 2018, Section 4.3: two hidden layers of 50 units, 100 for Protein. Weights and output bias are
    truncated normal, std 0.1; gamma starts at 1 and beta at 0, both trained like any other BN layer's.
    Q is `n_inputs`, D `n_outputs`, `hidden` the units of each hidden layer. `seed` leaves the global generator alone;
    without it weights come from that, as those of PyTorch's layers do.

    >>> RegressionMLP(13, (50, 50), seed=0)(torch.randn(32, 13)).shape
    torch.Size([32, 1])
    """

    def __init__(
        self, n_inputs: int, hidden: Sequence[int] = (50, 50), n_outputs: int = 1, *, seed: int | None = None
    ) -> None:
        sizes = [n_inputs, *hidden]
        if min(*sizes, n_outputs) < 1:
            raise MCBNError(f"layer sizes must be at least 1; got {n_inputs}, {tuple(hidden)}, {n_outputs}")
        generator = None if seed is None else torch.Generator(torch.get_default_device()).manual_seed(seed)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            linear = _linear(fan_in, fan_out, bias=False, generator=generator)
            layers += [linear, nn.BatchNorm1d(fan_out, eps=BN_EPSILON), nn.ReLU()]
        super().__init__(*layers, _linear(sizes[-1], n_outputs, bias=True, generator=generator))


class Standardized(nn.Module):
    """A network that sees standardised inputs and targets, wrapped to work in original units.

    f(x) = y_mean + y_std network((x - x_mean) / x_std), with mean and population std of the training part (a constant
    column: std 1). Teye et al. 2018, Section 4.3. So tau and all scores are in units of y. Of the training part are
    x (N, Q) and y (N,) or (N, D); outputs are shaped like y, and without one, such as logits, stay as they are.
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor | None = None) -> None:
        _check_data(x, x if y is None else y)
        super().__init__()
        self.network, self.has_targets = network, y is not None
        for name, value in {"x": x, "y": y}.items():
            if value is not None:
                constant = (value == value[0]).all(0)  # compared, as rounding can leave its std just above 0
                std = torch.where(constant, 1, value.detach().std(0, correction=0))  # (Q,); (D,) or ()
                self.register_buffer(f"{name}_mean", value.detach().mean(0))
                self.register_buffer(f"{name}_std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Predict in original units: x (N, Q) -> (N,) or (N, D), as y was."""
        output: Tensor = self.network(self.standardize_inputs(x))
        return self.in_units(output) if self.has_targets else output

    def in_units(self, output: Tensor) -> Tensor:
        """Bring outputs (..., D) of the inner network to the units and the shape of y."""
        if output.shape[-1] != self.y_mean.numel():
            raise MCBNError(f"the network gives {output.shape[-1]} outputs, the targets have {self.y_mean.numel()}")
        return (output if self.y_mean.ndim else output.squeeze(-1)) * self.y_std + self.y_mean

    def standardize(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and y in the units that the inner network sees, in their own shapes."""
        return self.standardize_inputs(x), (y - self.y_mean) / self.y_std if self.has_targets else y

    def standardize_inputs(self, x: Tensor) -> Tensor:
        """Return x in the units that the inner network sees."""
        return (x - self.x_mean) / self.x_std


def train_regression(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int = 32,
    epochs: int = 200,
    weight_decay: float = 1e-4,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_epoch: Callable[[int], bool | None] | None = None,
    penalty: Callable[[nn.Module, Tensor], Tensor] = lambda network, x: x.new_zeros(()),
) -> None:
    """Train in place with Adam on the paper's loss and leave the network in eval mode.

    loss = 1/2 mean_B (f(x) - y)^2 + lambda sum_l 1/2 ||W_l||^2, weight matrices only, B a batch of M rows.
    Teye et al. 2018, Section 4.3. A `Standardized` network is trained in standardised units.

    Each epoch cuts a new permutation into batches, without the last partial one. Learning rate 1e-3 and batch size 32,
    the least it tried, are the paper's; it selects epochs (up to 2000) and weight decay (1e-1 to 1e-15) by
    cross-validation; our defaults are starts. On a CPU, one thread is fastest at 50 units.

    Args:
        network: (N, Q) -> (N, D), such as `RegressionMLP`, or that network `Standardized`.
        x: inputs, (N, Q).
        y: targets, (N,) or (N, D).
        batch_size, epochs, weight_decay, learning_rate: M (above N it means N), passes over the rows, lambda, of Adam.
        seed: of the order of the rows; the global generator is untouched.
        on_epoch: called with the epoch, from 1, in eval mode after each; ends training by returning True.
        penalty: what the loss of a batch (M, Q) has on top, by the inner network in standardised units.

    >>> x, y = torch.randn(64, 3), torch.randn(64)
    >>> network = Standardized(RegressionMLP(3, seed=0), x, y)
    >>> train_regression(network, x, y, epochs=2)
    >>> network(x).shape
    torch.Size([64])
    """
    _check_data(x, y)
    if batch_size < 2 or epochs < 1:
        raise MCBNError(f"batch_size must be at least 2 and epochs 1; got {batch_size} and {epochs}")
    dtype = next(network.parameters()).dtype
    if not x.dtype == y.dtype == dtype:
        raise MCBNError(f"network, x and y must have one dtype; got {dtype}, {x.dtype}, {y.dtype}: convert with .to()")
    inner = network
    if isinstance(network, Standardized):
        inner = network.network
        x, y = network.standardize(x, y)
    y, M = y.reshape(len(y), -1), min(batch_size, len(x))  # (N, D)
    optimizer, generator = adam(inner, weight_decay, learning_rate), torch.Generator().manual_seed(seed)
    try:
        for epoch in range(1, epochs + 1):
            network.train()
            order = torch.randperm(len(x), generator=generator, device="cpu")[: len(x) // M * M].to(x.device)
            for x_batch, y_batch in zip(torch.split(x[order], M), torch.split(y[order], M), strict=True):
                optimizer.zero_grad()
                output = inner(x_batch)  # (M, D)
                if output.shape != y_batch.shape:
                    shapes = f"{tuple(output.shape)} for targets {tuple(y_batch.shape)}"
                    raise MCBNError(f"the network gives {shapes}: set n_outputs")
                torch.autograd.backward(0.5 * mse_loss(output, y_batch) + penalty(inner, x_batch))
                optimizer.step()
            network.eval()
            if on_epoch is not None and on_epoch(epoch):
                return
    finally:
        network.eval()
        optimizer.zero_grad()


def adam(network: nn.Module, weight_decay: float, learning_rate: float) -> torch.optim.Adam:
    """Return Adam that adds lambda W, the gradient of lambda 1/2 ||W||^2, for weight matrices only."""
    matrices, others = ([p for p in network.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]
    return torch.optim.Adam(groups, lr=learning_rate, fused=True)  # fused: a third less time per step than foreach


def _linear(fan_in: int, fan_out: int, *, bias: bool, generator: torch.Generator | None) -> nn.Linear:
    # Built on "meta": PyTorch's own initial draw would move the global generator.
    linear = nn.Linear(fan_in, fan_out, bias=bias, device="meta").to_empty(device=torch.get_default_device())
    cut = 2 * INITIAL_STD
    for parameter in linear.parameters():
        nn.init.trunc_normal_(parameter, std=INITIAL_STD, a=-cut, b=cut, generator=generator)
    return linear


def _check_data(x: Tensor, y: Tensor) -> None:
    if x.ndim != 2 or y.ndim not in (1, 2) or len(x) != len(y) or len(x) < 2:
        shapes = f"x {tuple(x.shape)} and y {tuple(y.shape)}"
        raise MCBNError(f"x must be (N, Q) and y (N,) or (N, D), N at least 2; got {shapes}")
    if not (x.is_floating_point() and y.is_floating_point() and x.isfinite().all() and y.isfinite().all()):
        raise MCBNError(f"x and y must be finite floating-point tensors; got {x.dtype} and {y.dtype}")


__getattr__ = moved_names(__name__, "CifarResNet", "standardize")
