"""`mcbn playground`: Figure 1, live."""

import webbrowser
from typing import Annotated

import typer

from mcbn.cli.session import command


@command
def playground(
    port: Annotated[int, typer.Option(help="on this machine alone; 0: any free one")] = 0,
    browser: Annotated[bool, typer.Option(help="open the page")] = True,
) -> None:
    """Play with the toy problem of Figure 1 in the browser: click to add points. Ctrl-C stops it.

    \b
    Example:
      mcbn playground --port 8000 --no-browser
    """
    from mcbn_study.playground.server import Playground

    with Playground(port) as server:
        typer.echo(f"playground at {server.address} (Ctrl-C stops it)")
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            typer.echo("stopped")
