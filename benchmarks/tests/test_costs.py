"""The cost model: limits that can be worked out by hand."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcbn import MCBNError
from mcbn_benchmarks import pages as costs
from mcbn_benchmarks.__main__ import app
from mcbn_study.journal import extend

ROOT = Path(__file__).parents[2]


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
    assert "0.139 h, $0.278" in costs.costs(records)[0]  # 10^6 inputs times 500 draws times 1 us


def test_without_times_there_is_no_cost(tmp_path):
    with pytest.raises(MCBNError, match="no measured times"):
        costs.read_costs(tmp_path)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_prints(records):
    assert "| net |" in call("costs", "--records", records).replace("  ", "")


@pytest.mark.slow
def test_the_table_of_the_documentation_comes_from_the_committed_records():
    shown = call("costs", "--records", ROOT / "benchmarks" / "results")
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    documented = (ROOT / "docs" / "scale.md").read_text().splitlines()
    assert [line for line in tables if line not in documented] == []
    assert len(tables) > 7
