"""A training kept in a file and gone on with, and weights that must fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mcbn import MCBNError
from mcbn_study import checkpoints

SETTINGS = {"rates": [[0, 0.1]], "seed": 3}


def learner(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(width)
        network = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    for parameter in network.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return network, optimizer


def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(torch.arange(8.0).reshape(4, 2)).square().sum().backward()
    optimizer.step()


def test_a_step_after_resuming_is_the_step_without_a_break(tmp_path: Path) -> None:
    whole, other = learner(), learner()
    state = checkpoints.training_state(*whole)
    step(*whole)  # the state follows: it is the tensors themselves
    checkpoints.keep(tmp_path / "c.safetensors", state, SETTINGS, [1, 2.5])
    resumed = checkpoints.training_state(*other)
    assert checkpoints.resume(tmp_path / "c.safetensors", resumed, SETTINGS) == [1, 2.5]
    step(*whole)
    step(*other)
    assert any("momentum_buffer" in name for name in state)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in state.items())


def test_no_file_is_no_progress_and_other_files_are_refused(tmp_path: Path) -> None:
    path, state = tmp_path / "c.safetensors", checkpoints.training_state(*learner())
    before = {name: tensor.clone() for name, tensor in state.items()}
    assert checkpoints.resume(path, state, SETTINGS) is None
    checkpoints.keep(path, checkpoints.training_state(*learner(5)), SETTINGS, [])
    with pytest.raises(MCBNError, match="does not fit the network it names; remove it"):
        checkpoints.resume(path, state, SETTINGS)
    with pytest.raises(MCBNError, match="of a training with other settings; remove it"):
        checkpoints.resume(path, state, SETTINGS | {"seed": 4})
    path.write_bytes(b"nothing")
    with pytest.raises(MCBNError, match=r"not a whole safetensors file.*remove it to train"):
        checkpoints.resume(path, state, SETTINGS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    network, wider = learner()[0], learner(5)[0]
    with pytest.raises(MCBNError, match=r"w\.safetensors does not fit the network it names"):
        checkpoints.load_weights(network, wider.state_dict(), tmp_path / "w.safetensors")
    assert not checkpoints.load_weights(network, learner()[0].state_dict(), tmp_path / "w.safetensors").training
