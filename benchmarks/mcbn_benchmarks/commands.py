"""The command line: `python -m mcbn_benchmarks COMMAND`. Its `speed` is also `mcbn bench`."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU where there is one")]
Only = Annotated[str, typer.Option(help='what holds this in its title, such as "mlp", "N=1", "linear", "timm/"')]
Out = Annotated[Path | None, typer.Option(help="file to append records to")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Measured = Annotated[Path, typer.Option("--records", help="folder of measured times")]
RESULTS = Path("benchmarks/results")

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def main(debug: Debug = False) -> None:
    """Speed, memory and the networks of others."""
    from mcbn.cli.session import begin

    begin(debug)


def _command(function: Callable[..., Iterable[object] | None]) -> Callable[..., None]:
    """Make a command of a function that gives lines: mistakes end in one, its device is one that is here."""

    @wraps(function)
    def run(**options: Any) -> None:
        from mcbn.cli.session import session, set_debug  # here: mcbn.cli imports this module, for its `bench`
        from mcbn.tables.specs import device

        set_debug(options.get("debug", False))
        with session():
            if "device" in options:
                options["device"] = device(options["device"]).type
            for line in function(**options) or ():
                print(line, flush=True)

    app.command()(run)
    return run


def _keep(records: Iterable[dict[str, Any]], out: Path | None, device: str = "cpu") -> Iterator[str]:
    """Add records to the file, where one is named, with where they were made; give them as lines."""
    from mcbn_study.journal import extend
    from mcbn_study.machine import environment

    for record in records:
        if out is not None:
            extend(out, [record | asdict(environment(device))])
        yield json.dumps(record)


@_command
def speed(
    out: Annotated[Path | None, typer.Option(help="folder for <device>.jsonl (appended to) and <device>.md")] = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="two cases with few draws, as <device>-quick")] = False,
    only: Only = "",
    compile: Annotated[bool, typer.Option("--compile", help="time predict(compile=True) too")] = False,
    peer_path: Annotated[Path | None, typer.Option(help="folder that torch-uncertainty was installed into")] = None,
    debug: Debug = False,
) -> None:
    """Measure MCBN against the loop of Algorithm 1, T plain passes and torch-uncertainty.

    \b
    Example:
      mcbn bench --quick
    """
    from mcbn_benchmarks.speed import measures

    measures.run(measures.Options(device, quick, compile, peer_path), out, only)


@_command
def zoo(
    out: Annotated[Path, typer.Option(help="folder of records.jsonl and table.md")] = Path("results/zoo"),
    only: Only = "",
    again: Annotated[bool, typer.Option("--again", help="run also what is on record already")] = False,
) -> None:
    """Run mcbn over networks that others wrote; one that is inexact or touched makes it fail."""
    from mcbn_benchmarks.zoo import checks, table

    checks.run(out, only=only, again=again)
    if failed := table.write(out):
        raise SystemExit(f"not exact, or not left untouched: {', '.join(failed)}")


@_command
def pages(root: Annotated[Path, typer.Option(help="the checkout")] = Path()) -> Iterable[object]:
    """Write the tables of README and documentation anew from the records."""
    from mcbn_benchmarks.pages import write

    return write(root) or ["every table is that of the records"]


@_command
def chunks(device: Device = "cuda", only: Only = "") -> Iterable[object]:
    """Time `predict`, and its memory, by the bound on a chunk of draws: how many values keep a GPU busy."""
    from mcbn_benchmarks.gpu import sweep_chunks

    return sweep_chunks(device, only)


@_command
def narrow() -> Iterable[object]:
    """Time the kernel of narrow convolutions beside PyTorch's, and their distance from double precision."""
    from mcbn_benchmarks.gpu import compare_narrow

    return compare_narrow("cuda")


@_command
def trainer(
    device: Device = "cpu",
    out: Out = None,
    seconds: Annotated[float, typer.Option(help="time to spend on each measurement")] = 3.0,
    share: Annotated[float, typer.Option(help="share of the paper's networks to train at once")] = 1.0,
    only: Only = "",
    fused: Annotated[bool, typer.Option("--fused", help="take many steps in one CUDA kernel")] = False,
) -> Iterable[object]:
    """Time the study's batched trainer against training one network at a time."""
    from mcbn_benchmarks.trainer import measure
    from mcbn_study.machine import one_thread

    with one_thread(device):
        yield from _keep(measure(device, only, seconds, share, fused=fused), out, device)


@_command
def estimator(rows: int = 100_000, columns: int = 10, epochs: int | None = None, out: Out = None) -> Iterable[object]:
    """Time fit and predict of the scikit-learn regressor, by its default parameters, in CPU and wall seconds."""
    import numpy as np

    from mcbn.sklearn import MCBNRegressor
    from mcbn_study.machine import one_thread

    random = np.random.default_rng(0)
    x = random.normal(size=(rows, columns))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * random.normal(size=rows)
    model = MCBNRegressor(random_state=0, epochs=epochs)
    works: dict[str, Callable[[], object]] = {"fit": partial(model.fit, x, y)}
    works["predict"] = partial(model.predict, x, return_std=True)
    record: dict[str, Any] = {"case": "estimator", "n": rows, "columns": columns}
    with one_thread("cpu"):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            record[f"{name}_seconds"] = time.perf_counter() - wall
            record[f"{name}_cpu_seconds"] = time.process_time() - cpu
    return _keep([record | {"epochs": model.n_iter_, "load": os.getloadavg()[0]}], out)


@_command
def memory(out: Out = None, only: Only = "") -> Iterable[object]:
    """Measure the peak memory of `fit` at few and many draws against a plain loop; needs timm and smp."""
    from mcbn_benchmarks.memory import measure

    return _keep(measure(only), out)


@_command
def first(device: Device = "auto", out: Out = None, only: Only = "") -> Iterable[object]:
    """Time the first `fit` and `predict` of fresh processes against training forwards and T plain passes."""
    from mcbn_benchmarks.first import measure

    return _keep(measure(device, only), out, device)


@_command
def ray(
    rows: int = 200_000,
    samples: Annotated[int, typer.Option(help="T")] = 500,
    workers: Annotated[int, typer.Option(help="actors, and threads of the plain engine")] = 2,
    rounds: int = 3,
    out: Out = None,
) -> Iterable[object]:
    """Time prediction on Ray against the plain engine, in rows a second."""
    from mcbn_benchmarks import ray

    return _keep([ray.measure(rows, samples, workers, rounds)], out)


@_command
def costs(records: Measured = RESULTS) -> Iterable[object]:
    """Work out what a million predictions cost, from measured times."""
    from mcbn_benchmarks.costs import cost_table, read_costs

    return [cost_table(read_costs(records)).rstrip()]


@_command
def sweep(
    records: Measured = RESULTS,
    network: str = "resnet50",
    samples: Annotated[int, typer.Option(help="T")] = 32,
    images: int = 1_000_000_000,
    out: Annotated[Path | None, typer.Option(help="file of records, written anew")] = None,
) -> None:
    """SIMULATE a sweep over many GPUs with the measured time of one; no such cluster was used."""
    from mcbn_benchmarks.costs import run_sweep

    run_sweep(records, network, samples, images, out)
