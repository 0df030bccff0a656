"""The command line `mcbn`: one module a group of commands."""

from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as error:  # the script is installed without its extra, too
    raise SystemExit("mcbn: the command line needs typer: pip install 'mcbn[cli]'") from error

from mcbn.cli import images as images  # registers its commands
from mcbn.cli import model
from mcbn.cli.data import data
from mcbn.cli.fitted import session
from mcbn.cli.mistakes import Debug, begin
from mcbn.cli.report import report
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
app.command()(report)
app.command()(data)
app.add_typer(reproduce, name="reproduce")


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


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option(help="folder for <device>.jsonl (appended to) and <device>.md")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU where there is one")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="two cases with few draws, to see that it runs")] = False,
    only: Annotated[str, typer.Option(help='cases whose title holds this, such as "mlp", "N=1", "linear"')] = "",
    compile: Annotated[bool, typer.Option("--compile", help="time predict(compile=True) too")] = False,
    peer_path: Annotated[Path | None, typer.Option(help="folder that torch-uncertainty was installed into")] = None,
    debug: Debug = False,
) -> None:
    """Measure MCBN against the loop of Algorithm 1 and T plain passes.

    \b
    Example:
      mcbn bench --quick
    """
    from mcbn.bench.__main__ import bench

    with session():
        bench(out=out, device=device, quick=quick, only=only, compile=compile, peer_path=peer_path)


@app.command()
def playground(
    port: Annotated[int, typer.Option(help="on this machine alone; 0: any free one")] = 0,
    browser: Annotated[bool, typer.Option(help="open the page")] = True,
    debug: Debug = False,
) -> None:
    """Play with the toy problem of Figure 1 in the browser: click to add points. Ctrl-C stops it.

    \b
    Example:
      mcbn playground --port 8000 --no-browser
    """
    from mcbn import playground

    with session():
        playground.main(port, browser=browser)
