"""A draw equals a hand-made training-mode pass on the same batch, for every kind of batch norm."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mcbn
from drawn import rows_of_draw
from kinds import KINDS, make, norms_in_training
from mcbn.batch_norm import Record, normalize, scale_and_shift

M, T = 12, 4


def training_pass(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return norms_in_training(copy.deepcopy(getattr(model, "_orig_mod", model)))(batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_same_batch_equals_training_forward(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model, x = make(kind, dtype=dtype)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=T, batch_size=M)
    assert bayes.posterior.layers == KINDS[kind].calls
    for t in range(T):
        batch = x[rows_of_draw(len(x), M, 0, t)]
        expected = training_pass(model, batch)
        got = bayes.sample(batch)[t]
        assert got.dtype == dtype
        assert (got - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_mean_and_biased_variance_of_the_layers_inputs(kind: str) -> None:
    model, x = make(kind, dtype=torch.float64)
    posterior = mcbn.MCBN(model, "regression").fit(x, n_samples=1, batch_size=M).posterior
    batch, seen = x[rows_of_draw(len(x), M, 0, 0)], []
    reference = norms_in_training(copy.deepcopy(getattr(model, "_orig_mod", model)))
    original = torch.nn.functional.batch_norm

    def spy(input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append(input)
        return original(input, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "batch_norm", spy)
        reference(batch)
    for name, h in zip(posterior.layers, seen, strict=False):
        flat = h.transpose(0, 1).flatten(1)  # (C, n)
        n = flat.shape[1]
        mean = flat.sum(1) / n
        torch.testing.assert_close(posterior.mean[name][0], mean, rtol=1e-10, atol=1e-10)
        variance = ((flat - mean[:, None]) ** 2).sum(1) / n
        torch.testing.assert_close(posterior.var[name][0], variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_statistics_in_float32(dtype: torch.dtype) -> None:
    model, x = make("residual")
    exact = mcbn.MCBN(model, "regression").fit(x, n_samples=T, batch_size=M)
    half = mcbn.MCBN(copy.deepcopy(model).to(dtype), "regression").fit(x, n_samples=T, batch_size=M)
    assert all(value.dtype == torch.float32 for value in half.posterior.var.values())
    samples = half.sample(x)
    assert samples.dtype == dtype
    torch.testing.assert_close(samples.float(), exact.sample(x), rtol=0.1, atol=0.1)
    assert half.predict(x).mean.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draw_equals_half_precision_training(dtype: torch.dtype) -> None:
    model, x = make("1d")
    model = model.to(dtype)
    bayes = mcbn.MCBN(model, "regression").fit(x.to(dtype), n_samples=1, batch_size=M)
    batch = x[rows_of_draw(len(x), M, 0, 0)].to(dtype)
    expected = training_pass(model, batch).float()
    resolution = 4 * torch.finfo(dtype).eps
    assert (bayes.sample(batch)[0].float() - expected).abs().max() <= resolution * expected.abs().max().clamp(min=1)


def test_scale_and_shift_is_batch_norm() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 4, generator=g, dtype=torch.float64) * 3 + 5
    mean, var, weight, bias = torch.rand(4, 3, generator=g, dtype=torch.float64)
    naive = torch.stack([(x[:, c] - mean[c]) / (var[c] + 1e-3) ** 0.5 * weight[c] + bias[c] for c in range(3)], 1)
    torch.testing.assert_close(normalize(x, *scale_and_shift(mean, var, weight, bias, 1e-3)), naive)


def test_layers_not_chosen_keep_running_statistics_while_recording() -> None:
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression", layers=["4"]).fit(x, n_samples=1, batch_size=M)
    assert bayes.posterior.layers == ("4",)
    batch = x[rows_of_draw(len(x), M, 0, 0)]
    reference = copy.deepcopy(model).eval()
    reference[4].training = True
    with torch.no_grad():
        torch.testing.assert_close(bayes.sample(batch)[0], reference(batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ("first", "shortcut.1", "head.1")),
        (1, ("first",)),
        (2, ("first", "shortcut.1")),
        (99, ("first", "shortcut.1", "head.1")),
        (["head.1", "first"], ("first", "head.1")),
        (lambda name, module: isinstance(module, nn.BatchNorm1d), ("head.1",)),
    ],
)
def test_layers_choose_by_number_name_or_predicate(layers: object, expected: tuple[str, ...]) -> None:
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression", layers=layers).fit(x, n_samples=2, batch_size=M)
    assert bayes.posterior.layers == expected


def test_first_layers_are_the_first_to_run_not_to_be_defined() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.late(self.early(x).relu())

    bayes = mcbn.MCBN(Backwards(), "regression", layers=1).fit(torch.randn(50, 5), n_samples=2, batch_size=20)
    assert bayes.posterior.layers == ("early",)


@pytest.mark.parametrize("name", ["module.1", "_orig_mod.1", "1"])
def test_names_of_wrapped_networks_are_understood(name: str) -> None:
    model, x = make("data-parallel" if name.startswith("module") else "compiled")
    bayes = mcbn.MCBN(model, "regression", layers=[name]).fit(x, n_samples=2, batch_size=M)
    assert bayes.posterior.layers == ("1",)


def test_second_name_of_a_shared_layer_is_understood() -> None:
    model, x = make("two-names")
    bayes = mcbn.MCBN(model, "regression", layers=["alias"]).fit(x, n_samples=2, batch_size=M)
    assert bayes.posterior.layers == ("inner.1", "inner.1#2")


def test_record_refuses_one_value_a_channel() -> None:
    with pytest.raises(mcbn.MCBNError, match="one value a channel"), Record(frozenset([""])):
        nn.BatchNorm1d(3).eval()(torch.zeros(1, 3))


def test_layer_with_its_own_arithmetic_is_not_silently_left_deterministic() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - self.running_mean) / (self.running_var + self.eps).sqrt()

    net, x = nn.Sequential(nn.BatchNorm1d(5), Own(5)), torch.randn(40, 5)
    with pytest.raises(mcbn.MCBNError, match=r"'1' .*own arithmetic"):
        mcbn.MCBN(net, "regression").fit(x, batch_size=8)
    assert mcbn.MCBN(net, "regression", layers=["0"]).fit(x, n_samples=2, batch_size=20).posterior.layers == ("0",)


def test_unchosen_layer_without_running_statistics_warns() -> None:
    model, x = make("no-tracking")
    with pytest.warns(UserWarning, match="'4' is not among layers= and has no running"):
        mcbn.MCBN(model, "regression", layers=1).fit(x, n_samples=2, batch_size=M)


def test_path_that_changes_between_fit_and_predict_is_an_error() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bn(self.bn(x)) if len(x) > 10 else self.bn(x)

    bayes = mcbn.MCBN(Grows(), "regression").fit(torch.randn(50, 5), n_samples=2, batch_size=10)
    with pytest.raises(mcbn.MCBNError, match="called more often"):
        bayes.predict(torch.randn(11, 5))


def test_path_that_changes_between_batches_is_an_error() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.count = nn.BatchNorm1d(5), nn.BatchNorm1d(5), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.b(self.a(x)) if self.count % 2 else self.a(x)

    with pytest.raises(mcbn.MCBNError, match=r"'b' was called for [12] of 3 training batches"):
        mcbn.MCBN(Sometimes(), "regression").fit(torch.randn(50, 5), n_samples=3, batch_size=10)


class InstanceNormed(nn.Module):
    """Instance norm and weight standardisation written with the batch-norm function, beside a real batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.style = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(self.conv.weight.reshape(1, 4, -1), None, None, training=True).reshape_as(
            self.conv.weight
        )
        h = self.bn(F.conv2d(x, weight, self.conv.bias))
        N, C, H, W = h.shape
        return F.batch_norm(h.reshape(1, N * C, H, W), None, None, training=True).reshape(N, C, H, W)


def test_instance_norm_and_weight_standardisation_are_not_batch_norm() -> None:
    net, x = InstanceNormed().double(), torch.randn(24, 3, 6, 6, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=3, batch_size=8)
    assert bayes.posterior.layers == ("bn",)
    for n in (1, 8, 24):
        assert bayes.predict(x[:n]).mean.shape == (n, 4, 4, 4)
    batch = x[rows_of_draw(24, 8, 0, 1)]
    with torch.no_grad():
        torch.testing.assert_close(bayes.sample(batch)[1], norms_in_training(copy.deepcopy(net))(batch))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_parts_run_and_scripted_batch_norm_is_refused() -> None:
    x = torch.randn(40, 5)
    net = nn.Sequential(nn.BatchNorm1d(5), torch.jit.script(nn.GELU()))
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=3, batch_size=20)
    assert (bayes.predict(x).epistemic > 0).any()
    hidden = nn.Sequential(nn.BatchNorm1d(5), torch.jit.script(nn.BatchNorm1d(5)))
    with pytest.raises(mcbn.MCBNError, match="'1' is batch norm inside TorchScript"):
        mcbn.MCBN(hidden, "regression").fit(x, n_samples=3, batch_size=20)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted_norm(
        x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias)


def in_a_thread(bn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(bn, x).result()


def without_torch_function(bn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)


def tensors(bn: nn.Module) -> tuple[torch.Tensor, ...]:
    return bn.weight, bn.bias, bn.running_mean, bn.running_var


UNSEEN = {
    "native": lambda bn, x: torch.native_batch_norm(x, *tensors(bn), False, 0.1, 1e-5)[0],
    "native operator": lambda bn, x: torch.ops.aten.native_batch_norm(x, *tensors(bn), False, 0.1, 1e-5)[0],
    "inference operator": lambda bn, x: torch.ops.aten._native_batch_norm_legit_no_training(x, *tensors(bn), 0.1, 1e-5)[
        0
    ],
    "TorchScript": lambda bn, x: scripted_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias),
    "thread": in_a_thread,
    "no torch function": without_torch_function,
    "arithmetic": lambda bn, x: (x - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias,
    "scale and shift": lambda bn, x: torch.addcmul(
        bn.bias - bn.running_mean * torch.rsqrt(bn.running_var), x, torch.rsqrt(bn.running_var)
    ),
}
SEEN = {
    "operator": lambda bn, x: torch.ops.aten.batch_norm(x, *tensors(bn), False, 0.1, 1e-5, True),
    "overload": lambda bn, x: torch.ops.aten.batch_norm.default(x, *tensors(bn), False, 0.1, 1e-5, True),
    "torch": lambda bn, x: torch.batch_norm(x, *tensors(bn), False, 0.1, 1e-5, True),
}


class Behind(nn.Module):
    """A batch norm that is seen, and another that runs as it is told."""

    def __init__(self, how: object) -> None:
        super().__init__()
        self.first, self.second, self.unused, self.how = *(nn.BatchNorm1d(5) for _ in range(3)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.second, self.first(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", UNSEEN)
def test_batch_norm_that_runs_unseen_is_named(how: str) -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"mcbn: batch norm of '(second|the network)' runs .* adds no uncertainty"):
        bayes = mcbn.MCBN(Behind(UNSEEN[how]), "regression").fit(x, n_samples=3, batch_size=8)
    assert bayes.posterior.layers == ("first",)
    chosen = mcbn.MCBN(Behind(UNSEEN[how]), "regression", layers=["first"])
    assert chosen.fit(x, n_samples=3, batch_size=8).posterior.layers == ("first",)  # nothing to say: it was asked for


@pytest.mark.parametrize("how", SEEN)
def test_operators_of_batch_norm_are_recorded(how: str) -> None:
    net = Behind(SEEN[how]).double()
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bayes = mcbn.MCBN(net, "regression").fit(x, n_samples=2, batch_size=8)
    h, samples = x[rows_of_draw(40, 8, 0, 1)], bayes.sample(x[rows_of_draw(40, 8, 0, 1)])
    for _ in range(2):
        h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(samples[1], h)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported_programs_are_recorded() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh()).double().eval()
    program = torch.export.export(part, (x[:8],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    bayes = mcbn.MCBN(nn.Sequential(nn.BatchNorm1d(5).double(), program), "regression").fit(
        x, n_samples=3, batch_size=8
    )
    assert len(bayes.posterior.layers) == 2
    assert (bayes.sample(x).std(0) > 0).all()


class Branched(nn.Module):
    """Two paths, one for inputs above zero on average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = (nn.BatchNorm1d(5, momentum=None) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if bool(self.first(x).mean() > 0.5) else self.down(x)


def test_layers_on_a_path_that_draws_did_not_take_are_named() -> None:
    net, x = Branched(), torch.randn(64, 5)
    for layer in (net.first, net.up, net.down):
        layer(x)
    bayes = mcbn.MCBN(net.eval(), "regression").fit(x, n_samples=4, batch_size=16)
    assert bayes.posterior.layers == ("first", "down")
    with pytest.raises(mcbn.MCBNError, match="layer 'up' was not called when the posterior was drawn"):
        bayes.sample(x + 3)
    assert bayes.sample(x).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other layers are not of this path
        some = mcbn.MCBN(net, "regression", layers=["first"]).fit(x, n_samples=4, batch_size=16)
    assert some.sample(x + 3).isfinite().all()
