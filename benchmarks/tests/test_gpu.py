"""Constants of the engine at several values, and narrow convolutions: a record for each."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mcbn.engine import constants, kernels
from mcbn.model import MCBN
from mcbn_benchmarks import gpu
from mcbn_benchmarks.speed.cases import MLP, fitted, prepare, time_interleaved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 3e-3  # a GPU multiplies as TF32
SMALL = replace(MLP, rows=64, n=3, n_samples=4)


SWEPT = {"CPU_CHUNK": [[64, 4096], [["predict", "mlp", 3, 4]]], "CPU_GROUP_WIDTH": [[0, 4096], [["fit", "mlp", 1, 4]]]}


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TRIED", {"cpu": SWEPT})
    half = replace(SMALL, name="mlp bf16", dtype=torch.bfloat16)
    monkeypatch.setattr(gpu, "CASES", {"mlp": SMALL, "mlp bf16": half})
    monkeypatch.setattr(gpu, "time_interleaved", lambda *given: time_interleaved(*given[:3], most_repeats=1))


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


def test_a_list_reaches_the_engine_as_a_tuple() -> None:
    seen: list[object] = []
    gpu.with_value("NARROW_PIXELS", [64], lambda: seen.append(constants.NARROW_PIXELS))(0)
    assert seen == [(64,)]


@pytest.mark.usefixtures("swept")
def test_a_case_in_half_precision_predicts_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = MCBN.predict, list[object]()

    def predict(bayes: MCBN, x: torch.Tensor) -> object:
        seen.append((bayes.network.dtype, x.dtype))
        return plain(bayes, x)

    monkeypatch.setattr(MCBN, "predict", predict)
    work = ["predict", "mlp bf16", 3, 4]
    monkeypatch.setattr(gpu, "TRIED", {"cpu": {"CPU_CHUNK": [[4096], [work, ["predict", "mlp", 3, 4]]]}})
    assert [record["case"] for record in gpu.constants("cpu")] == ["mlp bf16 N=3", "mlp N=3"]
    assert list(dict.fromkeys(seen)) == [(torch.bfloat16,) * 2, (torch.float32,) * 2]


@pytest.mark.usefixtures("swept")
def test_only_takes_several_names() -> None:
    names = {only: {record["constant"] for record in gpu.constants("cpu", only)} for only in ("CHUNK", "CHUNK,WIDTH")}
    assert names == {"CHUNK": {"CPU_CHUNK"}, "CHUNK,WIDTH": SWEPT.keys()}


@pytest.mark.usefixtures("swept")
def test_repeats_bound_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gpu, "time_interleaved", lambda *given: asked.append(given[3]) or {})
    with pytest.raises(ValueError, match="shorter"):  # nothing was timed
        list(gpu.constants("cpu", "CHUNK", repeats=7))
    assert asked == [7]


@pytest.mark.usefixtures("swept")
def test_the_peak_on_a_gpu_is_that_of_the_calls_until_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter([5, 6, 70, 8, 9, 60, 1, 2])  # of two values in turns, four calls each
    monkeypatch.setattr(gpu, "TRIED", {"cuda": {"CPU_CHUNK": SWEPT["CPU_CHUNK"]}})
    monkeypatch.setattr(gpu, "prepared", lambda case, device: prepare(case, "cpu"))
    monkeypatch.setattr(gpu, "gpu_growth", lambda run: run() and next(grown))
    monkeypatch.setattr(gpu, "time_interleaved", lambda methods, T, *_: time_interleaved(methods, T, "cpu", 1))
    assert [record["peak_bytes"] for record in gpu.constants("cuda")] == [70, 60]
    assert next(grown, None) is None


TRIED_NARROW = [
    (name, value) for name, (values, _) in gpu.TRIED["cuda"].items() if name[:7] == "NARROW_" for value in values
]


@pytest.mark.parametrize(("name", "value"), TRIED_NARROW)
def test_every_value_gives_warps_of_the_narrow_kernel_whole_tiles(name: str, value: object) -> None:
    def check() -> None:
        for C, D, height, stride, _ in gpu.SIZES:
            weight, shape = torch.ones(D, C, 3, 3), (1, C, height, height)
            if kernels.suits_narrow(weight, (1, D, *(2 * [height // stride])), stride, 1, 1, 1):
                sizes = kernels.narrow_sizes(shape, kernels.packed(weight).shape, D, 0, False, stride, 1)
                pixels = sizes["ROWS"] * sizes["COLUMNS"] * sizes["IMAGES"]
                assert pixels
                assert pixels % (16 * sizes["WARPS"]) == 0

    gpu.with_value(name, value, check)(0)


@pytest.mark.usefixtures("swept")
def test_chunks_are_the_constants_that_bound_them() -> None:
    values = [(record["constant"], record["value"]) for record in gpu.chunks("cpu", "mlp")]
    assert values == [("CPU_CHUNK", 64), ("CPU_CHUNK", 4096)]
    assert list(gpu.chunks("cpu", "unet")) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_constants_of_the_engine_and_networks_of_the_benchmark_are_tried(device: str) -> None:
    for name, (values, works) in gpu.TRIED[device].items():
        value = getattr(constants, name)
        assert (list(value) if isinstance(value, tuple) else value) in values
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
