"""The gradient of a written-down pass as a written-down pass, for any number of inputs."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mcbn import private_torch
from mcbn.export.passes import Pass


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
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode = private_torch.stand_in_mode()

    def stand_in(tensor: Tensor, axis: int | None) -> Tensor:
        kinds = [DimDynamic.DUCK if number == axis else DimDynamic.STATIC for number in range(tensor.ndim)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        return mode.from_tensor(tensor, static_shapes=False, symbolic_context=context)  # type: ignore[no-any-return]

    return [stand_in(tensor, axis) for tensor, axis in zip(tensors, axes, strict=True)]


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Name gradients that have no operator outside torch, as operators that have one."""
    table: dict[Any, Callable[..., Any]] = {**torch.export.default_decompositions()}
    aten = torch.ops.aten
    table |= private_torch.decompositions([aten.max_pool2d_with_indices_backward, aten.slice_backward])
    table[aten.convolution_backward.default] = _convolution_backward
    table[aten.avg_pool2d_backward.default] = _average_backward
    return table


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
    """Differentiate a convolution by its input: the transposed one with the same weights, and the other way round."""
    if output_mask[1] or output_mask[2]:
        return NotImplemented
    extra = [0 for _ in stride] if transposed else _left_over(x, gradient, weight.shape[2:], stride, padding, dilation)
    arguments = stride, padding, dilation, not transposed, extra, groups
    return torch.ops.aten.convolution(gradient, weight, None, *arguments), None, None


def _average_backward(
    gradient: Tensor,
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Differentiate an average over windows: each window's share goes back to its values."""
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented  # windows of several sizes
    (height, width), stride, C = kernel_size, stride or kernel_size, x.shape[1]
    weight = gradient.new_full((C, 1, height, width), 1 / (divisor_override or height * width))
    extra = _left_over(x, gradient, kernel_size, stride, padding, [1, 1])
    return torch.ops.aten.convolution(gradient, weight, None, stride, padding, [1, 1], True, extra, C)


def _left_over(
    x: Tensor,
    gradient: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Count what a transposed convolution of the gradient lacks of the input's size: rows the stride left out."""
    sizes = zip(x.shape[2:], gradient.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [whole - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for whole, out, k, s, p, d in sizes]
