"""CUDA kernels compiled for the host (`cuda_on_host.h`)."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from mcbn.engine import kernels

HERE = Path(__file__).parent
READ_BY_FOUR = ("narrow",)


@cache
def library(folder: Path, source: Path, kernel: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a source with a kernel's path and options."""
    path = folder / f"{abs(hash((source, options)))}.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", f"-I{HERE}", f'-DKERNEL="{kernel}"']
    subprocess.run(["g++", *flags, *options, str(source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def pointers(tensors):
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def launch_on_host(folder, name, constants, grid, tensors, *numbers):
    """Do what `mcbn.engine.kernels.launch` does, by `<name>_on_host.cpp`."""
    kernel = Path(kernels.__file__).with_name(f"{name}.cu")
    options = (*kernels.options(constants), f"-DTHREADS={grid[1]}")
    assert name not in READ_BY_FOUR or not any(tensor.data_ptr() % 16 for tensor in tensors)
    arguments = [ctypes.c_double(value) if isinstance(value, float) else value for value in numbers]
    library(folder, HERE / f"{name}_on_host.cpp", kernel, options).run(grid[0], *pointers(tensors), *arguments)
