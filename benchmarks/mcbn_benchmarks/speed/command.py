"""`mcbn bench`: speed against Algorithm 1 and plain passes."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli.session import Debug, session


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
    from mcbn_benchmarks.speed.__main__ import bench

    with session():
        bench(out=out, device=device, quick=quick, only=only, compile=compile, peer_path=peer_path)
