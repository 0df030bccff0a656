"""Faults seen in other implementations of MCBN; each test fails on that fault."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from drawn import rows_of_draw
from kinds import BatchNormAct2d, make, norms_in_training


def fitted(kind: str, **options: object) -> tuple[mcbn.MCBN, Tensor]:
    model, x = make(kind, dtype=torch.float64)
    return mcbn.MCBN(model, "regression").fit(x, **{"n_samples": 10, "batch_size": 8, **options}), x


def test_failed_fit_of_one_object_does_not_corrupt_another() -> None:
    """Layer list kept on the class."""
    good, x = fitted("1d")
    before = good.predict(x).epistemic
    with pytest.raises(mcbn.MCBNError):
        mcbn.MCBN(good.model, "regression").fit(x * torch.nan, batch_size=8)
    assert torch.equal(good.predict(x).epistemic, before)


def test_copies_and_loaded_objects_keep_their_variance(tmp_path: Path) -> None:
    """deepcopy, save/load and a second wrapper gave zero variance without an error."""
    bayes, x = fitted("residual")
    bayes.save(tmp_path / "net.mcbn")
    for twin in (copy.deepcopy(bayes), mcbn.MCBN.load(tmp_path / "net.mcbn", bayes.model)):
        assert torch.equal(twin.predict(x).epistemic, bayes.predict(x).epistemic)
    assert (bayes.predict(x).epistemic > 0).any()


def test_every_layer_kind_of_a_mixed_network_is_stochastic() -> None:
    """1-d and Sync layers beside 2-d ones stayed deterministic; layers not named 'bn' were missed."""
    bayes, _ = fitted("residual")
    assert bayes.posterior.layers == ("first", "shortcut.1", "head.1")
    assert all((bayes.posterior.mean[name].std(0) > 0).all() for name in bayes.posterior.layers)


def test_activation_inside_a_batch_norm_layer_survives() -> None:
    """Swapping the module for a plain one lost the activation."""
    net = nn.Sequential(BatchNormAct2d(3))
    x = torch.randn(64, 3, 4, 4)
    sample = mcbn.MCBN(net, "regression").fit(x, n_samples=3, batch_size=16).sample(x)
    assert sample.min() > -0.3  # SiLU has its minimum at -0.2785


@pytest.mark.parametrize("m", [4, 8])
def test_variance_is_biased(m: int) -> None:
    """The unbiased variance shrinks the epistemic std."""
    bayes, x = fitted("bare", n_samples=1, batch_size=m)
    batch = x[rows_of_draw(len(x), m, 0, 0)]
    torch.testing.assert_close(bayes.posterior.var[""][0], ((batch - batch.mean(0)) ** 2).sum(0) / m)


def test_batch_of_one_on_single_values_is_an_error_not_nan() -> None:
    """NaN at M = 1 on 1x1 maps."""
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(9, 3, 3, 3)
    with pytest.warns(UserWarning, match="batch_size is 1"), pytest.raises(mcbn.MCBNError, match="one value a channel"):
        mcbn.MCBN(net, "regression").fit(x, batch_size=1)


def test_more_draws_than_the_data_could_fill_once() -> None:
    """T * M > N raised."""
    bayes, _ = fitted("1d", n_samples=200)
    assert len(torch.unique(bayes.posterior.mean["1"], dim=0)) == 200


def test_class_sorted_loader_that_does_not_shuffle() -> None:
    """Reading an unshuffled loader in order makes each batch a single class."""
    x = torch.cat([torch.zeros(50, 2), torch.full((50, 2), 10.0)]) + torch.randn(100, 2)
    loader = DataLoader(TensorDataset(x), batch_size=50, shuffle=False)
    net = nn.BatchNorm1d(2)
    net.running_mean.fill_(5)
    net.running_var.fill_(26)
    posterior = mcbn.MCBN(net, "regression").fit(loader, n_samples=50).posterior
    assert (posterior.mean[""] - 5).abs().max() < 3


def test_remainder_batch_is_never_a_draw() -> None:
    """The last batch of one example counted as a full sample."""
    model, x = make("2d", n=25)
    bayes = mcbn.MCBN(model, "regression").fit(DataLoader(TensorDataset(x), batch_size=8), n_samples=40)
    spread = bayes.posterior.mean["1"].std(0)
    assert spread.max() < 3 * spread.min() + x.std() / 8**0.5
    assert bayes.posterior.batch_size == 8


def test_collate_function_is_used() -> None:
    """collate_fn was dropped."""
    model, x = make("1d")
    loader = DataLoader(list(x), batch_size=8, collate_fn=lambda rows: {"features": torch.stack(rows)})
    bayes = mcbn.MCBN(model, "regression").fit(loader, n_samples=3, inputs="features")
    direct = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=8)
    assert torch.equal(bayes.sample(x), direct.sample(x))


def test_query_never_enters_the_statistics() -> None:
    """Forgetting eval() normalised by the test batch; train mode also switched dropout on."""
    model, x = make("residual", dtype=torch.float64)
    model.train()
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    alone = bayes.sample(x[:1])
    crowd = bayes.sample(torch.cat([x[:1], 100 * x]))
    torch.testing.assert_close(alone[:, 0], crowd[:, 0])
    assert torch.equal(bayes.sample(x), bayes.sample(x))
    assert model.training


def test_plain_prediction_is_not_lost() -> None:
    """Running statistics were thrown away."""
    bayes, x = fitted("1d")
    with torch.no_grad():
        assert torch.equal(bayes.plain(x), bayes.model(x))


def test_running_statistics_are_not_mixed_in() -> None:
    """momentum 0.1 mixed 10 % batch statistics with 90 % running ones."""
    model, x = make("bare", dtype=torch.float64)
    far = copy.deepcopy(model)
    far.running_mean.add_(100)
    near = mcbn.MCBN(model, "regression").fit(x, n_samples=2, batch_size=8)
    with pytest.warns(UserWarning, match="disagree"):
        other = mcbn.MCBN(far, "regression").fit(x, n_samples=2, batch_size=8)
    assert torch.equal(near.sample(x), other.sample(x))


def test_statistics_of_deeper_layers_belong_to_the_same_batch() -> None:
    """Layers drawn independently of each other are not a sample of the posterior."""
    model, x = make("1d", dtype=torch.float64)
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=1, batch_size=8)
    batch = x[rows_of_draw(len(x), 8, 0, 0)]
    with torch.no_grad():
        hidden = norms_in_training(copy.deepcopy(model))[:4](batch)
        running = copy.deepcopy(model).eval()[:4](batch)
    torch.testing.assert_close(bayes.posterior.mean["4"][0], hidden.mean(0))
    assert (hidden.mean(0) - running.mean(0)).abs().max() > 1e-3


def test_layers_own_epsilon_is_used() -> None:
    """Another epsilon than the layer's."""
    bayes, x = fitted("large-eps", n_samples=1)
    batch = x[rows_of_draw(len(x), 8, 0, 0)]
    with torch.no_grad():
        torch.testing.assert_close(bayes.sample(batch)[0], norms_in_training(copy.deepcopy(bayes.model))(batch))


def test_output_is_shaped_draws_first() -> None:
    """(T * N, ...) had to be reshaped by the user."""
    bayes, x = fitted("2d")
    assert bayes.sample(x[:3]).shape == (10, 3, 4, 4, 4)


def test_gradients_flow_to_the_input() -> None:
    """No gradients."""
    bayes, x = fitted("residual")
    query = x[:2].clone().requires_grad_()
    F.softmax(bayes.sample(query), 2).mean(0)[:, 0].sum().backward()
    assert query.grad is not None
    assert (query.grad != 0).any()


@pytest.mark.parametrize("kind", ["called-twice", "two-names", "no-affine"])
def test_layers_that_other_code_crashes_on_or_gets_wrong(kind: str) -> None:
    """A layer called twice was wrong, affine=False crashed."""
    bayes, x = fitted(kind, n_samples=2)
    batch = x[rows_of_draw(len(x), 8, 0, 1)]
    with torch.no_grad():
        torch.testing.assert_close(bayes.sample(batch)[1], norms_in_training(copy.deepcopy(bayes.model))(batch))
