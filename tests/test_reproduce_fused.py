"""The Triton kernel of training steps against the stacked steps, on a GPU or by Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from mcbn.reproduce.problem import Part, make_problem
from mcbn.reproduce.training import Networks, Trainer
from test_reproduce_training import STREAMS, toy

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # must be set before Triton is first imported
RUNS = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="run in a process of its own, by the test below")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernel runs here itself")
@pytest.mark.slow
def test_fused_steps_in_the_interpreter():
    arguments = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout, done.stdout


@pytest.fixture
def fused(monkeypatch):
    """The module, with tiles so small that every loop of the kernel turns more than once."""
    from mcbn.reproduce import fused

    for name, value in {"TILE": 512, "OUTER": 16, "ROWS": 16, "UPDATED": 1}.items():
        monkeypatch.setattr(fused, name, value)
    return fused


def trainers(family, batch_size=16, hidden=20, chosen=slice(None), **options):
    parts = [Part(torch.arange(n), torch.arange(n, 40), STREAMS[i]) for i, n in enumerate((33, 34, 35))]
    decay, rate = torch.tensor([0.3, 1e-3] * 2), torch.tensor([0.1, 0.3] * 2)
    networks = Networks(family, torch.tensor([0, 1, 1, 2]), decay, rate, batch_size, hidden)
    return Trainer(make_problem(toy(), parts, DEVICE), networks[torch.arange(4)[chosen]], **options)


def assert_equal_networks(found, expected):
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(found._moments()[name], expected._moments()[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@RUNS
@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_fused_steps_equal_stacked_steps(family):
    stacked, fused = trainers(family, graphs=False), trainers(family, fused=True)
    for trainer in (stacked, fused):
        trainer.advance(2)
        trainer.keep(torch.tensor([1, 3], device=DEVICE))
        trainer.advance(1)
    assert_equal_networks(fused, stacked)


@RUNS
@pytest.mark.parametrize("family", ["bn", "dropout"])
@pytest.mark.parametrize("hidden", [10, 35])
def test_tiles_change_no_number(fused, family, hidden):
    stacked = trainers(family, 32, hidden, slice(1, 3), graphs=False)
    tiled = trainers(family, 32, hidden, slice(1, 3), fused=True)
    for trainer in (stacked, tiled):
        trainer.advance(2)
    assert_equal_networks(tiled, stacked)


@RUNS
def test_fused_and_stacked_steps_take_turns():
    whole, mixed = trainers("bn", fused=True), trainers("bn", fused=True)
    whole.advance(2)
    mixed.advance(1)
    later = trainers("bn", graphs=False)
    later.restore(mixed.state(), torch.arange(4, device=DEVICE))
    later.advance(1)
    assert_equal_networks(later, whole)


@RUNS
def test_company_changes_no_bit():
    whole, alone = trainers("dropout", fused=True), trainers("dropout", fused=True, chosen=slice(2, 3))
    for trainer in (whole, alone):
        trainer.advance(1)
    for name, value in alone.values.items():
        assert torch.equal(value[0], whole.values[name][2])


def test_networks_that_do_not_fit_are_left_to_the_stack():
    from mcbn.reproduce import fused

    assert [size for size in (8, 16, 24, 32, 128, 256, 1024) if fused.fits(size, 100)] == [16, 32, 128]
    assert not fused.fits(32, 129)
