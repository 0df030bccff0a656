"""Trained networks of the study as one safetensors file, and back as modules in original units."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcbn.data import Regression, folds, split
from mcbn.data import load as load_data
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.networks import RegressionMLP, Standardized
from mcbn_study.regression.evaluation import population_statistics
from mcbn_study.regression.problem import Problem
from mcbn_study.regression.stack import Values, module_state
from mcbn_study.regression.train import Networks

FORMAT = "mcbn study networks"


def network_states(values: Values, networks: Networks, problem: Problem) -> list[dict[str, Tensor]]:
    """Return each BN network as a state dict of `RegressionMLP`.

    Running statistics are those of one pass over the whole training part: the plain network.
    """
    Q, H = problem.train.x.shape[2], networks.hidden
    with torch.no_grad():
        states = []
        for index in range(len(networks.stream)):
            one = torch.tensor([index], device=problem.device)
            single = {name: value[one] for name, value in values.items()}
            state = module_state(values, index, Q, H)
            for layer, statistics in zip((1, 4), population_statistics(single, networks[one], problem), strict=True):
                for name, value in zip(("running_mean", "running_var"), statistics, strict=True):
                    state[f"{layer}.{name}"] = value[0].cpu()
            states.append(state)
    return states


def save_networks(path: Path, states: Sequence[dict[str, Tensor]], infos: Sequence[dict[str, Any]]) -> None:
    """Write networks, float32, with one description each: dataset, split, seed or fold, config, tau."""
    from safetensors.torch import save_file

    tensors = {
        f"{i}.{name}": value.float().contiguous() for i, state in enumerate(states) for name, value in state.items()
    }
    metadata = {"format": FORMAT, "networks": json.dumps(list(infos))}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def load_networks(path: str | Path) -> list[tuple[Standardized, dict[str, Any]]]:
    """Read networks as modules that take and give original units, in eval mode, each with its description.

    The description names dataset, split, seed or fold, config, tau, tau_constant, and holds `train`, the row indices
    of its training part in `mcbn.data.load(dataset)`, from which statistics are drawn.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise MCBNError(f"{path} is no whole safetensors file ({error}); run `mcbn reproduce regression`") from error
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} holds no networks of a study; they are written by `mcbn reproduce regression`")
    infos = json.loads(metadata["networks"])
    sets = {name: load_data(name) for name in {info["dataset"] for info in infos}}
    return [(_module(tensors, i, info, sets[info["dataset"]]), info) for i, info in enumerate(infos)]


def _module(tensors: dict[str, Tensor], index: int, info: dict[str, Any], data: Regression) -> Standardized:
    prefix = f"{index}."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    info["train"] = _training_rows(info, len(data.y))
    hidden, n_inputs = state["0.weight"].shape
    network = RegressionMLP(n_inputs, (hidden, hidden), seed=0)
    network.load_state_dict(state | _counters(network))
    return Standardized(network, data.x[info["train"]], data.y[info["train"]]).float().eval()


def _training_rows(info: dict[str, Any], n: int) -> Tensor:
    train = split(n, info["split"]).train
    return folds(train, info["n_folds"])[info["fold"]].train if "fold" in info else train


def _counters(network: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")}
