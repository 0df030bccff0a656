"""Every plan gives the numbers of Algorithm 1 as printed, and stays right between calls."""

import copy
import gc
import linecache
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import mcbn
from drawn import check_equal, fit, loop
from kinds import KINDS, make, settle
from mcbn import batches
from mcbn.engine import agree as agreement, constants, fuse, plan as plans, run
from mcbn.engine.graph import as_code
from mcbn_study.networks import UNet, cifar_resnet, resnet50


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size_equals_the_loop(kind: str, chunk_size: int | None) -> None:
    model, x = make(kind, dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    check_equal(bayes.sample(x, chunk_size=chunk_size), loop(bayes, x), 1e-12)
    pred, expected = bayes.predict(x, chunk_size=chunk_size), loop(bayes, x)
    torch.testing.assert_close(pred.mean, expected.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pred.epistemic, expected.var(0, correction=0), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_a_program(kind: str) -> None:
    model, x = make(kind, dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    assert "own code" not in bayes.explain(x)
    assert "one by one" not in bayes.explain(x, chunk_size=1)
    assert bayes.explain(x, n_samples=3).startswith("3 draws")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_net", "shape"),
    [(lambda: cifar_resnet(5), (3, 32, 32)), (UNet, (3, 32, 32)), (resnet50, (3, 64, 64))],
    ids=["resnet32", "unet", "resnet50"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_real_networks(make_net: Any, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    if make_net is resnet50 and dtype == torch.float32:
        tolerance = 1e-4  # 53 layers of random weights on 2x2 maps: the loop itself is no nearer to the truth
    torch.manual_seed(0)
    x = torch.randn(32, *shape, dtype=dtype)
    bayes = fit(make_net().to(dtype), x, n_samples=3, batch_size=16)
    expected = loop(bayes, x[:4])
    for chunk_size in (None, 1, 3):
        check_equal(bayes.sample(x[:4], chunk_size=chunk_size), expected, tolerance)


def test_batch_norm_is_folded_and_the_first_layer_runs_once() -> None:
    bayes = fit(cifar_resnet(5), torch.randn(16, 3, 32, 32))
    assert "one draw a pass, 30 of 31 batch norm calls folded" in bayes.explain(torch.randn(32, 3, 32, 32))
    assert "5 draws in one pass; 1 operations before the first batch norm run once" in bayes.explain(
        torch.randn(1, 3, 32, 32)
    )


def test_many_inputs_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "CPU_BLOCK", 60)
    model, x = make("1d", n=50, dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    assert "50 inputs in 5 blocks" in bayes.explain(x)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_many_inputs_have_batch_norm_in_the_weights_of_each_draw(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4, bias=bias), nn.BatchNorm1d(4)]
    x = torch.randn(40, 5, dtype=torch.float64)
    bayes = fit(nn.Sequential(*layers, nn.ReLU(), nn.Linear(4, 2)).double(), x)
    assert "5 draws in one pass" in bayes.explain(x)
    products: list[Tensor] = []
    plain = torch.baddbmm

    def counted(*args: Any, **options: Any) -> Tensor:
        products.append(plain(*args, **options))
        return products[-1]

    monkeypatch.setattr(torch, "baddbmm", counted)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)
    assert not products
    monkeypatch.setattr(constants, "FOLD_FROM", len(x))
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)
    assert [found.shape for found in products] == [(5, 40, 4)]


class Neighbours(nn.Module):
    """A network whose outputs depend on the inputs beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        return y - y.mean(0)


def test_inputs_that_need_each_other_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "CPU_BLOCK", 60)
    x = torch.randn(50, 5, dtype=torch.float64)
    bayes = fit(Neighbours().double(), x)
    assert "blocks" not in bayes.explain(x)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)


def test_equal_inputs_do_not_decide_whether_others_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "CPU_BLOCK", 60)
    x = torch.randn(50, 5, dtype=torch.float64)
    bayes = fit(Neighbours().double(), x)
    bayes.sample(torch.zeros(50, 5))  # less their mean they are zero, however they are cut
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)


def test_new_shapes_and_dtypes_find_new_plans() -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    for n in range(1, 24):
        check_equal(bayes.sample(x[:n]), loop(bayes, x[:n]), 1e-5)
    wide = torch.randn(3, 3, 9, 7)
    check_equal(bayes.sample(wide), loop(bayes, wide), 1e-5)
    assert len(bayes.engine.plans) <= constants.PLANS_KEPT
    assert bayes.sample(x[:0]).shape == (5, 0, 5)


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch 2.6 has the older switches alone")
def test_plans_are_found_anew_where_tf32_is_switched() -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=8)
    wanted = bayes.sample(x)
    assert batches.tf32()[0]  # PyTorch's default
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="allow_tf32"):
            _ = torch.backends.cudnn.allow_tf32  # the older switch cannot be read now
        assert not batches.tf32()[0]
        assert torch.equal(bayes.sample(x), wanted)
    finally:
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    assert len(bayes.engine.plans) == 2


def test_inputs_are_not_remembered_between_calls() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    first = bayes.sample(x)
    check_equal(bayes.sample(x + 1), loop(bayes, x + 1), 1e-12)
    assert not torch.equal(bayes.sample(x + 1), first)


def test_copies_and_pickles_find_their_plans_again(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    expected = bayes.sample(x)
    assert torch.equal(copy.deepcopy(bayes).sample(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(bayes)).sample(x), expected)


def test_out_of_memory_halves_the_chunk_then_the_inputs(
    regression: tuple[mcbn.MCBN, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    bayes, x = regression
    expected, engine = bayes.sample(x), bayes.engine
    tried: list[tuple[int, int]] = []
    original = plans.Plan.prepare
    limit = 3 * len(x)

    def scarce(self: plans.Plan, inputs: Any, buffers: Any) -> Any:
        run, n = original(self, inputs, buffers), len(inputs)

        def limited(start: int, stop: int) -> Tensor:
            tried.append((stop - start, n))
            if (stop - start) * n > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(start, stop)

        return limited

    engine.plan(x)
    monkeypatch.setattr(plans.Plan, "prepare", scarce)
    torch.testing.assert_close(bayes.sample(x), expected)
    assert tried[:4] == [(20, 24), (10, 24), (5, 24), (2, 24)]
    limit = 24
    engine.plan(x[:12], 1)
    engine.plan(x[:1])
    limit = 12
    torch.testing.assert_close(bayes.sample(x), expected)
    limit = 0
    with pytest.raises(mcbn.MCBNError, match=r"one draw of one input does not fit .*values\): CUDA out of memory"):
        bayes.sample(x[:1])


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, True])
def test_bad_chunk_size(regression: tuple[mcbn.MCBN, Tensor], chunk_size: Any) -> None:
    bayes, x = regression
    for call in (bayes.predict, bayes.sample, bayes.explain):
        with pytest.raises(mcbn.MCBNError, match="chunk_size must be a whole number, at least 1"):
            call(x, chunk_size=chunk_size)


# ---------------------------------------------------------------- adaptive T


def test_tolerance_stops_once_every_standard_error_is_below() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=400, batch_size=8)
    reached = bayes.predict(x, n_samples=100).standard_error.max().item()
    pred = bayes.predict(x, tolerance=reached, chunk_size=10)
    assert pred.n_samples % 10 == 0
    assert 20 <= pred.n_samples < 400
    assert pred.standard_error.max() < reached
    before = bayes.predict(x, n_samples=pred.n_samples - 10)
    assert before.standard_error.max() >= reached
    torch.testing.assert_close(pred.mean, bayes.predict(x, n_samples=pred.n_samples).mean)
    bayes.tau = 1.0
    adaptive, fixed = bayes.predict(x, tolerance=reached, chunk_size=10), bayes.predict(x, n_samples=pred.n_samples)
    torch.testing.assert_close(adaptive.log_prob(pred.mean), fixed.log_prob(pred.mean))


def test_tolerance_that_cannot_be_reached_uses_all_draws(classification: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = classification
    assert bayes.predict(x, tolerance=1e-9).n_samples == 20
    loose = bayes.predict(x, tolerance=0.5, chunk_size=1)
    assert loose.n_samples == 8


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan"), "0.1", [0.1]])
def test_bad_tolerance(regression: tuple[mcbn.MCBN, Tensor], tolerance: Any) -> None:
    bayes, x = regression
    with pytest.raises(mcbn.MCBNError, match="tolerance must lie between 0 and inf"):
        bayes.predict(x, tolerance=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["1d", "2d", "residual", "fused-activation"])
def test_gpu_plans_equal_the_loop(kind: str) -> None:
    model, x = make(kind)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        bayes = fit(model.cuda(), x, n_samples=6)
        q = x.cuda()
        expected = loop(bayes, q)
        for chunk_size in (None, 1, 2, 6):
            for _ in range(6):  # the later calls replay a CUDA graph
                check_equal(bayes.sample(q, chunk_size=chunk_size), expected, 1e-5)
        check_equal(bayes.sample(q + 1), loop(bayes, q + 1), 1e-5)
        bayes = fit(model.cuda(), x, n_samples=6)  # plans are found anew
        with mock.patch.object(plans, "draws_at_once", return_value=1):
            for _ in range(6):  # passes side by side
                check_equal(bayes.sample(q), loop(bayes, q), 1e-5)
        (plan,) = bayes.engine.plans.values()
        assert plan.at_once == 6


class OnGpu(list):
    """Stands for T draws on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("T", "chunk", "width", "outputs", "group"),
    [
        (128, 1, 2**22, 2560, 8),  # as many as a graph takes
        (20, 1, 2**23, 2**22, 2),  # outputs as large as what is handed on at once: just two side by side
        (9, 1, 2**22, 10, 5),  # 5 and 4, not 8 and 1
        (128, 128, 2**19, 320, 1),  # one pass holds them all
        (32, 1, 2**29, 10, 1),  # too large for a graph
    ],
)
def test_passes_that_share_a_cuda_graph(T: int, chunk: int, width: int, outputs: int, group: int) -> None:
    program, omega = SimpleNamespace(width=width), OnGpu(range(T))
    assert plans.passes_at_once(program, omega, chunk, outputs) == group  # type: ignore[arg-type]
    assert plans.passes_at_once(program, torch.zeros(T, 2), chunk, outputs) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "convolutional", "narrow", "draws"),
    [
        (5_000, False, False, 500),  # all of them
        (100_000, False, False, 39),  # at most 2^22 values, 13 passes of one size
        (5_000_000, False, False, 3),  # not four in 2^22: at most 2^24
        (2**20, True, False, 16),
        (2**22, True, False, 1),  # folded
        (2**22, True, True, 4),  # kernels of ours fold nothing
    ],
)
def test_draws_in_one_pass_on_a_gpu(width: int, convolutional: bool, narrow: bool, draws: int) -> None:
    chosen = plans.draws_at_once(width, convolutional, n_samples=500, chunk_size=None, on_gpu=True, narrow=narrow)
    assert chosen == draws


@pytest.mark.parametrize("T", [1, 4, 7])
def test_groups_of_passes_give_the_draws_in_order(monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    model, x = make("residual", dtype=torch.float64)
    bayes = fit(model, x, n_samples=T)
    monkeypatch.setattr(plans, "passes_at_once", lambda *_: 3)
    monkeypatch.setattr(plans, "draws_at_once", lambda *_, **__: 1)
    check_equal(bayes.sample(x), loop(bayes, x), 1e-12)
    (plan,) = bayes.engine.plans.values()
    assert isinstance(plan, plans.Plan)
    assert plan.at_once == 3
    assert "one draw a pass" in bayes.explain(x)
    assert "3 passes in one CUDA graph;" in bayes.explain(x)
    for name in ("current_stream", "Stream", "stream"):  # no GPU here: all streams are one
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for small, streams in ((plan.program.width, 4), (plan.program.width - 1, 2)):
        monkeypatch.setattr(constants, "SMALL_PASS", small)
        beside = plan.side_by_side(plan.program.run_shared(x), plan.omega)
        assert torch.equal(beside, plan.prepare(x, {})(0, len(plan.omega)))
        assert torch.cuda.Stream.call_count == streams - 1  # type: ignore[attr-defined]
        torch.cuda.Stream.reset_mock()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- what stays between calls


def test_inference_mode_takes_the_same_plan() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8, posterior="gaussian")
    with torch.inference_mode():
        assert "own code" not in bayes.explain(x)
        inside = bayes.sample(x.clone(), n_samples=9)
    assert torch.equal(inside, bayes.sample(x, n_samples=9))
    wanted = x.clone().requires_grad_()
    bayes.sample(wanted, n_samples=9).sum().backward()
    assert wanted.grad is not None


def test_inputs_that_fail_say_nothing_about_others_of_their_shape() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 2))
    x = torch.randint(0, 9, (40, 3))
    bayes = fit(net, x)
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        bayes.sample(torch.full((7, 3), 9))
    assert "own code" not in bayes.explain(x[:7])


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.stop = nn.BatchNorm1d(5), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.stop[0] -= 1
            if self.stop[0] == 0:
                raise KeyboardInterrupt
            return self.bn(x)

    x = torch.randn(30, 5, dtype=torch.float64)
    bayes = fit(Interrupted().double(), x)
    assert bayes.network is not None
    expected, stop = loop(bayes, x), bayes.network.module.stop
    for count in (1, 2):
        stop[0] = count
        with pytest.raises(KeyboardInterrupt):
            bayes.sample(x, chunk_size=count)
        assert torch.nn.functional.batch_norm(x, torch.zeros(5).double(), torch.ones(5).double(), eps=1e-99).equal(x)
    check_equal(bayes.sample(x), expected, 1e-12)


def test_shapes_share_the_scales_and_shifts_of_the_draws() -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    for n in (1, 2, 3):
        bayes.sample(x[:n])
    found = [plan.omega for plan in bayes.engine.plans.values() if isinstance(plan, plans.Plan)]
    assert len(found) == 3
    assert all(omega is found[0] for omega in found)


def sources() -> int:
    """Count the sources that torch keeps once those of modules that are gone were forgotten."""
    gc.collect()
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    as_code(nn.Module(), graph)
    return sum(name.startswith("<eval_with_key>") for name in linecache.cache)


def test_source_of_programs_goes_with_them() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    before = sources()
    for n in range(1, 24):
        bayes.sample(x[:n])
    assert sources() > before
    del bayes
    assert sources() <= before


class Branching(nn.Module):
    """Takes another path for a number of another type, and for another layout of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        factor = {int: 1, bool: 2, float: 3}[type(scale)] + 10 * x.is_contiguous()
        return self.norm(x) * factor


def test_inputs_that_compare_equal_and_other_layouts_have_plans_of_their_own() -> None:
    x = torch.randn(20, 5, dtype=torch.float64)
    net = Branching().double()
    net(x, 1)
    bayes = mcbn.MCBN(net.eval(), "regression", inputs=lambda rows: (rows, 1)).fit(x, n_samples=3, batch_size=8)
    for inputs in ((x, 1), (x, True), (x, 1.0), (x.T.contiguous().T, 1)):
        check_equal(bayes.sample(inputs), loop(bayes, inputs), 1e-12)


# ---------------------------------------------------------------- plans: when they are prepared, and compared again


class Moody(nn.Module):
    """Multiplies by a number that is no tensor, so that no trace sees it change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mood = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.mood[0]


def moody() -> tuple[mcbn.MCBN, Tensor, list[float]]:
    torch.manual_seed(0)
    x = torch.randn(24, 5)
    bayes = fit(Moody(), x)
    assert bayes.network is not None
    return bayes, x, bayes.network.module.mood


def replays(bayes: mcbn.MCBN, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the draws that run by the network's own code from now on."""
    numbers, replay = list[int](), bayes.engine.replay

    def counted(inputs: Any, t: int) -> Tensor:
        numbers.append(t)
        return replay(inputs, t)

    monkeypatch.setattr(bayes.engine, "replay", counted)
    return numbers


def test_a_plan_that_is_wrong_for_later_inputs_is_replaced() -> None:
    bayes, x, mood = moody()
    check_equal(bayes.sample(x), loop(bayes, x), 1e-5)
    mood[0] = 2.0
    with pytest.warns(UserWarning, match="failed on later inputs .*on call 2 it gave other numbers"):
        check_equal(bayes.sample(x), loop(bayes, x), 1e-5)
    mood[0] = 3.0
    check_equal(bayes.sample(x), loop(bayes, x), 1e-5)
    check_equal(bayes.sample(x[:3]), loop(bayes, x[:3]), 1e-5)  # nor is a trace of another shape trusted
    assert "own code, because a plan of it failed on later inputs" in bayes.explain(x)


def test_inputs_larger_than_any_seen_are_compared() -> None:
    bayes, x, mood = moody()
    for _ in range(2):
        bayes.sample(x)
    mood[0] = 2.0
    bayes.sample(1.5 * x)  # call 3, of the same range: not compared
    with pytest.warns(UserWarning, match="on call 4"):
        check_equal(bayes.sample(x), loop(bayes, x), 1e-5)
    bayes, x, mood = moody()
    for _ in range(4):
        bayes.sample(x)
    mood[0] = 2.0
    with pytest.warns(UserWarning, match="on call 5"):
        check_equal(bayes.sample(3 * x), loop(bayes, 3 * x), 1e-5)


def test_comparing_again_costs_nothing_over_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x, _ = moody()
    bayes.sample(x[:2])
    numbers = replays(bayes, monkeypatch)
    for call in range(999):
        bayes.sample(x[:2] * (1 + 0.001 * call))
    assert 9 * 4 <= len(numbers) <= 9 * 5  # calls 2, 4, ..., 512: the draws a plan is judged by, and one that changes
    assert len({*numbers}) == 5


def test_a_plan_that_raises_on_later_inputs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, x, _ = moody()
    bayes.sample(x)
    bayes.sample(x, chunk_size=2)
    prepare = plans.Plan.prepare

    def failing(self: plans.Plan, inputs: Any, buffers: Any) -> Any:
        sampler = prepare(self, inputs, buffers)

        def run(start: int, stop: int) -> Tensor:
            if start:
                raise RuntimeError("no such kernel")
            return sampler(start, stop)

        return run

    monkeypatch.setattr(plans.Plan, "prepare", failing)
    with pytest.warns(UserWarning, match=r"failed on later inputs \(RuntimeError: no such kernel\)"):
        check_equal(bayes.sample(x, chunk_size=2), loop(bayes, x), 1e-5)
    check_equal(bayes.sample(x, chunk_size=2), loop(bayes, x), 1e-5)
    assert "own code, because a plan" in bayes.explain(x, chunk_size=2)
    assert "own code" not in bayes.explain(x)  # other plans go on


def test_a_plan_stays_where_the_inputs_are_at_fault() -> None:
    x = torch.randint(0, 9, (40, 3))
    bayes = fit(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 2)), x)
    bayes.sample(x)
    with pytest.raises(mcbn.MCBNError, match="could not run"):
        bayes.sample(torch.full((40, 3), 9))
    assert "own code" not in bayes.explain(x)


def test_outputs_that_overflow_do_not_refute_a_plan() -> None:
    x, net = torch.randn(24, 5), nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    nn.init.constant_(net[2].weight, 100.0)
    bayes = fit(net, x)
    bayes.sample(x)
    assert not bool(bayes.sample(5e37 * x).isfinite().all())
    assert "own code" not in bayes.explain(x)


@pytest.mark.parametrize(("T", "calls"), [(40, 0), (32, 0), (20, 1), (5, 6)])
def test_a_plan_is_prepared_once_it_pays(T: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DRAWS_BEFORE_PLAN", 32)
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=T, batch_size=8)
    first = bayes.sample(x)
    for _ in range(calls):
        assert not bayes.engine.plans
        check_equal(bayes.sample(x), first, 1e-12)
    assert len(bayes.engine.plans) == 1
    check_equal(first, loop(bayes, x), 1e-12)


def test_who_asks_for_chunks_has_a_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DRAWS_BEFORE_PLAN", 32)
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    bayes.predict(x, chunk_size=2)
    assert len(bayes.engine.plans) == 1


def test_the_first_calls_do_not_wait_for_kernels_later_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    build, asked = plans.build, list[int]()

    def with_kernels(*args: Any, **options: Any) -> plans.Program:
        program = build(*args, **options)
        return replace(program, by_kernels=program.each)

    monkeypatch.setattr(run, "build", with_kernels)
    monkeypatch.setattr(fuse, "compiled", lambda *_: bool(asked.append(1)))
    first = bayes.sample(x)
    assert not asked  # whether they are there: that begins to compile them
    for _ in range(constants.CALLS_WITHOUT_KERNELS):
        assert not bayes.engine.plans
        check_equal(bayes.sample(x), first, 1e-5)
    assert len(bayes.engine.plans) == 1
    assert "own code" not in bayes.explain(x[:3])  # who asks how, waits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN sets convolutions up")
def test_who_predicts_once_on_a_gpu_has_no_convolution_set_up_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("2d")
    bayes = mcbn.MCBN(model.cuda(), "regression").fit(x.cuda(), n_samples=5, batch_size=8)
    traced = list[int]()
    trace = run.ReplayTracer.trace
    monkeypatch.setattr(run.ReplayTracer, "trace", lambda *given: traced.append(1) or trace(*given))
    first = bayes.sample(x)
    assert not traced
    for _ in range(constants.CALLS_WITHOUT_KERNELS):
        check_equal(bayes.sample(x), first, 1e-3)
    assert traced
    assert bayes.engine.plans


# ---------------------------------------------------------------- what a plan must agree with


def changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every plan give other samples."""
    prepare = plans.Plan.prepare

    def wrong(self: plans.Plan, inputs: Any, buffers: Any) -> Any:
        sampler = prepare(self, inputs, buffers)
        return lambda start, stop: change(sampler(start, stop))

    monkeypatch.setattr(plans.Plan, "prepare", wrong)


@pytest.mark.parametrize("n", [1, 24])
@pytest.mark.parametrize("tf32", [False, True])
def test_a_plan_off_by_a_percent_is_refused(n: int, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("1d")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bayes = mcbn.MCBN(model.to(device), "regression").fit(x, n_samples=40, batch_size=8)
    monkeypatch.setattr(agreement, "is_tf32", lambda values: tf32)  # as on a GPU, by PyTorch's default
    changed(monkeypatch, lambda samples: samples * 1.01)
    assert "gave other numbers" in bayes.explain(x[:n])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 24])
def test_half_precision_has_plans_as_exact_as_the_network(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    net, x = nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(64, 32)
    bayes = fit(settle(net, x), x, n_samples=40, batch_size=32)
    expected = bayes.sample(x[:n])
    half = bayes.to(dtype)
    assert "own code" not in half.explain(x[:n])
    plain = torch.stack([half.engine.replay(half.engine.network.prepare(x[:n]), t) for t in range(40)]).float()
    error, own_error = ((samples - expected).square().mean().sqrt() for samples in (half.sample(x[:n]).float(), plain))
    assert error < 1.5 * own_error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 32])
def test_gpu_plans_of_every_precision(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3, 32, 32, device="cuda")
    bayes = fit(settle(cifar_resnet(5).cuda(), x, 32), x, n_samples=40, batch_size=32).to(dtype)
    assert "own code" not in bayes.explain(x[:n])


class Single(nn.Module):
    """An operation that takes single precision alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("single precision alone")
        return self.head(self.norm(x))


def test_networks_that_cannot_run_in_double_precision_have_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(24, 5)
    bayes = fit(Single(), x, n_samples=1)  # no spread: rounding decides
    changed(monkeypatch, lambda samples: samples * (1 + 2e-5))
    assert "own code" not in bayes.explain(x)
    changed(monkeypatch, lambda samples: samples * (1 + 2e-4))
    assert "gave other numbers" in bayes.explain(x[:20])
