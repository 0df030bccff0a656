"""`mcbn fit`, `mcbn predict`, `mcbn evaluate`: a model file and arrays in, uncertainty out."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mcbn.cli import fitted, many, sheet
from mcbn.cli.mistakes import Debug
from mcbn.files import replacing
from mcbn.model import MCBN
from mcbn.prediction import warn_if_untuned
from mcbn.progress import bar
from mcbn.tables import results, scoring, specs
from mcbn.tables.source import Source, open_source

Model = Annotated[str, typer.Option(help="package.module:factory; called without arguments, it returns the network")]
Weights = Annotated[Path | None, typer.Option(help="weights of the network: .safetensors, or .pt with a state_dict")]
Posterior = Annotated[Path, typer.Option(help="the file that `mcbn fit` wrote")]
Target = Annotated[
    str | None,
    typer.Option(help="target columns of a table by name or place (price; a,b; -1 the last), or array of an npz"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")]
Method = Annotated[
    str, typer.Option(help="sample: Monte Carlo over the draws; linear: gradient and 8 draws, approximate")
]
Samples = Annotated[int | None, typer.Option(help="T: use only the first draws; by default all")]
Data = "csv, parquet, npy or npz file, or package.module:loader_factory"


def fit(
    model: Model,
    data: Annotated[str, typer.Option(help=f"training data: {Data}")],
    task: Annotated[str, typer.Option(help="regression or classification")],
    out: Annotated[Path, typer.Option(help="file to write the posterior to")],
    weights: Weights = None,
    batch_size: Annotated[int | None, typer.Option(help="M, as in training; a loader brings its own")] = None,
    samples: Annotated[int, typer.Option(help="T, number of draws")] = 100,
    posterior: Annotated[str, typer.Option(help="sample, gaussian, layerwise or diagonal")] = "sample",
    tune: Annotated[str | None, typer.Option(help="held-out data to tune tau on, the noise or temperature")] = None,
    layers: Annotated[str | None, typer.Option(help="stochastic layers: k, the first k; or names a,b")] = None,
    target: Target = None,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Draw batch-norm statistics from training batches and keep them as a posterior file.

    \b
    Example, with a file nets.py here that defines make() and weights w.pt:
      mcbn fit --model nets:make --weights w.pt --data train.csv --target price \\
        --task regression --batch-size 32 --tune val.csv --out net.mcbn

    An npz file holds inputs x and targets y. The first line of a csv file may name the columns; the names are kept, and
    later tables are read by them. Data comes as in training, augmentation included: take a loader_factory for that.
    """
    with fitted.session():
        results.require_writable(out, ())
        network = specs.model(model, weights, specs.device(device))
        bayes: MCBN[Any] = MCBN(network, task, layers=fitted.read_layers(layers))
        train = open_source(data, target=target)
        opening: dict[str, Any] = {"target": target, "fitted": train.layout, "keys": fitted.keys(bayes)}
        held_out = tune and open_source(tune, need_targets=True, **opening)
        fitted.draw(bayes, train, n_samples=samples, batch_size=batch_size, seed=seed, posterior=posterior)
        constant = fitted.tune(bayes, held_out) if held_out else None
        fitted.save(bayes, out, train.layout, constant)
        typer.echo(f"{out}: {bayes.posterior!r}, {sheet.describe_tau(bayes)}")


def predict(
    posterior: Posterior,
    model: Model,
    data: Annotated[str, typer.Option(help=f"inputs: {Data}; or a folder of csv, parquet or image files")],
    out: Annotated[Path, typer.Option(help="csv, parquet or npz file to write; for many files a folder")],
    weights: Weights = None,
    coverage: Annotated[float, typer.Option(help="regression: share of targets low to high should hold")] = 0.95,
    method: Method = "sample",
    samples: Samples = None,
    target: Target = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray: on a cluster, into a folder of parquet files")] = "local",
    address: Annotated[str | None, typer.Option(help="ray: the cluster, host:port; by default this machine")] = None,
    workers: Annotated[int | None, typer.Option(help="ray: actors; by default one a GPU or CPU")] = None,
    key: Annotated[str | None, typer.Option(help="folder: columns a,b to pass on to the results")] = None,
    transform: Annotated[str | None, typer.Option(help="images: package.module:function, PIL image to tensor")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="folder: go on with an interrupted job")] = False,
    debug: Debug = False,
) -> None:
    """Predict with uncertainty, row by row of the input, in bounded memory.

    \b
    Example:
      mcbn predict --posterior net.mcbn --model nets:make --weights w.pt --data x.csv --out pred.csv

    Regression writes mean, std, low, high (mean_0, mean_1, ... for several outputs); classification writes prob_0,
    prob_1, ..., label, entropy, mutual_information. An npz file holds them as arrays, probabilities as probs; outputs
    of any shape go there. The file appears whole or not at all.

    \b
    Many files, here or on a cluster, into a folder of parquet files:
      mcbn predict ... --data rows/ --key id --engine ray --address head:6379 --out predictions/

    Files that cannot be read are listed in bad_files.jsonl there, and the command ends with code 1. The same command
    with --resume goes on after an interruption.
    """
    with fitted.session():
        many.require_engine(engine)
        is_many = engine == "ray" or resume or Path(data).is_dir()
        if not is_many:
            results.require_writable(out)
        bayes, layout, _ = fitted.load(posterior, specs.model(model, weights, specs.device(device)))
        if is_many:
            options = {"method": method, "n_samples": samples, "coverage": coverage, "target": target, "layout": layout}
            options |= {"resume": resume, **many.reading(key, transform)}
            many.predict(Path(data), bayes, out, engine=engine, address=address, workers=workers, **options)
            return
        inputs = open_source(data, target=target, fitted=layout, keys=fitted.keys(bayes))
        warn_if_untuned(bayes.noise_precision)
        rows = _write(out, inputs, coverage, lambda x: bayes.predict(x, method=method, n_samples=samples))
        typer.echo(f"{out}: {rows} predictions, T = {samples or bayes.posterior.n_samples}")


def _write(out: Path, inputs: Source, coverage: float, predict: Callable[[Any], Any]) -> int:
    """Predict block by block into a file that appears whole or not at all; return the number of rows."""
    rows = 0
    with (
        replacing(out) as temporary,
        results.KINDS[out.suffix](temporary) as file,
        bar("predicting", inputs.count(), "row") as tick,
    ):
        for x, _ in inputs.blocks():
            arrays = results.arrays_of(predict(x), coverage)
            file.add(arrays)
            done = len(next(iter(arrays.values())))
            rows += done
            tick(done)
    return rows


def evaluate(
    posterior: Posterior,
    model: Model,
    data: Annotated[str, typer.Option(help=f"held-out inputs and targets: {Data}")],
    weights: Weights = None,
    tune: Annotated[str | None, typer.Option(help="validation data: tune tau, and the constant twin's, on it")] = None,
    coverage: Annotated[float | None, typer.Option(help="regression: one more interval to check")] = None,
    method: Method = "sample",
    samples: Samples = None,
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="write JSON")] = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Score predictions on held-out data.

    \b
    Example:
      mcbn evaluate --posterior net.mcbn --model nets:make --weights w.pt --data test.csv

    Regression: RMSE, CRPS, PLL beside the constant twin (the same mean, one variance for all), normalised (0 the twin,
    100 the best variance for every point), and the coverage of intervals. Classification: accuracy, NLL, Brier score,
    ECE and the AUROC of errors by entropy, beside the plain network.
    """
    with fitted.session():
        bayes, layout, constant = fitted.load(posterior, specs.model(model, weights, specs.device(device)))
        opening: dict[str, Any] = {"target": target, "fitted": layout, "need_targets": True, "keys": fitted.keys(bayes)}
        test = open_source(data, **opening)
        if tune:
            constant = fitted.tune(bayes, open_source(tune, **opening))
        fitted.require_tau(bayes, posterior)
        with bar("evaluating", test.count(), "row") as tick:
            pairs, options = fitted.counted(test.blocks(), tick), {"method": method, "n_samples": samples}
            if bayes.task == "classification":
                scores = scoring.evaluate_classification(bayes, pairs, **options)
            else:
                levels = {*scoring.LEVELS, *([] if coverage is None else [coverage])}
                scores = scoring.evaluate_regression(bayes, pairs, constant=constant, levels=sorted(levels), **options)
        tuned_on = tune or (constant is not None and "the validation data of the fit") or None
        report = sheet.gather(bayes, scores, data=data, n_samples=samples, tuned_on=tuned_on)
        typer.echo(sheet.as_json(report) if as_json else sheet.as_text(report))
