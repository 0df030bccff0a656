"""`mcbn report`: a page about one network or its predictions, or the pages of the whole reproduction."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mcbn import plugins
from mcbn.cli import session
from mcbn.cli.session import Data, Debug, Device, Fitted, Target, Weights
from mcbn.errors import MCBNError
from mcbn.tables import open_examples
from mcbn.tables import results as outputs


def report(
    results: Annotated[Path | None, typer.Argument(help="the reproduction: folder of records (results)")] = None,
    posterior: Annotated[Path | None, typer.Option(help="one network: the file that `mcbn fit` wrote")] = None,
    model: Annotated[str | None, typer.Option(help="package.module:factory, as for `mcbn fit`")] = None,
    weights: Weights = None,
    predictions: Annotated[Path | None, typer.Option(help="instead of a network: what `mcbn predict` wrote")] = None,
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
    Predictions that were written before, without their network:
      mcbn report --predictions pred.csv --data test.csv --target price
    Every table and figure of the paper, ours beside the paper's:
      mcbn report results --out site

    Pages are complete in themselves: they open offline, interactive, light or dark, and print.
    """
    with session.session():
        if sum(source is not None for source in (results, posterior, predictions)) > 1:
            raise MCBNError("give one of a folder of results, --posterior and --predictions: they make different pages")
        of_network = {"--model": model, "--weights": weights, "--train": train, "--tune": tune}
        wording: dict[str, Any] = {
            "title": title or f"How far can {model or predictions} be trusted on {data}?",
            "units": units,
            "classes": None if classes is None else [name.strip() for name in classes.split(",")],
        }
        if posterior is not None:
            if model is None or data is None:
                raise MCBNError(f"a report of {posterior} needs --model and --data, the held-out inputs and targets")
            path, fitted = _writable(out), session.load(posterior, model, weights, device)
            wording |= {"ignore_index": ignore_index, "seed": seed}
            page = _of_network(path, fitted, data, train, tune, target, **wording)
        elif predictions is not None:
            _refuse_alone(of_network)
            page = _of_predictions(predictions, data, target, out, wording)
        else:
            _refuse_alone({**of_network, "--data": data})
            page = plugins.find(plugins.REPORTS, "site")(results or Path("results"), out or Path("site"))
        typer.echo(page)


def _of_network(
    path: Path, fitted: Fitted, data: str, train: str | None, tune: str | None, target: str | None, **wording: Any
) -> Path:
    from mcbn.page import write_page

    test = fitted.open(data, target)
    fit_data = fitted.open(train, target, need_targets=False).training_data() if train else None
    constant = session.tune(fitted.bayes, fitted.open(tune, target)) if tune else fitted.constant
    constant_std = None if constant is None else float(constant.reshape(-1)[0]) ** -0.5
    x, y = session.read_whole(test)
    wording |= {"constant_std": constant_std, "names": test.layout.columns}
    return write_page(path, fitted.bayes, x, y, train=fit_data, **wording)


def _of_predictions(
    predictions: Path, data: str | None, target: str | None, out: Path | None, wording: dict[str, Any]
) -> Path:
    from mcbn.page import write_prediction_page

    if data is None:
        raise MCBNError(f"a report of {predictions} needs --data, the inputs and targets they were made for")
    path, predicted = _writable(out), outputs.read_predictions(predictions)
    test = open_examples(data, target=target, need_targets=True)
    x, y = session.read_whole(test)
    return write_prediction_page(path, predicted, y, x=x, names=test.layout.columns, **wording)


def _writable(out: Path | None) -> Path:
    return outputs.require_writable(out or Path("report.html"), (".html", ".htm"))


def _refuse_alone(options: Mapping[str, object]) -> None:
    alone = [name for name, value in options.items() if value is not None]
    if alone:
        raise MCBNError(f"{', '.join(alone)} without --posterior, the file that `mcbn fit` wrote")
