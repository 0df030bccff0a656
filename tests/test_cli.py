"""The command line: what there is, and what its help says."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcbn.cli import app
from workplace import run


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_help_names_the_commands() -> None:
    words = helped()
    for name in ("fit", "predict", "evaluate", "demo", "bench", "reproduce"):
        assert name in words


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("fit", "model weights data task batch-size samples posterior tune layers target seed device debug out"),
        ("predict", "posterior model weights data out coverage method samples target device debug"),
        ("evaluate", "posterior model weights data tune coverage method samples target json device debug"),
    ],
)
def test_help_of_a_command_lists_its_options_and_an_example(command: str, options: str) -> None:
    words = helped(command)
    assert f"mcbn {command} --" in words  # the example
    for option in options.split():
        assert f" --{option} " in words
    example = re.search(rf"mcbn {command} (--.*?) (?:An npz|Regression)", words)
    assert example
    assert set(re.findall(r"--([\w-]+)", example.group(1))) <= set(options.split())


@pytest.mark.parametrize(
    "command", ["regression", "sensitivity", "statistics", "objective", "regularizer", "toy", "tables"]
)
def test_reproduce_has_help_for_every_experiment(command: str) -> None:
    assert "Usage: " in helped("reproduce", command)


def test_unknown_commands_and_options_exit_with_2() -> None:
    for arguments in (["predikt"], ["fit", "--modle", "x"], ["predict", "--model", "a:b"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


@pytest.mark.slow
def test_help_of_a_process(tmp_path: Path) -> None:
    done = run(tmp_path, "fit", "--help")
    assert done.returncode == 0
    assert "mcbn fit --model nets:make" in done.stdout


@pytest.mark.slow
def test_demo_takes_its_own_options(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--splits", "1", "--epochs", "20"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "toy.png").exists()
