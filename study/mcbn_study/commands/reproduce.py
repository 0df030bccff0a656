"""`mcbn reproduce`: the experiments of the paper, and those beyond it."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mcbn.cli.session import one_line_errors, one_line_warnings, require_engine
from mcbn.errors import MCBNError

reproduce = typer.Typer(no_args_is_help=True, help="Repeat the experiments of the paper, Teye et al. 2018")
Lines = Iterable[object]
Experiment = Callable[..., Lines | None]


def command(example: str, *, small: bool = False) -> Callable[[Experiment], object]:
    """Make a command of a function that gives lines to print: mistakes end it in one line.

    Its help is the docstring and the example. small: its tensors are small, so on a CPU it runs on one thread.
    """

    def register(function: Experiment) -> object:
        @wraps(function)
        def run(**options: Any) -> None:
            from mcbn_study.machine import one_thread  # torch takes a second

            with one_line_errors(), one_thread(options.get("device", "cpu")) if small else nullcontext():
                for line in function(**options) or ():
                    typer.echo(line)

        return reproduce.command(help=f"{function.__doc__}\n\n\b\nExample:\n  mcbn reproduce {example}")(run)

    return register


def _choose_device(name: str) -> str:
    """Turn auto into what there is."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _split(names: list[str] | None) -> list[str]:
    return [name.strip() for text in names or () for name in text.split(",") if name.strip()]


Names = Annotated[list[str] | None, typer.Option(callback=_split, help="names, separated by commas; all by default")]
ProfileName = Annotated[str, typer.Option(help="paper: the whole protocol; quick: minutes on two cores")]
_AUTO = typer.Option(callback=_choose_device, help="auto, cpu or cuda; auto takes a GPU if there is one")
Device = Annotated[str, _AUTO]
Compile = Annotated[bool, typer.Option("--compile", help="fuse kernels by torch.compile: pays on large sets")]
EngineName = Annotated[str, typer.Option(help="local, or ray: cells of work as tasks on a cluster")]
Address = Annotated[str | None, typer.Option(help="ray: the cluster, host:port; by default this machine")]
Fused = Annotated[bool, typer.Option("--fused", help="take many training steps in one CUDA kernel")]
Records = Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")]
Results = Annotated[Path, typer.Option(help="folder of records, tables and figures")]
Regression = Annotated[Path, typer.Option(help="folder of the regression study")]


@command("regression --profile quick --datasets boston,yacht --methods mcbn,bn", small=True)
def regression(
    datasets: Names = None,
    methods: Names = None,
    profile: ProfileName = "paper",
    device: Device = "auto",
    compiled: Compile = False,
    fused: Fused = False,
    search_seed: Annotated[int, typer.Option(help="of the fold networks: how much does the search decide?")] = 1,
    fresh_draws: Annotated[bool, typer.Option("--fresh-draws", help="draw anew at every validation")] = False,
    full_batches: Annotated[bool, typer.Option("--full-batches", help="keep batch sizes above the rows")] = False,
    one_stream: Annotated[bool, typer.Option("--one-stream", help="one seed for the folds of all splits")] = False,
    published_mnf: Annotated[bool, typer.Option("--published-mnf", help="stop MNF as the published script")] = False,
    out: Records = Path("results/regression"),
    engine: EngineName = "local",
    address: Address = None,
) -> Lines:
    """Cross-validate, tune tau and test on the paper's regression sets."""
    from mcbn_study.profiles import find_profile
    from mcbn_study.regression import run as regression
    from mcbn_study.regression.profile import METHODS, PROFILES

    require_engine(engine)
    how: dict[str, Any] = {"compiled": compiled, "fused": fused, "engine": engine, "address": address, "device": device}
    switches: dict[str, Any] = {"fresh_draws": fresh_draws, "full_batches": full_batches, "one_stream": one_stream}
    chosen = replace(find_profile(PROFILES, profile), search_seed=search_seed, published_mnf=published_mnf, **switches)
    journal = regression.run(chosen, out, datasets=datasets or (), methods=methods or METHODS, **how)
    return [f"{len(journal.find(kind='test'))} test runs in {journal.path}"]


@command("sensitivity --profile quick --datasets boston", small=True)
def sensitivity(
    datasets: Names = None,
    profile: ProfileName = "paper",
    device: Device = "auto",
    compiled: Compile = False,
    fused: Fused = False,
    out: Records = Path("results/sensitivity"),
    regression: Regression = Path("results/regression"),
    engine: EngineName = "local",
    address: Address = None,
) -> Lines:
    """Vary batch size and number of passes of MCBN; needs the MCBN runs of `regression`."""
    from mcbn_study import sensitivity
    from mcbn_study.profiles import find_profile
    from mcbn_study.regression.profile import PROFILES

    require_engine(engine)
    how: dict[str, Any] = {"compiled": compiled, "fused": fused, "engine": engine, "address": address, "device": device}
    chosen = find_profile(PROFILES, profile)
    journal = sensitivity.run(chosen, out, datasets=datasets or (), regression=regression, **how)
    return [f"{len(journal.find(kind='sensitivity'))} runs in {journal.path}"]


def _command_of(name: str, folder: str, words: str) -> None:
    """Make a command of a module whose `run(out)` does all there is to do."""

    def run(out: Results = Path("results") / folder) -> Lines | None:
        lines: Lines | None = import_module(f"mcbn_study.{name}").run(out)
        return lines

    run.__name__, run.__doc__ = name, words
    command(name, small=True)(run)


_command_of("statistics", "statistics", "Draw the distributions of batch statistics on Yacht, test them for Gaussians.")
_command_of("objective", "objective", "Measure how the gradients of Eq. (1) and Eq. (2) approach as N grows.")
_command_of("toy", "regression", "Fit the toy problem of Figure 1; `tables` draws it.")
_command_of("estimators", "estimators", "Score the scikit-learn estimators beside the paper's MCBN and others.")


@command("regularizer --datasets yacht", small=True)
def regularizer(datasets: Names = None, out: Results = Path("results/regularizer")) -> None:
    """Train with the KL regulariser beside weight decay on four regression sets."""
    from mcbn_study import regularizer

    regularizer.run(out, datasets=datasets or regularizer.DATASETS)


@command("coverage --datasets boston,yacht", small=True)
def coverage(
    datasets: Names = None,
    out: Results = Path("results/coverage"),
    cifar: Annotated[bool, typer.Option("--cifar", help="CIFAR-10 instead, on the networks of `cifar10`")] = False,
    networks: Annotated[Path, typer.Option(help="of --cifar")] = Path("results/cifar10/networks"),
    device: Device = "auto",
) -> Lines:
    """Count whether calibrated intervals, sets and refusals keep what they promise."""
    from mcbn_study.coverage import run as coverage

    if cifar:
        coverage.run_cifar(networks, out, device=device)
    else:
        coverage.run(out, datasets=datasets or ())
    return [coverage.report(out)]


@command("posteriors --datasets yacht")
def posteriors(
    datasets: Names = None,
    profile: ProfileName = "paper",
    out: Results = Path("results/posteriors"),
    regression: Regression = Path("results/regression"),
    cifar: Annotated[bool, typer.Option("--cifar", help="CIFAR-10 instead, on a network that others trained")] = False,
    weights: Annotated[Path, typer.Option(help="ResNet-32 weights for --cifar")] = Path("resnet32.npz"),
    n_test: Annotated[int, typer.Option(help="test images for --cifar")] = 1000,
) -> Lines:
    """Compare Gaussian, linear and rescaled posteriors with sampled ones on the networks of `regression`."""
    from mcbn_study.foreign import run as foreign
    from mcbn_study.machine import one_thread
    from mcbn_study.posteriors import report
    from mcbn_study.posteriors import run as posteriors
    from mcbn_study.profiles import find_profile
    from mcbn_study.regression.profile import PROFILES

    if cifar:
        foreign.cifar(weights, out, n_test=n_test)
    else:
        with one_thread("cpu"):
            posteriors.run(find_profile(PROFILES, profile), out, regression=regression, datasets=datasets or ())
    return report.write(out)


@command("tables --results results")
def tables(results: Annotated[Path, typer.Option(help="folder that holds regression/")] = Path("results")) -> Lines:
    """Write every table and figure of the regression study from its records."""
    from mcbn_study.regression import report as regression

    return regression.write(results)


@command("mnf-epochs --datasets power --device cuda")
def mnf_epochs(datasets: Names = None, device: Device = "auto", out: Results = Path("results/mnf_epochs")) -> Lines:
    """Measure MNF's test error by epochs of training, where ours is better than printed."""
    from mcbn_study import mnf_epochs

    return mnf_epochs.run(out, datasets=datasets or (), device=device)


@command("cifar10 --seeds 1,2,3 --device cuda", small=True)
def cifar10(
    seeds: Annotated[str, typer.Option(help="one network each, separated by commas")] = "1,2,3",
    profile: ProfileName = "paper",
    device: Device = "auto",
    out: Records = Path("results/cifar10"),
    networks: Annotated[
        Path | None, typer.Option(help="folder of trained networks; those it holds are not trained again")
    ] = None,
    dropout: Annotated[float, typer.Option(help="train with this rate for MC dropout instead, and stop there")] = 0.0,
) -> Lines:
    """Train ResNet-32 on CIFAR-10 and measure MCBN on it over T and M (Table 2); needs `mcbn data cifar10`."""
    from mcbn_study.cifar10 import report
    from mcbn_study.cifar10.profile import PROFILES
    from mcbn_study.cifar10.run import run
    from mcbn_study.profiles import find_profile

    run(find_profile(PROFILES, profile), out, seeds=_numbers(seeds), device=device, networks=networks, dropout=dropout)
    return () if dropout else report.write(out)


@command("alternatives --foreign foreign.npz --device cuda")
def alternatives(
    networks: Annotated[Path, typer.Option(help="networks of `mcbn reproduce cifar10`")] = Path(
        "results/cifar10/networks"
    ),
    out: Results = Path("results/alternatives"),
    foreign: Annotated[Path | None, typer.Option(help="npz of foreign images; made there where it is missing")] = None,
    methods: Names = None,
    seeds: Annotated[list[int] | None, typer.Option(help="of the networks; all by default")] = None,
    device: Device = "auto",
    n_samples: Annotated[int, typer.Option(help="T of MCBN and MC dropout")] = 128,
    n_test: Annotated[int | None, typer.Option(help="test images; all by default")] = None,
    n_corrupted: Annotated[int, typer.Option(help="of these, how many are also corrupted at each severity")] = 1250,
    measure: Annotated[bool, typer.Option(help="no: only tables and figures, from the records")] = True,
) -> Lines:
    """Compare MCBN with softmax, temperature scaling, MC dropout, an ensemble and last-layer Laplace on CIFAR-10."""
    from mcbn_study.alternatives import report
    from mcbn_study.alternatives import run as alternatives
    from mcbn_study.alternatives.inputs import build_foreign

    if measure:
        if foreign is not None and not foreign.is_file():
            build_foreign(foreign)
        images: dict[str, Any] = {"foreign": foreign, "n_test": n_test, "n_corrupted": n_corrupted}
        options: dict[str, Any] = {"device": device, "methods": methods or (), "seeds": seeds or ()}
        alternatives.run(networks, out, n_samples=n_samples, **options, **images)
    return report.write(out)


@command("segmentation --dataset camvid --device cuda")
def segmentation(
    dataset: Annotated[str, typer.Option(help="camvid or voc")] = "camvid",
    device: Device = "auto",
    profile: ProfileName = "paper",
    out: Records = Path("results/segmentation"),
) -> Lines:
    """Train SegNet, segment with the paper's setting and with ours, score and draw the uncertainty maps."""
    from mcbn_study.profiles import find_profile
    from mcbn_study.segmentation import report
    from mcbn_study.segmentation.profile import PROFILES
    from mcbn_study.segmentation.run import run

    with one_line_warnings():
        run(find_profile(PROFILES, f"{profile} {dataset}"), out, device=device, echo=typer.echo)
        return report.write(out)


@command("shift --foreign foreign.npz --frost imagecorruptions/frost --device cuda")
def shift(
    networks: Annotated[Path, typer.Option(help="networks of `mcbn reproduce cifar10`")] = Path(
        "results/cifar10/networks"
    ),
    out: Records = Path("results/shift"),
    foreign: Annotated[Path | None, typer.Option(help="npz of foreign images, (n, 3, 32, 32) bytes each")] = None,
    frost: Annotated[Path | None, typer.Option(help="folder of frost pictures: imagecorruptions has it")] = None,
    weights: Annotated[Path | None, typer.Option(help="folder of ResNets that others trained, resnet*.npz")] = None,
    kinds: Names = None,
    profile: ProfileName = "paper",
    device: Device = "auto",
    measure: Annotated[bool, typer.Option(help="no: only tables, from the records")] = True,
) -> Lines:
    """See shifts, know strange inputs and repair networks, on CIFAR-10-C and on tables, beside other methods."""
    from mcbn_study.profiles import find_profile
    from mcbn_study.shift import report
    from mcbn_study.shift.profile import PROFILES, load_inputs
    from mcbn_study.shift.run import run

    if measure:
        chosen = find_profile(PROFILES, profile)
        inputs = load_inputs(chosen, foreign, frost)
        run(chosen, inputs, out, networks=networks, weights=weights, device=device, kinds=kinds or ())
    return report.write(out, Path("docs/field.md"))


def _numbers(text: str) -> list[int]:
    try:
        return [int(seed) for seed in _split([text])]
    except ValueError:
        raise MCBNError(f"seeds are whole numbers separated by commas, such as 1,2,3; got {text!r}") from None
