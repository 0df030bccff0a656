"""Throughput of prediction on Ray against the plain engine: `python -m mcbn_benchmarks.ray`.

The paper's MLP (13-50-50-1), T draws, 13 columns in one parquet file; both read that file and write a folder of parquet
files, in parts of the default size, bit for bit the same. Plain: `mcbn.scale.predict`, one process, a thread a core,
its way through the network already found. Memory: the same process without any file. Ray: `mcbn.ray.predict` on as many
actors of one thread each, none of which is up when its time begins. Steady leaves out what comes before each actor has
ended a part; whole has all after the cluster is up; alone has the start of Ray itself too. Rounds alternate; medians.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mcbn.ray
from mcbn import scale
from mcbn.model import MCBN
from mcbn.ray.cluster import connected
from mcbn.ray.prediction import POOLS
from mcbn.tables import rows_of_block
from mcbn.tables.formats import pyarrow
from mcbn_study.journal import Record, append
from mcbn_study.machine import environment

INPUTS = 13


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and append a record where --out names a file."""
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.ray", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=500, help="T")
    parser.add_argument("--workers", type=int, default=2, help="actors, and threads of the plain engine")
    parser.add_argument("--pool", choices=list(POOLS), default="data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="file to append the record to")
    options = parser.parse_args(arguments)
    found = measure(options.rows, options.samples, options.workers, options.pool, options.rounds)
    for name, value in found.items():
        print(f"{name:>24}  {value:,.4g}" if isinstance(value, float) else f"{name:>24}  {value}")
    if options.out is not None:
        append(options.out, found | asdict(environment("cpu")))


def measure(rows: int, n_samples: int, workers: int, pool: str = "data", rounds: int = 1) -> Record:
    """Time both engines on the same rows, in turns; medians over the rounds."""
    bayes, x = _fitted(n_samples), np.random.default_rng(0).standard_normal((rows, INPUTS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrow, parquet = pyarrow(folder)
        parquet.write_table(arrow.table({f"x{c}": x[:, c] for c in range(INPUTS)}), folder / "rows.parquet")
        begun = time.perf_counter()
        with connected() as ray:
            ray.get(ray.remote(_nothing).remote())  # the cluster is up
            up = time.perf_counter() - begun
            times = [_round(bayes, torch.from_numpy(x), folder / str(i), workers, pool) for i in range(rounds)]
    found: Record = {"case": "ray mlp", "n": rows, "n_samples": n_samples, "workers": workers, "pool": pool}
    found |= {"rounds": rounds, "load": os.getloadavg()[0], "cluster_seconds": up}
    found |= {name: statistics.median(time[name] for time in times) for name in times[0]}
    return found | _ratios(found)


def _ratios(found: Record) -> Record:
    """Divide Ray's rows a second by those of the plain engine: file to file, and from memory without any file."""
    plain, whole = found["plain_rows_per_second"], found["whole_rows_per_second"]
    alone = found["n"] / (found["n"] / whole + found["cluster_seconds"])
    return {
        "ratio_steady": found["steady_rows_per_second"] / plain,
        "ratio_whole": whole / plain,
        "ratio_alone": alone / plain,
        "ratio_whole_to_memory": whole / found["memory_rows_per_second"],
    }


def _round(bayes: MCBN[Any], x: torch.Tensor, folder: Path, workers: int, pool: str) -> Record:
    """Time the plain engine, then Ray; both must have done every row."""
    source = folder.parent / "rows.parquet"
    with _threads(workers):
        memory = _time_memory(bayes, x)
        started = time.perf_counter()
        assert scale.predict(source, bayes, out=folder / "plain").rows == len(x)
        plain = time.perf_counter() - started
    times = {"memory_rows_per_second": len(x) / memory, "plain_rows_per_second": len(x) / plain}
    return times | _time_ray(bayes, source, folder / "ray", len(x), workers, pool)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def _time_memory(bayes: MCBN[Any], x: torch.Tensor) -> float:
    size = rows_of_block(8 * INPUTS)
    bayes.predict(x[:size])  # the way for this shape is found
    started = time.perf_counter()
    for block in torch.split(x, size):
        bayes.predict(block).interval(0.95)
    return time.perf_counter() - started


def _nothing() -> None:
    pass


def _time_ray(bayes: MCBN[Any], source: Path, out: Path, rows: int, workers: int, pool: str) -> Record:
    ends: list[tuple[float, int]] = []
    started = time.perf_counter()
    summary = mcbn.ray.predict(
        source,
        bayes,
        out=out,
        workers=workers,
        pool=pool,
        on_part=lambda outcome: ends.append((time.perf_counter(), outcome.rows)),
    )
    whole = time.perf_counter() - started
    assert summary.rows == rows
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
