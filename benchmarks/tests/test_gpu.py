"""Constants of the engine at several values, and narrow convolutions: a record for each."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mcbn.engine import constants
from mcbn_benchmarks import gpu
from mcbn_benchmarks.speed.cases import MLP, fitted, prepare, time_interleaved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 3e-3  # a GPU multiplies as TF32
SMALL = replace(MLP, rows=64, n=3, n_samples=4)


SWEPT = {"CPU_CHUNK": [[64, 4096], [["predict", "mlp", 3, 4]]], "CPU_GROUP_WIDTH": [[0, 4096], [["fit", "mlp", 1, 4]]]}


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TRIED", {"cpu": SWEPT})
    monkeypatch.setattr(gpu, "CASES", {"mlp": SMALL})
    monkeypatch.setattr(gpu, "time_interleaved", partial(time_interleaved, most_repeats=1))


@pytest.mark.usefixtures("swept")
def test_every_value_of_a_constant_is_timed_on_every_work() -> None:
    before = constants.CPU_CHUNK
    records = list(gpu.constants("cpu"))
    tried = [
        (name, value, work, f"mlp N={n}") for name, (values, [(work, _, n, _)]) in SWEPT.items() for value in values
    ]
    assert [tuple(record[key] for key in ("constant", "value", "work", "case")) for record in records] == tried
    assert all(record["milliseconds"] > 0 for record in records)
    assert before == constants.CPU_CHUNK


def test_a_value_reaches_the_engine() -> None:
    ready = prepare(SMALL, "cpu")
    bayes = fitted(SMALL, ready)
    ways = []
    for value in (1, 4096):
        twin = bayes.with_posterior(bayes.posterior)
        gpu.with_value("CPU_CHUNK", value, lambda twin=twin: ways.append(twin.explain(ready.query)))(0)
    assert ["one draw a pass" in way for way in ways] == [True, False]


@pytest.mark.usefixtures("swept")
def test_chunks_are_the_constants_that_bound_them() -> None:
    values = [(record["constant"], record["value"]) for record in gpu.chunks("cpu", "mlp")]
    assert values == [("CPU_CHUNK", 64), ("CPU_CHUNK", 4096)]
    assert list(gpu.chunks("cpu", "unet")) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_constants_of_the_engine_and_networks_of_the_benchmark_are_tried(device: str) -> None:
    for name, (values, works) in gpu.TRIED[device].items():
        assert getattr(constants, name) in values
        assert {network for _, network, _, _ in works} <= gpu.CASES.keys()


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
