"""Throughput of prediction on Ray against the plain engine: `python -m mcbn.ray.benchmark`.

The paper's MLP (13-50-50-1), T draws, rows in one parquet file. Plain: `MCBN.predict` block by block on all cores, rows
in memory, nothing written. Ray: `mcbn.ray.predict` on as many actors of one thread each, file to files, on a cluster
that is already up. Steady leaves out what comes before each actor has done a part: processes starting, networks traced.
"""

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mcbn.ray
from mcbn.bench.records import environment
from mcbn.model import MCBN
from mcbn.ray.cluster import connected
from mcbn.records import Record, append
from mcbn.tabular.source import rows_of_block
from mcbn.tabular.tables import pyarrow

INPUTS, PARTS = 13, 16  # parts: so many that two actors end at about the same time


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and append a record where --out names a file."""
    parser = argparse.ArgumentParser(prog="python -m mcbn.ray.benchmark", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=500, help="T")
    parser.add_argument("--workers", type=int, default=2, help="actors, and threads of the plain engine")
    parser.add_argument("--out", type=Path, default=None, help="file to append the record to")
    options = parser.parse_args(arguments)
    found = measure(options.rows, options.samples, options.workers)
    for name, value in found.items():
        print(f"{name:>24}  {value:,.4g}" if isinstance(value, float) else f"{name:>24}  {value}")
    if options.out is not None:
        append(options.out, found | asdict(environment("cpu")))


def measure(rows: int, n_samples: int, workers: int) -> Record:
    """Time both engines on the same rows."""
    bayes, x = _fitted(n_samples), np.random.default_rng(0).standard_normal((rows, INPUTS))
    plain = _time_plain(bayes, torch.from_numpy(x), workers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrow, parquet = pyarrow(folder)
        parquet.write_table(arrow.table({f"x{c}": x[:, c] for c in range(INPUTS)}), folder / "rows.parquet")
        found = _time_ray(bayes, folder, rows, workers)
    base: Record = {"case": "ray mlp", "n": rows, "n_samples": n_samples, "workers": workers}
    base |= {"plain_rows_per_second": rows / plain, **found}
    base["ratio_steady"] = found["steady_rows_per_second"] / base["plain_rows_per_second"]
    base["ratio_whole"] = found["whole_rows_per_second"] / base["plain_rows_per_second"]
    return base


def _fitted(n_samples: int) -> MCBN[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs in (INPUTS, 50):
            layers += [nn.Linear(inputs, 50), nn.BatchNorm1d(50, momentum=None), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Linear(50, 1))
        x = torch.randn(2000, INPUTS)
        with torch.no_grad():
            for batch in torch.split(x, 32):
                network(batch)  # running statistics settle
    bayes: MCBN[Any] = MCBN(network.eval(), "regression").fit(x, n_samples=n_samples, batch_size=32)
    bayes.tau = 1.0
    return bayes


def _time_plain(bayes: MCBN[Any], x: torch.Tensor, threads: int) -> float:
    before, size = torch.get_num_threads(), rows_of_block(8 * INPUTS)
    torch.set_num_threads(threads)
    try:
        bayes.predict(x[:size])  # the way for this shape is found
        started = time.perf_counter()
        for block in torch.split(x, size):
            bayes.predict(block).interval(0.95)
        return time.perf_counter() - started
    finally:
        torch.set_num_threads(before)


def _nothing() -> None:
    pass


def _time_ray(bayes: MCBN[Any], folder: Path, rows: int, workers: int) -> Record:
    size = rows_of_block(8 * INPUTS)
    ends: list[tuple[float, int]] = []
    with connected() as ray:
        ray.get(ray.remote(_nothing).remote())  # the cluster is up
        started = time.perf_counter()
        summary = mcbn.ray.predict(
            folder / "rows.parquet",
            bayes,
            out=folder / "out",
            workers=workers,
            part_rows=max(size, rows // PARTS),
            on_part=lambda outcome: ends.append((time.perf_counter(), outcome.rows)),
        )
        whole = time.perf_counter() - started
    warm = min(workers, len(ends) - 1)  # parts by which every actor has begun
    steady, after = ends[-1][0] - ends[warm - 1][0], sum(count for _, count in ends[warm:])
    n_batches, predicting = sum(o.batches for o in summary.outcomes), sum(o.predicting for o in summary.outcomes)
    working, waits = sum(o.seconds for o in summary.outcomes), [o.waited for o in summary.outcomes if o.waited]
    return {
        "parts": summary.parts,
        "batches": n_batches,
        "whole_rows_per_second": rows / whole,
        "steady_rows_per_second": after / steady if warm else float("nan"),
        "start_seconds": ends[0][0] - started,
        "reading_ms_per_batch": 1000 * (working - predicting) / n_batches,
        "waiting_ms_per_part": 1000 * sum(waits) / max(1, len(waits)),
    }


if __name__ == "__main__":
    main()
