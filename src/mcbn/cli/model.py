"""`mcbn fit`, `predict`, `evaluate` and `export`: a model file and data in, uncertainty out."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor, as_tensor

import mcbn
from mcbn import batches, saving, scale
from mcbn.cli import session
from mcbn.cli.session import FAILURE, Data, Fitted, FittedOptions, Key, NetworkOptions, Overwrite, Target
from mcbn.errors import MCBNError
from mcbn.field.watch import Watch
from mcbn.files import replacing, require_output, to_json
from mcbn.model import MCBN
from mcbn.prediction import warn_if_untuned
from mcbn.progress import bar, counting
from mcbn.tables import Examples, Layout, open_examples, require_fits, results, scoring

Method = Annotated[str, typer.Option(help="sample: Monte Carlo over the draws; linear: approximate, fewer of them")]
Samples = Annotated[int | None, typer.Option(help="T: use only the first draws; by default all")]
Mean = Annotated[str, typer.Option(help="drawn: the mean over the draws; plain: the network's own, with their spread")]


@session.command
def fit(
    network: NetworkOptions,
    data: Annotated[str, typer.Option(help=f"training data: {Data}")],
    task: Annotated[str, typer.Option(help="regression, classification, or multilabel: a target column a label")],
    out: Annotated[Path, typer.Option(help="file to write the posterior to")],
    batch_size: Annotated[int | None, typer.Option(help="M, as in training; a loader brings its own")] = None,
    samples: Annotated[int, typer.Option(help="T, number of draws")] = 100,
    posterior: Annotated[str, typer.Option(help="sample, gaussian, layerwise or diagonal")] = "sample",
    tune: Annotated[str | None, typer.Option(help="held-out data: tune the noise or temperature on it")] = None,
    calibrate: Annotated[str | None, typer.Option(help="further held-out data: intervals, sets keep promises")] = None,
    layers: Annotated[str | None, typer.Option(help="stochastic layers: k, the first k; or names a,b")] = None,
    target: Target = None,
    key: Key = None,
    classes: Annotated[str | None, typer.Option(help="text labels a,b,c in the order of the outputs (sorted)")] = None,
    outputs: Annotated[str, typer.Option(help="of classes: logits, probs or log_probs; auto finds out")] = "auto",
    noise: Annotated[str, typer.Option(help="constant; head: the network gives it; full: correlated")] = "constant",
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Draw batch-norm statistics from training batches and keep them as a posterior file.

    \b
    Example, with a file nets.py here that defines make() and weights w.pt:
      mcbn fit --model nets:make --weights w.pt --data train.csv --target price \\
        --task regression --batch-size 32 --tune val.csv --out net.mcbn

    An npz file holds inputs x and targets y. Names of columns are kept, and later tables are read by them; so are the
    names of classes where the target is text. Data comes as in training: augmentation needs a loader_factory.
    """
    sources = {"--data": data, "--tune": tune, "--calibrate": calibrate, "--weights": network.weights}
    require_output(out, sources, saving.is_posterior, overwrite=overwrite)
    first = int(layers) if layers and layers.isdecimal() else session.split_names(layers) or None
    bayes: MCBN[Any] = MCBN(network.make(), task, layers=first, outputs=outputs, noise=noise)
    named = Layout(classes=tuple(session.split_names(classes)) or None)
    keys, classify = session.split_names(key), bayes.task == "classification"
    if classes and not classify:
        raise MCBNError(f"--classes names those of --task classification, one label a row; the task is {bayes.task}")
    train = open_examples(data, target=target, fitted=named, passed_on=keys, classify=classify)
    opened = Fitted(bayes, train.layout, None)
    held_out, last = (opened.open(name, target) if name else None for name in (tune, calibrate))
    _draw(bayes, train, n_samples=samples, batch_size=batch_size, seed=seed, posterior=posterior)
    constant = session.tune(bayes, held_out) if held_out else None
    if last:
        bayes.calibrate(session.loader(last))
    opened._replace(constant=constant).save(bayes, out)
    tau, hint = bayes.noise_precision, "the noise is not known yet: give held-out data by --tune"
    name, value = ("noise std", bayes.noise_std) if bayes.task == "regression" else ("temperature", 1 / bayes.tau)
    told = hint if tau.isinf().any() else f"{name} {scoring.number(as_tensor(value).tolist())}"
    typer.echo(f"{out}: {bayes.posterior!r}, {told}")


def _draw(bayes: MCBN[Any], train: Examples, *, n_samples: int, batch_size: int | None, **options: Any) -> None:
    """Fit the posterior."""
    if train.loader is None and batch_size is None:
        raise MCBNError("give --batch-size, the M of training: the spread of the draws depends on it")
    if batch_size is not None:
        batches.require_int("batch_size", batch_size, 1)
    if train.layout.width is not None:
        columns = f"the {train.layout.width} input columns of {train.name}"
        require_fits(bayes, next(train.blocks()).x, columns, "--target and --key leave others out")
    with bar("drawing", n_samples, "batch") as tick, counting(bayes, tick):
        bayes.fit(train.training_data(), n_samples=n_samples, batch_size=batch_size, **options)
    if names := train.layout.classes:
        K = bayes.predict(next(train.blocks()).x[:2], n_samples=1).probs.shape[1]
        if len(names) != K:
            cure = "name them all, in the order of its outputs, by --classes"
            raise MCBNError(f"the network tells {K} classes apart, but there are {len(names)} names of classes; {cure}")


@session.command
def predict(
    source: FittedOptions,
    files: session.FolderOptions,
    data: Annotated[str, typer.Option(help=f"inputs: {Data}; or a folder of csv, parquet or image files")],
    out: Annotated[Path, typer.Option(help="csv, parquet or npz file to write; for many files a folder")],
    coverage: Annotated[float, typer.Option(help="share of targets that low to high, or the set, should hold")] = 0.95,
    risk: Annotated[float | None, typer.Option(help="mark what to ask a human, so that errors stay below")] = None,
    tolerance: Annotated[float | None, typer.Option(help="regression, with --risk: how far off is an error")] = None,
    method: Method = "sample",
    samples: Samples = None,
    mean: Mean = "drawn",
    watch: session.WatchFile = None,
    resume: Annotated[bool, typer.Option("--resume", help="folder: go on with an interrupted job")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Predict with uncertainty, row by row of the input, in bounded memory.

    \b
    Example:
      mcbn predict --posterior net.mcbn --model nets:make --weights w.pt --data x.csv --out pred.csv

    Regression writes mean, std, low, high (mean_0, mean_1, ... for several outputs); classification prob_0, prob_1, ...
    (or prob_cat, by names of the fit), label, entropy, mutual_information. After a fit with calibration data low and
    high keep their promise, classification writes set_0, set_1, ..., and --risk adds ask_human: errors among the other
    rows stay below the risk, with probability 0.9. --watch adds novelty_p_value, novelty_distance, novelty_combined.
    An npz file holds outputs of any shape. --key passes columns on. The file appears whole or not at all.

    \b
    Many files, here or on a cluster, into a folder of parquet files:
      mcbn predict ... --data rows/ --key id --engine ray --address head:6379 --out predictions/

    Files that cannot be read are listed in bad_files.jsonl there, and the command ends with code 1. The same command
    with --resume goes on after an interruption.
    """
    is_many = files.is_many(data) or resume
    if not is_many:
        results.require_writable(out, {**source.sources(data), "--watch": watch}, files.keys, overwrite=overwrite)
    if tolerance is not None and risk is None:
        raise MCBNError("--tolerance says what --risk counts as an error; give both, or neither")
    fitted = source.load()
    bayes = fitted.bayes
    how: dict[str, Any] = {"method": method, "n_samples": samples, "mean": mean}
    if is_many:
        if risk is not None:
            raise MCBNError("--risk marks the rows of one file; predict files of a folder one by one, or leave it out")
        options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "coverage": coverage, "watch": watch}
        return _predict_many(data, fitted, files, out, **options, **how)
    inputs = fitted.open(data, files.target, need_targets=False, passed_on=files.keys)
    warn_if_untuned(bayes.noise_precision)
    rejection = {} if risk is None else {"risk": risk, "tolerance": tolerance}
    how["watch"] = Watch.load(watch, bayes) if watch else None
    rows = _write(out, inputs, coverage, lambda x: bayes.predict(x, **how), **rejection)
    typer.echo(f"{out}: {rows} predictions, T = {samples or bayes.posterior.n_samples}")


def _write(out: Path, inputs: Examples, coverage: float, predict: Callable[[Any], Any], **rejection: Any) -> int:
    """Predict block by block into a file that appears whole or not at all; return the number of rows."""
    rows, classes = 0, inputs.layout.classes

    def blocks() -> Iterator[dict[str, Any]]:
        nonlocal rows
        for x, _, keys in inputs.blocks("predicting"):
            pred = predict(x)
            arrays = results.arrays_of(pred, coverage, classes, rows)
            if rejection:
                arrays["ask_human"] = pred.reject(**rejection).cpu().numpy()
            yield {**keys, **arrays}
            rows += len(next(iter(arrays.values())))

    with replacing(out) as temporary:
        results.WRITERS[out.suffix](temporary, blocks(), classes)
    return rows


def _predict_many(data: str, fitted: Fitted, files: session.FolderOptions, out: Path, **options: Any) -> None:
    """Predict all files, say how many rows there are now, and end with code 1 where a file was left out."""
    if out.suffix in results.WRITERS:
        raise MCBNError(f"--out {out} must be a folder: many files go there; leave out {out.suffix}")
    summary = files.predict(data, fitted, out=out, **options)
    typer.echo(f"{out}: {summary.rows} predictions in {summary.parts} files ({summary.resumed} were there)")
    if summary.bad_files:
        typer.echo(f"mcbn: {len(summary.bad_files)} inputs left out, listed in {out / scale.BAD_FILES}", err=True)
        raise typer.Exit(FAILURE)


@session.command
def evaluate(
    source: FittedOptions,
    data: Annotated[str, typer.Option(help=f"held-out inputs and targets: {Data}")],
    tune: Annotated[str | None, typer.Option(help="validation data: tune the noise or temperature on it")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="with --tune: which alternative to take")] = False,
    coverage: Annotated[float | None, typer.Option(help="level of one more interval or set to count")] = None,
    method: Method = "sample",
    samples: Samples = None,
    mean: Mean = "drawn",
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="write JSON")] = False,
) -> None:
    """Score predictions on held-out data.

    \b
    Example:
      mcbn evaluate --posterior net.mcbn --model nets:make --weights w.pt --data test.csv

    Regression: RMSE, CRPS, PLL beside the constant twin (same mean, one variance), normalised (0 the twin, 100 the best
    variance of every point). Classification: accuracy, NLL, Brier score, ECE, AUROC of errors, beside plain. Both: the
    share inside the intervals or sets, after a fit with calibration data the calibrated ones; the table names them.
    """
    fitted = source.load()
    bayes, test = fitted.bayes, fitted.open(data, target)
    if compare:
        if tune is None:
            raise MCBNError("--compare needs validation data by --tune, for what each alternative has to tune")
        validation = session.loader(fitted.open(tune, target))
        return typer.echo(mcbn.compare(bayes, validation, session.loader(test), level=coverage or 0.95))
    constant = session.tune(bayes, fitted.open(tune, target)) if tune else fitted.constant
    if bayes.noise_precision.isinf().any():  # the log likelihood of a regression without noise does not exist
        raise MCBNError(f"{source.posterior} knows no noise; give validation data by --tune, here or to mcbn fit")
    pairs = (block[:2] for block in test.blocks("evaluating"))
    levels = sorted({*scoring.LEVELS, *([] if coverage is None else [coverage])})
    options: dict[str, Any] = {"method": method, "n_samples": samples, "mean": mean, "levels": levels}
    if bayes.task != "regression":
        scores = scoring.evaluate_classification(bayes, pairs, **options)
    else:
        scores = scoring.evaluate_regression(bayes, pairs, constant=constant, **options)
    tuned_on = tune or (constant is not None and "the validation data of the fit") or None
    report = scoring.gather(bayes, scores, data=data, n_samples=samples, tuned_on=tuned_on)
    typer.echo(to_json(report) if as_json else scoring.as_text(report))


@session.command
def export(
    source: FittedOptions,
    data: Annotated[str, typer.Option(help=f"inputs as they will come, one is enough: {Data}")],
    out: Annotated[Path, typer.Option(help="onnx file to write")],
    inputs: Annotated[int, typer.Option(help="how many inputs will come at once; any number can")] = 1,
    method: Method = "sample",
    samples: Samples = None,
    watch: session.WatchFile = None,
    coverage: Annotated[float | None, typer.Option(help="level of calibrated low and high, or sets")] = None,
    each: Annotated[bool, typer.Option("--each", help="watch: judge every input by itself, any number")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write network, draws and noise as one ONNX file that runs without mcbn and torch.

    \b
    Example:
      mcbn export --posterior net.mcbn --model nets:make --weights w.pt --data x.csv --out net.onnx

    It takes inputs x and gives mean, variance and epistemic, or probs, entropy and mutual_information, compared with
    `mcbn predict` before; after a fit with calibration data --coverage adds low and high, or set. With --watch it is
    the watch: M inputs give distance and p_value; with --each, each does.
    """
    if out.suffix != ".onnx":
        raise MCBNError(f"--out {out} must end in .onnx")
    sources = {**source.sources(data), "--watch": watch}
    require_output(out, sources, lambda path: b"mcbn_version" in path.read_bytes(), overwrite=overwrite)
    batches.require_int("inputs", inputs, 1)
    fitted = source.load()
    x = next(fitted.open(data, None, need_targets=False).blocks()).x
    if watch is not None:
        home = Watch.load(watch, fitted.bayes)
        home.export(out, x[: home.batch_size], each=each)
        return typer.echo(f"{out}: {home!r}")
    how: dict[str, Any] = {"method": method, "n_samples": samples, "level": coverage}
    fitted.bayes.export(out, x[:inputs] if isinstance(x, Tensor) else x, **how)
    typer.echo(f"{out}: {fitted.bayes.task}, T = {samples or fitted.bayes.posterior.n_samples}")
