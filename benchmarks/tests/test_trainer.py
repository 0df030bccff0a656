"""The batched trainer against one network at a time: both times, as a user asks for them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcbn_benchmarks.__main__ import app


@pytest.mark.slow
def test_benchmark_records_both_times(tmp_path: Path) -> None:
    out = tmp_path / "new" / "trainer.jsonl"
    options = ["--only", "boston-bn", "--share", "0.08", "--seconds", "0.1", "--out", str(out)]
    result = CliRunner().invoke(app, ["trainer", *options])
    record = json.loads(out.read_text())
    assert record["networks"] == 30
    ratio = record["microseconds_one_at_a_time"] / record["microseconds_a_network_step"]
    assert record["speed_up"] == pytest.approx(ratio)
    assert record["speed_up"] > 1
    assert json.loads(result.output)["case"] == "boston-bn-32"
    assert record["hardware"]
