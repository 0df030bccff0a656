from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kinds
from drawn import rows_of_draw
from mcbn import MCBN
from mcbn.batching import GROUP
from mcbn.engine import agree, constants, record as recording
from mcbn.engine.trace import RecordTracer


def small() -> tuple[nn.Module, Tensor]:
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6))
    return kinds.settle(network, x), x


def test_a_group_in_one_pass_equals_batches_one_by_one(monkeypatch):
    network, x = small()
    together = MCBN(network, "regression").fit(x, n_samples=2 * GROUP + 3, batch_size=16).posterior
    monkeypatch.setattr(constants, "CPU_GROUP_WIDTH", 0)
    alone = MCBN(network, "regression").fit(x, n_samples=2 * GROUP + 3, batch_size=16).posterior
    for name in alone.layers:
        torch.testing.assert_close(together.mean[name], alone.mean[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(together.var[name], alone.var[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fewer", [2, GROUP - 1, GROUP, GROUP + 1])
def test_a_draw_has_the_same_bits_whatever_the_number_of_draws(fewer):
    network, x = small()
    many = MCBN(network, "regression").fit(x, n_samples=GROUP + 5, batch_size=16).posterior
    few = MCBN(network, "regression").fit(x, n_samples=fewer, batch_size=16).posterior
    for name in many.layers:
        assert torch.equal(few.mean[name], many.mean[name][:fewer])
        assert torch.equal(few.var[name], many.var[name][:fewer])


def test_small_batches_are_recorded_in_groups():
    network, x = small()
    passes = []
    plain = recording.Recorder._together

    def counted(self, program, group):
        passes.append(len(group))
        return plain(self, program, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording.Recorder, "_together", counted)
        MCBN(network, "regression").fit(x, n_samples=GROUP + 5, batch_size=16)
    assert passes == [GROUP, 5]


def test_groups_that_give_other_numbers_are_not_tried_again(monkeypatch):
    network, x = small()
    alone, passes = recording.Recorder._together, []

    def wrong(self, program, group):
        passes.append(len(group))
        return {name: (mean + 1, var) for name, (mean, var) in alone(self, program, group).items()}

    expected = MCBN(network, "regression").fit(x, n_samples=2 * GROUP + 5, batch_size=16).posterior
    monkeypatch.setattr(recording.Recorder, "_together", wrong)
    found = MCBN(network, "regression").fit(x, n_samples=2 * GROUP + 5, batch_size=16).posterior
    assert passes == [GROUP]
    for name in expected.mean:
        torch.testing.assert_close(found.mean[name], expected.mean[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tf32", "by", "same"), [(True, 0.01, True), (True, 0.05, False), (False, 0.01, False)])
def test_convolutions_in_tf32_may_differ_by_a_part_of_the_spread(monkeypatch, tf32, by, same):
    mean, var = torch.zeros(3), torch.full((3,), 4.0)
    for module in (agree, recording):
        monkeypatch.setattr(module, "is_tf32", lambda _: tf32)
    assert recording.statistics_agree({"bn": (mean + 2 * by, var)}, {"bn": (mean, var)}) == same
    assert recording.statistics_agree({"bn": (mean, var * (1 + 2 * by))}, {"bn": (mean, var)}) == same


def test_a_traced_pass_keeps_no_layers_output():
    network, x = small()
    bayes = MCBN(network, "regression").fit(x, n_samples=2, batch_size=16)
    tracer = RecordTracer(frozenset(bayes.posterior.layers))
    with torch.no_grad():
        tracer.trace_once(bayes.engine.network, x)
    results = tracer.program()(x)
    assert [[len(part) for part in parts] for parts in results.values()] == [
        [8, 8],
        [6, 6],
    ]


def test_batches_of_several_shapes_are_recorded_as_they_come():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(10, 5, 6 if t < 2 else 6 + t % 3, generator=generator) for t in range(GROUP + 6)]
    network = kinds.settle(nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4)), batches[0])
    found = MCBN(network, "regression").fit(iter(batches), n_samples=GROUP + 6).posterior
    for t, batch in enumerate(batches):
        with torch.no_grad():
            h = network[0](batch)  # (10, 4, L)
        torch.testing.assert_close(found.mean["1"][t], h.mean((0, 2)), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.var["1"][t], h.var((0, 2), correction=0), rtol=1e-4, atol=1e-6)


class Stubborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.bn(Stubborn.apply(x))


def test_a_network_that_refuses_groups_is_recorded_all_the_same():
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    network = kinds.settle(Custom(), x)
    posterior = MCBN(network, "regression").fit(x, n_samples=GROUP + 1, batch_size=10).posterior
    assert posterior.mean["bn"].shape == (GROUP + 1, 5)
    torch.testing.assert_close(posterior.mean["bn"].mean(0), 2 * x.mean(0), rtol=0, atol=0.4)


@pytest.mark.parametrize(
    "power", [lambda x: x**2, lambda x: x ** torch.full_like(x, 2), lambda x: 2**x, lambda x: 1 / x]
)
def test_operators_of_python_are_traced(power: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)])

        def forward(self, x: Tensor) -> Tensor:
            linear, first, second = self.layers
            return second(power(first(linear(x))))

    x = torch.randn(40, 3, dtype=torch.float64)
    net = kinds.settle(Net().double(), x)
    bayes = MCBN(net, "regression").fit(x, n_samples=5, batch_size=8)
    rows = rows_of_draw(40, 8, 0, 4)
    expected = net.train()(x[rows]).detach()
    torch.testing.assert_close(bayes.sample(x[rows])[4], expected, rtol=1e-9, atol=1e-9)
    if not torch.__version__.startswith("2.6"):  # reflected operators run by the network's own code there
        assert "one pass" in bayes.explain(x)


class Changing(nn.Module):
    """Works on its inputs in place."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.bn(x.sub_(1).mul_(3))


@pytest.mark.filterwarnings("ignore:mcbn")
@pytest.mark.parametrize("posterior", ["sample", "diagonal"])
def test_inputs_that_the_network_changes_are_seen_once_and_stay_the_users(posterior):
    batches = [torch.randn(10, 5, generator=torch.Generator().manual_seed(t)) for t in range(6)]
    before = [batch.clone() for batch in batches]
    bayes = MCBN(Changing(), "regression").fit(iter(batches), n_samples=6, posterior=posterior)
    bayes.check(batches[0])
    assert all(map(torch.equal, batches, before))
    expected = torch.stack([(batch - 1).mul(3).mean(0) for batch in before])
    if posterior == "sample":
        torch.testing.assert_close(bayes.posterior.mean["bn"], expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(bayes.posterior.gaussian.location[:5], expected.mean(0), rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x, scale):
        return self.bn(x * scale)


@pytest.mark.filterwarnings("ignore:mcbn")
def test_batches_with_numbers_of_their_own_are_recorded_with_them():
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(10, 5, generator=generator), "scale": 1 + t // 4} for t in range(12)]
    found = MCBN(Scaled(), "regression").fit(iter(batches), n_samples=12).posterior
    expected = torch.stack([(batch["x"] * batch["scale"]).mean(0) for batch in batches])
    torch.testing.assert_close(found.mean["bn"], expected, rtol=1e-4, atol=1e-5)


def test_free_memory_is_given_back_after_large_batches_alone(monkeypatch):
    released = []
    monkeypatch.setattr(recording, "release_memory", lambda: released.append(1))
    monkeypatch.setattr(constants, "CPU_TRACED_WIDTH", 0)  # the network's own code
    network, x = small()
    MCBN(network, "regression").fit(x, n_samples=4, batch_size=16)
    assert not released
    monkeypatch.setattr(constants, "CPU_RELEASED_FROM", 16 * 5)
    MCBN(network, "regression").fit(x, n_samples=4, batch_size=16)
    assert len(released) == 3  # the first batch is traced


def test_memory_can_be_given_back_at_any_time():
    kept = torch.arange(10)
    recording.release_memory()
    assert kept.tolist() == list(range(10))


def test_a_network_that_keeps_the_shape_of_its_inputs_is_fitted() -> None:
    class Detecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.shape = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), torch.Size([1, 2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.shape = x.shape
            return self.norm(self.conv(x)).mean((2, 3))

    x = torch.randn(40, 3, 8, 8)
    network = Detecting()
    network(x)
    assert MCBN(network.eval(), "regression").fit(x, n_samples=4, batch_size=8).predict(x[:2]).mean.shape == (2, 4)
