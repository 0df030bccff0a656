"""The cost model and the simulated sweep: limits that can be worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcbn import MCBNError
from mcbn_benchmarks import costs
from mcbn_benchmarks.__main__ import app
from mcbn_benchmarks.costs import Assumptions, simulate
from mcbn_study.journal import extend, read

ROOT = Path(__file__).parents[2]

IDEAL = Assumptions(0.0, 0.0, 0.0, 0.0, 1e9, 0.0, 1e-30)
WORK = (1_000_000, 1000, 0.01)  # inputs, those of a part, seconds of one


@pytest.fixture
def records(tmp_path: Path) -> Path:
    base = {"case": "net", "method": "mcbn", "hardware": "box"}
    extend(
        tmp_path / "cuda.jsonl",
        [
            {**base, "n": 100, "n_samples": 50, "milliseconds": 7.0},
            {**base, "n": 100, "n_samples": 50, "milliseconds": 5.0},
            {**base, "n": 1, "n_samples": 50, "milliseconds": 3.0},
            {**base, "n": 1000, "n_samples": 50, "milliseconds": None},
            {**base, "n": 1000, "n_samples": 50, "milliseconds": 1.0, "method": "algorithm 1"},
        ],
    )
    extend(tmp_path / "cpu.jsonl", [{**base, "n": 10, "n_samples": 5, "milliseconds": 50.0}])
    return tmp_path


def test_a_million_inputs_cost_what_the_latest_largest_run_says(records, monkeypatch):
    gpu, cpu = costs.read_costs(records)
    assert (gpu["microseconds"], cpu["microseconds"]) == (1.0, 1000.0)
    monkeypatch.setattr(costs, "PRICES", {"cuda": 2.0, "cpu": 0.0})
    monkeypatch.setattr(costs, "DRAWS", [3600])
    assert "1 h, $2" in costs.costs(records)[0]


def test_without_times_there_is_no_cost(tmp_path):
    with pytest.raises(MCBNError, match="no measured times"):
        costs.read_costs(tmp_path)


@pytest.mark.parametrize("gpus", [1, 8, 1000])
def test_an_ideal_cluster_divides_the_work(gpus):
    found = simulate(*WORK, gpus, IDEAL)
    assert found["hours"] * 3600 == pytest.approx(10_000 / gpus)
    assert found["efficiency"] == pytest.approx(1.0)
    assert found["dollars"] == pytest.approx(costs.PRICES["cuda"] * 10_000 / 3600)


def test_more_gpus_than_parts_do_not_help():
    hours = [simulate(*WORK, gpus, IDEAL)["hours"] for gpus in (1000, 5000)]
    assert hours[0] == hours[1] == pytest.approx(10 / 3600)


def test_the_driver_and_the_storage_are_limits():
    slow_driver = simulate(*WORK, 1000, replace(IDEAL, driver_seconds=1.0))
    assert slow_driver["hours"] * 3600 == pytest.approx(1000 + 10)
    storage = simulate(*WORK, 1000, replace(IDEAL, storage_gigabytes=1.0, input_bytes=1e6))
    assert storage["hours"] * 3600 == pytest.approx(1e6 * 1e6 / 1e9)


def test_failures_cost_the_part_at_work_and_a_start():
    found = simulate(*WORK, 1, replace(IDEAL, failures_per_gpu_hour=36.0, start_seconds=5.0))
    failures = found["failures"]
    mean_loss = found["hours"] * 3600 - 10_000 - 5 * (failures + 1)
    # A part of 10 s fails with probability 1 - exp(-0.1) and, given that, after 4.92 s on average.
    assert failures == pytest.approx(1000 * 0.1052, abs=4 * 1000**0.5 * 0.35)
    assert mean_loss / failures == pytest.approx(4.92, abs=4 * 2.9 / failures**0.5)


def test_the_same_seed_gives_the_same_sweep_and_another_another():
    a = Assumptions(failures_per_gpu_hour=1.0)
    assert simulate(*WORK, 10, a) == simulate(*WORK, 10, a)
    assert simulate(*WORK, 10, a)["hours"] != simulate(*WORK, 10, replace(a, seed=1))["hours"]


@pytest.mark.parametrize("option", ["--images", "--samples"])
def test_nonsense_is_refused(option):
    result = CliRunner().invoke(app, ["sweep", option, "0"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_print_and_record(records, tmp_path):
    assert "| net |" in call("costs", "--records", records).replace("  ", "")
    out = tmp_path / "sweep.jsonl"
    common = "sweep", "--records", records, "--images", 2_000_000, "--samples", 100
    shown = call(*common, "--network", "net", "--out", out)
    assert shown.startswith("SIMULATED: net, T = 100, 0.1 ms an image as measured")
    rows = read(out)
    assert len(rows) == 8 + 4
    assert all(row["simulated"] and row["assumptions"]["driver_seconds"] == 0.005 for row in rows)
    with pytest.raises(MCBNError, match="no time of other"):
        costs.sweep(records, "other")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["costs", "sweep"])
def test_the_tables_of_the_documentation_come_from_the_committed_records(command):
    shown = call(command, "--records", ROOT / "benchmarks" / "results")
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    documented = (ROOT / "docs" / "scale.md").read_text().splitlines()
    assert [line for line in tables if line not in documented] == []
    assert len(tables) > 7


def test_the_committed_sweep_is_what_the_command_gives_today():
    path = ROOT / "benchmarks" / "results" / "sweep.jsonl"
    for row in read(path):
        if row["changed"] == "as assumed" and row["gpus"] == 1000 and row["part_inputs"] == 16384:
            work = row["inputs"], row["part_inputs"], row["seconds_per_image"], row["gpus"]
            again = simulate(*work, Assumptions(**row["assumptions"]))
            assert json.loads(json.dumps(again)) == {name: row[name] for name in again}
            return
    pytest.fail("no record of 1,000 GPUs")
