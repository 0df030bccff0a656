"""MNF: flows against Jacobians, the KL against brute force, stacks against single networks, and the trained method."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from mcbn.baselines import MNF, ConstantUncertainty, MNFLinear, MNFNetwork, stack
from mcbn.baselines.flows import FlowStep, MaskedFlow
from untouched import generators

DOUBLE = torch.float64


def sources(n: int, first: int = 0) -> list[torch.Generator]:
    return [stack.generator(first + s, stack.INITIAL) for s in range(n)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


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


# ---------------------------------------------------------------- flows


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


def test_flow_log_determinant_equals_that_of_the_jacobian() -> None:
    flow = MaskedFlow(5, hidden=6, n_steps=2, generators=sources(3)).double()
    z, m = normal(3, 1, 5), masks(3, 2, 1, 5, seed=2)
    _, log_det = flow(z, m)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v, m)[0], z)  # (3, 1, 5, 3, 1, 5)
    for s in range(3):
        torch.testing.assert_close(log_det[s, 0], torch.linalg.slogdet(jacobian[s, 0, :, s, 0])[1], rtol=1e-9, atol=0)
    assert torch.all(jacobian[0, :, :, 1] == 0)


def test_flow_starts_near_the_identity_and_a_mask_of_ones_is_the_identity() -> None:
    flow = MaskedFlow(5, hidden=6, n_steps=2, generators=sources(1)).double()
    z = normal(1, 4, 5)
    moved, log_det = flow(z, torch.ones(1, 2, 4, 5, dtype=DOUBLE))
    assert torch.equal(moved, z)
    assert torch.all(log_det == 0)
    torch.testing.assert_close(flow.steps[0].bias_out[..., 5:], torch.full((1, 1, 5), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_flow_without_width_or_steps_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(mcbn.MCBNError, match="at least 1"):
        MaskedFlow(sizes[0], hidden=sizes[1], n_steps=sizes[2], generators=sources(1))


# ---------------------------------------------------------------- the layer


def brute_force_kl(layer: MNFLinear, n: int) -> Tensor:
    """log q(W, b, z) - log r(z | W) - log p(W, b) for n explicit draws of everything, (n,)."""

    def log_normal(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return torch.distributions.Normal(mean, std).log_prob(value).flatten(1).sum(1)

    wide = repeated(layer, n)
    assert isinstance(wide, MNFLinear)
    std_z, std_b = torch.exp(wide.z_log_var / 2), torch.exp(wide.bias_log_var / 2)
    z_0 = wide.z_mean + std_z * normal(n, 1, layer.n_inputs, seed=11)
    z, log_q = z_0, log_normal(z_0, wide.z_mean, std_z)
    for i, step in enumerate(wide.q.steps):
        z, log_det = naive_step(step, z, masks(n, 1, layer.n_inputs, seed=20 + i))
        log_q = log_q - log_det[:, 0]
    weight = z.mT * wide.mean + wide.log_std.exp() * normal(*wide.mean.shape, seed=12)  # (n, I, O)
    bias = wide.bias + std_b * normal(*wide.bias.shape, seed=13)
    a = torch.tanh(wide.c @ weight).mean(2, keepdim=True)  # (n, 1, 1)
    end, log_r = z, torch.zeros(n, dtype=DOUBLE)
    for i, step in enumerate(wide.r.steps):
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
    assert layer.q.steps[0].weight_in.shape == (20, 40, 50)
    assert layer.r.steps[0].weight_in.shape == (20, 40, 100)


def test_network_without_layers_or_generators_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="inputs and outputs"):
        MNFNetwork([3], generators=sources(1))
    with pytest.raises(mcbn.MCBNError, match="a generator"):
        MNFNetwork([3, 1], generators=[])


# ---------------------------------------------------------------- stacks


def stacked(members: list[int], *, n: int = 50, batch_size: int = 10) -> stack.Stack:
    """Networks of these numbers, each with data, weights and streams of its own."""
    network = MNFNetwork([3, 6, 1], generators=[stack.generator(s, stack.INITIAL) for s in members]).double()
    x = torch.stack([normal(n, 3, seed=s) for s in members])
    return stack.Stack(network, x, x.sum(2, keepdim=True), [[s] for s in members], batch_size=batch_size)


def assert_networks_equal(a: stack.Stack, i: int, b: stack.Stack, j: int) -> None:
    for p, q in zip(a.network.parameters(), b.network.parameters(), strict=True):
        torch.testing.assert_close(p[i], q[j], rtol=1e-8, atol=1e-10)


def test_network_of_a_stack_equals_the_network_alone() -> None:
    together = stacked([4, 7, 9])
    for _ in range(13):
        together.epoch()  # 65 steps: more than a block of noise
    for i, member in enumerate([4, 7, 9]):
        alone = stacked([member])
        for _ in range(13):
            alone.epoch()
        assert_networks_equal(together, i, alone, 0)


def test_each_network_stops_at_its_own_epoch() -> None:
    together = stacked([1, 2, 3])
    stack.train_for(together, [2, 5, 3])
    for i, epochs in enumerate([2, 5, 3]):
        alone = stacked([i + 1])
        stack.train_for(alone, [epochs])
        assert_networks_equal(together, i, alone, 0)


@pytest.mark.slow
def test_early_stopping_in_a_stack_equals_early_stopping_alone_and_a_naive_loop() -> None:
    def held_out(members: list[int], network: MNFNetwork) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.stack([normal(20, 3, seed=100 + s) for s in members])
        sign = torch.tensor([-1 if s == 2 else 1 for s in members]).reshape(-1, 1, 1)  # 2 gets worse as it learns
        noise = stack.draw_noise([[s, stack.VALIDATION] for s in members], 0, 4, network.draw_size).double()
        return x, sign * x.sum(2, keepdim=True), noise

    together = stacked([1, 2])
    epochs = stack.train_until_best(together, *held_out([1, 2], together.network), max_epochs=40, patience=5)
    assert epochs[1] < epochs[0]
    for i, member in enumerate([1, 2]):
        alone = stacked([member])
        x, y, noise = held_out([member], alone.network)
        found = stack.train_until_best(alone, x, y, noise, max_epochs=40, patience=5)
        assert found == [epochs[i]]
        assert_networks_equal(together, i, alone, 0)
        assert naive_best_epoch(stacked([member]), x, y, noise) == epochs[i]


def naive_best_epoch(single: stack.Stack, x: Tensor, y: Tensor, noise: Tensor) -> int:
    best, best_epoch = math.inf, 0
    for epoch in range(1, 41):
        single.epoch()
        with torch.no_grad():
            rmse = (single.network.sample(x, noise).mean(1) - y).square().mean().sqrt().item()
        if rmse < best:
            best, best_epoch = rmse, epoch
        if epoch - best_epoch >= 5:
            break
    return best_epoch


def test_loss_is_half_the_squared_error_plus_kl_over_n() -> None:
    two = stacked([1, 2])
    two._next_batch()
    x, y = two.x[two.rows, two.index], two.y[two.rows, two.index]
    output, kl = two.network(x, two.noise)
    naive = sum(0.5 * ((output[s] - y[s]) ** 2).mean() + kl[s] / 50 for s in range(2))
    torch.testing.assert_close(two.losses(x, y, two.noise), naive)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while tracing
def test_loss_traces_whole_and_gives_the_same_gradients() -> None:
    two = stacked([1, 2])
    two._next_batch()
    batch = two.x[two.rows, two.index], two.y[two.rows, two.index], two.noise
    traced = torch.compile(two.losses, backend="aot_eager", dynamic=False, fullgraph=True)
    found, expected = (torch.autograd.grad(f(*batch), list(two.network.parameters())) for f in (traced, two.losses))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_draws_in_chunks_equal_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    two = stacked([1, 2])
    noise = normal(2, 7, two.network.draw_size)
    with torch.no_grad():
        whole = two.network.sample(two.x, noise).mean(1)
        monkeypatch.setitem(stack.CHUNK, "cpu", 2 * 50 * 6 * 3)
        torch.testing.assert_close(stack.sample_mean(two.network, two.x, noise), whole, rtol=1e-12, atol=1e-12)


def test_what_a_warm_up_changed_is_put_back() -> None:
    warmed, fresh = stacked([1, 2]), stacked([1, 2])
    before = [parameter.detach().clone() for parameter in warmed.network.parameters()]
    for _ in range(3):
        warmed._step()
    stack._restore(list(warmed.network.parameters()), before, warmed.optimizer)
    for one in (warmed, fresh):
        one.epoch()
    for i in range(2):
        assert_networks_equal(warmed, i, fresh, i)


# ---------------------------------------------------------------- the method


def toy(n: int = 200) -> tuple[Tensor, Tensor]:
    x = normal(n, 4).float()
    return x, 30 + 10 * (x[:, 0] + x[:, 1].sin()) + normal(n, seed=3).float()


@pytest.mark.slow
def test_fit_learns_and_tuned_intervals_cover() -> None:
    x, y = toy(400)
    method = MNF("regression", hidden=(20,)).fit(x[:300], y[:300], epochs=150, batch_size=30)
    pred = method.tune((x[300:], y[300:])).predict(x[300:])
    assert mcbn.metrics.rmse(pred.mean, y[300:]) < 0.3 * y.std()
    low, high = pred.interval(0.95)
    assert 0.85 < ((low < y[300:]) & (y[300:] < high)).float().mean() <= 1


def test_validation_keeps_the_best_epoch_and_stops() -> None:
    x, y = toy()
    pair = (x[:50], y[:50].flip(0))  # nothing to learn: the first epochs are the best
    short = MNF("regression", hidden=(5,)).fit(x[50:], y[50:], epochs=60, validation=pair, patience=3)
    long = MNF("regression", hidden=(5,)).fit(x[50:], y[50:], epochs=5000, validation=pair, patience=3)
    assert torch.equal(short.predict(x).mean, long.predict(x).mean)


def test_fit_takes_tensors_a_pair_a_loader_or_a_dataset_alike() -> None:
    x, y = toy()
    pairs = TensorDataset(x, y)
    data: list[tuple[Any, ...]] = [(x, y), ((x, y),), (DataLoader(pairs, batch_size=64),), (pairs,)]
    means = [MNF("regression", hidden=(5,)).fit(*given, epochs=2).predict(x).mean for given in data]
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_fit_and_predict_leave_the_global_generators() -> None:
    x, y = toy()
    state = generators()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=2)
    method.tune((x, y)).predict(x)
    assert generators() == state


def test_outputs_are_shaped_like_the_targets() -> None:
    x, y = toy()
    for target in (y, y.unsqueeze(1), torch.stack([y, -y], 1)):
        method = MNF("regression", hidden=(5,)).fit(x, target, epochs=1)
        assert method.predict(x).mean.shape == method.plain(x).shape == target.shape


def test_whole_number_targets_are_standardised_like_any_others() -> None:
    x, y = toy()
    y = y.round()
    means = [MNF("regression", hidden=(5,)).fit(x, given, epochs=3).predict(x).mean for given in (y, y.long())]
    assert torch.equal(*means)


def test_default_dtype_changes_nothing() -> None:
    x, y = toy()
    expected = MNF("regression", hidden=(5,)).fit(x, y, epochs=2).predict(x).mean
    torch.set_default_dtype(torch.float64)
    try:
        found = MNF("regression", hidden=(5,)).fit(x, y, epochs=2).predict(x).mean
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_more_draws_begin_with_the_same_draws() -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1)
    assert torch.equal(method.sample(x, n_samples=9)[:4], method.sample(x, n_samples=4))


def test_chunked_prediction_equals_unchunked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1)
    whole = method.predict(x)
    monkeypatch.setitem(stack.CHUNK, "cpu", len(x) * 5 * 3)
    parts = method.predict(x)
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.epistemic, whole.epistemic, rtol=1e-4, atol=1e-4)


def test_failed_fit_leaves_the_fitted_network() -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1, n_samples=4, seed=1)
    before = method.sample(x)
    with pytest.raises(mcbn.MCBNError):
        method.fit(x, y.fill_(math.inf), n_samples=7, seed=2)
    assert torch.equal(method.sample(x), before)


def test_constant_twin_of_mnf_has_its_mean() -> None:
    x, y = toy()
    method = MNF("regression", hidden=(5,)).fit(x, y, epochs=1, n_samples=5)
    assert torch.equal(ConstantUncertainty(method).predict(x).mean, method.predict(x).mean)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_saved_and_loaded_predicts_the_same(task: str, tmp_path: Path) -> None:
    x, y = toy()
    target = y if task == "regression" else (y > 30).long()
    method = MNF(task, hidden=(5,)).fit(x, target, epochs=2, n_samples=6, seed=3).tune((x, target))
    method.save(tmp_path / "net.mnf")
    again = MNF.load(tmp_path / "net.mnf")
    assert torch.equal(again.sample(x), method.sample(x))
    assert again.tau == method.tau
    assert [path.name for path in tmp_path.iterdir()] == ["net.mnf"]
    with pytest.raises(mcbn.MCBNError, match="does not exist"):
        method.save(tmp_path / "gone" / "net.mnf")


def test_loading_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    (tmp_path / "text").write_text("not a network")
    for name in ("other", "text", "missing"):
        with pytest.raises(mcbn.MCBNError, match="saved MNF"):
            MNF.load(tmp_path / name)


def test_mistakes_are_told() -> None:
    x, y = toy()
    with pytest.raises(mcbn.MCBNError, match="not fitted"):
        MNF("regression").predict(x)
    with pytest.raises(mcbn.MCBNError, match="needs targets"):
        MNF("regression").fit(x)
    with pytest.raises(mcbn.MCBNError, match="finite"):
        MNF("regression").fit(x, y.clone().fill_(math.nan))
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        MNF("regression", hidden=(3,)).fit(x, y, epochs=1).predict(x[:, :2])
    with pytest.raises(mcbn.MCBNError, match="labels must be whole numbers"):
        MNF("classification").fit(x, y)
    with pytest.raises(mcbn.MCBNError, match="leave validation= out"):
        MNF("classification").fit(x, (y > 30).long(), validation=(x, y))
    with pytest.raises(mcbn.MCBNError, match="task must be one of"):
        MNF("ranking")


@pytest.mark.parametrize("option", ["epochs", "patience", "batch_size", "n_samples"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(mcbn.MCBNError, match=f"{option} must be a whole number"):
        MNF("regression").fit(*toy(), **{option: 0})
    with pytest.raises(mcbn.MCBNError, match="learning_rate"):
        MNF("regression").fit(*toy(), learning_rate=0.0)
