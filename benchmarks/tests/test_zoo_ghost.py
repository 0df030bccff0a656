"""Ghost batch norm: pieces of a batch normalised one by one, as TabNet does."""

import pytest
import torch
from imitations import GhostBatchNorm
from torch import nn

import mcbn

VIRTUAL = 8


def ghost() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    first, second = GhostBatchNorm(6, VIRTUAL), GhostBatchNorm(6, VIRTUAL)
    net = nn.Sequential(nn.Linear(5, 6), first, nn.Tanh(), nn.Linear(6, 6), second, nn.Linear(6, 2)).double()
    x = torch.randn(64, 5, dtype=torch.float64)
    net.train()
    for _ in range(20):
        net(x)
    return net.eval(), x


def test_every_input_meets_the_same_draw_however_many_pieces() -> None:
    net, x = ghost()
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=4, batch_size=VIRTUAL)
    assert bayes.posterior.layers == ("1.bn", "4.bn")
    alone = torch.cat([bayes.sample(row.unsqueeze(0)) for row in x[:20]], 1)
    for chunk_size in (None, 1, 3):
        torch.testing.assert_close(bayes.sample(x[:20], chunk_size=chunk_size), alone, rtol=1e-10, atol=1e-12)
    assert "one pass" in bayes.explain(x[:20])


def test_pieces_are_plain_batch_norm_with_the_statistics_of_the_draw() -> None:
    net, x = ghost()
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=3, batch_size=VIRTUAL)
    mean, var = bayes.posterior.draw(2)
    for name in mean:
        layer = net.get_submodule(name)
        layer.running_mean.copy_(mean[name])
        layer.running_var.copy_(var[name])
    torch.testing.assert_close(bayes.sample(x)[2], net(x), rtol=1e-10, atol=1e-12)


def test_batch_of_several_pieces_is_refused_with_the_size_to_pass() -> None:
    net, x = ghost()
    with pytest.raises(mcbn.MCBNError, match=r"'1.bn' normalises a batch of 32 in pieces of 8 .* pass batch_size=8"):
        mcbn.MCBN(net, "regression").fit(x, n_samples=2, batch_size=32)


def test_steps_of_a_series_are_calls_of_their_own_as_before() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(0, 1).contiguous()  # (L, N, 5): the steps are neighbours in memory
            return torch.stack([self.bn(step) for step in x]).mean(0)

    x = torch.randn(40, 3, 5)
    net = Steps().eval()
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=2, batch_size=8)
    assert bayes.posterior.layers == ("bn", "bn#2", "bn#3")
    with pytest.raises(mcbn.MCBNError, match="called more often"):
        bayes.predict(torch.randn(4, 4, 5))
