"""`mcbn reproduce`: the experiments of the paper."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mcbn.cli.session import one_line_errors as _one_line_errors
from mcbn.cli.session import require_engine

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
Fused = Annotated[bool, typer.Option("--fused", help="take many training steps in one CUDA kernel; needs CuPy")]


@reproduce.command()
def regression(
    datasets: Names = None,
    methods: Names = None,
    profile: ProfileName = "paper",
    device: Device = "auto",
    compiled: Compile = False,
    fused: Fused = False,
    search_seed: Annotated[int, typer.Option(help="of the fold networks: how much does the search decide?")] = 1,
    out: Annotated[Path, typer.Option(help="folder of records; the same command goes on after an interruption")] = Path(
        "results/regression"
    ),
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

    with _one_line_errors(), _one_thread(device):
        require_engine(engine)
        chosen = replace(find_profile(profile), search_seed=search_seed)
        options = {"methods": _split(methods) or METHODS, **_options(datasets, device, compiled, fused)}
        if engine == "ray":
            from mcbn_study import ray as study

            store = study.run_regression(chosen, out, address=address, **options)
        else:
            store = regression.run(chosen, out, **options)
        typer.echo(f"{len(store.find(kind='test'))} test runs in {store.path}")


@reproduce.command()
def sensitivity(
    datasets: Names = None,
    profile: ProfileName = "paper",
    device: Device = "auto",
    compiled: Compile = False,
    fused: Fused = False,
    out: Annotated[Path, typer.Option(help="folder of records")] = Path("results/sensitivity"),
    regression: Annotated[Path, typer.Option(help="folder of the regression study")] = Path("results/regression"),
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

    with _one_line_errors(), _one_thread(device):
        require_engine(engine)
        options = {"regression": regression, **_options(datasets, device, compiled, fused)}
        if engine == "ray":
            from mcbn_study import ray as study

            store = study.run_sensitivity(find_profile(profile), out, address=address, **options)
        else:
            store = sensitivity.run(find_profile(profile), out, **options)
        typer.echo(f"{len(store.find(kind='sensitivity'))} runs in {store.path}")


Results = Annotated[Path, typer.Option(help="folder of records, tables and figures")]


@reproduce.command()
def statistics(out: Results = Path("results/statistics")) -> None:
    """Draw the distributions of batch statistics on Yacht and test them for Gaussians (appendix).

    \b
    Example:
      mcbn reproduce statistics
    """
    from mcbn_study import statistics

    with _one_line_errors(), _one_thread("cpu"):
        statistics.run(out)


@reproduce.command()
def objective(out: Results = Path("results/objective")) -> None:
    """Measure how the gradients of Eq. (1) and Eq. (2) approach each other as N grows.

    \b
    Example:
      mcbn reproduce objective
    """
    from mcbn_study import objective

    with _one_line_errors(), _one_thread("cpu"):
        objective.run(out)


@reproduce.command()
def regularizer(datasets: Names = None, out: Results = Path("results/regularizer")) -> None:
    """Train with the KL regulariser beside weight decay on four regression sets.

    \b
    Example:
      mcbn reproduce regularizer --datasets yacht
    """
    from mcbn_study import regularizer

    with _one_line_errors(), _one_thread("cpu"):
        regularizer.run(out, datasets=_split(datasets) or regularizer.DATASETS)


@reproduce.command()
def toy(out: Results = Path("results/regression")) -> None:
    """Fit the toy problem of Figure 1; `tables` draws it.

    \b
    Example:
      mcbn reproduce toy
    """
    from mcbn_study.toy import run as toy

    with _one_line_errors(), _one_thread("cpu"):
        typer.echo(toy.main(out))


@reproduce.command()
def estimators(out: Results = Path("results/estimators")) -> None:
    """Score the scikit-learn estimator with its default parameters on the embedded sets.

    \b
    Example:
      mcbn reproduce estimators --out results/estimators
    """
    from mcbn_study import estimators

    with _one_line_errors(), _one_thread("cpu"):
        estimators.run(out)
        typer.echo(estimators.report(out))


@reproduce.command()
def posteriors(
    datasets: Names = None,
    profile: ProfileName = "paper",
    out: Results = Path("results/posteriors"),
    regression: Annotated[Path, typer.Option(help="folder of the regression study")] = Path("results/regression"),
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

    with _one_line_errors():
        if cifar:
            foreign.cifar(weights, out, n_test=n_test)
        else:
            with _one_thread("cpu"):
                posteriors.run(find_profile(profile), out, regression=regression, datasets=_split(datasets))
        typer.echo("\n".join(map(str, report.write(out))))


@reproduce.command()
def tables(results: Annotated[Path, typer.Option(help="folder that holds regression/")] = Path("results")) -> None:
    """Write every table and figure of the regression study from its records.

    \b
    Example:
      mcbn reproduce tables --results results
    """
    from mcbn_study.regression import report as regression

    with _one_line_errors():
        typer.echo("\n".join(map(str, regression.write(results))))


def _options(datasets: Sequence[str] | None, device: str, compiled: bool, fused: bool) -> dict[str, Any]:
    return {"datasets": _split(datasets), "device": device, "compiled": compiled, "fused": fused}


def _split(names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for name in names or () for part in name.split(",") if part.strip())


def _one_thread(device: str) -> AbstractContextManager[None]:
    from mcbn_study.machine import one_thread

    return one_thread(device)
