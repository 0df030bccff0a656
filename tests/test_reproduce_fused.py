"""The Triton kernels of training steps against the stacked steps, on a GPU or by Triton's interpreter."""

import os

import pytest
import torch

from mcbn.reproduce.problem import Part, make_problem
from mcbn.reproduce.training import Networks, Trainer
from test_reproduce_training import STREAMS, H, toy

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"


def trainers(family, **options):
    parts = [Part(torch.arange(n), torch.arange(n, 40), STREAMS[i]) for i, n in enumerate((33, 34, 35))]
    decay, rate = torch.tensor([0.3, 1e-3] * 3), torch.tensor([0.1, 0.3] * 3)
    networks = Networks(family, torch.arange(3).repeat_interleave(2), decay, rate, 16, H)
    return Trainer(make_problem(toy(), parts, DEVICE), networks, **options)


@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_fused_steps_equal_stacked_steps(family):
    stacked, fused = trainers(family, graphs=False), trainers(family, fused=True)
    for trainer in (stacked, fused):
        trainer.advance(4)
        trainer.keep(torch.tensor([1, 2, 5], device=DEVICE))
        trainer.advance(3)
    for name, value in stacked.values.items():
        torch.testing.assert_close(fused.values[name], value, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(fused._moments()[name], stacked._moments()[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_fused_and_stacked_steps_take_turns():
    whole, mixed = trainers("bn", fused=True), trainers("bn", fused=True)
    whole.advance(4)
    mixed.advance(2)
    later = trainers("bn", graphs=False)
    later.restore(mixed.state(), torch.arange(6, device=DEVICE))
    later.advance(2)
    for name, value in whole.values.items():
        torch.testing.assert_close(later.values[name], value, rtol=1e-5, atol=1e-5)


def test_batches_that_do_not_fit_are_left_to_the_stack():
    from mcbn.reproduce import fused

    assert [size for size in (8, 16, 24, 32, 1024) if fused.fits(size, 50)] == [16, 32]
