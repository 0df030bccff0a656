"""Gradients by a program of both directions equal those of autograd, or are refused."""

import pytest
import torch
from torch import Tensor, nn

import mcbn
from kinds import scramble, settle
from mcbn.engine.jacobian import Differentiator
from mcbn.engine.trace import UntraceableError
from mcbn.networks import RegressionMLP, Standardized

N, Q = 9, 5


class Chain(nn.Module):
    """A batch norm of raw inputs, numbers and a constant as factors and summands; a value read twice if asked."""

    def __init__(self, activation: nn.Module, *, residual: bool = False) -> None:
        super().__init__()
        self.residual = residual
        self.first, self.one, self.two = nn.BatchNorm1d(Q), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.into, self.through, self.last = nn.Linear(Q, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.activation = activation
        self.register_buffer("factor", torch.tensor([0.5, -1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.one(self.into(self.first(x)) * 3.0))
        h = (h if self.residual else 2.0) + self.activation(self.two(self.through(h))) * self.factor
        return 0.25 * self.last(h).squeeze(-1)


def differentiator(net: nn.Module) -> tuple[Differentiator, Tensor]:
    scramble(net.double())
    x = torch.randn(64, Q, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settle(net, x, 16)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=20, batch_size=16)
    return bayes.linearizer.expansion(x[:N], 20).differentiate, x[:N]


def standardized() -> nn.Module:
    x = torch.randn(40, Q, generator=torch.Generator().manual_seed(1))
    return Standardized(RegressionMLP(Q, (6, 6), seed=0), x, x.sum(1))


@pytest.mark.parametrize(
    "make",
    [
        standardized,
        lambda: Chain(nn.ReLU()),
        lambda: Chain(nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.BatchNorm1d(Q), nn.Linear(Q, 1), nn.Flatten()),
    ],
    ids=["standardized", "chain", "in-place", "single"],
)
def test_equals_autograd(make) -> None:
    differentiate, x = differentiator(make())
    output, jacobian = differentiate.plain(x)
    found = differentiate.reversal(x)(x)
    assert jacobian.abs().sum() > 0
    torch.testing.assert_close(found[0], output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], jacobian, rtol=1e-10, atol=1e-12)
    assert differentiate.fastest(x).__qualname__.startswith("Differentiator.reversal")


@pytest.mark.parametrize(
    ("net", "reason"),
    [(Chain(nn.Softplus()), r"no rule for .*softplus"), (Chain(nn.ReLU(), residual=True), "one chain")],
    ids=["softplus", "residual"],
)
def test_what_has_no_rule_is_refused_and_left_to_autograd(net: nn.Module, reason: str) -> None:
    differentiate, x = differentiator(net)
    expected = differentiate.plain(x)
    with pytest.raises(UntraceableError, match=reason):
        differentiate.reversal(x)
    way = differentiate.fastest(x)
    assert way.__qualname__.startswith("Differentiator.plain")
    torch.testing.assert_close(way(x)[1], expected[1], rtol=1e-10, atol=1e-12)


def test_several_outputs_are_left_to_autograd() -> None:
    differentiate, x = differentiator(nn.Sequential(nn.Linear(Q, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)))
    differentiate.plain(x)
    with pytest.raises(UntraceableError, match="more than one output"):
        differentiate.reversal(x)


def test_inputs_changed_in_place_are_left_to_autograd() -> None:
    differentiate, x = differentiator(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(Q), nn.Linear(Q, 1)))
    before, expected = x.clone(), differentiate.plain(x)
    with pytest.raises(UntraceableError, match="changed in place"):
        differentiate.reversal(x)
    torch.testing.assert_close(differentiate.fastest(x)(x)[1], expected[1], rtol=1e-10, atol=1e-12)
    assert torch.equal(x, before)
