"""`mcbn reproduce alternatives`: MCBN against what one would use instead."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli.mistakes import one_line_errors


def alternatives(
    networks: Annotated[Path, typer.Option(help="networks of `mcbn reproduce cifar10`")] = Path(
        "results/cifar10/networks"
    ),
    out: Annotated[Path, typer.Option(help="folder of records, tables and figures")] = Path("results/alternatives"),
    foreign: Annotated[Path | None, typer.Option(help="npz of foreign images; made there where it is missing")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="names, separated by commas; all by default")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="of the networks; all by default")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    n_samples: Annotated[int, typer.Option(help="T of MCBN and MC dropout")] = 128,
    n_test: Annotated[int | None, typer.Option(help="test images; all by default")] = None,
    n_corrupted: Annotated[int, typer.Option(help="of these, how many are also corrupted at each severity")] = 1250,
    measure: Annotated[bool, typer.Option(help="no: only tables and figures, from the records")] = True,
) -> None:
    """Compare MCBN with softmax, temperature scaling, MC dropout, an ensemble and last-layer Laplace on CIFAR-10."""
    from mcbn.report import alternatives as report
    from mcbn.reproduce import alternatives
    from mcbn.reproduce.alternatives.foreign_images import build

    with one_line_errors():
        if measure:
            chosen = [part.strip() for name in methods or () for part in name.split(",") if part.strip()]
            if foreign is not None and not foreign.is_file():
                build(foreign)
            alternatives.run(
                networks,
                out,
                foreign=foreign,
                device=device,
                methods=chosen,
                seeds=seeds or (),
                n_samples=n_samples,
                n_test=n_test,
                n_corrupted=n_corrupted,
            )
            alternatives.time_methods(networks, out, device=device, methods=chosen, n_samples=n_samples)
        typer.echo("\n".join(map(str, report.write(out))))
