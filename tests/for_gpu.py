"""CUDA kernels compiled for an H200 by CUDA's own compiler, which needs no GPU: what of a multiprocessor they take.

`PYTHONPATH=tests python -m for_gpu` prints that for the kernel of narrow convolutions at other values of its constants,
and for class probabilities by the number of classes: benchmarks/results/registers.txt.
"""

import ctypes
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mcbn.engine import constants, kernels

TARGET = "sm_90"
REGISTERS, SHARED, THREADS, BLOCKS = 65_536, 228 * 1024, 2048, 32  # of a multiprocessor of an H200


class Taken(NamedTuple):
    registers: int  # of a thread
    spilled: int  # bytes of a thread that registers could not hold
    shared: int  # bytes of a block

    def blocks(self, threads: int) -> int:
        """How many blocks of so many threads a multiprocessor holds."""
        own = -(-self.registers // 8) * 8 * threads
        return min(REGISTERS // own, SHARED // (self.shared + 1024), THREADS // threads, BLOCKS)


@cache
def compiler() -> ctypes.CDLL | None:
    """Load NVRTC of the package nvidia-cuda-nvrtc, or of a torch with CUDA; None where there is neither."""
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    libraries = sorted(path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*"))
    for path in libraries[-1:]:
        for part in path.parent.glob("libnvrtc-builtins.so.*"):  # which it would look for elsewhere
            ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    return None


def compiled(name: str, sizes: dict[str, int | str], package: str = kernels.__name__, target: str = TARGET) -> Taken:
    """Compile a kernel as `mcbn.engine.kernels` has it compiled on a GPU."""
    library, program = compiler(), ctypes.c_void_p()
    code = kernels.source(name, package).encode()
    assert library is not None
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, f"{name}.cu".encode(), 0, None, None) == 0
    flags = [f"--gpu-architecture={target}", "-std=c++17", "--ptxas-options=-v", *kernels.options(sizes)]
    given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    failed = library.nvrtcCompileProgram(program, len(flags), given)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode()
    assert not failed, said
    used = [
        re.search(what, said) for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
    ]
    return Taken(*(int(number[1]) if number else 0 for number in used))


def narrow_sizes(C: int, D: int, side: int, stride: int, images: int) -> dict[str, int | str]:
    """Sizes of a 3 x 3 convolution from C to D channels with a shortcut, as `mcbn::narrow` has them."""
    return kernels.narrow_sizes((images, C, side, side), (C // 16, 9, D // 8, 32, 4), D, 0, True, stride, 1)


def read_for_one(sizes: dict[str, int | str]) -> float:
    """Pixels that a block reads for one that it computes: the border comes on top."""
    rows, columns, stride, size = (int(sizes[name]) for name in ("ROWS", "COLUMNS", "STRIDE", "SIZE"))
    return ((rows - 1) * stride + size) * ((columns - 1) * stride + size) / (rows * columns)


def main() -> None:
    from mcbn_benchmarks.gpu import SIZES, TRIED, with_value

    print(
        f"{TARGET}, NVRTC; convolutions: {', '.join(f'{C} -> {D} of {side} / {step}' for C, D, side, step, _ in SIZES)}"
    )
    print("registers a thread, bytes spilled a thread, blocks a multiprocessor holds, pixels read for one computed")
    for name in ("PIXELS", "COLUMNS", "WARPS", "BLOCKS", "BLOCKS_OF_16"):
        for value in TRIED["cuda"][f"NARROW_{name}"][0]:
            found: list[str] = []

            def look(found: list[str] = found) -> None:
                for size in SIZES:
                    sizes = narrow_sizes(*size)
                    taken = compiled("narrow", sizes)
                    blocks = taken.blocks(32 * constants.NARROW_WARPS)
                    found.append(f"{taken.registers} {taken.spilled} {blocks} {read_for_one(sizes):.2f}")

            with_value(f"NARROW_{name}", value, look)(0)
            print(f"NARROW_{name} = {value}: {', '.join(found)}")
    print("probabilities, by classes: registers, bytes spilled")
    taken = {K: compiled("probabilities", {"CLASSES": K}) for K in (2, 10, 16, 21, 24, 32, 40, 48, 64)}
    print(", ".join(f"{K}: {each.registers} {each.spilled}" for K, each in taken.items()))


if __name__ == "__main__":
    main()
