"""The results folder of a study: append-only records, cells written whole or not at all.

A cell is one unit of work. Its file `cells/<name>.safetensors` holds tensors and, as metadata, the records it gave;
it is written first, the records after it, so that an interruption between the two loses nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.files import replacing, write_text
from mcbn_study.records import Record, extend, read

KEYS = {
    "test": ("dataset", "method", "split", "seed"),
    "selection": ("dataset", "family", "batch_size", "dropout", "split"),
    "sensitivity": ("dataset", "method", "split", "seed", "batch_size", "n_samples"),
    "posterior": ("dataset", "family", "split", "seed"),
}


class Store:
    """The folder of one study made with one configuration."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.folder, self.settings = folder, settings
        self.path = folder / "records.jsonl"
        self._require_same_settings()
        self.records = read(self.path)
        self._known = {record_key(record) for record in self.records}

    def has(self, records: Iterable[Record]) -> bool:
        """Tell whether records with these keys are all there."""
        return all(record_key(record) in self._known for record in records)

    def find(self, **wanted: object) -> list[Record]:
        """Return the records whose fields are as wanted."""
        return [r for r in self.records if all(r.get(name) == value for name, value in wanted.items())]

    def append(self, records: Iterable[Record]) -> None:
        """Add the records that are not there yet, each a whole line."""
        new = [record for record in records if record_key(record) not in self._known]
        extend(self.path, new)
        self.records += new
        self._known |= {record_key(record) for record in new}

    def finish(self, cell: str, tensors: Mapping[str, Tensor], records: list[Record]) -> None:
        """Write a cell's file, then its records; what was kept of it on the way goes."""
        self.keep(cell, tensors, records)
        self.append(records)
        self._cell(f"{cell}.part").unlink(missing_ok=True)

    def keep(self, cell: str, tensors: Mapping[str, Tensor], records: Sequence[Record] = ()) -> None:
        """Write a file of tensors under the cell's name."""
        from safetensors.torch import save_file

        stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        metadata = {"records": json.dumps(records), "settings": json.dumps(self.settings)}
        with replacing(self._cell(cell)) as temporary:
            save_file(stored, temporary, metadata)
        (self.folder / "cells" / ".gitignore").write_text("*\n")  # to go on from, not to publish

    def load(self, cell: str) -> dict[str, Tensor] | None:
        """Return the tensors of a finished cell, None if there is none; records it still owes are added."""
        from safetensors import safe_open

        path = self._cell(cell)
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if json.loads(metadata["settings"]) != self.settings:
            raise MCBNError(f"{path} belongs to another configuration; remove it, or use another folder with --out")
        self.append(json.loads(metadata["records"]))
        return tensors

    def save_predictions(self, dataset: str, method: str, split: int, arrays: Mapping[str, Any]) -> None:
        """Write the per-point predictions of one method and split."""
        path = self.folder / "predictions" / f"{dataset}-{method}-{split}.npz"
        with replacing(path) as temporary:
            np.savez_compressed(temporary, **arrays)

    def _cell(self, name: str) -> Path:
        return self.folder / "cells" / f"{name}.safetensors"

    def _require_same_settings(self) -> None:
        path = self.folder / "settings.json"
        if not path.exists():
            if self.path.exists():
                raise MCBNError(f"{self.folder} holds records but no settings.json; use another folder with --out")
            write_text(path, json.dumps(self.settings, indent=1) + "\n")
            return
        before = json.loads(path.read_text())
        for name in ["name", *sorted(before.keys() | self.settings.keys())]:
            if before.get(name) != self.settings.get(name):
                raise MCBNError(
                    f"{self.folder} was made with another configuration: {name} is {before.get(name)!r} there, "
                    f"{self.settings.get(name)!r} now; use the same, or another folder with --out"
                )


def record_key(record: Record) -> tuple[object, ...]:
    """Return what makes a record the record of one run."""
    return (record["kind"], *(record.get(name) for name in KEYS[record["kind"]]))
