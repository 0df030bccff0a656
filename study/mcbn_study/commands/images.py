"""`mcbn reproduce cifar10`, `alternatives` and `segmentation`: the experiments on images."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli.session import one_line_errors, one_line_warnings
from mcbn.errors import MCBNError
from mcbn_study.commands.reproduce import Device, Names, ProfileName, _one_thread, _split, reproduce


@reproduce.command()
def cifar10(
    seeds: Annotated[str, typer.Option(help="one network each, separated by commas")] = "1,2,3",
    profile: ProfileName = "paper",
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")] = Path(
        "results/cifar10"
    ),
    networks: Annotated[
        Path | None, typer.Option(help="folder of trained networks; those it holds are not trained again")
    ] = None,
    dropout: Annotated[float, typer.Option(help="train with this rate for MC dropout instead, and stop there")] = 0.0,
) -> None:
    """Train ResNet-32 on CIFAR-10 and measure MCBN on it over T and M (Table 2); needs `mcbn data cifar10`.

    \b
    Example:
      mcbn reproduce cifar10 --seeds 1,2,3 --device cuda
    """
    from mcbn_study.cifar10 import report
    from mcbn_study.cifar10.profile import find_profile
    from mcbn_study.cifar10.run import run

    with one_line_errors(), _one_thread(device):
        chosen = _numbers(seeds)
        run(find_profile(profile), out, seeds=chosen, device=device, networks=networks, dropout=dropout)
        if not dropout:
            typer.echo("\n".join(map(str, report.write(out))))


@reproduce.command()
def alternatives(
    networks: Annotated[Path, typer.Option(help="networks of `mcbn reproduce cifar10`")] = Path(
        "results/cifar10/networks"
    ),
    out: Annotated[Path, typer.Option(help="folder of records, tables and figures")] = Path("results/alternatives"),
    foreign: Annotated[Path | None, typer.Option(help="npz of foreign images; made there where it is missing")] = None,
    methods: Names = None,
    seeds: Annotated[list[int] | None, typer.Option(help="of the networks; all by default")] = None,
    device: Device = "auto",
    n_samples: Annotated[int, typer.Option(help="T of MCBN and MC dropout")] = 128,
    n_test: Annotated[int | None, typer.Option(help="test images; all by default")] = None,
    n_corrupted: Annotated[int, typer.Option(help="of these, how many are also corrupted at each severity")] = 1250,
    measure: Annotated[bool, typer.Option(help="no: only tables and figures, from the records")] = True,
) -> None:
    """Compare MCBN with softmax, temperature scaling, MC dropout, an ensemble and last-layer Laplace on CIFAR-10.

    \b
    Example:
      mcbn reproduce alternatives --foreign foreign.npz --device cuda
    """
    from mcbn_study.alternatives import report
    from mcbn_study.alternatives import run as alternatives
    from mcbn_study.alternatives.inputs import build_foreign

    with one_line_errors():
        if measure:
            if foreign is not None and not foreign.is_file():
                build_foreign(foreign)
            chosen = _split(methods)
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


@reproduce.command()
def segmentation(
    dataset: Annotated[str, typer.Option(help="camvid or voc")] = "camvid",
    device: Device = "auto",
    profile: ProfileName = "paper",
    out: Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")] = Path(
        "results/segmentation"
    ),
) -> None:
    """Train SegNet, segment with the paper's setting and with ours, score and draw the uncertainty maps.

    \b
    Example:
      mcbn reproduce segmentation --dataset camvid --device cuda
    """
    from mcbn_study.segmentation import report
    from mcbn_study.segmentation.profile import find_profile
    from mcbn_study.segmentation.run import run

    with one_line_errors(), one_line_warnings():
        run(find_profile(profile, dataset), out, device=device, echo=typer.echo)
        for path in report.write(out):
            typer.echo(path)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _split([text])]
    except ValueError:
        raise MCBNError(f"seeds are whole numbers separated by commas, such as 1,2,3; got {text!r}") from None
