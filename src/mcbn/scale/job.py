"""A job of prediction: which inputs, how, into which folder; and the network with its posterior to travel."""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcbn import batches, saving
from mcbn.errors import MCBNError
from mcbn.model import MCBN, METHODS
from mcbn.prediction import warn_if_untuned
from mcbn.scale.inputs import Inputs, Part, Reader, cut_images, cut_tables, list_files
from mcbn.tables import EMPTY, Layout, require_fits

FORMAT = 1


@dataclass(frozen=True)
class Job:
    """All a worker needs beside the network: the same on every machine."""

    folder: Path
    parts: tuple[Part, ...]
    reader: Reader
    method: str
    n_samples: int | None
    coverage: float
    settings: dict[str, Any]  # what the results depend on, to be told from another job

    @property
    def id(self) -> str:
        """Name the job by what its results depend on."""
        return _digest(self.settings)


def plan(
    inputs: Inputs,
    bayes: MCBN[Any],
    *,
    out: str | Path,
    key: str | Sequence[str] = (),
    columns: Sequence[str] | None = None,
    layout: Layout = EMPTY,
    target: str | None = None,
    transform: Callable[[Any], Tensor] | None = None,
    batch_size: int | None = None,
    part_rows: int | None = None,
    method: str = "sample",
    n_samples: int | None = None,
    coverage: float = 0.95,
) -> Job:
    """Cut the inputs into parts; refuse what no worker could do, before any work is given out."""
    if method not in METHODS:
        raise MCBNError(f"method must be one of {list(METHODS)}, got {method!r}")
    if not 0 < coverage < 1:
        raise MCBNError(f"coverage must lie between 0 and 1, got {coverage!r}")
    bayes.engine_for(n_samples, None)
    warn_if_untuned(bayes.noise_precision)
    if batch_size is not None:
        batches.require_int("batch_size", batch_size, 1)
    if columns is not None:
        layout = Layout(tuple(columns), len(columns), target)
    keys = (key,) if isinstance(key, str) else tuple(key)
    files = list_files(inputs)
    reader = Reader(batch_size or 0, keys, layout, target, transform).probe(files)
    cut = cut_tables if reader.is_table else cut_images
    parts = tuple(cut(files, reader.batch_rows, part_rows))
    _require_first(bayes, reader, parts[0])
    settings = {
        "format": FORMAT,
        "network and posterior": identify(bayes),
        "inputs": _digest([[label, path.stat().st_size] for label, path in files.items()]),
        "parts": _digest([[part.name, part.start, part.stop] for part in parts]),
        "reading": reader.describe(),
        "options": {"method": method, "n_samples": n_samples, "coverage": coverage},
    }
    return Job(Path(out).resolve(), parts, reader, method, n_samples, coverage, settings)


def _require_first(bayes: MCBN[Any], reader: Reader, part: Part) -> None:
    """Try the network on inputs of the first part, to refuse what it cannot take before a cluster is at work."""
    try:
        batch = next(reader.read(part), None)
    except Exception:  # a file that cannot be read is one of many
        return
    if batch is not None and len(batch.rows):
        what = f"the {reader.layout.width} input columns" if reader.is_table else f"images {reader.shape}"
        cure = "name its inputs by columns=, leave out others by key= and target=, or give a transform="
        require_fits(bayes, batch.x, f"{what} of {batch.labels[0]}", cure)


def identify(bayes: MCBN[Any]) -> str:
    """Hash all that predictions depend on: weights, draws, tau."""
    drawn = bayes.posterior
    digest = hashlib.sha256(json.dumps(saving.fingerprint(bayes.engine.network.module)).encode())
    for tensors in (drawn.mean, drawn.var, {"tau": bayes.noise_precision}):
        for name, value in tensors.items():
            values = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()[:16]


def on_device(bayes: MCBN[Any], device: torch.device) -> MCBN[Any]:
    """Copy a fitted MCBN to a device, without the network it was made from."""
    module = copy.deepcopy(bayes.engine.network.module).to(device)
    return bayes.with_posterior(bayes.posterior.to(device), model=module)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
