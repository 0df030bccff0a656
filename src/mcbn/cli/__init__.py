"""The command line `mcbn`: one module a group of commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as error:  # the script is installed without its extra, too
    raise SystemExit("mcbn: the command line needs typer: pip install 'mcbn[cli]'") from error

from mcbn import plugins
from mcbn.cli import model
from mcbn.cli.fitted import session
from mcbn.cli.mistakes import Debug, begin
from mcbn.cli.report import report
from mcbn.errors import MCBNError

app = typer.Typer(
    no_args_is_help=True,
    help="Bayesian uncertainty for trained batch-normalised networks.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(no_args_is_help=True)(model.fit)
app.command(no_args_is_help=True)(model.predict)
app.command(no_args_is_help=True)(model.evaluate)
app.command()(report)


@app.callback()
def main(debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False) -> None:
    """Bayesian uncertainty for trained batch-normalised networks."""
    begin(debug)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for figures and report")] = Path("demo"),
    splits: Annotated[int, typer.Option(help="train/test splits of each data set")] = 5,
    epochs: Annotated[int | None, typer.Option(help="fewer epochs than the protocol's, for a quick look")] = None,
    seed: Annotated[int, typer.Option(help="of networks, training and draws")] = 0,
    debug: Debug = False,
) -> None:
    """Train, fit and score on Boston and Concrete; the report it ends with is one page to look at.

    \b
    Example:
      mcbn demo --out demo
    """
    from mcbn import demo

    with session():
        demo.run(out, splits=splits, epochs=epochs, seed=seed)


def _refusal(error: MCBNError) -> Callable[[], None]:
    """Make the command that says why there is none."""

    def refuse() -> None:
        with session():
            raise error

    refuse.__doc__ = f"Not here: {error}."
    return refuse


for _name in plugins.commands():
    try:
        _command = plugins.find(plugins.COMMANDS, _name)
    except MCBNError as _error:
        _anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(_name, context_settings=_anything)(_refusal(_error))
    else:
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name)(_command)
