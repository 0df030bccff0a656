"""The CUDA kernel of training steps against the stacked steps: on a GPU, or compiled for the host."""

import ctypes
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from for_gpu import compiled, compiler
from mcbn.data import Regression
from mcbn.engine.kernels import options
from mcbn.errors import MCBNError
from mcbn_study.regression import fused
from mcbn_study.regression.measure import Evaluator
from mcbn_study.regression.problem import Part, make_problem
from mcbn_study.regression.stack import Networks
from mcbn_study.regression.train import Trainer
from on_host import library, pointers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernel(monkeypatch, tmp_path_factory):
    """Run the kernel here if there is no GPU."""
    if DEVICE == "cuda":
        return
    if shutil.which("g++") is None:
        pytest.skip("needs a GPU or g++")
    monkeypatch.setattr(fused.kernels, "available", lambda: True)
    monkeypatch.setattr(fused, "launch", partial(launch_on_host, tmp_path_factory.getbasetemp()))


def launch_on_host(folder, name, constants, grid, tensors, *numbers, shared):
    kernel = Path(fused.__file__).with_name(f"{name}.cu")
    run = library(folder, Path(__file__).with_name(f"{name}_on_host.cpp"), kernel, tuple(options(constants))).run
    run(grid[0], ctypes.c_longlong(shared), *pointers(tensors), *numbers)


def trainers(family, Q=3, hidden=50, batch_size=32, steps=2, chosen=slice(None), fused=False, query=4):
    """Four networks on three streams of equally many batches."""
    n, generator = batch_size * steps, torch.Generator().manual_seed(0)
    x = torch.randn(n + 9, Q, generator=generator, dtype=torch.float64) + 2
    data = Regression(x, x.sin().sum(1))
    parts = [Part(torch.arange(n + i), torch.arange(n + 9 - query, n + 9), 7 * i + 1) for i in range(3)]
    decay, rate = torch.tensor([0.3, 1e-3] * 2), torch.tensor([0.1, 0.3] * 2)
    networks = Networks(family, torch.tensor([0, 1, 1, 2]), decay, rate, batch_size, hidden)
    given = make_problem(data, parts, DEVICE)
    trainer = Trainer(given, networks[torch.arange(4)[chosen]], fused=fused)
    trainer._graphs = False
    return trainer


def assert_equal_networks(found, expected):
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=2e-5)
        for mine, theirs in zip(found.moments, expected.moments, strict=True):
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_fused_steps_equal_stacked_steps(family):
    stacked, fused = trainers(family), trainers(family, fused=True)
    for trainer in (stacked, fused):
        trainer.advance(2)
        trainer.keep(torch.tensor([1, 3], device=DEVICE))
        trainer.advance(1)
    assert_equal_networks(fused, stacked)


SIZES = [  # Q, H, M: padded units, more products of inputs than threads, few rows, several chunks of rows
    ("bn", 13, 50, 16),
    ("bn", 4, 50, 8),
    ("bn", 4, 50, 128),
    ("bn", 9, 100, 32),
    ("bn", 9, 100, 64),
    ("dropout", 9, 100, 32),
    ("dropout", 13, 50, 16),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.slow
def test_sizes_change_no_number(sizes):
    stacked = trainers(*sizes, chosen=slice(1, 3))
    fused = trainers(*sizes, chosen=slice(1, 3), fused=True)
    for trainer in (stacked, fused):
        trainer.advance(1)
    assert_equal_networks(fused, stacked)


@pytest.mark.slow
def test_fused_and_stacked_steps_take_turns():
    whole, mixed = trainers("bn", fused=True), trainers("bn", fused=True)
    whole.advance(2)
    mixed.advance(1)
    later = trainers("bn")
    later.epoch = mixed.epoch
    later._start(*({name: value.clone() for name, value in t.items()} for t in (mixed.values, *mixed.moments)))
    later.advance(1)
    assert_equal_networks(later, whole)


def test_company_changes_no_bit():
    whole, alone = trainers("dropout", fused=True), trainers("dropout", fused=True, chosen=slice(2, 3))
    for trainer in (whole, alone):
        trainer.advance(1)
    for name, value in alone.values.items():
        assert torch.equal(value[0], whole.values[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 50), (9, 100)], ids=str)
def test_draws_of_the_kernel_have_the_moments_of_the_stack(sizes):
    trainer = trainers("dropout", *sizes, steps=5, query=140)  # two blocks of rows
    trainer.advance(1)
    evaluator = Evaluator(trainer.problem, 32, 6)
    evaluator.draw_anew(3)
    expected = evaluator.moments(trainer.values, trainer.networks)
    evaluator._fused = True
    found = evaluator.moments(trainer.values, trainer.networks)
    for mine, theirs in zip(found, expected, strict=True):  # (S, n) each
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert float(expected[1].min()) > 1e-6


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(fused.kernels, "available", lambda: False)
    with pytest.raises(MCBNError, match=r"needs a GPU.*run without --fused"):
        trainers("bn", fused=True)


def test_networks_that_do_not_fit_are_left_to_the_stack():
    assert [size for size in (4, 8, 24, 32, 1024, 2048) if fused.fits("bn", size, 100)] == [8, 32, 1024]
    assert [size for size in (16, 32, 64) if fused.fits("dropout", size, 50)] == [16, 32]
    assert not fused.fits("bn", 32, 70)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="needs nvidia-cuda-nvrtc")
@pytest.mark.parametrize("sizes", [("bn", 8, 50, 32), ("bn", 9, 100, 1024), ("dropout", 9, 100, 32)], ids=str)
def test_a_multiprocessor_holds_as_many_networks_as_the_kernel_promises(sizes):
    constants, shared = fused.sizes(*sizes)
    taken = compiled("fused", constants, "mcbn_study.regression")._replace(shared=shared)
    assert taken.blocks(int(constants["THREADS"])) >= int(constants["BLOCKS"])
    assert taken.spilled <= 128


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="needs nvidia-cuda-nvrtc")
@pytest.mark.parametrize("sizes", [(4, 50), (13, 50), (9, 100)], ids=str)
def test_draws_of_dropout_stay_in_registers(sizes):
    constants = {"N_INPUTS": sizes[0], "N_UNITS": sizes[1], "THREADS": fused.THREADS}
    assert compiled("dropped", constants, "mcbn_study.regression").spilled <= 256
