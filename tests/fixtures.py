"""What the suites of all three roots share."""

import builtins
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mcbn
from kinds import make
from mcbn.engine import constants, kernels
from on_host import launch_on_host
from workplace import furnish, working_in

_shared = Path(__file__).resolve().parents[2] / "shared" / "data"
if "MCBN_DATA_DIR" not in os.environ and _shared.is_dir():
    os.environ["MCBN_DATA_DIR"] = str(_shared)

torch.set_num_threads(1)  # small tensors: a second thread only waits
constants.DRAWS_BEFORE_PLAN = 1  # tests are of plans, of few draws
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in a shell's background; what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def regression() -> tuple[mcbn.MCBN, torch.Tensor]:
    """A fitted regression MCBN (float64, T = 20, M = 8) and its inputs."""
    net, x = make("1d", dtype=torch.float64)
    return mcbn.MCBN(net, "regression").fit(x, n_samples=20, batch_size=8), x


@pytest.fixture
def classification() -> tuple[mcbn.MCBN, torch.Tensor]:
    """A fitted classification MCBN on images (float64, T = 20, M = 8) and its inputs."""
    net, x = make("residual", dtype=torch.float64)
    return mcbn.MCBN(net, "classification").fit(x, n_samples=20, batch_size=8), x


@pytest.fixture(scope="session")
def fitted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: networks, weights, tables and arrays, and posteriors fitted on them by `mcbn fit`."""
    import command_line  # needs typer

    made = tmp_path_factory.mktemp("work")
    furnish(made, command_line.MODULE)
    with contextlib.chdir(made):
        command_line.fit_all()
    return made


@pytest.fixture
def at_work(fitted_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in that folder; what a test makes there is taken away."""
    with working_in(fitted_folder, monkeypatch):
        yield


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra for plots."""
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """CUDA kernels, compiled for the host if there is no GPU."""
    if torch.cuda.is_available():
        if not kernels.available():
            pytest.skip("PyTorch cannot compile kernels here")
    elif shutil.which("g++") is None:
        pytest.skip("needs a GPU or g++")
    else:
        monkeypatch.setattr(kernels, "launch", partial(launch_on_host, tmp_path_factory.getbasetemp()))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state, so that one that fails, fails again."""
    torch.manual_seed(0)
    np.random.seed(0)
