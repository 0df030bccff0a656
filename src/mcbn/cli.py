"""The command line: `mcbn demo`, `mcbn bench`."""

import typer

from mcbn.errors import MCBNError

app = typer.Typer(no_args_is_help=True, help="Bayesian uncertainty for trained batch-normalised networks.")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=PASS_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Train, fit and score on Boston and Concrete; `mcbn demo --help` lists its options."""
    from mcbn import demo

    demo.main(context.args)


@app.command(context_settings=PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure MCBN against the loop of Algorithm 1 and T plain passes; `mcbn bench --help` lists its options."""
    from mcbn.bench.__main__ import main

    try:
        main(context.args)
    except MCBNError as error:
        typer.echo(f"mcbn: {error}", err=True)
        raise typer.Exit(2) from error
