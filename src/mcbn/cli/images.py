"""`mcbn reproduce cifar10`: the paper's experiments on images."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli.mistakes import one_line_errors as _one_line_errors
from mcbn.cli.reproduce import Device, ProfileName, _one_thread, _split, reproduce
from mcbn.errors import MCBNError


@reproduce.command()
def cifar10(
    seeds: Annotated[str, typer.Option(help="one network each, separated by commas")] = "1,2,3",
    profile: ProfileName = "paper",
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")] = Path(
        "results/cifar10"
    ),
    networks: Annotated[
        Path | None, typer.Option(help="folder of trained networks; those it holds are not trained again")
    ] = None,
    dropout: Annotated[float, typer.Option(help="train with this rate for MC dropout instead, and stop there")] = 0.0,
) -> None:
    """Train ResNet-32 on CIFAR-10 and measure MCBN on it over T and M (Table 2); needs `mcbn data cifar10`."""
    from mcbn.report import cifar10 as report
    from mcbn.reproduce.cifar10 import find_profile, run

    with _one_line_errors(), _one_thread(device):
        run(
            find_profile(profile),
            out,
            seeds=_numbers(seeds),
            device=device,
            networks=networks,
            dropout=dropout,
        )
        if not dropout:
            typer.echo("\n".join(map(str, report.write(out))))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _split([text])]
    except ValueError:
        raise MCBNError(f"seeds are whole numbers separated by commas, such as 1,2,3; got {text!r}") from None
