"""Tensors put back, and weights that must fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mcbn import MCBNError
from mcbn_study import checkpoints


def learner(width: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(width)
        return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_what_is_changed_inside_is_put_back_also_after_an_error() -> None:
    tensors = [torch.arange(3.0), torch.ones(2)]

    def fail() -> None:
        with checkpoints.unchanged(tensors):
            tensors[0].zero_()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [1, 1]]


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    network, wider = learner(), learner(5)
    with pytest.raises(MCBNError, match=r"w\.safetensors does not fit the network it names"):
        checkpoints.load_weights(network, wider.state_dict(), tmp_path / "w.safetensors")
    assert not checkpoints.load_weights(network, learner().state_dict(), tmp_path / "w.safetensors").training
