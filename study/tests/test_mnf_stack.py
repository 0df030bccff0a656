"""Networks of a stack against the same networks alone."""

import math

import pytest
import torch
from torch import Tensor

from kinds import normal
from mcbn_study.mnf import stack
from mcbn_study.mnf.layers import MNFNetwork


def stacked(members: list[int], *, n: int = 50, batch_size: int = 10, max_steps: int = 0) -> stack.Stack:
    """Networks of these numbers, each with data, weights and streams of its own."""
    network = MNFNetwork([3, 6, 1], generators=[stack.generator(s, stack.INITIAL) for s in members]).double()
    x = torch.stack([normal(n, 3, seed=s) for s in members])
    keys = [[s] for s in members]
    return stack.Stack(network, x, x.sum(2, keepdim=True), keys, batch_size=batch_size, max_steps=max_steps)


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


def test_the_published_rule_judges_a_pass_without_noise_and_bests_far_apart() -> None:
    x = normal(20, 3, seed=101)[None]
    training = stacked([1])
    epochs = stack.train_until_best(training, x, x.sum(2, keepdim=True), None, max_epochs=40, patience=9, apart=6)
    alone, best, best_epoch = stacked([1]), math.inf, 0
    for epoch in range(1, 41):
        alone.epoch()
        with torch.no_grad():
            rmse = (alone.network.centre(x) - x.sum(2, keepdim=True)).square().mean().sqrt().item()
        if rmse < best and (best_epoch == 0 or epoch - best_epoch > 6):
            best, best_epoch = rmse, epoch
    assert epochs == [best_epoch] == [36]  # the error falls in every epoch: 1, 8, 15, ...


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


def test_what_a_warm_up_changed_is_put_back() -> None:
    warmed, fresh = stacked([1, 2]), stacked([1, 2])
    with warmed.unchanged():
        for _ in range(3):
            warmed._step()
    for one in (warmed, fresh):
        one.epoch()
    for i in range(2):
        assert_networks_equal(warmed, i, fresh, i)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while compiling
def test_long_training_is_compiled_and_gives_the_same_networks() -> None:
    fused, plain = stacked([1, 2], max_steps=stack.COMPILE_FROM), stacked([1, 2])
    assert fused.loss != fused.losses
    for one in (fused, plain):
        stack.train_for(one, [2, 3])
    for i in range(2):
        assert_networks_equal(fused, i, plain, i)


def test_training_that_does_not_compile_says_so_and_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_args: object, **_options: object) -> object:
        def fail(*_batch: Tensor) -> Tensor:
            raise RuntimeError("no compiler found")

        return fail

    monkeypatch.setattr(torch, "compile", refusing)
    with pytest.warns(UserWarning, match="runs uncompiled .*no compiler found"):
        uncompiled = stacked([1, 2], max_steps=stack.COMPILE_FROM)
    plain = stacked([1, 2])
    for one in (uncompiled, plain):
        one.epoch()
    assert_networks_equal(uncompiled, 1, plain, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore::DeprecationWarning")  # torch's, on compiling
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_training_gives_the_same_networks_on_a_gpu() -> None:
    def trained(max_steps: int) -> stack.Stack:
        members = [1, 2, 3]
        network = MNFNetwork([3, 20, 20, 1], generators=[stack.generator(s, stack.INITIAL) for s in members]).cuda()
        x = torch.stack([normal(200, 3, seed=s) for s in members]).float().cuda()
        made = stack.Stack(network, x, x.sum(2, keepdim=True), [[s] for s in members], max_steps=max_steps)
        for _ in range(40):
            made.epoch()
        return made

    compiled, plain = trained(stack.COMPILE_FROM), trained(0)
    for a, b in zip(compiled.network.parameters(), plain.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
