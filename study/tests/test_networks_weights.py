"""Weights that must fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mcbn import MCBNError
from mcbn_study.networks import load_weights


def learner(width: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(width)
        return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    network, wider = learner(), learner(5)
    with pytest.raises(MCBNError, match=r"w\.safetensors does not fit the network it names"):
        load_weights(network, wider.state_dict(), tmp_path / "w.safetensors")
    assert not load_weights(network, learner().state_dict(), tmp_path / "w.safetensors").training
