"""Every name of torch that is no part of its public face, and what becomes of mcbn where one is missing.

Tried with torch 2.13.0 and 2.6.0 on a CPU and 2.11 on an H200; the tests use all of these. Tensors have had theirs
since torch 1. Those that compile kernels came with 2.8, and mcbn does without them where they are missing. Under 2.6
networks with `2**x` or `1 / x` run by their own code. `mcbn.export` needs the others.
"""

import linecache
from collections.abc import Callable, Iterable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.cuda import _utils
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

AnyBatchNorm = _BatchNorm  # what all of torch's batch norms are; in torch since 1
AnyInstanceNorm, AnyDropout = nn.modules.instancenorm._InstanceNorm, nn.modules.dropout._DropoutNd  # likewise
COMPILED = "_orig_mod"  # where a module that `torch.compile` made holds the one it was made of
is_view: Callable[[Tensor], bool] = Tensor._is_view  # a part of another, as autograd knows it
decompositions: Callable[[list[Any]], dict[Any, Any]] = torch._decomp.get_decompositions  # operators made of others


def version_of(tensor: Tensor) -> int:
    """Count how often a tensor was changed in place; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def global_hooks() -> tuple[int, ...]:
    """Identify the hooks that now run before or after every module there is."""
    hooks = nn.modules.module
    return (*map(id, hooks._global_forward_hooks.values()), *map(id, hooks._global_forward_pre_hooks.values()))


def hooks_of(module: nn.Module) -> list[Any]:
    """List what runs before or after a module."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def held_by(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module by name, its own tensors too."""
    return {**vars(module), **module._parameters, **module._buffers}


def compiled_from(function: Any) -> Any:
    """Return what `torch.compile` made a function of; None where it did not."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def storage_of(tensor: Tensor) -> int:
    """Identify the memory of a value, while it lives; 0 where it has none of its own, as tensors of torch.func."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Show every operator that runs in this thread, whoever calls it: Python, TorchScript, C++."""

    def __init__(self, see: Callable[[Any, dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see  # (operator, its arguments by name, result)

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # modes have seen its caller, or cannot see it at all
            result = func(*args, **(kwargs or {}))
        defaults = _defaults(func)
        self.see(func, {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}, result)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator would import torch._dynamo: seconds


@cache
def _defaults(operator: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in operator._schema.arguments}


@cache
def written_by(operator: Any) -> tuple[str, ...]:
    """Name the arguments of an operator that it changes in place."""
    return tuple(a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def gives_tensors(operator: Any) -> bool:
    """Tell whether an operator hands back tensors alone, no numbers."""
    return all("Tensor" in str(value.type) for value in operator._schema.returns)


def forget_source(file: str) -> None:
    """Let the source of a graph's code go: torch keeps that of all code it ever made."""
    linecache.cache.pop(file, None)
    loader = getattr(fx.graph_module, "_loader", None)  # without it the source stays: some kilobytes a program
    getattr(loader, "eval_cache", {}).pop(file, None)


def works_in_place(node: fx.Node) -> bool:
    """Tell whether the operation of an exported graph changes one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def unguarded(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return an exported program as a module; newer versions of torch would have it check its inputs again."""
    options = {"check_guards": False} if "check_guards" in signature(program.module).parameters else {}
    return program.module(**options)


def size_seen(size: int | torch.SymInt) -> int:
    """Return an open size as it was for the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def trace_open_sizes(function: Any, table: dict[Any, Any]) -> Any:
    """Return what traces a function on tensors without values, as `torch.export` notes them, open sizes kept open."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decomposition_table=table, tracing_mode="symbolic", _allow_non_fake_inputs=True)


def scan(step: Any, start: Any, rows: Any) -> tuple[Any, Any]:
    """Run a step over rows inside a graph, as a loop of the graph."""
    from torch._higher_order_ops.scan import scan as loop

    return loop(step, start, rows)


def compiles_kernels() -> bool:
    """Tell whether this torch has a compiler of CUDA sources (2.8 and later); without, networks run by its own."""
    return hasattr(_utils, "_nvrtc_compile") and hasattr(_utils, "_cuda_load_module")


def compile_kernel(source: str, name: str, options: list[str]) -> bytes:  # pragma: no cover
    """Compile the function of this name."""
    compiled: Any = _utils._nvrtc_compile(source, name, nvcc_options=options)
    return bytes(compiled[0] if isinstance(compiled, tuple) else compiled)  # 2.8 hands back the code alone


def load_kernel(compiled: bytes, name: str, shared: int = 0) -> Any:  # pragma: no cover
    """Load what `compile_kernel` gave onto the current GPU; shared: bytes of dynamic shared memory it will take."""
    kernel = _utils._cuda_load_module(compiled, [name])[name]  # type: ignore[index]
    if shared:
        kernel.set_shared_memory_config(shared)
    return kernel
