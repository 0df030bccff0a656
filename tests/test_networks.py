import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from mcbn.errors import MCBNError
from mcbn.networks import RegressionMLP, Standardized, train_regression


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only wait for one another's threads
    yield
    torch.set_num_threads(before)


def data(n=70, q=3, d=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 5 + 3 * torch.randn(n, q, generator=generator, dtype=torch.float64)
    slopes = torch.randn(q, d or 1, generator=generator, dtype=torch.float64)
    y = 100 + 20 * (x @ slopes)
    return x, y if d else y[:, 0]


def mlp(q=3, d=1, seed=0, hidden=(50, 50)):
    return RegressionMLP(q, hidden, d, seed=seed).double()


def state(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def assert_same(a, b, tolerance=0.0):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- RegressionMLP ----------------------------------------------------------------------------------------


def test_layers_are_the_papers():
    network = RegressionMLP(13, (50, 20), 2)
    kinds = [type(layer) for layer in network]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2 + [nn.Linear]
    assert [layer.weight.shape for layer in network if isinstance(layer, nn.Linear)] == [
        (50, 13),
        (20, 50),
        (2, 20),
    ]
    assert [layer.bias is None for layer in network if isinstance(layer, nn.Linear)] == [True, True, False]


def test_batch_norm_starts_at_one_and_zero_with_the_papers_epsilon():
    for layer in RegressionMLP(4):
        if isinstance(layer, nn.BatchNorm1d):
            assert layer.eps == 1e-10
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()
            assert layer.weight.requires_grad
            assert layer.bias.requires_grad


def test_initial_weights_are_truncated_normal():
    weights = RegressionMLP(300, (300,), 300, seed=1)
    drawn = torch.cat([weights[0].weight.flatten(), weights[3].weight.flatten()]).detach()
    density = math.exp(-2) / math.sqrt(2 * math.pi)  # of a standard normal at its cut, 2
    expected = 0.1 * math.sqrt(1 - 4 * density / math.erf(math.sqrt(2)))
    assert drawn.abs().max() <= 0.2
    assert drawn.mean().abs() < 5 * expected / drawn.numel() ** 0.5
    assert abs(drawn.std() - expected) < 5 * expected / drawn.numel() ** 0.5
    assert 0.06 < weights[3].bias.std() < 0.12


def test_output_keeps_its_dimension():
    assert mlp()(data()[0]).shape == (70, 1)
    assert mlp(d=4)(data()[0]).shape == (70, 4)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first, same, other = mlp(seed=1), mlp(seed=1), mlp(seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert_same(state(first), state(same))
    assert not torch.equal(first[0].weight, other[0].weight)


def test_without_seed_weights_follow_the_global_generator():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = RegressionMLP(4)
        torch.manual_seed(3)
        assert_same(state(first), state(RegressionMLP(4)))
        assert not torch.equal(first[0].weight, RegressionMLP(4)[0].weight)


@pytest.mark.parametrize("sizes", [(0, (50,), 1), (3, (50, 0), 1), (3, (50,), 0)])
def test_empty_layers_are_refused(sizes):
    with pytest.raises(MCBNError, match="at least 1"):
        RegressionMLP(*sizes)


# --- Standardized -----------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Return one fixed tensor and remember the input."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        self.x = x
        return self.output


@pytest.mark.parametrize("d", [None, 1, 2])
def test_standardized_sees_standard_inputs_and_returns_original_units(d):
    x, y = data(d=d)
    inner = Seen(((y - y.mean(0)) / y.std(0, correction=0)).reshape(70, -1))
    assert_same(Standardized(inner, x, y)(x), y, 1e-10)  # a perfect inner network gives back y, in the shape of y
    np.testing.assert_allclose(inner.x.mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(inner.x.numpy().std(0), 1, atol=1e-10)


def test_standardized_equals_its_equation_on_new_inputs():
    (x, y), (new, _) = data(), data(seed=1)
    network = Standardized(mlp().eval(), x, y)
    scaled = (new.numpy() - x.numpy().mean(0)) / x.numpy().std(0)
    with torch.no_grad():
        expected = y.mean() + y.numpy().std() * network.network(torch.from_numpy(scaled))[:, 0]
        assert_same(network(new), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_columns_have_std_one(dtype):
    x, _ = data(7)
    x[:, 1] = 0.1  # its mean rounds in float32, so its computed std may not be 0
    network = Standardized(RegressionMLP(3).to(dtype), x.to(dtype), torch.full((7,), 0.1, dtype=dtype))
    assert network.x_std[1] == 1
    assert network.y_std == 1
    assert network.x_std[0] != 1
    assert network.x_std.dtype == dtype


def test_standard_units_travel_in_the_state_dict():
    x, y = data()
    source, target = Standardized(mlp(seed=1), x, y).eval(), Standardized(mlp(seed=2), 2 * x, 2 * y).eval()
    target.load_state_dict(source.state_dict())
    assert_same(target(x), source(x))


def test_standardized_refuses_a_network_with_other_outputs():
    x, y = data()
    with pytest.raises(MCBNError, match="2 outputs, the targets have 1"):
        Standardized(mlp(d=2), x, y)(x)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(5), torch.zeros(5), r"\(5,\)"),
        (torch.zeros(5, 2), torch.zeros(4), r"\(5, 2\) and y \(4,\)"),
        (torch.zeros(1, 2), torch.zeros(1), "at least 2"),
        (torch.zeros(5, 2), torch.zeros(5, 1, 1), r"\(5, 1, 1\)"),
        (torch.zeros(5, 2), torch.zeros(5, dtype=torch.long), "floating"),
        (torch.full((5, 2), math.nan), torch.zeros(5), "finite"),
    ],
)
def test_bad_data_is_refused(x, y, message):
    with pytest.raises(MCBNError, match=message):
        Standardized(RegressionMLP(2), x, y)
    with pytest.raises(MCBNError, match=message):
        train_regression(RegressionMLP(2), x, y)


# --- train_regression -------------------------------------------------------------------------------------


def train_naively(network, x, y, *, batch_size, epochs, weight_decay, seed):
    """Follow the equation of `train_regression`: explicit loss, explicit penalty, PyTorch's plain Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator).tolist()
        while len(order) >= batch_size:
            rows, order = order[:batch_size], order[batch_size:]
            output = network(x[rows])
            error = sum((output[i, 0] - y[row]) ** 2 for i, row in enumerate(rows)) / batch_size
            penalty = sum((layer.weight**2).sum() for layer in network if isinstance(layer, nn.Linear)) / 2
            optimizer.zero_grad()
            (error / 2 + weight_decay * penalty).backward()
            optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_training_equals_the_naive_loop(weight_decay):
    x, y = data(30)
    y = (y - y.mean()) / y.std()
    settings = {"batch_size": 8, "epochs": 2, "weight_decay": weight_decay, "seed": 5}
    fast, naive = mlp(hidden=(6, 5)), mlp(hidden=(6, 5))
    train_regression(fast, x, y, **settings)
    train_naively(naive, x, y, **settings)
    assert_same(state(fast), state(naive), 1e-10)


def test_weight_decay_alone_moves_matrices_and_nothing_else():
    network = mlp()
    with torch.no_grad():
        network[-1].bias.fill_(3.0)
        network[-1].weight.fill_(0.0)  # so the output is the bias, equal to the target: no gradient of the error
    before = state(network)
    x, _ = data()
    train_regression(network, x, torch.full((70,), 3.0, dtype=torch.float64), epochs=1, weight_decay=1e-2)
    moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"0.weight", "3.weight"}


def test_standardized_trains_its_network_in_standard_units():
    x, y = data()
    wrapped, bare = Standardized(mlp(), x, y), mlp()
    train_regression(wrapped, x, y, epochs=3)
    train_regression(bare, *wrapped.standardize(x, y), epochs=3)
    assert_same(state(wrapped.network), state(bare))


def test_last_partial_batch_is_discarded():
    x, y = data(70)
    network = mlp()
    train_regression(network, x, y, batch_size=32, epochs=3)
    assert network[1].num_batches_tracked == 3 * 2


def test_batch_larger_than_the_data_means_all_data():
    x, y = data(20)
    small, large = mlp(), mlp()
    train_regression(small, x, y, batch_size=20, epochs=3)
    train_regression(large, x, y, batch_size=1024, epochs=3)
    assert_same(state(small), state(large))


def test_same_seed_same_network_other_seed_other_network():
    x, y = data()
    first, same, other = mlp(), mlp(), mlp()
    for network, seed in ((first, 1), (same, 1), (other, 2)):
        train_regression(network, x, y, epochs=2, seed=seed)
    assert_same(state(first), state(same))
    assert not torch.equal(first[0].weight, other[0].weight)


def test_training_leaves_global_generators_and_data_alone():
    x, y = data()
    x_before, y_before = x.clone(), y.clone()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    train_regression(Standardized(mlp(), x, y), x, y, epochs=2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()
    assert_same((x, y), (x_before, y_before))


@pytest.mark.parametrize("d", [None, 2])
def test_training_learns_a_linear_function(d):
    x, y = data(200, d=d)
    network = Standardized(mlp(d=d or 1), x, y)
    train_regression(network, x, y, epochs=150, weight_decay=1e-6)
    with torch.no_grad():
        assert ((network(x) - y).square().mean(0).sqrt() < 0.15 * y.std(0)).all()


def test_on_epoch_counts_from_one_in_eval_mode_and_can_stop():
    x, y = data()
    network, calls = mlp(), []

    def on_epoch(epoch):
        calls.append((epoch, network.training, int(network[1].num_batches_tracked)))
        return epoch == 3

    train_regression(network, x, y, epochs=10, on_epoch=on_epoch)
    assert calls == [(1, False, 2), (2, False, 4), (3, False, 6)]


def test_network_is_in_eval_without_gradients_afterwards_also_after_an_exception():
    x, y = data()
    network = mlp()
    train_regression(network, x, y, epochs=1)
    assert not network.training
    assert all(parameter.grad is None for parameter in network.parameters())
    with pytest.raises(MCBNError, match=r"\(32, 2\) for targets \(32, 1\)"):
        train_regression(broken := mlp(d=2), x, y)
    assert not broken.training


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"epochs": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(MCBNError, match="at least 2 and epochs 1"):
        train_regression(mlp(), *data(), **options)


def test_mixed_dtypes_are_refused():
    with pytest.raises(MCBNError, match=r"torch.float32, torch.float64"):
        train_regression(RegressionMLP(3), *data())
