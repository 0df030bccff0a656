"""The rows of a `ray.data.Dataset` as files, so that batches depend on their order alone and a job can be resumed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.scale.folder import require_free
from mcbn.tables.formats import pyarrow

SPOOL, COMPLETE = ".input", "complete"
FILE_ROWS = 2**20


@contextmanager
def spooled(dataset: Any, out: str | Path, resume: bool, options: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Give inputs as files, and whether the folder may hold something: what is no data set goes as it is.

    The files are removed once the job is done, and kept where it is interrupted.
    """
    require_free(Path(out), resume)
    if not hasattr(dataset, "iter_batches"):
        yield dataset, resume
        return
    folder = Path(out) / SPOOL
    if not (folder / COMPLETE).exists():
        _write(dataset, folder, options)
    yield folder, True
    shutil.rmtree(folder)


def _write(dataset: Any, folder: Path, options: dict[str, Any]) -> None:
    """Write the rows in their order; Ray reads ahead meanwhile."""
    _, parquet = pyarrow(folder)
    key = options.get("key") or ()
    wanted = [*([key] if isinstance(key, str) else key), *(options.get("columns") or ())]
    if not key:
        raise MCBNError("name the key column(s) of the data set by key=: nothing else tells its rows apart")
    names = list(dataset.schema().names)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MCBNError(f"the data set has no column {missing[0]!r}; it has {', '.join(names)}")
    shutil.rmtree(folder, ignore_errors=True)
    size = options.get("part_rows") or FILE_ROWS
    with _in_order(dataset):
        for number, table in enumerate(dataset.iter_batches(batch_size=size, batch_format="pyarrow")):
            with replacing(folder / f"rows-{number:06d}.parquet") as temporary:
                parquet.write_table(table, temporary)
    (folder / COMPLETE).touch()


@contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """Have the data set give its rows in order, whoever reads them first."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before
