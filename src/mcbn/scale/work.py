"""One part predicted and written: a parquet file that appears whole or not at all."""

import errno
import json
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.scale.job import Job
from mcbn.scale.outcome import BAD, DONE, STOPPED, Outcome
from mcbn.scale.parts import Part
from mcbn.scale.reading import Batch, reason
from mcbn.tables.formats import pyarrow
from mcbn.tables.results import arrays_of, as_columns

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
MARK = b"mcbn"  # metadata of a part's file


class UnreadableError(Exception):
    """The input of a part cannot be read."""


def work(job: Job, bayes: MCBN[Any], part: Part) -> Outcome:
    """Predict a part, unless its file is there already; say what became of it."""
    done = finished(job, part.name)
    if done is not None:
        return done
    try:
        return _Writing(job, bayes, part).run()
    except UnreadableError as error:
        rows = [part.start, part.stop]
        bad = {"file": part.labels[0], "rows": rows, "reason": str(error)}
        return Outcome(part.name, BAD, bad=(bad,), reason=str(error))
    except OSError as error:
        if error.errno not in FULL:
            raise
        return Outcome(part.name, STOPPED, reason=f"{error.strerror}: {job.folder}")


def path_of(job: Job, name: str) -> Path:
    """Name the file of a part's results."""
    return job.folder / f"{name}.parquet"


def finished(job: Job, name: str) -> Outcome | None:
    """Read what became of a part from its file; None where there is none of this job."""
    path = path_of(job, name)
    if not path.exists():
        return None
    arrow, parquet = pyarrow(path)
    try:
        found = json.loads((parquet.read_schema(path).metadata or {})[MARK])
    except (KeyError, ValueError, arrow.ArrowInvalid):
        raise MCBNError(f"{path} is not a result of this job; move it away, or give another folder") from None
    if found["job"] != job.id:
        raise MCBNError(f"{path} is the result of another job; give another folder")
    return Outcome.from_json(found["outcome"])


class _Writing:
    """A part at work."""

    def __init__(self, job: Job, bayes: MCBN[Any], part: Part) -> None:
        self.job, self.bayes, self.part = job, bayes, part
        self.rows = self.batches = 0
        self.predicting = 0.0
        self.bad: list[dict[str, Any]] = []

    def run(self) -> Outcome:
        started = time.perf_counter()
        tables = [self._table(batch) for batch in self._batches() if len(batch.rows)]
        if not tables:
            reasons = self.bad or [{"file": self.part.labels[0], "reason": "it holds no rows"}]
            return Outcome(self.part.name, BAD, bad=tuple(reasons), reason=str(reasons[0]["reason"]))
        seconds = time.perf_counter() - started
        outcome = Outcome(
            self.part.name,
            DONE,
            rows=self.rows,
            batches=self.batches,
            seconds=seconds,
            predicting=self.predicting,
            bad=tuple(self.bad),
        )
        self._write(tables, outcome)
        return outcome

    def _batches(self) -> Iterator[Batch]:
        """Read on; whatever reading raises is the file's fault, what predicting raises is not."""
        source = self.job.reader.read(self.part)
        while True:
            try:
                batch = next(source, None)
            except Exception as error:
                raise UnreadableError(reason(error)) from error
            if batch is None:
                return
            self.bad += batch.bad
            yield batch

    def _table(self, batch: Batch) -> Any:
        """Predict a batch: file and row, then the keys, then the results, as columns."""
        arrow, _ = pyarrow(self.job.folder)
        options, started = self.job.options, time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where one is an error, the engine takes another way, of other rounding
            pred = self.bayes.predict(batch.x, method=options.method, n_samples=options.n_samples)
        columns = as_columns(arrays_of(pred, options.coverage))
        self.predicting += time.perf_counter() - started
        self.rows, self.batches = self.rows + len(batch.rows), self.batches + 1
        clash = [name for name in batch.keys if name in columns]
        if clash:
            raise MCBNError(f"the key column {clash[0]!r} is called like a result; rename it")
        n = len(batch.rows)
        places = np.arange(n, dtype=np.int32) if len(batch.labels) == n else np.zeros(n, dtype=np.int32)
        labels = arrow.DictionaryArray.from_arrays(places, arrow.array(batch.labels, arrow.string()))
        return arrow.table({"file": labels, "row": batch.rows, **batch.keys, **columns})

    def _write(self, tables: list[Any], outcome: Outcome) -> None:
        arrow, parquet = pyarrow(self.job.folder)
        table = arrow.concat_tables(tables).unify_dictionaries()
        mark = json.dumps({"job": self.job.id, "outcome": outcome.to_json()})
        table = table.replace_schema_metadata({MARK: mark})
        temporary = self.job.folder / f".{self.part.name}.{uuid.uuid4().hex}.tmp"
        try:
            parquet.write_table(table, temporary)
            _sync(temporary)
            os.replace(temporary, path_of(self.job, self.part.name))
        finally:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Have the file on disk before it gets its name: a name without content would count as finished."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
