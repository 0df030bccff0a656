"""`mcbn reproduce`: the experiments of the paper, and those beyond it."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mcbn.cli.session import one_line_errors, one_line_warnings, require_engine
from mcbn.errors import MCBNError

reproduce = typer.Typer(no_args_is_help=True, help="Repeat the experiments of the paper, Teye et al. 2018")
Names = Annotated[list[str] | None, typer.Option(help="names, separated by commas; all by default")]
ProfileName = Annotated[str, typer.Option(help="paper: the whole protocol; quick: minutes on two cores")]


def _choose_device(name: str) -> str:
    """Turn auto into what there is."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


Device = Annotated[
    str, typer.Option(callback=_choose_device, help="auto, cpu or cuda; auto takes a GPU if there is one")
]
Compile = Annotated[bool, typer.Option("--compile", help="fuse kernels by torch.compile: pays on large sets")]
EngineName = Annotated[str, typer.Option(help="local, or ray: cells of work as tasks on a cluster")]
Address = Annotated[str | None, typer.Option(help="ray: the cluster, host:port; by default this machine")]
Fused = Annotated[bool, typer.Option("--fused", help="take many training steps in one CUDA kernel")]
Records = Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")]
Results = Annotated[Path, typer.Option(help="folder of records, tables and figures")]
Regression = Annotated[Path, typer.Option(help="folder of the regression study")]


@reproduce.command()
def regression(
    datasets: Names = None,
    methods: Names = None,
    profile: ProfileName = "paper",
    device: Device = "auto",
    compiled: Compile = False,
    fused: Fused = False,
    search_seed: Annotated[int, typer.Option(help="of the fold networks: how much does the search decide?")] = 1,
    out: Records = Path("results/regression"),
    engine: EngineName = "local",
    address: Address = None,
) -> None:
    """Cross-validate, tune tau and test on the paper's regression sets.

    \b
    Example:
      mcbn reproduce regression --profile quick --datasets boston,yacht --methods mcbn,bn
    """
    from mcbn_study.regression import run as regression
    from mcbn_study.regression.profile import METHODS, find_profile

    with one_line_errors(), _one_thread(device):
        require_engine(engine)
        chosen = replace(find_profile(profile), search_seed=search_seed)
        options: dict[str, Any] = {"datasets": _split(datasets), "device": device, "compiled": compiled, "fused": fused}
        options["methods"] = _split(methods) or METHODS
        if engine == "ray":
            from mcbn_study import ray

            journal = ray.run_regression(chosen, out, address=address, **options)
        else:
            journal = regression.run(chosen, out, **options)
        typer.echo(f"{len(journal.find(kind='test'))} test runs in {journal.path}")


@reproduce.command()
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
) -> None:
    """Vary batch size and number of passes of MCBN; needs the MCBN runs of `regression`.

    \b
    Example:
      mcbn reproduce sensitivity --profile quick --datasets boston
    """
    from mcbn_study.regression.profile import find_profile
    from mcbn_study.sensitivity import run as sensitivity

    with one_line_errors(), _one_thread(device):
        require_engine(engine)
        options: dict[str, Any] = {"datasets": _split(datasets), "device": device, "compiled": compiled, "fused": fused}
        options["regression"] = regression
        if engine == "ray":
            from mcbn_study import ray

            journal = ray.run_sensitivity(find_profile(profile), out, address=address, **options)
        else:
            journal = sensitivity.run(find_profile(profile), out, **options)
        typer.echo(f"{len(journal.find(kind='sensitivity'))} runs in {journal.path}")


@reproduce.command()
def statistics(out: Results = Path("results/statistics")) -> None:
    """Draw the distributions of batch statistics on Yacht and test them for Gaussians (appendix).

    \b
    Example:
      mcbn reproduce statistics
    """
    from mcbn_study import statistics

    with one_line_errors(), _one_thread("cpu"):
        statistics.run(out)


@reproduce.command()
def objective(out: Results = Path("results/objective")) -> None:
    """Measure how the gradients of Eq. (1) and Eq. (2) approach each other as N grows.

    \b
    Example:
      mcbn reproduce objective
    """
    from mcbn_study import objective

    with one_line_errors(), _one_thread("cpu"):
        objective.run(out)


@reproduce.command()
def regularizer(datasets: Names = None, out: Results = Path("results/regularizer")) -> None:
    """Train with the KL regulariser beside weight decay on four regression sets.

    \b
    Example:
      mcbn reproduce regularizer --datasets yacht
    """
    from mcbn_study import regularizer

    with one_line_errors(), _one_thread("cpu"):
        regularizer.run(out, datasets=_split(datasets) or regularizer.DATASETS)


@reproduce.command()
def toy(out: Results = Path("results/regression")) -> None:
    """Fit the toy problem of Figure 1; `tables` draws it.

    \b
    Example:
      mcbn reproduce toy
    """
    from mcbn_study import toy

    with one_line_errors(), _one_thread("cpu"):
        typer.echo(toy.run(out))


@reproduce.command()
def estimators(out: Results = Path("results/estimators")) -> None:
    """Score the scikit-learn estimator with its default parameters on the embedded sets.

    \b
    Example:
      mcbn reproduce estimators --out results/estimators
    """
    from mcbn_study import estimators

    with one_line_errors(), _one_thread("cpu"):
        estimators.run(out)
        typer.echo(estimators.report(out))


@reproduce.command()
def posteriors(
    datasets: Names = None,
    profile: ProfileName = "paper",
    out: Results = Path("results/posteriors"),
    regression: Regression = Path("results/regression"),
    cifar: Annotated[bool, typer.Option("--cifar", help="CIFAR-10 instead, on a network that others trained")] = False,
    weights: Annotated[Path, typer.Option(help="ResNet-32 weights for --cifar")] = Path("resnet32.npz"),
    n_test: Annotated[int, typer.Option(help="test images for --cifar")] = 1000,
) -> None:
    """Compare Gaussian, linear and rescaled posteriors with sampled ones on the networks of `regression`.

    \b
    Example:
      mcbn reproduce posteriors --datasets yacht
    """
    from mcbn_study.foreign import run as foreign
    from mcbn_study.posteriors import report
    from mcbn_study.posteriors import run as posteriors
    from mcbn_study.regression.profile import find_profile

    with one_line_errors():
        if cifar:
            foreign.cifar(weights, out, n_test=n_test)
        else:
            with _one_thread("cpu"):
                posteriors.run(find_profile(profile), out, regression=regression, datasets=_split(datasets))
        _echo(report.write(out))


@reproduce.command()
def tables(results: Annotated[Path, typer.Option(help="folder that holds regression/")] = Path("results")) -> None:
    """Write every table and figure of the regression study from its records.

    \b
    Example:
      mcbn reproduce tables --results results
    """
    from mcbn_study.regression import report as regression

    with one_line_errors():
        _echo(regression.write(results))


@reproduce.command()
def mnf_epochs(datasets: Names = None, device: Device = "auto", out: Results = Path("results/mnf_epochs")) -> None:
    """Measure MNF's test error by epochs of training, where ours is better than printed.

    \b
    Example:
      mcbn reproduce mnf-epochs --datasets power --device cuda
    """
    from mcbn_study import mnf_epochs

    with one_line_errors():
        _echo(mnf_epochs.run(out, datasets=_split(datasets), device=device))


@reproduce.command()
def cifar10(
    seeds: Annotated[str, typer.Option(help="one network each, separated by commas")] = "1,2,3",
    profile: ProfileName = "paper",
    device: Device = "auto",
    out: Records = Path("results/cifar10"),
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
            _echo(report.write(out))


@reproduce.command()
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
            options: dict[str, Any] = {"device": device, "methods": _split(methods), "n_samples": n_samples}
            images: dict[str, Any] = {"foreign": foreign, "n_test": n_test, "n_corrupted": n_corrupted}
            alternatives.run(networks, out, seeds=seeds or (), **options, **images)
            alternatives.time_methods(networks, out, **options)
        _echo(report.write(out))


@reproduce.command()
def segmentation(
    dataset: Annotated[str, typer.Option(help="camvid or voc")] = "camvid",
    device: Device = "auto",
    profile: ProfileName = "paper",
    out: Records = Path("results/segmentation"),
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
        _echo(report.write(out))


def _echo(lines: Iterable[object]) -> None:
    for line in lines:
        typer.echo(line)


def _split(names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(name.strip() for text in names or () for name in text.split(",") if name.strip())


def _one_thread(device: str) -> AbstractContextManager[None]:
    from mcbn_study.machine import one_thread  # torch takes a second

    return one_thread(device)


def _numbers(text: str) -> list[int]:
    try:
        return [int(seed) for seed in _split([text])]
    except ValueError:
        raise MCBNError(f"seeds are whole numbers separated by commas, such as 1,2,3; got {text!r}") from None
