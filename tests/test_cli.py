"""The command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcbn.cli import app


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "bench" in result.output


@pytest.mark.slow
def test_demo_takes_its_own_options(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--splits", "1", "--epochs", "20"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "toy.png").exists()
