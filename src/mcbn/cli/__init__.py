"""The command line `mcbn`: commands on models, a demo, and what plugins add."""

import platform
import sys
from pathlib import Path
from typing import Annotated, Any

from mcbn import plugins

try:
    import typer
except ImportError as error:  # the script is installed without its extra, too; what brings a command brings that
    told = plugins.HOMES.get("".join(sys.argv[1:2]), "the command line needs typer: pip install 'mcbn[cli]'")
    raise SystemExit(f"mcbn: {told}") from error

import torch

import mcbn
from mcbn.cli import field, model, session
from mcbn.cli.report import report
from mcbn.errors import MCBNError
from mcbn.files import require_own_folder


def show_version(asked: bool) -> None:
    """Say which mcbn and torch there are, and end."""
    if asked:
        typer.echo(f"mcbn {mcbn.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="say which mcbn it is")]


def main(debug: session.Debug = False, version: Version = False) -> None:
    """Bayesian uncertainty for trained batch-normalised networks."""
    session.debugging.set(debug)  # nothing is left of an earlier command in the same process


@session.command
def demo(
    out: Annotated[Path, typer.Option(help="folder for figures and report")] = Path("demo"),
    splits: Annotated[int, typer.Option(help="train/test splits of each data set")] = 5,
    epochs: Annotated[int | None, typer.Option(help="fewer epochs than the protocol's, for a quick look")] = None,
    seed: Annotated[int, typer.Option(help="of networks, training and draws")] = 0,
) -> None:
    """Train, fit and score on Boston and Concrete; the report it ends with is one page to look at.

    \b
    Example:
      mcbn demo --out demo
    """
    from mcbn import demo

    require_own_folder(out, "report.html")
    demo.run(out, splits=splits, epochs=epochs, seed=seed)


def build() -> typer.Typer:
    """Put the commands together: those of the library, then what is installed beside it."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(main)
    for command in (model.fit, model.predict, model.evaluate, model.export, field.watch, field.adapt):
        app.command(no_args_is_help=True)(command)
    app.command()(report)
    app.command()(demo)
    for name in plugins.commands():
        _add_plugin(app, name)
    show_whole_sentences(app)
    return app


def show_whole_sentences(app: typer.Typer) -> None:
    """List each command with the whole first paragraph of its help, which click would cut at 45 characters."""
    for command in app.registered_commands:
        command.short_help = " ".join((command.help or command.callback.__doc__ or "").partition("\n\n")[0].split())
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.short_help = str(group.typer_instance.info.help)
            show_whole_sentences(group.typer_instance)


def _add_plugin(app: typer.Typer, name: str) -> None:
    """Add an installed command, or one that says why there is none: whatever options follow, one line and code 2."""
    try:
        command: Any = plugins.find(plugins.COMMANDS, name)
    except MCBNError as error:
        reason = error

        def refuse() -> None:
            with session.session():
                raise reason

        refuse.__doc__ = f"Not here: {reason}."
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, add_help_option=False, context_settings=anything)(refuse)
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


app = build()
