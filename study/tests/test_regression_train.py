"""The batched trainer: every network of a stack is the network trained alone."""

import pytest
import torch
from torch import nn

from mcbn.data import Regression
from mcbn.errors import MCBNError
from mcbn.networks import RegressionMLP
from mcbn.stacked import network
from mcbn_study.regression.problem import (
    Part,
    batch_draws,
    make_problem,
    purpose_key,
    random_bits,
    row_orders,
    stream_key,
    uniforms,
)
from mcbn_study.regression.stack import Networks, initial_values, matrices
from mcbn_study.regression.train import EPOCH_STEPS, Trainer

Q, H, M = 3, 6, 8
SIZES = (30, 31, 32)  # 3, 3 and 4 batches an epoch
STREAMS = [stream_key("toy", 1, fold, 1) for fold in range(3)]
DECAYS = (0.3, 1e-3)


def toy(n=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, Q, generator=generator, dtype=torch.float64)
    return Regression(x, x.sin().sum(1) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64))


def problem(which=(0, 1, 2), dtype=torch.float64):
    parts = [Part(torch.arange(SIZES[i]), torch.arange(SIZES[i], 40), STREAMS[i]) for i in which]
    return make_problem(toy(), parts, dtype=dtype)


def networks(family, n_streams=3, decays=DECAYS):
    stream = torch.arange(n_streams).repeat_interleave(len(decays))
    rate = torch.tensor([0.1, 0.3]).repeat(n_streams)[: len(stream)]
    return Networks(family, stream, torch.tensor(decays).repeat(n_streams), rate, M, H)


def the(index, trainer):
    return {name: value[index] for name, value in trainer.values.items()}


def assert_same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def batches(given, r, epochs):
    """Yield epoch, step and rows of every batch of stream r, from the orders of that stream alone."""
    n = given.train.n[r : r + 1]
    keys = torch.tensor([purpose_key(given.streams[r], "rows")])
    for epoch in range(epochs):
        order = row_orders(keys, n, torch.tensor([epoch]))[0, 0]
        for step in range(int(n) // M):
            yield epoch, step, order[step * M : (step + 1) * M]


@pytest.mark.parametrize(("index", "r"), [(0, 0), (3, 1), (5, 2)])
def test_a_stacked_network_equals_the_module_trained_alone_by_adam(index, r):
    given, wanted = problem(), networks("bn")
    trainer = Trainer(given, wanted)
    trainer.advance(3)
    alone = RegressionMLP(Q, (H, H), seed=purpose_key(STREAMS[r], "weights")).double()
    matrices_ = [p for p in alone.parameters() if p.ndim > 1]
    others = [p for p in alone.parameters() if p.ndim < 2]
    decay = float(wanted.weight_decay[index])
    optimizer = torch.optim.Adam([{"params": matrices_, "weight_decay": decay}, {"params": others}], lr=1e-3)
    for _, _, rows in batches(given, r, 3):
        optimizer.zero_grad()
        error = alone(given.train.x[r, rows])[:, 0] - given.train.y[r, rows]
        (0.5 * error.square().mean()).backward()
        optimizer.step()
    state = dict(network(trainer.values, index, Q).named_parameters())
    assert_same(state, dict(alone.named_parameters()))


class DropoutMLP(nn.Module):
    """Three layers with the masks given from outside."""

    def __init__(self, values):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(Q, H), nn.Linear(H, H), nn.Linear(H, 1)]).double()
        for i, (layer, weight) in enumerate(zip(self.layers, matrices(values, Q), strict=True), 1):
            layer.weight.data, layer.bias.data = weight[0].T.double().clone(), values[f"bias{i}"][0].double().clone()

    def forward(self, x, masks):
        first, second, last = self.layers
        a = torch.relu(first(x * masks[:, :Q]))
        a = torch.relu(second(a * masks[:, Q : Q + H]))
        return last(a * masks[:, Q + H :])[:, 0]


@pytest.mark.parametrize(("index", "r"), [(0, 0), (5, 2)])
def test_a_stacked_dropout_network_equals_the_module_trained_alone(index, r):
    given, wanted = problem(), networks("dropout")
    trainer = Trainer(given, wanted)
    trainer.advance(2)
    alone = DropoutMLP(initial_values("dropout", STREAMS[r : r + 1], Q, H))
    decay, rate = float(wanted.weight_decay[index]), float(wanted.rate[index])
    optimizer = torch.optim.Adam(alone.parameters(), lr=1e-3)
    key = torch.tensor([purpose_key(STREAMS[r], "training dropout")])
    for epoch, step, rows in batches(given, r, 2):
        u = uniforms(key, torch.tensor([epoch * EPOCH_STEPS + step]), M, Q + 2 * H)[0, 0]
        masks = (u >= rate).double() / (1 - rate)
        error = alone(given.train.x[r, rows], masks) - given.train.y[r, rows]
        penalty = sum(layer.weight.square().sum() for layer in alone.layers) / 2
        optimizer.zero_grad()
        (0.5 * error.square().mean() + decay * penalty).backward()
        optimizer.step()
    for name, layer in zip(("bias1", "bias2", "bias3"), alone.layers, strict=True):
        assert_same(trainer.values[name][index], layer.bias.data, 1e-8)  # rate and decay are float32 in the stack
    found = torch.cat([w[index].flatten() for w in matrices(trainer.values, Q)])
    assert_same(found, torch.cat([layer.weight.data.T.flatten() for layer in alone.layers]), 1e-8)


@pytest.mark.parametrize("family", ["bn", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_company_does_not_matter(family, dtype):
    everyone = Trainer(problem(dtype=dtype), networks(family))
    everyone.advance(3)
    wanted = networks(family)
    for r in range(3):
        index = 2 * r + 1
        own = Networks(family, torch.zeros(1, dtype=torch.long), wanted.weight_decay[[1]], wanted.rate[[index]], M, H)
        alone = Trainer(problem([r], dtype), own)
        alone.advance(3)
        # Not bit-equal: the matrix product of one network adds in another order than that of many.
        assert_same(the(index, everyone), the(0, alone), 1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_dropping_networks_leaves_the_others_on_their_way(family):
    whole, thinned = Trainer(problem(), networks(family)), Trainer(problem(), networks(family))
    whole.advance(5)
    thinned.advance(2)
    thinned.keep(torch.tensor([1, 2, 5]))
    thinned.advance(1)
    thinned.keep(torch.tensor([0, 2]))
    thinned.advance(2)
    for i, index in enumerate((1, 5)):
        assert_same(the(i, thinned), the(index, whole))


def test_dropping_before_the_first_step():
    whole, thinned = Trainer(problem(), networks("bn")), Trainer(problem(), networks("bn"))
    thinned.keep(torch.tensor([4]))
    whole.advance(1)
    thinned.advance(1)
    assert_same(the(0, thinned), the(4, whole))


def test_epochs_in_one_go_equal_epochs_one_by_one():
    at_once, stepwise = Trainer(problem(), networks("dropout")), Trainer(problem(), networks("dropout"))
    at_once.advance(4)
    for _ in range(4):
        stepwise.advance(1)
    assert_same(at_once.values, stepwise.values, 0)


def test_networks_of_a_stream_start_alike_and_other_streams_differ():
    values = Trainer(problem(), networks("bn")).values
    assert torch.equal(values["weights"][0], values["weights"][1])
    assert not torch.equal(values["weights"][0], values["weights"][2])


def test_dropout_biases_of_rectified_layers_start_positive():
    values = initial_values("dropout", STREAMS, Q, 50)
    assert (values["bias1"] > 0).all()
    assert (values["bias2"] > 0).all()
    assert values["bias1"].max() <= 0.2
    assert not torch.equal(values["bias1"], values["bias2"])


def test_global_generator_is_untouched():
    before = torch.get_rng_state()
    Trainer(problem(), networks("dropout")).advance(1)
    assert torch.equal(before, torch.get_rng_state())


def test_unordered_networks_and_too_large_batches_are_refused():
    wanted = networks("bn")
    with pytest.raises(MCBNError, match=r"ascending order.*\[4, 3\]"):
        Trainer(problem(), wanted[torch.tensor([5, 0])])
    large = Networks("bn", wanted.stream, wanted.weight_decay, wanted.rate, 33, H)
    with pytest.raises(MCBNError, match="leave out batch sizes above"):
        Trainer(problem(), large)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["bn", "dropout"])
def test_graphs_equal_eager_steps_on_a_gpu(family):
    parts = [Part(torch.arange(SIZES[i]), torch.arange(SIZES[i], 40), STREAMS[i]) for i in range(3)]
    given = make_problem(toy(), parts, "cuda")
    eager, captured = Trainer(given, networks(family)), Trainer(given, networks(family))
    eager._graphs = False
    on_cpu = Trainer(problem(dtype=torch.float32), networks(family))
    for trainer in (eager, captured, on_cpu):
        trainer.advance(6)
    assert_same(captured.values, eager.values, 1e-5)
    assert_same({n: v.cpu() for n, v in captured.values.items()}, on_cpu.values, 1e-3)


# --- streams ----------------------------------------------------------------------------------------------


def test_hash_is_splitmix64():
    generated = random_bits(torch.tensor([1234567]), torch.arange(3))[0].tolist()
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # the first outputs for seed 1234567
    assert [number % 2**64 for number in generated] == published


def test_uniforms_are_uniform_and_depend_on_key_and_position_alone():
    keys = torch.tensor([purpose_key(stream, "training dropout") for stream in STREAMS])
    u = uniforms(keys, torch.arange(50), 20, 40)  # (3, 50, 20, 40)
    n = u.numel()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.double().mean() - 0.5) < 5 / (12 * n) ** 0.5
    assert abs((u < 0.1).double().mean() - 0.1) < 5 * (0.09 / n) ** 0.5
    assert torch.equal(uniforms(keys[1:2], torch.tensor([7]), 5, 3)[0, 0], u[1, 7, :5, :3])
    assert len(u.unique()) > 0.98 * n  # 24 bits for 120,000 numbers: few coincide


def test_row_orders_permute_the_streams_own_rows():
    keys = torch.tensor([purpose_key(stream, "rows") for stream in STREAMS])
    orders = row_orders(keys, torch.tensor(SIZES), torch.arange(4))  # (3, 4, 32)
    for r, n in enumerate(SIZES):
        for e in range(4):
            assert orders[r, e, :n].sort().values.tolist() == list(range(n))
    assert not torch.equal(orders[0, 0], orders[0, 1])
    assert torch.equal(row_orders(keys[1:2], torch.tensor([31]), torch.tensor([2]))[0, 0], orders[1, 2, :31])


def test_every_row_comes_equally_often_to_every_place():
    orders = row_orders(torch.tensor([purpose_key(7, "rows")]), torch.tensor([5]), torch.arange(4000))[0]
    counts = torch.nn.functional.one_hot(orders, 5).sum(0)  # (place, row)
    assert (counts - 800).abs().max() < 5 * (4000 * 0.2 * 0.8) ** 0.5


def test_batch_draws_hold_distinct_rows_and_are_a_prefix_of_more():
    draws = batch_draws(STREAMS[0], 30, 20, 8)
    assert draws.shape == (20, 8)
    assert all(len(set(draw)) == 8 for draw in draws.tolist())
    assert (batch_draws(STREAMS[0], 30, 50, 8)[:20] == draws).all()
    assert (batch_draws(STREAMS[1], 30, 20, 8) != draws).any()
    assert sorted(batch_draws(STREAMS[0], 30, 1, 30)[0].tolist()) == list(range(30))


def test_streams_differ_in_each_of_their_parts():
    keys = {stream_key("a", 1, 0, 1), stream_key("b", 1, 0, 1), stream_key("a", 2, 0, 1), stream_key("a", 1, None, 1)}
    assert len(keys | {stream_key("a", 1, 0, 2), stream_key("a", 1, 1, 1)}) == 6
