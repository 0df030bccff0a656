"""The gradient of a written-down pass as a written-down pass, for any number of inputs."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mcbn.passes import Pass


def write_down_gradient(written: Pass, crossing: Sequence[Tensor], parts: Sequence[Tensor]) -> nn.Module:
    """Return (crossing, parts, chosen) -> outputs (B, ...) and the gradient of their chosen sum, (B, S).

    `chosen` (B, D) picks which of a row's outputs is differentiated. The tensors given are examples: of any B > 1.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def joint(crossing: list[Tensor], parts: list[Tensor], chosen: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in parts]
            outputs = written.each(*crossing, *leaves)
            total = (outputs.reshape(chosen.shape) * chosen).sum()
            gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
        return outputs.detach(), torch.cat(gradients, 1)

    outputs = written.each(*crossing, *parts)
    chosen = torch.ones_like(outputs.reshape(len(parts[0]), -1))  # (B, D)
    stand_ins = _stand_ins([*crossing, *parts, chosen], [*written.axes, *(0 for _ in parts), 0])
    arguments = stand_ins[: len(crossing)], stand_ins[len(crossing) : -1], stand_ins[-1]
    trace = make_fx(joint, decomposition_table=_decompositions(), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    return cast(nn.Module, trace(*arguments))


def _stand_ins(tensors: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
    """Stand for tensors without their values, all with the same open batch axis and everything else fixed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)

    def stand_in(tensor: Tensor, axis: int | None) -> Tensor:
        kinds = [DimDynamic.DUCK if number == axis else DimDynamic.STATIC for number in range(tensor.ndim)]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        return mode.from_tensor(tensor, static_shapes=False, symbolic_context=context)

    return [stand_in(tensor, axis) for tensor, axis in zip(tensors, axes, strict=True)]


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Name gradients that have no operator outside torch, as operators that have one."""
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
    aten = torch.ops.aten
    table |= torch._decomp.get_decompositions([aten.max_pool2d_with_indices_backward, aten.slice_backward])
    return table | {aten.convolution_backward.default: _convolution_backward}


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    """Differentiate a convolution by its input: the transposed convolution with the same weights."""
    if transposed or output_mask[1] or output_mask[2]:
        return NotImplemented
    axes = range(2, x.ndim)
    missing = [
        x.shape[axis] - ((gradient.shape[axis] - 1) * s - 2 * p + d * (weight.shape[axis] - 1) + 1)
        for axis, s, p, d in zip(axes, stride, padding, dilation, strict=True)
    ]
    arguments = stride, padding, dilation, True, missing, groups
    return torch.ops.aten.convolution(gradient, weight, None, *arguments), None, None
