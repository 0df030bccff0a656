"""`mcbn watch` and `mcbn adapt`: is what comes in like home, and the shift undone; a posterior file and data in."""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mcbn import saving, scale
from mcbn.cli import session
from mcbn.cli.report import writable
from mcbn.cli.session import Data, FileOptions, Fitted, FittedOptions, FolderOptions, Overwrite, WatchFile
from mcbn.errors import MCBNError
from mcbn.field.watch import Watch
from mcbn.files import replacing, require_output
from mcbn.model import MCBN
from mcbn.scale.job import read_folder
from mcbn.tables import results

ALARM = 3  # exit code
COLUMNS = {"p_value", "distance", "kind", "evidence"}  # of a table of readings, among others
Inputs = f"{Data}; or a folder of csv, parquet or image files"
Reference = Annotated[str | None, typer.Option(help=f"inputs as deployed before any shift, no labels: {Inputs}")]


@session.command
def watch(
    source: FittedOptions,
    files: FolderOptions,
    reference: Reference = None,
    watch: WatchFile = None,
    data: Annotated[str | None, typer.Option(help=f"inputs to judge, in their order: {Inputs}")] = None,
    out: Annotated[Path, typer.Option(help="csv or parquet file to write: one row a batch")] = Path("readings.csv"),
    batch_size: Annotated[int | None, typer.Option(help="M, inputs read together; chosen where not given")] = None,
    false_alarms: Annotated[float | None, typer.Option(help="rate of a batch, bound of a stream (0.01)")] = None,
    go_on: Annotated[bool, typer.Option("--continue", help="go on with the stream that the watch file keeps")] = False,
    page: Annotated[Path | None, typer.Option(help="html page to write as well; it reads the data whole")] = None,
    adapted: Annotated[Path | None, typer.Option(help="page: what `mcbn adapt` wrote, before and after")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Judge batches of inputs against a reference: p-values as a table, and code 3 for an alarm.

    \b
    Once, with inputs as the network meets them at home; then as often as there are new ones:
      mcbn watch --posterior net.mcbn --model nets:make --weights w.pt --reference val.csv --watch home.watch
      mcbn watch --posterior net.mcbn --model nets:make --weights w.pt --watch home.watch --continue \\
        --data today.csv --out p.csv --overwrite || mail -s shifted me@here < p.csv

    Each row is a batch of M inputs: p_value (exact rank among batches of the reference), distance, kind (none, inputs,
    classes, not finite), evidence of the stream so far, and how far each layer is (about 1 at home). The code is 3 when
    the evidence has reached 1 / false_alarms, which without a shift happens with probability false_alarms at most over
    any time, or when a batch is not finite; else 0; 2 after a mistake. Inputs that fill no batch are not read.
    """
    sources = {**source.sources(data), "--reference": reference, "--watch": watch, "--adapted": adapted}
    if go_on and watch is None:
        raise MCBNError("--continue goes on with the stream of a file; name it by --watch")
    if data is not None:
        results.require_writable(out, sources, (), overwrite=overwrite, columns=COLUMNS)
    if page is not None:
        writable(page, {**sources, "--out": out}, overwrite)
    fitted = source.load()
    home = _open_watch(fitted, files, reference, watch, batch_size=batch_size, false_alarms=false_alarms)
    if data is None:
        if reference is None or watch is None:
            raise MCBNError("give --data to judge, or --reference and --watch to make the file of a watch")
        return typer.echo(f"{watch}: {home!r}")
    if not go_on:
        home.reset()
    rows = _read(data, fitted, files, home, out.parent)
    with replacing(out) as temporary:
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        results.WRITERS[out.suffix](temporary, [columns], None)
    if page is not None:
        from mcbn.page.field import write_watch_page

        x, y = (None, None) if files.engine == "ray" else _inputs(data, fitted, files, finite=False)
        after: MCBN[Any] | None = MCBN.load(adapted, fitted.bayes.model) if adapted else None
        write_watch_page(page, home, x, y, rows=rows, bayes=fitted.bayes, adapted=after, names=fitted.layout.columns)
    if watch is not None and go_on:
        home.save(watch)
    _end(rows, home)


def _open_watch(fitted: Fitted, files: FileOptions, reference: str | None, path: Path | None, **settings: Any) -> Watch:
    """Read the file of a watch; or make a watch of a reference, and the file where one is named."""
    inputs = None if reference is None else _inputs(reference, fitted, files)[0]
    asked = {name: value for name, value in settings.items() if value is not None}
    if path is not None and path.exists():
        if asked:
            raise MCBNError(f"{path} has its own {' and '.join(asked)}; leave that out, or name a new file")
        return Watch.load(path, fitted.bayes, reference=inputs)
    if inputs is None:
        raise MCBNError(f"there is no file {path}" if path else "give --reference, inputs as at home, or --watch")
    made = fitted.bayes.watch(inputs, **asked)
    if path is not None:
        made.save(path)
    return made


def _inputs(data: str, fitted: Fitted, files: FileOptions, *, finite: bool = True) -> tuple[Any, Any]:
    """Read inputs, and targets where there are any, of a file, a folder, or what the user's factory gives."""
    if Path(data).is_dir():
        return read_folder(Path(data), finite=finite, **files.of_folder(fitted)), None
    return session.read_whole(fitted.open(data, files.target, need_targets=False, passed_on=files.keys, finite=finite))


def _read(data: str, fitted: Fitted, files: FolderOptions, home: Watch, place: Path) -> list[dict[str, Any]]:
    """Read batch by batch: one file or what a factory gives here, the files of a folder each by itself, as a job."""
    if not files.is_many(data):
        opened = fitted.open(data, files.target, need_targets=False, passed_on=files.keys, finite=False)
        rows = list(home.read((block.x for block in opened.blocks()), data))
        if not rows:
            raise MCBNError(f"{data} fills no batch of M = {home.batch_size}; wait for more, or choose --batch-size")
        return rows
    with tempfile.TemporaryDirectory(prefix=".mcbn-", dir=place) as name:
        home.save(Path(name) / "watch")
        job: dict[str, Any] = {"out": Path(name) / "job", "watch": Path(name) / "watch", "reading": True}
        summary = files.predict(data, fitted, batch_size=home.batch_size, **job)
        rows = scale.read_results(job["out"]).to_pylist()
    for bad in summary.bad_files:
        typer.echo(f"mcbn: warning: {bad['file']} is left out: {bad['reason']}", err=True)
    return [row | {"evidence": home.follow(row["distance"]).value} for row in rows]


def _end(rows: Sequence[dict[str, Any]], home: Watch) -> None:
    """Say what was seen, and end with the code of an alarm where there is one."""
    evidence, far, kinds = home.evidence, max(rows, key=lambda row: row["distance"]), [row["kind"] for row in rows]
    seen = f"{kinds.count('inputs')} shifted, {kinds.count('not finite')} not finite"
    limits = f"evidence {evidence.value:.3g}, alarm from {evidence.limit:.3g} on"
    typer.echo(f"{len(rows)} batches of {home.batch_size}, {seen}; {limits}")
    if evidence.shifted or "not finite" in kinds:
        typer.echo(f"mcbn: ALARM; farthest, at row {far['row']} of {far['file']}: {far['explanation']}", err=True)
        raise typer.Exit(ALARM)


@session.command
def adapt(
    source: FittedOptions,
    files: FileOptions,
    data: Annotated[str, typer.Option(help=f"unlabelled inputs as they come now: {Inputs}")],
    reference: Annotated[str, typer.Option(help=f"inputs as deployed before the shift: {Inputs}")],
    out: Annotated[Path, typer.Option(help="file to write the moved posterior to")],
    watch: WatchFile = None,
    strength: Annotated[str, typer.Option(help="auto, or the share of the move to keep, 0 to 1")] = "auto",
    calibrate: Annotated[str | None, typer.Option(help="labelled inputs as they come now: calibrate on them")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Move a posterior to inputs as they come now, without labels, and write it as a new file.

    \b
    Example:
      mcbn adapt --posterior net.mcbn --model nets:make --weights w.pt \\
        --reference val.csv --data today.csv --out moved.mcbn

    Nothing moves where there is no shift; the command says how far it moved and how sure that is. Weights are not
    touched. A calibration does not survive the move: --calibrate makes a new one.
    """
    sources = {**source.sources(data), "--reference": reference, "--watch": watch, "--calibrate": calibrate}
    require_output(out, sources, saving.is_posterior, overwrite=overwrite)
    fitted = source.load()
    home, share = _open_watch(fitted, files, reference, watch), strength
    with suppress(ValueError):
        share = float(strength)  # type: ignore[assignment]
    adapted = fitted.bayes.adapt(_inputs(data, fitted, files)[0], reference=home, strength=share)
    if calibrate is not None:
        adapted.calibrate(session.loader(fitted.open(calibrate, files.target)))
    fitted.save(adapted, out)
    typer.echo(f"{out}: {adapted.adaptation.explain() if adapted.adaptation else ''}")
