"""Other distributions beside the library: what they add, and what is said where they lack or are broken."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import mcbn.cli
from mcbn import MCBNError, plugins
from workplace import environment

STUDY, CHECKOUT = "pip install mcbn-study", "make bench"
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let these entry points, as (group, name, value), of a distribution mcbn-extra be all that are installed."""

    def pretend(*offers: tuple[str, str, str]) -> None:
        points = [metadata.EntryPoint(name, value, group) for group, name, value in offers]
        for point in points:
            vars(point)["dist"] = SimpleNamespace(name="mcbn-extra")
        monkeypatch.setattr(metadata, "entry_points", lambda **wanted: metadata.EntryPoints(points).select(**wanted))

    pretend()
    return pretend


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(mcbn.cli.build(), list(arguments))


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("mcbn: ")
    return line


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    "options", [(), ("--help",), ("regression", "--device", "cuda"), ("--no-such-option", "x"), ("--debug",)]
)
@pytest.mark.parametrize(
    ("command", "words"), [("reproduce", STUDY), ("data", STUDY), ("playground", STUDY), ("bench", CHECKOUT)]
)
def test_a_command_that_is_not_installed_says_what_to_install(
    command: str, words: str, options: tuple[str, ...]
) -> None:
    assert words in refused(invoke(command, *options))


@pytest.mark.usefixtures("install")
def test_the_site_of_the_reproduction_says_what_to_install() -> None:
    assert STUDY in refused(invoke("report", "results"))
    assert STUDY in refused(invoke("report"))


@pytest.mark.usefixtures("install")
def test_help_lists_what_could_be_installed() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(
        f" {name} " in result.output for name in (*plugins.HOMES, "fit", "predict", "evaluate", "report", "demo")
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:command", ("no_such_module:command", "ModuleNotFoundError", "No module named")),
        ("math:no_such_function", ("math:no_such_function", "AttributeError")),
        ("math:pi", ("math:pi", "float", "no command")),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution_and_the_rest_works(
    install: Install, value: str, words: tuple[str, ...]
) -> None:
    install((plugins.COMMANDS, "tea", value), (plugins.REPORTS, "site", value))
    for result in (invoke("tea", "--strong"), invoke("report", "results")):
        line = refused(result)
        assert all(word in line for word in (*words, "mcbn-extra")), line
    listed = invoke("--help")
    assert listed.exit_code == 0
    assert "tea" in listed.output
    assert invoke("predict", "--help").exit_code == 0
    assert STUDY in refused(invoke("data"))


def test_functions_and_groups_of_a_plugin_are_commands(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    group = typer.Typer()
    group.command("green")(lambda: typer.echo("green tea"))
    group.command("black")(lambda: typer.echo("black tea"))
    offer: Any = SimpleNamespace(water=lambda: typer.echo("water"), tea=group)
    monkeypatch.setitem(sys.modules, "kitchen", offer)
    install((plugins.COMMANDS, "water", "kitchen:water"), (plugins.COMMANDS, "tea", "kitchen:tea"))
    assert invoke("water").output == "water\n"
    assert invoke("tea", "green").output == "green tea\n"


MOVED = [
    ("mcbn.data", "cifar10"),
    ("mcbn.networks", "CifarResNet"),
    ("mcbn.baselines", "MNF"),
    ("mcbn.theory", "kl_regularizer"),
]


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_names_that_moved_to_the_study_are_found_where_it_is_installed(module: str, name: str) -> None:
    pytest.importorskip("mcbn_study")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(("module", "name"), MOVED)
def test_names_that_moved_to_the_study_say_what_to_install(module: str, name: str) -> None:
    before = importlib.import_module(module)
    assert not hasattr(before, name)
    with pytest.raises(AttributeError, match=rf"{module}\.{name} has moved: .*{STUDY}"):
        getattr(before, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from {module} import {name}")
    with pytest.raises(AttributeError, match=r"has no attribute 'kl_regulariser'$"):
        before.kl_regulariser  # noqa: B018 - a name that never was


def test_a_broken_home_of_moved_names_is_named(install: Install) -> None:
    install((plugins.NAMES, "mcbn.data", "no_such_module"))
    with pytest.raises(MCBNError, match=r"of mcbn-extra .no_such_module. does not load"):
        mcbn.data.cifar10  # noqa: B018


@pytest.mark.slow
def test_the_app_is_built_without_the_experiments_themselves() -> None:
    code = "import sys, mcbn.cli; print(*(name for name in sys.modules if name.startswith('mcbn_')))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("mcbn_study.")}
    assert rooms <= {"commands", "data", "machine"}
