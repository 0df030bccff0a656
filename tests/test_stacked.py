import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from mcbn import stacked
from mcbn.networks import RegressionMLP

SIZES = [((), 1), ((6,), 1), ((6, 5), 1), ((6, 5), 3), ((4, 7, 5), 2)]


def doubled(n_inputs, hidden, n_outputs, seeds=(1, 2, 3)):
    values = stacked.initial_values(n_inputs, hidden, n_outputs, seeds=seeds)
    return {name: value.double() for name, value in values.items()}


@pytest.mark.parametrize(("hidden", "n_outputs"), SIZES)
def test_a_network_of_the_stack_is_the_one_of_its_seed(hidden, n_outputs):
    values = stacked.initial_values(4, hidden, n_outputs, seeds=[7, 8])
    for s, seed in enumerate((7, 8)):
        alone = RegressionMLP(4, hidden, n_outputs, seed=seed).state_dict()
        for name, value in stacked.network(values, s, 4).state_dict().items():
            assert torch.equal(value, alone[name])


@pytest.mark.parametrize(("hidden", "n_outputs"), SIZES)
@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("n_inputs", [1, 4])
def test_gradients_equal_those_of_autograd_for_each_network_alone(hidden, n_outputs, classes, n_inputs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, n_inputs, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 16, n_outputs, generator=generator, dtype=torch.float64)
    y = y.argmax(2) if classes else y
    values, decay = doubled(n_inputs, hidden, n_outputs), torch.tensor([0.0, 0.1, 2.0], dtype=torch.float64)
    grads = stacked.gradients(values, x, y, decay)
    for s in range(3):
        alone = stacked.network(values, s, n_inputs).double()
        loss = cross_entropy(alone(x[s]), y[s]) if classes else 0.5 * mse_loss(alone(x[s]), y[s])
        weights = [p for p in alone.parameters() if p.ndim > 1]
        (loss + decay[s] * sum(0.5 * weight.square().sum() for weight in weights)).backward()
        shaped = stacked.network(grads, s, n_inputs).state_dict()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(shaped[name].double(), parameter.grad, rtol=1e-6, atol=1e-7)


def test_the_values_and_the_batch_are_untouched_by_gradients():
    values, x, y = doubled(3, (4, 4), 1), torch.randn(3, 8, 3).double(), torch.randn(3, 8, 1).double()
    before = {name: value.clone() for name, value in values.items()}
    x_before, y_before = x.clone(), y.clone()
    stacked.gradients(values, x, y, torch.ones(3).double())
    assert torch.equal(x, x_before)
    assert torch.equal(y, y_before)
    assert all(torch.equal(values[name], before[name]) for name in before)
