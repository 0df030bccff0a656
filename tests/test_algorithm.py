"""Algorithm 1 as printed: its own laws, and that `mcbn.MCBN` gives its numbers for every kind of batch norm."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import mcbn
from kinds import KINDS, make, norms_in_training
from mcbn import algorithm
from untouched import untouched


def batches_of(x: torch.Tensor, T: int = 5, M: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [x[torch.randperm(len(x), generator=generator)[:M]] for _ in range(T)]


@pytest.mark.parametrize("kind", KINDS)
def test_mcbn_gives_the_numbers_of_algorithm_1(kind: str) -> None:
    net, x = make(kind, dtype=torch.float64)
    batches = batches_of(x)
    bayes = mcbn.MCBN(net, "regression").fit(iter(batches), n_samples=5)
    bayes.tau = 4.0
    expected = algorithm.sample(bayes.network.module, batches, x)
    torch.testing.assert_close(bayes.sample(x), expected, rtol=1e-10, atol=1e-10)
    pred, (mean, variance) = bayes.predict(x), algorithm.moments(expected, tau=4.0)
    torch.testing.assert_close(pred.mean, mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pred.variance, variance, rtol=1e-10, atol=1e-10)


def test_a_batch_replayed_on_itself_is_the_training_forward() -> None:
    net, x = make("residual", dtype=torch.float64)
    training = norms_in_training(copy.deepcopy(net))(x)
    draw = algorithm.record(net.eval(), x)
    torch.testing.assert_close(algorithm.replay(net, draw, x), training, rtol=1e-10, atol=1e-10)


def test_only_the_calls_named_are_stochastic() -> None:
    net, x = make("residual", dtype=torch.float64)
    batches = batches_of(x)
    first = mcbn.MCBN(net, "regression", layers=1).fit(iter(batches), n_samples=5)
    torch.testing.assert_close(first.sample(x), algorithm.sample(net, batches, x, calls=[0]), rtol=1e-10, atol=1e-10)
    none = algorithm.sample(net, batches, x, calls=[])
    assert torch.equal(none[0], net.eval()(x))


def test_weight_standardisation_is_left_alone() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = nn.functional.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True)
            return nn.functional.conv2d(x, weight.reshape_as(self.weight), self.bias)

    net, x = nn.Sequential(Standardised(3, 4, 3), nn.BatchNorm2d(4)).double(), torch.randn(8, 3, 6, 6).double()
    standardisation, norm = algorithm.record(net.eval(), x)
    assert standardisation is None
    assert norm is not None


def test_the_network_is_left_as_it_was() -> None:
    net, x = make("1d")
    with untouched(net.train()):
        algorithm.sample(net, batches_of(x), x)


def test_it_fits_on_a_page() -> None:
    assert len(Path(algorithm.__file__).read_text().splitlines()) < 80
