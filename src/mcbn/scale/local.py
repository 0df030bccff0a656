"""All parts in this process, one after the other: what a cluster is compared with, and enough for many jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcbn.model import MCBN
from mcbn.scale.folder import Folder
from mcbn.scale.job import plan
from mcbn.scale.outcome import Outcome, Summary
from mcbn.scale.parts import Inputs
from mcbn.scale.work import work


def predict(
    inputs: Inputs,
    bayes: MCBN[Any],
    *,
    out: str | Path,
    resume: bool = False,
    on_part: Callable[[Outcome], object] | None = None,
    **options: Any,
) -> Summary:
    """Predict tables or images, part by part, into a folder of parquet files.

    The results hold the columns `file` and `row`, those named by `key`, and what `mcbn predict` writes. A file that
    cannot be read is listed in `bad_files.jsonl` of the folder and left out whole.

    Args:
        inputs: a csv or parquet file, an image, a folder of either kind, or a list of such.
        bayes: a fitted MCBN.
        out: folder of the results; empty, or with `resume`.
        resume: go on with a job that was interrupted; finished parts are kept.
        on_part: called with the outcome of each part.
        options: key (columns to pass on), columns (inputs of the network by name, in its order; by default all that
            are no key or target), target (columns to leave out), transform (of a PIL image to a tensor; by default RGB
            in [0, 1]), batch_size (inputs in one pass; part of the result's rounding), part_rows (of a parquet file or
            images in one part, rounded up to whole batches), method, n_samples and coverage (as `mcbn predict`).
    """
    job = plan(inputs, bayes, out=out, **options)
    folder = Folder(job, resume=resume)
    for part in folder.missing():
        outcome = work(job, bayes, part)
        folder.add(outcome)
        if on_part is not None:
            on_part(outcome)
    return folder.finish()
