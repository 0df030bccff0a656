"""`mcbn report`: a page about one network, or the pages of the whole reproduction."""

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from mcbn.cli import fitted
from mcbn.cli.mistakes import Debug
from mcbn.cli.model import Data, Device, Target, Weights
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.tabular import results as outputs
from mcbn.tabular import specs
from mcbn.tabular.source import Source, open_source


def report(
    results: Annotated[Path | None, typer.Argument(help="the reproduction: folder of records (results)")] = None,
    posterior: Annotated[Path | None, typer.Option(help="one network: the file that `mcbn fit` wrote")] = None,
    model: Annotated[str | None, typer.Option(help="package.module:factory, as for `mcbn fit`")] = None,
    weights: Weights = None,
    data: Annotated[str | None, typer.Option(help=f"held-out inputs and targets: {Data}")] = None,
    train: Annotated[str | None, typer.Option(help="the data of the fit: adds checks and each layer's share")] = None,
    tune: Annotated[str | None, typer.Option(help="validation data: tune tau, and the constant twin's, on it")] = None,
    target: Target = None,
    title: Annotated[str | None, typer.Option(help="heading of the page")] = None,
    units: Annotated[str, typer.Option(help="regression: units of the target")] = "target units",
    classes: Annotated[str | None, typer.Option(help="classification: names of the classes, a,b,c")] = None,
    ignore_index: Annotated[int | None, typer.Option(help="classification: a label to leave out (void)")] = None,
    out: Annotated[Path | None, typer.Option(help="page (report.html) or folder of pages (site) to write")] = None,
    seed: Annotated[int, typer.Option(help="of the examples that --train is checked on")] = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Show whether to trust a network's uncertainty, as one page; or the reproduction of the paper, as a site.

    \b
    One network, with a posterior that `mcbn fit` wrote:
      mcbn report --posterior net.mcbn --model nets:make --weights w.pt \\
        --data test.csv --train train.csv --out report.html
    Every table and figure of the paper, ours beside the paper's:
      mcbn report results --out site

    Pages are complete in themselves: they open offline, interactive, light or dark, and print.
    """
    with fitted.session():
        if posterior is None:
            _refuse_alone({"--model": model, "--weights": weights, "--data": data, "--train": train, "--tune": tune})
            typer.echo(_site(results or Path("results"), out or Path("site")))
            return
        if results is not None:
            raise MCBNError("give a folder of results or --posterior, not both: they make different pages")
        if model is None or data is None:
            raise MCBNError(f"a report of {posterior} needs --model and --data, the held-out inputs and targets")
        path = outputs.require_writable(out or Path("report.html"), (".html", ".htm"))
        bayes, layout, constant = fitted.load(posterior, specs.model(model, weights, specs.device(device)))
        opening: dict[str, Any] = {"target": target, "fitted": layout, "keys": fitted.keys(bayes)}
        test = open_source(data, need_targets=True, **opening)
        fit_data = open_source(train, **opening) if train else None
        if tune:
            constant = fitted.tune(bayes, open_source(tune, need_targets=True, **opening))
        wording: dict[str, Any] = {
            "title": title or f"How far can {model} be trusted on {data}?",
            "units": units,
            "classes": None if classes is None else [name.strip() for name in classes.split(",")],
            "ignore_index": ignore_index,
        }
        typer.echo(_page(path, bayes, test, fit_data, constant, seed=seed, **wording))


def _page(
    path: Path, bayes: MCBN[Any], test: Source, train: Source | None, constant: Tensor | None, **options: Any
) -> Path:
    from mcbn.page import write_page

    x, y = fitted.read_whole(test)
    return write_page(
        path,
        bayes,
        x,
        y,
        train=fitted.training_data(train, bayes.posterior.batch_size) if train else None,
        constant_std=None if constant is None else float(constant.reshape(-1)[0]) ** -0.5,
        names=test.layout.columns,
        **options,
    )


def _refuse_alone(given: dict[str, object]) -> None:
    lost = [name for name, value in given.items() if value is not None]
    if lost:
        raise MCBNError(f"{', '.join(lost)} without --posterior, the file that `mcbn fit` wrote")


def _site(results: Path, out: Path) -> Path:
    from mcbn.report import commands

    return commands.report(results, out)
