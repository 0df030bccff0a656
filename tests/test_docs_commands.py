"""Commands that a page shows are there, with their options."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

import mcbn.cli
from mcbn_benchmarks.__main__ import app as benchmarks

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for part in (
        "[!C]*.md",
        "docs/**/*.md",
        "docs/**/*.toml",
        "examples/*.md",
        "benchmarks/*.md",
        "study/*.md",
        "results/*/*.md",
    )
    for page in ROOT.glob(part)
]
SHOWN = re.compile(r"(?:^    |`|\$ )((?:[\w./]*python -m )?mcbn(?:_benchmarks)? [a-z](?:[^`\n]|\\\n)*)", re.MULTILINE)


def missing(line: str) -> list[str]:
    """Return what a line asks for and no command has: words of commands, options."""
    program, *words = re.sub(r".*python -m ", "", line).replace("\\\n", " ").split()
    command: Any = typer.main.get_command(benchmarks if program == "mcbn_benchmarks" else mcbn.cli.build())
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z][\w-]+", words[0]):
        inner = command.commands.get(words.pop(0))
        if inner is None:
            return [line]
        command = inner
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("--") and word != "--help" and word not in options]


def options(command: Any) -> set[str]:
    """Return the options of a command and of those below it."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


def test_options_named_alone_are_those_of_some_command() -> None:
    known = {"--help", "--no-tf32"}.union(
        *(options(typer.main.get_command(app)) for app in (mcbn.cli.build(), benchmarks))
    )  # or of `python -m fuzz`
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`(--[a-z][\w-]*)", page.read_text("utf-8"))}
    assert {(page, name) for page, name in named if name not in known} == set()


def test_commands_shown_on_pages_are_there() -> None:
    lines = {(page, line) for page in PAGES for line in SHOWN.findall(page.read_text("utf-8"))}
    assert len(lines) > 80
    lacking = [(str(page.relative_to(ROOT)), line, missing(line)) for page, line in sorted(lines)]
    assert [shown for shown in lacking if shown[2]] == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("mcbn fit --no-such x", ["--no-such"]),
        ("mcbn fly", ["mcbn fly"]),
        ("python -m mcbn_benchmarks zoo --readme x", ["--readme"]),
    ],
)
def test_what_no_command_has_is_found(line: str, what: list[str]) -> None:
    assert missing(line) == what
