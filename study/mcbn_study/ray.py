"""A regression study as Ray tasks: its own cells of work anywhere, one writer here; the records of a local run.

A task works in a folder of its own, given the files of the cells it builds on, and hands back what it made. A task
whose worker is lost is run again; a driver that is started again goes on from what is in the folder.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcbn.data import Regression, load
from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.ray import connected
from mcbn_study.journal import CellJournal, Record
from mcbn_study.machine import one_thread
from mcbn_study.regression.profile import Profile
from mcbn_study.study import Setup, Study, Task

KEPT = ("cells", "networks", "predictions")  # folders of a study that a task hands back
Made = tuple[dict[str, bytes], list[Record]]  # by a task: files by their path in the folder of the study, and records


def run(study: Study, tasks: Sequence[Task], setup: Setup) -> CellJournal:
    """Give out the cells that have no file, each with those it needs; write what they make, in the order they end."""
    made: dict[str, Any] = {}
    pending = []
    with connected(setup.address) as ray:
        work = ray.remote(num_cpus=1, num_gpus=1 if setup.device == "cuda" else 0)(_work)
        sets = {name: ray.put(load(name)) for name in dict.fromkeys(task.dataset for task in tasks)}
        for task in tasks:
            if study.journal.load(task.cell) is None:
                needed = [made[cell] for cell in task.needed]
                about = (study.name, study.profile, setup, task._replace(needed=()))
                pending.append(work.remote(about, sets[task.dataset], *needed))
                made[task.cell] = pending[-1]
            else:
                file = f"cells/{task.cell}.safetensors"
                made[task.cell] = ray.put(({file: (study.journal.folder / file).read_bytes()}, []))
        while pending:
            ready, pending = ray.wait(pending)
            try:
                files, records = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise MCBNError(f"a task of the study failed ({cause}); the same command goes on from here") from error
            for name, content in files.items():
                with replacing(study.journal.folder / name) as temporary:
                    temporary.write_bytes(content)
            study.journal.append(records)
    return study.journal


def _work(about: tuple[str, Profile, Setup, Task], data: Regression, *needed: Made) -> Made:
    """Run one cell in a folder of its own; return its new files and records."""
    name, profile, setup, task = about
    with one_thread(setup.device), tempfile.TemporaryDirectory() as temporary:
        folder, before = Path(temporary), {path: content for files, _ in needed for path, content in files.items()}
        for path, content in before.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        study = Study(name, profile, folder, setup)
        study.do(task, data)
        files = [path for kept in KEPT for path in sorted((folder / kept).rglob("*")) if path.is_file()]
        after = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        return {path: content for path, content in after.items() if path not in before}, study.journal.records
