"""CUDA kernels through CUDA's own compiler, for an H200 and for the oldest GPU that mcbn takes them on."""

import pytest

from for_gpu import compiled, compiler, narrow_sizes
from mcbn.engine import constants

pytestmark = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="needs nvidia-cuda-nvrtc")]
TARGETS = ("sm_80", "sm_90")
NARROW = [(16, 16, 32, 1, 8), (32, 32, 16, 1, 8), (64, 64, 8, 2, 8), (48, 16, 256, 1, 1), (192, 64, 64, 1, 1)]
SPILLED = 64  # bytes of a thread, at most: of one block more a multiprocessor it is twice as much


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_scaled_compiles(kind: int, target: str) -> None:
    assert compiled("scaled", {"KIND": kind}, target=target).spilled == 0


@pytest.mark.parametrize("target", TARGETS)
def test_halved_compiles(target: str) -> None:
    assert compiled("halved", {"CHANNELS": 16, "WIDTH": 8}, target=target).spilled == 0


@pytest.mark.parametrize("size", NARROW, ids=str)
def test_narrow_holds_as_many_blocks_as_it_promises_and_spills_little(size: tuple[int, ...]) -> None:
    sizes = narrow_sizes(*size)
    taken = compiled("narrow", sizes)
    assert taken.blocks(32 * constants.NARROW_WARPS) >= int(sizes["BLOCKS"])
    assert taken.spilled <= SPILLED


def test_narrow_compiles_for_the_oldest_gpu() -> None:
    assert compiled("narrow", narrow_sizes(*NARROW[0]), target=TARGETS[0]).registers


@pytest.mark.parametrize("classes", [2, constants.PROBABILITIES_MOST_CLASSES])
def test_probabilities_stay_in_registers(classes: int) -> None:
    taken = compiled("probabilities", {"CLASSES": classes})
    assert taken.spilled == 0
    assert taken.blocks(constants.PROBABILITIES_THREADS) * constants.PROBABILITIES_THREADS >= 384


def test_a_mistake_is_told_by_the_compiler() -> None:
    with pytest.raises(AssertionError, match="CLASSES"):
        compiled("probabilities", {})
