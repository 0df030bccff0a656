"""`mcbn reproduce regression` as a user runs it: profiles, and what it says of bad input."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from mcbn.cli import app
from mcbn_study.journal import read
from mcbn_study.regression import run as regression
from mcbn_study.regression.profile import PROFILES
from small_study import OURS, TINY


def command(*arguments):
    return CliRunner().invoke(app, ["reproduce", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("regression", "--datasets", "boston,bostn"), "data set must be one of ['boston', 'concrete'"),
        (("regression", "--methods", "mcbm"), "method must be one of ['mcbn', 'bn'"),
        (("regression", "--profile", "paprika"), "profile must be one of ['paper', 'quick'], got 'paprika'"),
        (("regression", "--device", "tpu"), "--device must be one of ['cpu', 'cuda'], got 'tpu'"),
        (("sensitivity", "--datasets", "x"), "got 'x'"),
    ],
)
def test_bad_input_ends_in_one_clear_line(tmp_path, arguments, message):
    result = command(*arguments, "--out", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_no_gpu_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command("regression", "--device", "cuda", "--out", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "sees no GPU; run with --device cpu" in result.output


def test_no_data_says_where_to_put_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("MCBN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("mcbn.data.regression.BASE_URL", "http://127.0.0.1:9")  # the port that discards: nobody answers
    result = command("regression", "--datasets", "yacht", "--methods", "mcbn", "--out", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "MCBN_DATA_DIR" in result.output
    assert "yacht.txt" in result.output
    assert not (tmp_path / "new").exists()


def test_another_configuration_is_refused(tmp_path):
    regression.run(replace(TINY, splits=(1,)), tmp_path, methods=("bn",))
    arguments = ("regression", "--profile", "quick", "--datasets", "boston", "--methods", "bn")
    result = command(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "name is 'tiny' there, 'quick' now" in result.output
    assert "--out" in result.output


def test_command_runs_a_profile(tmp_path, monkeypatch):
    monkeypatch.setitem(PROFILES, "tiny", replace(TINY, splits=(1,)))
    arguments = ("regression", "--profile", "tiny", "--methods", "mcbn,bn", "--out", str(tmp_path))
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    assert "4 test runs in" in result.output


@pytest.mark.slow
def test_quick_profile_runs_from_records_to_tables(tmp_path):
    result = command("regression", "--profile", "quick", "--device", "cpu", "--out", str(tmp_path / "regression"))
    assert result.exit_code == 0, result.output
    assert command("tables", "--results", str(tmp_path)).exit_code == 0
    tests = [r for r in read(tmp_path / "regression/records.jsonl") if r["kind"] == "test"]
    runs = Counter((r["dataset"], r["method"]) for r in tests)
    each = dict.fromkeys((*OURS, "mnf"), 4) | {"ensemble": 2}  # 2 splits of 2 seeds; one ensemble a split
    assert runs == {(name, method): n for name in ("boston", "concrete") for method, n in each.items()}
    assert "Boston Housing" in (tmp_path / "regression/tables.md").read_text()
