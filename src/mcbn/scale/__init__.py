"""Prediction of many files, on one machine here and on a cluster in `mcbn.ray`: parts, resumable, every row once.

Why the bits do not depend on the number of workers, and what each file of a job holds, stands in docs/scale.md.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError, one_line
from mcbn.field.watch import Watch
from mcbn.files import held, remove_leftovers, replacing, write_text
from mcbn.model import MCBN
from mcbn.scale.job import SPOOL, Batch, Inputs, Job, Part, plan
from mcbn.tables.formats import pyarrow
from mcbn.tables.results import arrays_of, as_columns

JOB, MANIFEST, BAD_FILES = "job.json", "manifest.json", "bad_files.jsonl"
DONE, BAD = "done", "bad"
MARK = b"mcbn"  # metadata of a part's file


@dataclass(frozen=True)
class Outcome:
    """One part: its rows are in a file, or its input cannot be read."""

    part: str
    status: str
    rows: int = 0
    bad: Sequence[dict[str, Any]] = ()  # inputs left out: file, rows, reason
    reason: str = ""


@dataclass(frozen=True)
class Summary:
    """A finished job."""

    folder: Path
    rows: int
    parts: int
    resumed: int  # parts that were there before
    bad_files: tuple[dict[str, Any], ...]


OnPart = Callable[[Outcome], object] | None


class UnreadableError(Exception):
    """The input of a part cannot be read."""


def work(job: Job, bayes: MCBN[Any], part: Part) -> Outcome:
    """Predict a part; say what became of it."""
    try:
        return _predict(job, bayes, part)
    except UnreadableError as error:
        bad = {"file": next(iter(part.files)), "rows": [part.start, part.stop], "reason": str(error)}
        return Outcome(part.name, BAD, bad=(bad,), reason=str(error))


def finished(job: Job, part: Part) -> Outcome | None:
    """Read what became of a part from its file; None where there is none of this job, or its input has changed."""
    path = job.folder / f"{part.name}.parquet"
    if not path.exists():
        return None
    arrow, parquet = pyarrow(path)
    try:
        mark = json.loads((parquet.read_schema(path).metadata or {})[MARK])
    except (KeyError, ValueError, arrow.ArrowInvalid):
        raise MCBNError(f"{path} is not a result of this job; move it away, or give another folder") from None
    if mark["job"] != job.id:
        raise MCBNError(f"{path} is the result of another job; give another folder")
    outcome = json.loads(mark["outcome"])  # older files hold timings, too
    return Outcome(part.name, DONE, outcome["rows"], outcome["bad"]) if mark["source"] == part.source() else None


def _predict(job: Job, bayes: MCBN[Any], part: Part) -> Outcome:
    """Predict a part batch by batch into its file; what was predicted before, in this process, changes no bit."""
    bayes.engine.plans_at_once = True
    source = part.source()
    watch = Watch.load(job.watch, bayes) if job.watch else None
    tables: list[Any] = []
    bad: list[dict[str, Any]] = []
    for batch in _read(job, part):
        bad += batch.bad
        if len(batch.rows) >= (job.reader.batch_rows if job.reading else 1):  # a watch reads whole batches
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where one is an error, the engine takes a way of other rounding
                tables.append(_table(job, bayes, watch, batch))
    if not tables and not bad:
        raise UnreadableError("it holds no rows, or too few for a batch")
    if not tables:
        return Outcome(part.name, BAD, bad=bad, reason=str(bad[0]["reason"]))
    outcome = Outcome(part.name, DONE, sum(map(len, tables)), bad)
    arrow, parquet = pyarrow(job.folder)
    mark = json.dumps({"job": job.id, "source": source, "outcome": json.dumps(asdict(outcome))})
    table = arrow.concat_tables(tables).unify_dictionaries().replace_schema_metadata({MARK: mark})
    try:
        with replacing(job.folder / f"{outcome.part}.parquet") as temporary:
            parquet.write_table(table, temporary)
    except OSError as error:
        cure = "make room and go on with resume=True (--resume)"
        raise MCBNError(f"cannot write results to {job.folder} ({error.strerror or error}); {cure}") from error
    return outcome


def _table(job: Job, bayes: MCBN[Any], watch: Watch | None, batch: Batch) -> Any:
    """Predict a batch; or have it read by the watch, which gives one row, of its first input."""
    arrow, _ = pyarrow(job.folder)
    labels = arrow.array(batch.labels, arrow.string()).dictionary_encode()
    if watch is not None and job.reading:
        row = {name: [value] for name, value in watch(batch.x).row().items()}
        return arrow.table({"file": labels[:1], "row": batch.rows[:1], **row})
    prediction, classes = bayes.predict(batch.x, **job.options, watch=watch), job.reader.layout.classes
    try:
        arrays = arrays_of(prediction, job.coverage, classes, int(batch.rows[0]))
    except MCBNError as error:
        raise UnreadableError(str(error)) from error
    return arrow.table({"file": labels, "row": batch.rows, **batch.keys, **as_columns(arrays, classes)})


def _read(job: Job, part: Part) -> Iterator[Batch]:
    """Read on; whatever reading raises is the file's fault, what predicting raises is not."""
    try:
        yield from job.reader.read(part)
    except Exception as error:
        raise UnreadableError(one_line(error)) from error


@contextmanager
def opened(job: Job, *, resume: bool, overwrite: bool = False) -> Iterator[dict[str, Outcome]]:
    """Open the folder of a job for this run alone, without rests of killed workers; give what is finished by part."""
    folder, before = job.folder, job.folder / JOB
    there = require_free(folder, resume, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder) as is_ours:
        if is_ours is False:
            raise MCBNError(f"another run works in {folder}; wait for its end, or name another folder")
        if overwrite and not resume:
            clear(folder)
        if before.exists():
            _require_same(json.loads(before.read_text()), job)
        elif resume and (visible := [name for name in there if not name.startswith(".")]):
            raise MCBNError(f"{folder} holds {visible[0]} but no {JOB}: no job to go on with; name another folder")
        write_text(before, json.dumps(job.settings, indent=1) + "\n")
        (folder / MANIFEST).unlink(missing_ok=True)
        remove_leftovers(folder)
        yield {part.name: outcome for part in job.parts if (outcome := finished(job, part))}


def collect(job: Job, done: Mapping[str, Outcome], outcomes: Iterable[Outcome], on_part: OnPart) -> Summary:
    """Take note of every part as it comes to something; write manifest and list of bad files at the end."""
    known = dict(done)
    for outcome in outcomes:
        known[outcome.part] = outcome
        if on_part is not None:
            on_part(outcome)
    if lost := [part.name for part in job.parts if part.name not in known]:
        raise MCBNError(f"{len(lost)} parts came to nothing, the first {lost[0]}; go on with resume=True (--resume)")
    ordered = [known[part.name] for part in job.parts]
    bad = tuple(entry for outcome in ordered for entry in outcome.bad)
    rows = sum(outcome.rows for outcome in ordered)
    listed = [{"part": o.part, "status": o.status, "rows": o.rows} for o in ordered]
    write_text(job.folder / BAD_FILES, "".join(json.dumps(entry) + "\n" for entry in bad))
    manifest = {"job": job.id, "rows": rows, "bad_files": len(bad), "parts": listed}
    write_text(job.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    written = sum(outcome.status == DONE for outcome in ordered)
    if not written:
        raise MCBNError(f"not one input file could be read; {job.folder / BAD_FILES} says why: {bad[0]['reason']}")
    return Summary(job.folder, rows, written, len(done), bad)


def require_free(folder: Path, resume: bool, overwrite: bool = False) -> list[str]:
    """Refuse a folder with something in it, unless a job is to be gone on with or replaced; return what it holds."""
    if folder.exists() and not folder.is_dir():
        raise MCBNError(f"{folder} is a file; results go to a folder")
    there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if there and not resume and not (overwrite and JOB in there):
        cure = "go on with resume=True (--resume), or replace an old job with overwrite=True (--overwrite)"
        raise MCBNError(f"{folder} is not empty (it holds {there[0]}); name another folder, {cure}")
    return there


def clear(folder: Path) -> None:
    """Remove an old job from its folder, and nothing else."""
    for old in (*folder.glob("part-*.parquet"), *(folder / name for name in (MANIFEST, JOB, BAD_FILES))):
        old.unlink(missing_ok=True)
    shutil.rmtree(folder / SPOOL, ignore_errors=True)


def _require_same(before: dict[str, Any], job: Job) -> None:
    now = json.loads(json.dumps(job.settings))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            change = f"its {name} was {before.get(name)!r}, is {now.get(name)!r} now"
            cure = "go on with the same inputs, network, posterior and options, or name another folder"
            raise MCBNError(f"{job.folder} belongs to another job: {change}; {cure}")


def read_results(folder: str | Path) -> Any:
    """Read all results of a finished job as one arrow table, in the order of the input."""
    folder = Path(folder)
    arrow, parquet = pyarrow(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise MCBNError(f"{folder} holds no finished job; go on with resume=True (--resume)") from error
    names = [part["part"] for part in manifest["parts"] if part["status"] == DONE]
    tables = [parquet.read_table(folder / f"{name}.parquet") for name in names]
    return arrow.concat_tables([table.replace_schema_metadata() for table in tables]).unify_dictionaries()


def predict(
    inputs: Inputs,
    bayes: MCBN[Any],
    *,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    on_part: OnPart = None,
    **options: Any,
) -> Summary:
    """Predict tables or images, part by part, into a folder of parquet files.

    The results hold the columns `file` and `row`, those named by `key`, and what `mcbn predict` writes. A file that
    cannot be read is listed in `bad_files.jsonl` of the folder and left out whole.

    Args:
        inputs: a csv or parquet file, an image, a folder of either kind, or a list of such.
        bayes, out: a fitted MCBN, and the folder of the results; empty, or with `resume`.
        resume: go on with a job that was interrupted; finished parts are kept, unless their input has another size or
            time of change now.
        overwrite: replace an old job in that folder.
        on_part: called with the outcome of each part.
        options: key (columns to pass on), columns (inputs by name, in order; by default all that are no key or target),
            target (columns to leave out), transform (of a PIL image to a tensor; by default RGB in [0, 1]), batch_size
            (inputs in one pass; part of the rounding), part_rows (rows or images in one part, up to whole batches),
            method, n_samples, mean, coverage (as `mcbn predict`), watch (file of a `Watch` that judges inputs).
    """
    job = plan(inputs, bayes, out=out, **options)
    with opened(job, resume=resume, overwrite=overwrite) as done:
        return collect(job, done, (work(job, bayes, part) for part in job.parts if part.name not in done), on_part)
