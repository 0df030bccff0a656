"""`mcbn reproduce segmentation`: uncertainty maps of street scenes and animals."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli.mistakes import one_line_errors, one_line_warnings


def segmentation(
    dataset: Annotated[str, typer.Option(help="camvid or voc")] = "camvid",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    profile: Annotated[str, typer.Option(help="paper: a GPU for minutes; quick: minutes on two cores")] = "paper",
    out: Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")] = Path(
        "results/segmentation"
    ),
) -> None:
    """Train SegNet, segment with the paper's setting and with ours, score and draw the uncertainty maps."""
    from mcbn.report import segmentation as report
    from mcbn.reproduce.segmentation.profiles import find_profile
    from mcbn.reproduce.segmentation.study import run

    with one_line_errors(), one_line_warnings():
        run(find_profile(profile, dataset), out, device=device, echo=typer.echo)
        for path in report.main(out):
            typer.echo(path)
