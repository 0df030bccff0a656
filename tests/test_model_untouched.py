"""What is the user's stays as it is: network, generators and earlier results, also after an exception."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mcbn
from kinds import KINDS, make
from mcbn import algorithm
from untouched import untouched


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_model_and_generators_are_bit_identical_after_every_call(kind: str, training: bool) -> None:
    model, x = make(kind)
    model.train(training)
    next(iter(model.parameters())).requires_grad_(False)
    model.register_forward_hook(lambda *args: None)
    loader = DataLoader(TensorDataset(x, x), batch_size=8, shuffle=True)
    with untouched(model):
        bayes = mcbn.MCBN(model, "regression")
        bayes.fit(loader, n_samples=3)
        bayes.plain(x)
        target = bayes.sample(x)[0] + 1
        bayes.tune((x, target))
        bayes.predict(x).log_prob(target)
        bayes.predict(loader)
        copy.deepcopy(bayes).predict(x)


class Interrupting(Dataset[Tensor]):
    """Examples that consume the global generators and break off at one of them."""

    def __init__(self, x: Tensor, error: type[BaseException], at: int) -> None:
        self.x, self.error, self.left = x, error, at

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        self.left -= 1
        noise = torch.rand(1)
        if self.left == 0:
            raise self.error
        return self.x[i] + 1e-3 * noise


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside a thread"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 12, 20])
def test_interrupted_fit_leaves_model_generators_and_old_posterior(
    error: type[BaseException], at: int, others: int, request: pytest.FixtureRequest
) -> None:
    end = threading.Event()
    for _ in range(others):
        threading.Thread(target=end.wait, daemon=True).start()
    request.addfinalizer(end.set)
    model, x = make("residual")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=3, batch_size=8)
    before, old = bayes.predict(x), bayes.posterior
    with untouched(model), pytest.raises(error):
        bayes.fit(Interrupting(x, error, at), n_samples=9, batch_size=8)
    assert bayes.posterior is old
    assert torch.equal(bayes.predict(x).mean, before.mean)


def test_exception_in_the_forward_pass_leaves_everything(regression: tuple[mcbn.MCBN, Tensor]) -> None:
    bayes, x = regression
    with untouched(bayes.model), pytest.raises(mcbn.MCBNError, match="could not run"):
        bayes.predict(x[:, :2])
    assert bayes.predict(x).mean.isfinite().all()


def test_two_objects_on_one_model_are_independent() -> None:
    model, x = make("1d")
    first = mcbn.MCBN(model, "regression", layers=1).fit(x, n_samples=5, batch_size=8)
    before = first.predict(x)
    mcbn.MCBN(model, "regression").fit(x, n_samples=7, batch_size=4, seed=3)
    after = first.predict(x)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.epistemic, after.epistemic)


def test_training_on_after_fit_does_not_change_the_fitted_object() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    before, plain = bayes.predict(x).mean, bayes.plain(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(bayes.predict(x).mean, before)
    assert torch.equal(bayes.plain(x), plain)


def test_fit_uses_the_weights_of_the_moment() -> None:
    model, x = make("1d")
    early = mcbn.MCBN(model, "regression")
    with torch.no_grad():
        model[6].bias.add_(5)
    late = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    assert torch.equal(early.fit(x, n_samples=5, batch_size=8).predict(x).mean, late.predict(x).mean)


class Rewriting(nn.Module):
    """Assigns to its input object, the idiom of graph networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, data: SimpleNamespace) -> Tensor:
        data.x = torch.relu(self.norm(self.first(data.x)))
        return self.last(data.x)


def test_networks_that_assign_to_their_input_object() -> None:
    net, x = Rewriting().double(), torch.randn(16, 6).double()
    for _ in range(100):
        net(SimpleNamespace(x=x))
    rows = DataLoader(x, batch_size=16, collate_fn=lambda rows: SimpleNamespace(x=torch.stack(rows)))
    with pytest.warns(UserWarning, match="every draw is the same"):
        bayes = mcbn.MCBN(net.eval(), "regression").fit(rows, n_samples=3)
    draw = algorithm.record(net, SimpleNamespace(x=x))
    torch.testing.assert_close(bayes.posterior.mean["norm"][0], draw[0][0], rtol=1e-10, atol=1e-10)
    query = SimpleNamespace(x=torch.randn(4, 6).double())
    before = query.x.clone()
    expected = algorithm.replay(net, draw, copy.deepcopy(query))
    torch.testing.assert_close(bayes.sample(query), expected.expand(3, 4, 1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(bayes.plain(query), net(copy.deepcopy(query)))
    assert torch.equal(query.x, before)


def test_inputs_that_cannot_be_copied_are_refused() -> None:
    query = SimpleNamespace(x=torch.randn(4, 6), lock=threading.Lock())
    with pytest.raises(mcbn.MCBNError, match=r"SimpleNamespace cannot be copied .*pass its tensors"):
        mcbn.MCBN(Rewriting().eval(), "regression").plain(query)


def test_a_posterior_changed_in_place_is_used_whole() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    before = bayes.sample(x), bayes.predict(x, method="linear").epistemic
    for kind in ("mean", "var"):
        for value in getattr(bayes.posterior, kind).values():
            value[0].mul_(2)
    fresh = bayes.with_posterior(copy.deepcopy(bayes.posterior))
    assert torch.equal(bayes.sample(x), fresh.sample(x))
    assert torch.equal(bayes.sample(x)[1:], before[0][1:])
    assert not torch.equal(bayes.sample(x)[0], before[0][0])
    linear = bayes.predict(x, method="linear").epistemic
    assert torch.equal(linear, fresh.predict(x, method="linear").epistemic)
    assert not torch.equal(linear, before[1])
    bayes.posterior.mean["1"] = torch.zeros(5, 6)
    assert torch.equal(bayes.sample(x), bayes.with_posterior(copy.deepcopy(bayes.posterior)).sample(x))


def test_a_posterior_changed_in_place_loses_its_calibration() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8)
    bayes.calibrate((x, bayes.plain(x) + 1), score="absolute")
    bayes.posterior.mean["1"].mul_(2)
    with pytest.warns(UserWarning, match="calibration is dropped"):
        assert bayes.predict(x).calibration is None


def test_a_gaussian_posterior_changed_in_place_is_refused() -> None:
    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=5, batch_size=8, posterior="gaussian")
    other = copy.deepcopy(bayes.posterior)
    for change in (lambda p: p.var["1"].mul_(2), lambda p: p.gaussian.location.add_(1)):
        change(bayes.posterior)
        with pytest.raises(mcbn.MCBNError, match=r"Gaussian posterior was changed in place.*assign another"):
            bayes.predict(x)
        bayes.posterior = other
        assert bayes.predict(x).mean.isfinite().all()
        other = copy.deepcopy(other)
