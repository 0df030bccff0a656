"""The folder of a job: what it holds, whether it can be gone on with, and the record of its end.

`job.json` says what the results depend on; one parquet file a part; `manifest.json` appears when all parts are done,
`bad_files.jsonl` beside it names every input that was left out, with the reason.
"""

import json
import time
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn.scale.job import Job
from mcbn.scale.outcome import DONE, STOPPED, Outcome, Summary
from mcbn.scale.parts import Part
from mcbn.scale.work import finished

JOB, MANIFEST, BAD_FILES = "job.json", "manifest.json", "bad_files.jsonl"


class Folder:
    """Collects what becomes of the parts of a job."""

    def __init__(self, job: Job, *, resume: bool) -> None:
        self.job, self.started = job, time.perf_counter()
        _open(job, resume)
        found = {part.name: finished(job, part.name) for part in job.parts} if resume else {}
        self.outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
        self.resumed = len(self.outcomes)

    def missing(self) -> list[Part]:
        """List the parts still to be done; those whose input could not be read are tried again."""
        return [part for part in self.job.parts if part.name not in self.outcomes]

    def add(self, outcome: Outcome) -> None:
        """Take note of a part; a full disk ends the job."""
        if outcome.status == STOPPED:
            raise MCBNError(
                f"cannot write results ({outcome.reason}); {len(self.outcomes)} of {len(self.job.parts)} parts are "
                "done: make room and go on with resume=True (--resume)"
            )
        self.outcomes[outcome.part] = outcome

    def finish(self) -> Summary:
        """Write manifest and list of bad files; every part must have come to something."""
        lost = [part.name for part in self.missing()]
        if lost:
            raise MCBNError(
                f"{len(lost)} parts came to nothing, the first {lost[0]}; go on with resume=True (--resume)"
            )
        outcomes = [self.outcomes[part.name] for part in self.job.parts]
        bad = tuple(entry for outcome in outcomes for entry in outcome.bad)
        rows = sum(outcome.rows for outcome in outcomes)
        listed = [{"part": o.part, "status": o.status, "rows": o.rows} for o in outcomes]
        write_text(self.job.folder / BAD_FILES, "".join(json.dumps(entry) + "\n" for entry in bad))
        manifest = {"job": self.job.id, "rows": rows, "bad_files": len(bad), "parts": listed}
        write_text(self.job.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        done = sum(outcome.status == DONE for outcome in outcomes)
        if not done:
            raise MCBNError(
                f"not one input file could be read; {self.job.folder / BAD_FILES} says why: {bad[0]['reason']}"
            )
        seconds = time.perf_counter() - self.started
        return Summary(self.job.folder, rows, done, self.resumed, bad, seconds, tuple(outcomes))


def require_free(folder: Path, resume: bool) -> list[str]:
    """Refuse a folder with something in it, unless a job is to be gone on with; return what it holds."""
    if folder.exists() and not folder.is_dir():
        raise MCBNError(f"{folder} is a file; results go to a folder")
    there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if there and not resume:
        raise MCBNError(
            f"{folder} is not empty (it holds {there[0]}); name another folder, or go on with resume=True (--resume)"
        )
    return there


def _open(job: Job, resume: bool) -> None:
    """Refuse a folder of something else; leave one that holds this job's settings and no rests of killed workers."""
    folder = job.folder
    there = require_free(folder, resume)
    before = folder / JOB
    if before.exists():
        _require_same(json.loads(before.read_text()), job)
    elif visible := [name for name in there if not name.startswith(".")]:
        raise MCBNError(f"{folder} holds {visible[0]} but no {JOB}: no job to go on with; name another folder")
    write_text(before, json.dumps(job.settings, indent=1) + "\n")
    (folder / MANIFEST).unlink(missing_ok=True)
    for rest in folder.glob(".*.tmp"):
        rest.unlink(missing_ok=True)


def _require_same(before: dict[str, Any], job: Job) -> None:
    now = json.loads(json.dumps(job.settings))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise MCBNError(
                f"{job.folder} belongs to another job: its {name} was {before.get(name)!r}, is {now.get(name)!r} now; "
                "go on with the same inputs, network, posterior and options, or name another folder"
            )


def read_results(folder: str | Path) -> Any:
    """Read all results of a finished job as one arrow table, in the order of the input."""
    from mcbn.tables.formats import pyarrow

    folder = Path(folder)
    arrow, parquet = pyarrow(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise MCBNError(f"{folder} holds no finished job; go on with resume=True (--resume)") from error
    names = [part["part"] for part in manifest["parts"] if part["status"] == DONE]
    tables = [parquet.read_table(folder / f"{name}.parquet") for name in names]
    return arrow.concat_tables([table.replace_schema_metadata() for table in tables]).unify_dictionaries()
