"""CUDA kernels compiled for the host (`cuda_on_host.h`)."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def library(folder: Path, source: str, kernel: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a source of this folder with a kernel's path and options."""
    path = folder / f"{abs(hash((source, options)))}.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", f'-DKERNEL="{kernel}"']
    subprocess.run(["g++", *flags, *options, str(HERE / source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def pointers(tensors):
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
