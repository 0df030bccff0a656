"""CUDA kernels as they are installed: source beside the code that launches it."""

import re
from pathlib import Path

import pytest

from mcbn.engine import kernels

FOLDER = Path(kernels.__file__).parent


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.cu")))
def test_a_kernel_is_found_by_the_name_of_its_function_and_launched_by_it(name: str) -> None:
    assert re.search(rf'extern "C" __global__ void (__launch_bounds__\(.*\)\s+)?{name}\(', kernels.source(name))
    launched = [f'launch("{name}", ' in path.read_text() for path in FOLDER.glob("*.py")]
    assert sum(launched) == 1


def test_sizes_are_given_to_the_compiler_as_definitions() -> None:
    assert kernels.options({"CHANNELS": 16, "WIDTH": 8}) == ("-DCHANNELS=16", "-DWIDTH=8")
