"""The command line: what there is, and what its help says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mcbn.cli import app
from workplace import environment, run


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_help_names_the_commands() -> None:
    words = helped()
    for name in ("fit", "predict", "evaluate", "report", "data", "demo", "bench", "playground", "reproduce"):
        assert f" {name} " in words


def test_lists_of_commands_cut_no_sentence() -> None:
    for group in ((), ("reproduce",)):
        assert "..." not in helped(*group).partition(" Commands: ")[2]
    assert "the gradients of Eq. (1) and Eq. (2) approach" in helped("reproduce")


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


def commands(group: typer.main.TyperGroup | None = None, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Walk through every command there is."""
    for name, found in (group or typer.main.get_command(app)).commands.items():
        if hasattr(found, "commands"):
            yield from commands(found, (*above, name))
        else:
            yield (*above, name)


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_has_help_with_an_example_that_takes_its_options(path: tuple[str, ...]) -> None:
    description, _, options = helped(*path).partition(" Options: ")
    examples = description.split(f"mcbn {' '.join(path)}")[1:]
    examples = examples[1:] if description.startswith("Usage: mcbn") else examples
    assert examples
    for option in re.findall(r"(?<!\w)(--[\w-]+)", " ".join(examples)):
        assert re.search(rf"{option}\b", options), option
    assert "--debug" in options


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("fit", "--seed --device"),
        ("predict", "--device"),
        ("evaluate", "--device"),
        ("report", "--seed --device"),
        ("demo", "--seed"),
        ("bench", "--device"),
        ("reproduce regression", "--device"),
        ("reproduce sensitivity", "--device"),
    ],
)
def test_seed_and_device_are_options_where_something_is_drawn_or_run(path: str, options: str) -> None:
    words = helped(*path.split())
    for option in options.split():
        assert f" {option} " in words
    assert "--device" not in options or "[default: auto]" in words


def test_unknown_commands_and_options_exit_with_2() -> None:
    for arguments in (["predikt"], ["fit", "--modle", "x"], ["predict", "--model", "a:b"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--splits", "0"), "needs a split"),
        (("demo", "--epochs", "-1"), "-1 epochs"),
        (("demo", "--out", "{file}/demo"), "cannot use {file}/demo"),
        (("bench", "--device", "abacus"), "--device abacus cannot be used here"),
        (("playground", "--port", "99999", "--no-browser"), "99999"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(app, [argument.format(file=file) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert words.format(file=file) in result.output
    assert result.output.count("\n") == 1


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("fit", "the command line needs typer: pip install 'mcbn[cli]'"),
        ("reproduce", "the reproduction of the paper is a distribution of its own: pip install mcbn-study"),
    ],
)
def test_without_its_extra_the_command_says_what_to_install_in_one_line(command: str, told: str) -> None:
    code = "import sys; sys.modules['typer'] = None; from mcbn.cli import app"
    run = [sys.executable, "-c", code, command]
    done = subprocess.run(run, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"mcbn: {told}\n")
