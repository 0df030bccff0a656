"""The Triton kernels against the batched products, in Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from mcbn.data import Regression
from mcbn.networks import BN_EPSILON
from mcbn_study.regression.evaluation import Evaluator
from mcbn_study.regression.problem import Part, make_problem
from mcbn_study.regression.stack import matrices
from mcbn_study.regression.train import Networks, Trainer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # must be set before Triton is first imported
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
RUNS = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="run in a process of its own, by the test above")


@TRITON
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run here themselves")
@pytest.mark.slow
def test_kernels_in_the_interpreter():
    arguments = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout, done.stdout


@pytest.fixture
def kernels():
    from mcbn_study.regression import kernels

    return kernels


def trained(family: str, n_inputs: int, hidden: int) -> tuple[Trainer, Evaluator]:
    x = torch.randn(290, n_inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.arange(len(x))
    parts = [Part(rows[:200], rows[200:], 1), Part(rows[50:251], rows[:50], 2)]  # padded: their sizes differ
    problem = make_problem(Regression(x, x.sum(1).sin()), parts, DEVICE)
    rate = torch.tensor([0.01, 0.1, 0.3, 0.2])
    networks = Networks(family, torch.tensor([0, 1, 0, 1]), torch.full((4,), 1e-4), rate, 40, hidden)
    trainer = Trainer(problem, networks)
    trainer.advance(3)
    evaluator = Evaluator(problem, 40, 9)
    evaluator._kernels = None  # the reference
    return trainer, evaluator


@TRITON
@RUNS
@pytest.mark.parametrize(("n_inputs", "hidden"), [(5, 10), (13, 50), (17, 70)])
def test_bn_moments_equal_the_batched_products(kernels, n_inputs, hidden):
    trainer, evaluator = trained("bn", n_inputs, hidden)
    expected = evaluator.moments(trainer.values, trainer.networks)
    evaluator._kernels = kernels
    mean, variance = evaluator.moments(trainer.values, trainer.networks)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, expected.variance, rtol=1e-4, atol=1e-6)


@TRITON
@RUNS
def test_batch_statistics_equal_the_batched_products(kernels):
    trainer, evaluator = trained("bn", 6, 20)
    values, networks = trainer.values, trainer.networks
    expected = evaluator._batch_statistics(values, networks, slice(0, 9))
    weights = matrices(values["weights"], 6, 20)
    found = kernels.batch_statistics(
        trainer.problem.train.x, evaluator._batches(), networks.stream, weights, values, BN_EPSILON
    )
    for layer, reference in zip(found, expected, strict=True):
        for part, other in zip(layer, reference, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-5)


@TRITON
@RUNS
@pytest.mark.parametrize(("n_inputs", "hidden"), [(5, 10), (13, 50)])
def test_dropout_moments_drop_the_same_units(kernels, n_inputs, hidden):
    trainer, evaluator = trained("dropout", n_inputs, hidden)
    expected = evaluator.moments(trainer.values, trainer.networks)
    evaluator._kernels = kernels
    mean, variance = evaluator.moments(trainer.values, trainer.networks)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, expected.variance, rtol=1e-4, atol=1e-6)
