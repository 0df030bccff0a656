"""MC dropout: its masks against naive ones, what it turns on, and what it refuses."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mcbn
from mcbn.baselines import MCDropout
from mcbn.baselines.dropout import ALPHA, SharedMasks
from untouched import untouched


class Functional(nn.Module):
    """Dropout as a function, guarded by the mode of the module."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(5, 40), nn.Linear(40, 2), p

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x).relu(), self.p, self.training))


class OnlyInTraining(Functional):
    """Dropout that evaluation never reaches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(F.dropout(h, self.p) if self.training else h)


class DropConnect(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return x @ F.dropout(self.a.weight, self.p, self.training).T


def normed(dropout: nn.Module | None = None) -> nn.Module:
    parts = [nn.Linear(5, 30), nn.BatchNorm1d(30), nn.ReLU(), dropout or nn.Dropout(0.3), nn.Linear(30, 2)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for part in parts:
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        net = nn.Sequential(*parts)
        for _ in range(20):
            net(torch.randn(8, 5) + 1)
    return net.eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(1)) + 1


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_pass_equals_naive_pass_with_that_mask(x: Tensor, p: float) -> None:
    net = normed(nn.Dropout(p)).double()
    hidden = net[:3](x.double())  # (N, 30)
    with SharedMasks(3) as mode:
        thinned = net[3](hidden)
    kept = torch.rand(1, 30, generator=torch.Generator().manual_seed(3)) >= p
    torch.testing.assert_close(thinned, torch.where(kept, hidden / (1 - p), 0.0), rtol=1e-12, atol=0)
    assert mode.calls == 1


@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout])
def test_feature_dropout_drops_whole_channels_alike_for_all_inputs(layer: type[nn.Module]) -> None:
    shape = {nn.Dropout1d: (4, 50, 3), nn.Dropout3d: (4, 50, 2, 2, 2)}.get(layer, (4, 50, 3, 2))
    with SharedMasks(0):
        out = layer(0.4).eval()(torch.ones(shape)).reshape(4, 50, -1)
    assert torch.equal(out, out[:1, :, :1].expand_as(out))
    assert len(out.unique()) == 2


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance_of_standard_inputs(layer: type[nn.Module]) -> None:
    x = torch.randn(1, 400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with SharedMasks(0):
        out = layer(0.3)(x)
    assert abs(out.mean()) < 5 / math.sqrt(x.numel())
    assert abs(out.var() - 1) < 10 / math.sqrt(x.numel())


def test_alpha_dropout_equals_torch_given_the_mask() -> None:
    x, p = torch.linspace(-2, 2, 1000).unsqueeze(0), 0.4
    torch_out = F.alpha_dropout(torch.cat([x, x]), p, training=True)[0]
    with SharedMasks(0):
        ours = F.alpha_dropout(x, p)[0]
    dropped = torch_out.mode().values  # every dropped unit has this one value
    slope = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p))
    torch.testing.assert_close(ours.mode().values, dropped)
    kept = ours != ours.mode().values
    torch.testing.assert_close(ours[kept], slope * x[0][kept] + slope * ALPHA * p)
    both = kept & (torch_out != dropped)
    torch.testing.assert_close(ours[both], torch_out[both])


def test_average_over_masks_equals_the_plain_network_where_dropout_enters_linearly(x: Tensor) -> None:
    net = normed(nn.Dropout(0.5))
    pred = MCDropout(net, "regression").predict(x, n_samples=2000)
    assert ((pred.mean - net(x)).abs() < 6 * pred.standard_error).all()
    with torch.no_grad():
        contribution = net[:3](x).unsqueeze(1) * net[4].weight  # (N, 2, 30)
    variance = contribution.square().sum(2)  # p / (1 - p) = 1
    torch.testing.assert_close(pred.epistemic, variance, rtol=0.25, atol=0)


def test_functional_dropout_guarded_by_training_is_on(x: Tensor) -> None:
    drop = MCDropout(Functional().eval(), "regression")
    assert (drop.predict(x).epistemic > 0).all()
    assert torch.equal(drop.plain(x), drop.model(x))


def test_dropconnect_has_a_mask_of_the_full_weight() -> None:
    model = DropConnect()
    out = MCDropout(model, "regression").sample(torch.eye(5), n_samples=1)[0]  # (5, 40): the thinned weight
    assert 20 < int((out == 0).sum()) < 180
    assert not torch.equal(out[0] == 0, out[1] == 0)


def test_batch_norm_is_as_in_evaluation_in_a_network_in_train_mode(x: Tensor) -> None:
    net = normed()
    evaluated = MCDropout(net, "regression").sample(x)
    with untouched(net.train()):
        assert torch.equal(MCDropout(net, "regression").sample(x), evaluated)


def test_transformer_layer_is_thinned_and_its_attention_dropout_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True).eval()
    with pytest.raises(mcbn.MCBNError, match=r"'self_attn' .* fused call"):
        MCDropout(layer, "regression")
    layer.self_attn.dropout = 0.0
    assert (MCDropout(layer, "regression").predict(torch.randn(3, 4, 8)).epistemic > 0).any()


def test_functional_attention_dropout_is_refused() -> None:
    class Attention(Functional):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    with pytest.raises(mcbn.MCBNError, match="dropout_p"):
        MCDropout(Attention(), "regression").sample(torch.randn(2, 4, 5))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)), lambda: nn.Sequential(nn.Linear(5, 2), nn.Dropout(0))],
)
def test_network_without_dropout_is_refused_at_once(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(mcbn.MCBNError, match="no dropout"):
        MCDropout(make(), "regression")


@pytest.mark.parametrize("model", [OnlyInTraining(), Functional(0.0)])
def test_network_whose_dropout_never_runs_is_refused_when_run(model: nn.Module, x: Tensor) -> None:
    with untouched(model), pytest.raises(mcbn.MCBNError, match="no dropout"):
        MCDropout(model, "regression").predict(x)


def test_recurrent_dropout_between_layers_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match="fused call"):
        MCDropout(nn.LSTM(5, 4, num_layers=2, dropout=0.1), "regression")


def test_not_a_module_is_refused() -> None:
    with pytest.raises(mcbn.MCBNError, match=r"torch\.nn\.Module"):
        MCDropout(lambda x: x, "regression")  # type: ignore[arg-type]


def test_draws_begin_with_the_same_draws_and_follow_fit(x: Tensor) -> None:
    net = normed()
    drop = MCDropout(net, "regression")
    assert drop.predict(x).n_samples == 100
    assert torch.equal(drop.sample(x, n_samples=9)[:3], drop.sample(x, n_samples=3))
    before = drop.sample(x)
    with torch.no_grad():
        net[4].bias.add_(5)
    assert torch.equal(drop.sample(x), before)
    torch.testing.assert_close(drop.fit(n_samples=100).sample(x), before + 5)


def test_float64_agrees_with_float32(x: Tensor) -> None:
    net = normed()
    single = MCDropout(net, "regression").predict(x)
    double = MCDropout(net.double(), "regression").predict(x.double())
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single.epistemic.double(), double.epistemic, rtol=1e-4, atol=1e-5)
