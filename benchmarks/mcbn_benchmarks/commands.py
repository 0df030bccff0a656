"""The command line: `python -m mcbn_benchmarks COMMAND`. Its `speed` is also `mcbn bench`.

Short commands are functions of their modules, which `__main__` adds.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU where there is one")]
Only = Annotated[str, typer.Option(help='what holds this in its title, such as "mlp", "N=1", "linear", "timm/"')]
Out = Annotated[Path | None, typer.Option(help="file to append records to")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def main(debug: Debug = False) -> None:
    """Speed, memory and the networks of others."""
    from mcbn.cli.session import debugging

    debugging.set(debug)


def command(function: Callable[..., Iterable[Any] | None], *, kept: bool = False) -> Callable[..., None]:
    """Make a command of a function that gives lines: mistakes end in one, its device is one that is here.

    kept: the function gives records; the command has an option --out more, and adds them, with where they were made, to
    the file it names.
    """

    @wraps(function)
    def run(**options: Any) -> None:
        from mcbn.cli.session import session  # here: mcbn.cli imports this module, for its `bench`
        from mcbn.tables.specs import device
        from mcbn_study.journal import extend
        from mcbn_study.machine import environment

        with session(options.get("debug", False)):
            if "device" in options:
                options["device"] = device(options["device"]).type
            out = options.pop("out") if kept else None
            for line in function(**options) or ():
                if out is not None:
                    extend(out, [line | asdict(environment(options.get("device", "cpu")))])
                print(json.dumps(line) if kept else line, flush=True)

    if kept:
        given = signature(function)
        more = Parameter("out", Parameter.KEYWORD_ONLY, default=None, annotation=Out)
        run.__signature__ = given.replace(parameters=[*given.parameters.values(), more])  # type: ignore[attr-defined]
    app.command()(run)
    return run


@command
def speed(
    out: Annotated[Path | None, typer.Option(help="folder for <device>.jsonl (appended to) and <device>.md")] = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="two cases with few draws, as <device>-quick")] = False,
    only: Only = "",
    peer_path: Annotated[Path | None, typer.Option(help="folder that torch-uncertainty was installed into")] = None,
    debug: Debug = False,
) -> None:
    """Measure MCBN against the loop of Algorithm 1, T plain passes and torch-uncertainty.

    \b
    Example:
      mcbn bench --quick
    """
    from mcbn_benchmarks.speed import measures

    measures.run(measures.Options(device, quick, peer_path), out, only)


@command
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


@partial(command, kept=True)
def estimator(rows: int = 100_000, columns: int = 10, epochs: int | None = None) -> Iterable[object]:
    """Time fit and predict of the scikit-learn regressor, by its default parameters, in CPU and wall seconds."""
    import numpy as np

    from mcbn.sklearn import MCBNRegressor
    from mcbn_study.machine import one_thread, timed

    random = np.random.default_rng(0)
    x = random.normal(size=(rows, columns))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * random.normal(size=rows)
    model = MCBNRegressor(random_state=0, epochs=epochs)
    works = {"fit": partial(model.fit, x, y), "predict": partial(model.predict, x, return_std=True)}
    record: dict[str, Any] = {"case": "estimator", "n": rows, "columns": columns}
    with one_thread("cpu"):
        for name, work in works.items():
            started = time.process_time()
            record[f"{name}_seconds"] = timed(work)[1]
            record[f"{name}_cpu_seconds"] = time.process_time() - started
    return [record | {"epochs": model.n_iter_, "load": os.getloadavg()[0]}]
