"""The warning about batches that are not those of training."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcbn
from kinds import KINDS, make
from mcbn.check import drift
from mcbn.check.diagnosis import check
from untouched import untouched


@pytest.mark.parametrize("kind", KINDS)
def test_batches_as_in_training_do_not_warn(kind: str) -> None:
    model, x = make(kind, n=64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mcbn.MCBN(model, "regression").fit(x, n_samples=30, batch_size=8)
    assert [str(warning.message) for warning in said] == []


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: 2 * x], ids=["shift", "scale"])
def test_other_preprocessing_warns_and_names_the_worst_layer(change: object) -> None:
    model, x = make("1d", n=64)
    with pytest.warns(UserWarning, match=r"disagree with the running statistics in \d layer\(s\), most in '1'"):
        mcbn.MCBN(model, "regression").fit(change(x), n_samples=30, batch_size=8)


def test_single_draw_can_warn_too() -> None:
    model, x = make("1d", n=200)
    with pytest.warns(UserWarning, match="disagree"):
        mcbn.MCBN(model, "regression").fit(x + 3, n_samples=1, batch_size=100)


def test_untrained_running_statistics_warn() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    with pytest.warns(UserWarning, match="most in '1'"):
        mcbn.MCBN(net, "regression").fit(torch.randn(64, 5) + 2, n_samples=30, batch_size=16)


def test_only_chosen_layers_are_compared() -> None:
    model, x = make("1d", n=64)
    with torch.no_grad():
        model[4].running_mean.add_(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mcbn.MCBN(model, "regression", layers=["1"]).fit(x, n_samples=30, batch_size=8)
    with pytest.warns(UserWarning, match=r"in 1 layer\(s\), most in '4'"):
        mcbn.MCBN(model, "regression").fit(x, n_samples=30, batch_size=8)


DEPTH = 12


class Deep(nn.Module):
    """A chain of layers that hands on what it gets: the shifts of their normalisations add up."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8, eps=0) for _ in range(DEPTH))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return self.head(x)


OPTIONS = {"n_samples": 40, "batch_size": 64}


def given(net: nn.Module, x: Any, **options: Any) -> Any:
    """Return what a fit gives the check: the network, and what was recorded."""
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "warn_if_far", lambda *arguments: kept.append(arguments))
        mcbn.MCBN(net, "regression").fit(x, **OPTIONS | options)
    return kept[0]


def messages(net: nn.Module, x: Any, task: str = "regression", **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mcbn.MCBN(net, task).fit(x, **OPTIONS | options)
    return [str(warning.message) for warning in said]


def deep(by: float = 0.0, **options: Any) -> tuple[Deep, Tensor]:
    """Make running statistics the average of the draws to come, all means off by so many standard deviations."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = Deep().double().eval(), torch.randn(400, 8, dtype=torch.float64)
    drawn = given(net, x, **options)[1].posterior
    bessel = drawn.batch_size / (drawn.batch_size - 1)
    for number, norm in enumerate(net.norms):
        mean, var = (part[f"norms.{number}"].mean(0) for part in (drawn.mean, drawn.var))
        norm.running_var.copy_(var * bessel)
        norm.running_mean.copy_(mean - by * norm.running_var.sqrt())
    return net, x


def test_running_statistics_that_are_the_average_of_the_draws_shift_nothing() -> None:
    net, x = deep()
    assert drift.shift(*given(net, x)).effect < 1e-10
    assert messages(net, x) == []


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("family", ["sample", "gaussian", "diagonal"])
def test_small_drift_of_many_layers_adds_up_to_a_warning(family: str, task: str) -> None:
    net, x = deep(by=0.12)
    assert all(d.effect < drift.EFFECT_LIMIT for d in drift.measure(given(net, x, posterior=family)[1]))
    (text,) = messages(net, x, task, posterior=family)
    assert text.startswith("mcbn: drawn batch statistics disagree with the running statistics by little in every layer")
    assert "(limit 0.5)" in text
    assert "preprocessing and augmentation" in text


@pytest.mark.parametrize(("batches", "warns"), [(0, True), (1, False), (199, False), (200, True)])
def test_outputs_of_a_network_young_in_its_training_are_not_judged(batches: int, warns: bool) -> None:
    net, x = deep(by=0.12)
    net.norms[0].num_batches_tracked.fill_(batches)  # zero: nobody counted
    assert bool(messages(net, x)) is warns


def test_shifts_of_a_chain_of_normalisations_add() -> None:
    net, x = deep(by=0.12)
    net.head = nn.Identity()
    assert drift.shift(*given(net, x)).effect == pytest.approx(DEPTH * 0.12, rel=0.1)  # rel: of one batch's own spread


def test_shift_is_that_of_its_equation() -> None:
    """Naively: the network in eval mode, its running statistics replaced by the average and by single draws."""
    net, x = deep(by=0.12)
    network, recorded = given(net, x)
    drawn, rows = recorded.posterior, recorded.first

    def under(draws: slice) -> Tensor:
        for number, norm in enumerate(net.norms):
            name = f"norms.{number}"
            norm.running_mean.copy_(drawn.mean[name][draws].mean(0))
            norm.running_var.copy_(drawn.var[name][draws].mean(0) * 64 / 63)
        return net(rows)

    def distance(a: Tensor, b: Tensor) -> float:
        ratios = [((a - b)[:, d] ** 2).mean() / running[:, d].var(correction=0) for d in range(3)]
        return math.sqrt(sorted(ratios)[1])

    with torch.no_grad():
        running = net(rows)
        average = under(slice(40))
        scatter = sum(distance(under(slice(t, t + 1)), average) ** 2 for t in (36, 37, 38, 39)) / 4
    found = drift.shift(network, recorded)
    error = math.sqrt(40 / 39 * scatter * (1 / 40 + 0.1 / 1.9))
    assert found.effect == pytest.approx(distance(average, running), rel=1e-9)
    assert found.sigmas == pytest.approx(found.effect / error, rel=1e-9)


def test_rescaling_and_moving_outputs_changes_nothing() -> None:
    net, x = deep(by=0.12)
    found = drift.shift(*given(net, x))
    with torch.no_grad():
        net.head.weight.mul_(torch.tensor([[1e-3], [7.0], [-1e4]]))
        net.head.bias.add_(torch.tensor([5.0, -2.0, 1e3]))
    assert drift.shift(*given(net, x))[1:] == pytest.approx(found[1:], rel=1e-6)


def test_scatter_of_few_draws_of_small_batches_excuses_the_same_shift() -> None:
    few = {"n_samples": 4, "batch_size": 4}
    net, x = deep(by=0.06, **few)
    found = drift.shift(*given(net, x, **few))
    assert found.effect > drift.SHIFT_LIMIT
    assert found.sigmas < drift.SIGMA_LIMIT
    assert messages(net, x, **few) == []
    assert len(messages(*deep(by=0.06))) == 1


@pytest.mark.parametrize("T", [1, 3])
def test_too_few_draws_to_know_their_scatter_are_silent(T: int) -> None:
    net, x = deep(by=0.12)
    assert math.isnan(drift.shift(*given(net, x, n_samples=T)).sigmas)


def test_networks_without_running_statistics_have_no_shift() -> None:
    model, x = make("no-tracking", n=64)
    assert drift.shift(*given(model, x, batch_size=8)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_shifts_by_little_on_its_own_data_and_is_left_alone(kind: str) -> None:
    model, x = make(kind, n=64)
    network, recorded = given(model, x, batch_size=8)
    with untouched(model), untouched(network.module):
        before = recorded.first.clone()
        found = drift.shift(network, recorded)
    assert torch.equal(recorded.first, before)
    assert (found is None) == (not recorded.running)
    assert found is None or 0 < found.effect < drift.SHIFT_LIMIT


def test_output_in_a_dict_is_compared() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"aux": x.sum(), "out": self.inner(x)}

    net, x = deep(by=0.12)
    assert drift.shift(*given(Wrapped(net), x))[1:] == pytest.approx(drift.shift(*given(net, x))[1:], rel=1e-9)


def test_a_network_that_overwrites_its_inputs_sees_the_same_ones_each_time() -> None:
    network, recorded = given(nn.Sequential(nn.ELU(inplace=True), deep()[0]), deep()[1])
    before = recorded.first.clone()
    drift.shift(network, recorded)
    assert torch.equal(recorded.first, before)


def test_a_network_that_takes_another_way_under_other_statistics_is_not_judged() -> None:
    class Again(nn.Module):
        def __init__(self, inner: Deep) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(self.inner.norms[0](x) if self.calls > late else x)

    late = 10**6
    net, x = deep(by=0.12)
    network, recorded = given(Again(net), x)
    late = 0
    assert drift.shift(network, recorded) is None


def test_check_names_what_adds_up() -> None:
    net, x = deep(by=0.12)
    with pytest.warns(UserWarning, match="add up"):
        bayes = mcbn.MCBN(net, "regression").fit(x, **OPTIONS)
    found = check(bayes, x)
    assert found.shift.far
    assert any(text.startswith("drift of all layers together: the average drawn") for text in found.warnings)
