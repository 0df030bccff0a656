"""Throughput of prediction on Ray against the plain engine. benchmarks/README.md says how."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import mcbn.ray
from mcbn import scale
from mcbn.model import MCBN
from mcbn.ray import connected
from mcbn.tables import rows_of_block
from mcbn.tables.formats import pyarrow
from mcbn_benchmarks.speed.cases import MLP, fitted, prepare
from mcbn_study.journal import Record
from mcbn_study.machine import threads, timed

(INPUTS,) = MLP.shape


def ray(
    rows: int = 200_000,
    samples: Annotated[int, typer.Option(help="T")] = 500,
    workers: Annotated[int, typer.Option(help="actors, and threads of the plain engine")] = 2,
    rounds: int = 3,
) -> Iterator[Record]:
    """Time prediction on Ray against the plain engine, in rows a second."""
    case = replace(MLP, rows=2000, n_samples=samples)
    bayes, x = fitted(case, prepare(case, "cpu")), np.random.default_rng(0).standard_normal((rows, INPUTS))
    bayes.tau = 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrow, parquet = pyarrow(folder)
        parquet.write_table(arrow.table({f"x{c}": x[:, c] for c in range(INPUTS)}), folder / "rows.parquet")
        begun = time.perf_counter()
        with connected() as cluster:
            cluster.get(cluster.remote(lambda: None).remote())  # it is up
            up = time.perf_counter() - begun
            times = [_round(bayes, torch.from_numpy(x), folder / str(i), workers) for i in range(rounds)]
    record: Record = {"case": "ray mlp", "n": rows, "n_samples": samples, "workers": workers}
    record |= {"rounds": rounds, "load": os.getloadavg()[0], "cluster_seconds": up}
    record |= {name: statistics.median(time[name] for time in times) for name in times[0]}
    plain, whole = record["plain_rows_per_second"], record["whole_rows_per_second"]
    alone = rows / (rows / whole + up)
    yield record | {  # file to file, and to memory without any file
        "ratio_steady": record["steady_rows_per_second"] / plain,
        "ratio_whole": whole / plain,
        "ratio_alone": alone / plain,
        "ratio_whole_to_memory": whole / record["memory_rows_per_second"],
    }


def _round(bayes: MCBN[Any], x: torch.Tensor, folder: Path, workers: int) -> Record:
    """Time the plain engine, then Ray; both must have done every row."""
    source = folder.parent / "rows.parquet"
    with threads(workers):
        size = rows_of_block(8 * INPUTS)
        bayes.predict(x[:size])  # the way for this shape is found
        _, memory = timed(lambda: [len(bayes.predict(block).interval(0.95)) for block in torch.split(x, size)])
        summary, plain = timed(scale.predict, source, bayes, out=folder / "plain")
    assert summary.rows == len(x)
    times = {"memory_rows_per_second": len(x) / memory, "plain_rows_per_second": len(x) / plain}
    return times | _time_ray(bayes, source, folder / "ray", len(x), workers)


def _time_ray(bayes: MCBN[Any], source: Path, out: Path, rows: int, workers: int) -> Record:
    ends: list[tuple[float, int]] = []
    started = time.perf_counter()

    def on_part(outcome: Any) -> None:
        ends.append((time.perf_counter(), outcome.rows))

    summary = mcbn.ray.predict(source, bayes, out=out, workers=workers, on_part=on_part)
    whole = time.perf_counter() - started
    assert summary.rows == rows
    warm = min(workers, len(ends) - 1)  # parts by which every actor has begun
    steady, after = ends[-1][0] - ends[warm - 1][0], sum(count for _, count in ends[warm:])
    return {
        "parts": summary.parts,
        "whole_rows_per_second": rows / whole,
        "steady_rows_per_second": after / steady if warm else float("nan"),
        "start_seconds": ends[0][0] - started,
    }
