"""CUDA kernels of this package: compiled by PyTorch for their sizes when they are first needed, and kept."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from mcbn.files import cache_folder, replacing


@cache
def available() -> bool:
    """Tell whether kernels can be compiled and run here."""
    if not torch.cuda.is_available() or torch.version.hip is not None or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    from torch.utils.cpp_extension import CUDA_HOME  # slow to import

    return CUDA_HOME is not None and torch.cuda.get_device_capability() >= (8, 0)


def source(name: str) -> str:
    """Read `<name>.cu`."""
    return files(__name__).joinpath(f"{name}.cu").read_text()


def options(constants: dict[str, int]) -> list[str]:
    """Return the compiler's definitions."""
    return [f"-D{name}={value}" for name, value in constants.items()]


@cache
def compiles(name: str, constants: tuple[tuple[str, int], ...], device: int) -> bool:  # pragma: no cover
    """Tell whether a kernel can be had: PyTorch's compiler is not a public part of it, and may refuse."""
    try:
        _compiled(name, constants, device)
    except Exception:
        return False
    return True


def launch(
    name: str, constants: dict[str, int], grid: tuple[int, int], tensors: Sequence[Tensor], *numbers: float
) -> None:  # pragma: no cover
    """Run the function of this name in `<name>.cu` on the current stream: (blocks, threads of one)."""
    kernel = _compiled(name, tuple(constants.items()), tensors[0].device.index)
    with torch.cuda.device(tensors[0].device):
        kernel((grid[0], 1, 1), (grid[1], 1, 1), [*tensors, *numbers])


@cache
def _compiled(name: str, constants: tuple[tuple[str, int], ...], device: int) -> Any:  # pragma: no cover
    """Load a kernel; what PyTorch compiles is kept for other processes, where there is a folder for it."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    code, flags = source(name), ["-std=c++17", *options(dict(constants))]
    with torch.cuda.device(device):
        known = f"{code}{flags}{torch.version.cuda}{torch.cuda.get_device_capability()}"
        kept = cache_folder() / "kernels" / f"{sha256(known.encode()).hexdigest()}.cubin"
        if kept.exists():
            made = kept.read_bytes()
        else:
            made, _ = _nvrtc_compile(code, name, nvcc_options=flags)
            with suppress(OSError), replacing(kept) as temporary:
                temporary.write_bytes(made)
        return _cuda_load_module(made, [name])[name]  # type: ignore[index]
