"""The command line `mcbn`: one module a group of commands."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli import model
from mcbn.cli.data import data
from mcbn.cli.mistakes import begin
from mcbn.cli.mistakes import one_line_errors as _one_line_errors
from mcbn.cli.reproduce import reproduce

app = typer.Typer(
    no_args_is_help=True,
    help="Bayesian uncertainty for trained batch-normalised networks.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(no_args_is_help=True)(model.fit)
app.command(no_args_is_help=True)(model.predict)
app.command(no_args_is_help=True)(model.evaluate)
app.command()(data)
app.add_typer(reproduce, name="reproduce")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.callback()
def main(debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False) -> None:
    """Bayesian uncertainty for trained batch-normalised networks."""
    begin(debug)


@app.command(context_settings=PASS_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Train, fit and score on Boston and Concrete; `mcbn demo --help` lists its options."""
    from mcbn import demo

    demo.main(context.args)


@app.command(context_settings=PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure MCBN against the loop of Algorithm 1 and T plain passes; `mcbn bench --help` lists its options."""
    from mcbn.bench.__main__ import main

    with _one_line_errors():
        main(context.args)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="folder of records")] = Path("results"),
    out: Annotated[Path, typer.Option(help="folder of the pages")] = Path("site"),
) -> None:
    """Show the reproduction as pages to browse: every table and figure, ours beside the paper's."""
    from mcbn.report import commands

    with _one_line_errors():
        typer.echo(commands.report(results, out))


@app.command()
def playground(
    port: Annotated[int, typer.Option(help="on this machine alone; 0: any free one")] = 0,
    browser: Annotated[bool, typer.Option(help="open the page")] = True,
) -> None:
    """Play with the toy problem of Figure 1 in the browser: click to add points."""
    from mcbn import playground

    with _one_line_errors():
        playground.main(port, browser=browser)
