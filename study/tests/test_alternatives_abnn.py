"""ABNN: the noise behind batch norm by hand, networks trained on, and the verbs of the other methods."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mcbn.errors import MCBNError
from mcbn_study.alternatives import abnn
from mcbn_study.alternatives.abnn import ABNN, class_weights, with_noise

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 4
DATA = DataLoader(TensorDataset(X, Y), 8)


def network():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    net(X)
    nn.init.normal_(net[1].weight)
    nn.init.normal_(net[1].bias)
    return net.eval()


def test_noise_multiplies_the_normalised_values():
    norm = network()[1]
    h = torch.randn(6, 5)
    normalised = (h - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    torch.manual_seed(3)
    noisy = with_noise(norm)(h)
    torch.manual_seed(3)
    e = torch.randn(6, 5)
    torch.testing.assert_close(noisy, norm.weight * normalised * (1 + abnn.ALPHA * e) + norm.bias)


def test_without_noise_and_training_every_draw_is_the_plain_network(monkeypatch):
    monkeypatch.setattr(abnn, "ALPHA", 0.0)
    rival = ABNN(network(), "classification").fit(DATA, n_samples=3, n_networks=0)
    torch.testing.assert_close(rival.sample(X), network()(X).expand(3, -1, -1))


def test_draws_go_from_network_to_network_and_depend_on_seed_alone():
    net = network()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fits = [ABNN(net, "classification").fit(DATA, n_samples=6, seed=seed, n_networks=2, epochs=1) for seed in (0, 0, 1)]
    state = torch.get_rng_state()
    first, again, other = (rival.sample(X) for rival in fits)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(draw.flatten().tolist()) for draw in first}) == 6
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    probs = fits[0].predict(X).probs
    torch.testing.assert_close(probs, torch.softmax(first, 2).mean(0))


def test_training_on_lowers_the_loss_with_noise():
    losses = [
        nn.functional.cross_entropy(ABNN(network(), "classification").fit(DATA, n_samples=64, epochs=e).sample(X)[1], Y)
        for e in (0, 60)
    ]
    assert losses[1] < losses[0]


def test_some_classes_weigh_more():
    assert sorted(class_weights(10).tolist()) == [1.0] * 7 + [abnn.PRIOR] * 3


def test_a_network_without_batch_norm_is_refused():
    with pytest.raises(MCBNError, match="classifiers with batch norm; got Linear"):
        ABNN(nn.Linear(3, 2), "classification")
