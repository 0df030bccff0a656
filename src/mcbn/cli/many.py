"""`mcbn predict` of many files: into a folder, in this process or on a Ray cluster."""

from pathlib import Path
from typing import Any

import typer

from mcbn.cli.mistakes import FAILURE
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.progress import bar
from mcbn.scale.folder import BAD_FILES
from mcbn.tables import results, specs

ENGINES = ("local", "ray")


def require_engine(engine: str) -> None:
    """Refuse an engine that does not exist."""
    if engine not in ENGINES:
        raise MCBNError(f"--engine must be one of {', '.join(ENGINES)}; got {engine!r}")


def reading(key: str | None, transform: str | None) -> dict[str, Any]:
    """Read --key and --transform."""
    keys = [part.strip() for part in key.split(",")] if key else []
    return {"key": keys, "transform": specs.find(transform, "--transform") if transform else None}


def predict(
    data: Path,
    bayes: MCBN[Any],
    out: Path,
    *,
    engine: str,
    address: str | None,
    workers: int | None,
    **options: Any,
) -> None:
    """Predict all files, say how many rows there are now, and end with code 1 where a file was left out."""
    if out.suffix in results.KINDS:
        raise MCBNError(f"--out {out} must be a folder: many files go there; leave out {out.suffix}")
    with bar("predicting", None, "row") as tick:
        options["on_part"] = lambda outcome: tick(outcome.rows)
        if engine == "ray":
            import mcbn.ray

            summary = mcbn.ray.predict(data, bayes, out=out, address=address, workers=workers, **options)
        else:
            from mcbn import scale

            summary = scale.predict(data, bayes, out=out, **options)
    typer.echo(f"{out}: {summary.rows} predictions in {summary.parts} files ({summary.resumed} were there)")
    if summary.bad_files:
        typer.echo(f"mcbn: {len(summary.bad_files)} inputs left out, listed in {out / BAD_FILES}", err=True)
        raise typer.Exit(FAILURE)
