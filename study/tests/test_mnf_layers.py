"""Flows of MNF against Jacobians, its layer and the KL against brute force."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import mcbn
from kinds import normal
from mcbn_study.mnf import stack
from mcbn_study.mnf.layers import STEPS, FlowStep, MNFLinear, MNFNetwork, follow

DOUBLE = torch.float64


def sources(n: int, first: int = 0) -> list[torch.Generator]:
    return [stack.generator(first + s, stack.INITIAL) for s in range(n)]


def masks(*shape: int, seed: int = 0) -> Tensor:
    return (normal(*shape, seed=seed) > 0).double()


def repeated(module: nn.Module, n: int) -> nn.Module:
    """Make a stack of n equal networks from a stack of one."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.expand(n, *parameter.shape[1:]).clone()
    return module


def scrambled_layer(n_inputs: int = 3, n_outputs: int = 2) -> MNFLinear:
    """A tiny layer away from its initial values, where every term of the KL counts."""
    layer = MNFLinear(n_inputs, n_outputs, generators=sources(1), hidden_q=4, hidden_r=5).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.add_(0.3 * normal(*parameter.shape, seed=i))
        layer.log_std.add_(7.5)  # std about 0.2, below the clip
        layer.bias_log_var.add_(7)
    return layer


def naive_step(step: FlowStep, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    hidden = ((mask * z) @ step.weight_in + step.bias_in).tanh()
    shift, logit = (hidden @ step.weight_out + step.bias_out).chunk(2, -1)
    gate = 1 / (1 + torch.exp(-logit))
    return mask * z + (1 - mask) * (gate * z + (1 - gate) * shift), ((1 - mask) * gate.log()).sum(-1)


def test_flow_step_and_its_gradient_equal_the_naive_equation() -> None:
    step = FlowStep(4, 6, sources(2)).double()
    z, mask = normal(2, 5, 4).requires_grad_(), masks(2, 5, 4, seed=1)
    found, expected = step(z, mask), naive_step(step, z, mask)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    weights = [normal(*t.shape, seed=7) for t in found]

    def gradients(result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        total = sum((r.sin() * w).sum() for r, w in zip(result, weights, strict=True))
        return torch.autograd.grad(total, [z, *step.parameters()])

    for a, b in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def steps(generators: list[torch.Generator]) -> nn.ModuleList:
    return nn.ModuleList(FlowStep(5, 6, generators) for _ in range(STEPS)).double()


def test_flow_log_determinant_equals_that_of_the_jacobian() -> None:
    flow = steps(sources(3))
    z, m = normal(3, 1, 5), masks(3, 2, 1, 5, seed=2)
    _, log_det = follow(flow, z, m)
    jacobian = torch.autograd.functional.jacobian(lambda v: follow(flow, v, m)[0], z)  # (3, 1, 5, 3, 1, 5)
    for s in range(3):
        torch.testing.assert_close(log_det[s, 0], torch.linalg.slogdet(jacobian[s, 0, :, s, 0])[1], rtol=1e-9, atol=0)
    assert torch.all(jacobian[0, :, :, 1] == 0)


def test_flow_starts_near_the_identity_and_a_mask_of_ones_is_the_identity() -> None:
    flow = steps(sources(1))
    z = normal(1, 4, 5)
    moved, log_det = follow(flow, z, torch.ones(1, 2, 4, 5, dtype=DOUBLE))
    assert torch.equal(moved, z)
    assert torch.all(log_det == 0)
    torch.testing.assert_close(flow[0].bias_out[..., 5:], torch.full((1, 1, 5), 2.0, dtype=DOUBLE))


def brute_force_kl(layer: MNFLinear, n: int) -> Tensor:
    """log q(W, b, z) - log r(z | W) - log p(W, b) for n explicit draws of everything, (n,)."""

    def log_normal(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return torch.distributions.Normal(mean, std).log_prob(value).flatten(1).sum(1)

    wide = repeated(layer, n)
    assert isinstance(wide, MNFLinear)
    std_z, std_b = torch.exp(wide.z_log_var / 2), torch.exp(wide.bias_log_var / 2)
    z_0 = wide.z_mean + std_z * normal(n, 1, layer.n_inputs, seed=11)
    z, log_q = z_0, log_normal(z_0, wide.z_mean, std_z)
    for i, step in enumerate(wide.q):
        z, log_det = naive_step(step, z, masks(n, 1, layer.n_inputs, seed=20 + i))
        log_q = log_q - log_det[:, 0]
    weight = z.mT * wide.mean + wide.log_std.exp() * normal(*wide.mean.shape, seed=12)  # (n, I, O)
    bias = wide.bias + std_b * normal(*wide.bias.shape, seed=13)
    a = torch.tanh(wide.c @ weight).mean(2, keepdim=True)  # (n, 1, 1)
    end, log_r = z, torch.zeros(n, dtype=DOUBLE)
    for i, step in enumerate(wide.r):
        end, log_det = naive_step(step, end, masks(n, 1, layer.n_inputs, seed=30 + i))
        log_r = log_r + log_det[:, 0]
    log_r = log_r + log_normal(end, a * wide.b_mean, torch.exp(-a * wide.b_log_precision / 2))
    log_q = log_q + log_normal(weight, z.mT * wide.mean, wide.log_std.exp()) + log_normal(bias, wide.bias, std_b)
    zero, one = torch.zeros((), dtype=DOUBLE), torch.ones((), dtype=DOUBLE)
    return (log_q - log_r - log_normal(weight, zero, one) - log_normal(bias, zero, one)).detach()


def test_kl_equals_brute_force_within_monte_carlo_error() -> None:
    n = 100_000
    layer = scrambled_layer()
    brute = brute_force_kl(layer, n)
    noise = [normal(n, *shape, seed=i) for i, shape in enumerate(layer.pass_shapes(1))]
    with torch.no_grad():
        _, kl = repeated(layer, n)(torch.zeros(n, 1, 3, dtype=DOUBLE), noise)
    error = math.sqrt((brute.var() / n + kl.var() / n).item())
    assert error < 0.03
    assert abs(brute.mean() - kl.mean()).item() < 4 * error
    assert kl.var() < brute.var()  # the parts known in closed form add no noise


def test_local_reparametrisation_has_the_moments_of_drawn_weights() -> None:
    n = 100_000
    layer = scrambled_layer()
    x = normal(1, 1, 3, seed=5)
    with torch.no_grad():
        noise = [normal(1, *shape, seed=i) for i, shape in enumerate(layer.pass_shapes(n))]
        local = layer(x.expand(1, n, 3), noise)[0][0]  # (n, O)
        weight, bias = layer.draw([normal(1, n, *shape, seed=9 + i) for i, shape in enumerate(layer.draw_shapes())])
        drawn = (x.unsqueeze(1) @ weight + bias)[0, :, 0]  # (n, O)
    error = (local.var(0) / n + drawn.var(0) / n).sqrt()
    assert ((local.mean(0) - drawn.mean(0)).abs() < 4 * error).all()
    torch.testing.assert_close(local.var(0), drawn.var(0), rtol=0.03, atol=0)


def test_weight_std_is_clipped_at_one_half() -> None:
    layer = scrambled_layer()
    with torch.no_grad():
        layer.log_std.fill_(3.0)
        noise = [torch.zeros(1, 1, *shape, dtype=DOUBLE) for shape in layer.draw_shapes()]
        centre, _ = layer.draw(noise)
        noise[2].fill_(1.0)
        torch.testing.assert_close(layer.draw(noise)[0] - centre, torch.full_like(centre, 0.5))


def test_initial_values_are_the_published_ones() -> None:
    layer = MNFLinear(40, 60, generators=sources(20))
    assert layer.mean.std().item() == pytest.approx(math.sqrt(4 / 100), rel=0.02)
    assert layer.z_mean.std().item() == pytest.approx(math.sqrt(4 / 40), rel=0.1)
    assert layer.log_std.mean().item() == pytest.approx(-9, abs=1e-4)
    assert layer.z_log_var.mean().item() == pytest.approx(math.log(0.1), abs=1e-4)
    assert layer.q[0].weight_in.shape == (20, 40, 50)
    assert layer.r[0].weight_in.shape == (20, 40, 100)


def test_network_without_layers_or_generators_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="inputs and outputs"):
        MNFNetwork([3], generators=sources(1))
    with pytest.raises(mcbn.MCBNError, match="a generator"):
        MNFNetwork([3, 1], generators=[])
