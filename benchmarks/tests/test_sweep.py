"""The simulated sweep: limits that can be worked out by hand, and the committed record made again."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcbn import MCBNError
from mcbn_benchmarks.__main__ import app
from mcbn_benchmarks.pages import JOB, PRICES
from mcbn_benchmarks.sweep import ASSUMED, simulate, sweep
from mcbn_study.journal import extend, latest, read

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results"
NOTHING = 1e-300  # of what has a logarithm

IDEAL = dict.fromkeys(ASSUMED, 0.0) | {"start_seconds": NOTHING, "storage_gigabytes": 1e9}
IDEAL |= {"failures_per_gpu_hour": 1e-30}
WORK = (1_000_000, 1000, 0.01)  # inputs, those of a part, seconds of one


@pytest.fixture
def records(tmp_path: Path) -> Path:
    timed = {"case": "net", "method": "mcbn", "hardware": "box", "n": 1000, "n_samples": 50, "milliseconds": 50.0}
    extend(tmp_path / "cuda.jsonl", [timed])
    extend(tmp_path / "cpu.jsonl", [timed | {"case": "slow"}])
    return tmp_path


@pytest.mark.parametrize("gpus", [1, 8, 1000])
def test_an_ideal_cluster_divides_the_work(gpus):
    job = simulate(*WORK, gpus, IDEAL)
    assert job["hours"] * 3600 == pytest.approx(10_000 / gpus)
    assert job["efficiency"] == pytest.approx(1.0)
    assert job["dollars"] == pytest.approx(PRICES["cuda"] * 10_000 / 3600)


def test_more_gpus_than_parts_do_not_help():
    hours = [simulate(*WORK, gpus, IDEAL)["hours"] for gpus in (1000, 5000)]
    assert hours[0] == hours[1] == pytest.approx(10 / 3600)


def test_the_driver_and_the_storage_are_limits():
    slow_driver = simulate(*WORK, 1000, IDEAL | {"driver_seconds": 1.0})
    assert slow_driver["hours"] * 3600 == pytest.approx(1000 + 10)
    assert slow_driver["driver_share"] == pytest.approx(1000 / 1010)
    storage = simulate(*WORK, 1000, IDEAL | {"storage_gigabytes": 1.0, "input_bytes": 1e6})
    assert storage["hours"] * 3600 == pytest.approx(1e6 * 1e6 / 1e9)


def test_failures_cost_the_part_at_work_and_a_start():
    job = simulate(*WORK, 1, IDEAL | {"failures_per_gpu_hour": 36.0, "start_seconds": 5.0})
    failures = job["failures"]
    mean_loss = job["hours"] * 3600 - 10_000 - 5 * (failures + 1)
    # A part of 10 s fails with probability 1 - exp(-0.1) and, given that, after 4.92 s on average.
    assert failures == pytest.approx(1000 * 0.1052, abs=4 * 1000**0.5 * 0.35)
    assert mean_loss / failures == pytest.approx(4.92, abs=4 * 2.9 / failures**0.5)


def test_the_same_seed_gives_the_same_job_and_another_another():
    a = ASSUMED | {"failures_per_gpu_hour": 1.0}
    assert simulate(*WORK, 10, a) == simulate(*WORK, 10, a)
    assert simulate(*WORK, 10, a)["hours"] != simulate(*WORK, 10, a | {"seed": 1})["hours"]


def test_the_command_prints_and_records(records, tmp_path):
    out = tmp_path / "sweep.jsonl"
    how = ["--records", records, "--images", 2_000_000, "--samples", 100, "--network", "net", "--out", out]
    result = CliRunner().invoke(app, ["sweep", *map(str, how)])
    assert result.exit_code == 0, result.output
    rows = read(out)
    assert [row["seconds_per_image"] for row in rows] == [pytest.approx(1e-4)] * 12
    assert all(row["simulated"] and row["commit"] for row in rows)
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["hours"] for row in printed] == [row["hours"] for row in rows]
    slow = [row["assumptions"]["driver_seconds"] for row in rows if row["changed"] == "driver 10 times slower"]
    assert slow == [10 * ASSUMED["driver_seconds"]]


@pytest.mark.parametrize("network", ["other", "slow"])
def test_a_network_that_no_gpu_was_timed_with_is_refused(records, network):
    with pytest.raises(MCBNError, match=f"no time of {network} on a GPU; measure it by"):
        next(sweep(records, network))


@pytest.mark.parametrize("option", ["--images", "--samples"])
def test_nonsense_is_refused(option):
    result = CliRunner().invoke(app, ["sweep", option, "0"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_the_committed_record_is_what_the_command_gives_today():
    rows = {tuple(row[key] for key in JOB): row for row in latest(read(RECORDS / "sweep.jsonl"), JOB)}
    row = rows["as assumed", 16384, 1000]
    work = row["inputs"], row["part_inputs"], row["seconds_per_image"], row["gpus"]
    again = simulate(*work, row["assumptions"])
    assert again == pytest.approx({name: row[name] for name in again}, rel=1e-9)
    assert len(rows) == 12
