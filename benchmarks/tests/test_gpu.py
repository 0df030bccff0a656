"""Chunks of draws and narrow convolutions: a line for each bound and each size."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mcbn_benchmarks import gpu
from mcbn_benchmarks.speed.cases import MLP, time_interleaved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 3e-3  # a GPU multiplies as TF32
SMALL = replace(MLP, rows=64, n=3, n_samples=4)


def test_sweep_of_chunks_gives_a_line_for_each_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CASES", (SMALL, replace(SMALL, name="other")))
    monkeypatch.setattr(gpu, "EXPONENTS", (4, 20))
    monkeypatch.setattr(gpu, "peak_bytes", lambda *arguments: 2**20)
    lines = list(gpu.chunks("cpu", "mlp"))
    assert [line.split(":")[0] for line in lines] == ["mlp N=3 T=4 2^4", "mlp N=3 T=4 2^20"]


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_comparison_with_pytorch_gives_a_line_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", ((16, 16, 8, 1, 2),))
    for name, number in (("DRAWS", 1), ("CALLS", 1)):
        monkeypatch.setattr(gpu, name, number)
    monkeypatch.setattr(gpu, "time_interleaved", partial(time_interleaved, most_repeats=1))
    (line,) = gpu.narrow(DEVICE)
    assert line.startswith("16 -> 16 channels, 8 x 8, stride 1: convolution ")
    plain, kernel = (float(error) for error in line.split("from float64 ")[1].split(", "))
    assert plain < TOLERANCE
    assert kernel < 1e-3  # weights are rounded to TF32
