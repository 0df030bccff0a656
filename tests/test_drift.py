"""The warning about batches that are not those of training."""

import warnings

import pytest
import torch
from torch import nn

import mcbn
from kinds import KINDS, make


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
