"""`mcbn report`: a page about one network or its predictions, or the pages of the whole reproduction."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mcbn import plugins
from mcbn.cli import session
from mcbn.cli.session import Data, Device, Fitted, FittedOptions, Key, Overwrite, OwnWeights, Target, Weights
from mcbn.errors import MCBNError
from mcbn.files import printable, require_output, require_own_folder
from mcbn.tables import Layout, open_examples, results as outputs


@session.command
def report(
    results: Annotated[Path | None, typer.Argument(help="the reproduction: folder of records (results)")] = None,
    posterior: Annotated[Path | None, typer.Option(help="one network: the file that `mcbn fit` wrote")] = None,
    model: Annotated[str | None, typer.Option(help="package.module:factory, as for `mcbn fit`")] = None,
    weights: Weights = None,
    own_weights: OwnWeights = False,
    predictions: Annotated[Path | None, typer.Option(help="instead of a network: what `mcbn predict` wrote")] = None,
    data: Annotated[str | None, typer.Option(help=f"held-out inputs and targets: {Data}")] = None,
    train: Annotated[str | None, typer.Option(help="the data of the fit: adds checks and each layer's share")] = None,
    tune: Annotated[str | None, typer.Option(help="validation data: tune the noise or temperature on it")] = None,
    target: Target = None,
    key: Key = None,
    title: Annotated[str | None, typer.Option(help="heading of the page")] = None,
    units: Annotated[str, typer.Option(help="regression: units of the target")] = "target units",
    classes: Annotated[str | None, typer.Option(help="classification: names of the classes, a,b,c")] = None,
    ignore_index: Annotated[int | None, typer.Option(help="classification: a label to leave out (void)")] = None,
    out: Annotated[Path | None, typer.Option(help="page (report.html) or folder of pages (site) to write")] = None,
    seed: Annotated[int, typer.Option(help="of the examples that --train is checked on")] = 0,
    overwrite: Overwrite = False,
    device: Device = "auto",
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
    if sum(source is not None for source in (results, posterior, predictions)) > 1:
        raise MCBNError("give one of a folder of results, --posterior and --predictions: they make different pages")
    of_network = {"--model": model, "--weights": weights, "--train": train, "--tune": tune}
    needless = {**of_network, "--data": None if predictions else data}
    if posterior is None and (alone := [name for name, value in needless.items() if value is not None]):
        raise MCBNError(f"{', '.join(alone)} without --posterior, the file that `mcbn fit` wrote")
    sources = {"--data": data, "--posterior": posterior, "--predictions": predictions, **of_network}
    title = title or f"How far can {model or predictions} be trusted on {printable(data or '')}?"
    wording: dict[str, Any] = {"title": title, "units": units, "classes": session.split_names(classes) or None}
    if posterior is not None:
        if model is None or data is None:
            raise MCBNError(f"a report of {posterior} needs --model and --data, the held-out inputs and targets")
        path = writable(out or Path("report.html"), sources, overwrite)
        named: dict[str, Any] = {"model": model, "weights": weights, "own_weights": own_weights, "device": device}
        fitted = FittedOptions(posterior=posterior, **named).load()
        wording |= {"ignore_index": ignore_index, "seed": seed}
        page = _of_network(path, fitted, data, train, tune, target, **wording)
    elif predictions is not None:
        if data is None:
            raise MCBNError(f"a report of {predictions} needs --data, the inputs and targets they were made for")
        from mcbn.page import write_prediction_page

        path = writable(out or Path("report.html"), sources, overwrite)
        predicted, names = outputs.read_predictions(predictions)
        examples: dict[str, Any] = {"target": target, "passed_on": session.split_names(key), "need_targets": True}
        test = open_examples(data, fitted=Layout(classes=names), **examples)
        x, y = session.read_whole(test)
        wording["classes"] = wording["classes"] or names
        page = write_prediction_page(path, predicted, y, x=x, names=test.layout.columns, **wording)
    else:
        require_own_folder(out or Path("site"), "index.html")
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
    wording["classes"] = wording["classes"] or test.layout.classes
    return write_page(path, fitted.bayes, x, y, train=fit_data, **wording)


def writable(path: Path, sources: Mapping[str, Any], overwrite: bool) -> Path:
    """Refuse a place for a page before any work is done for it."""
    if path.suffix not in (".html", ".htm"):
        raise MCBNError(f"the page {path} must end in .html, .htm")
    return require_output(path, sources, lambda old: b"Made by mcbn" in old.read_bytes(), overwrite=overwrite)
