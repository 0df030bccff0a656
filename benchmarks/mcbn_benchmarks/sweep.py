"""A SIMULATED sweep over many GPUs, from the measured time of one: no such cluster was used.

A driver hands out parts one after the other, to the GPU that is free first. GPUs read over one storage while they
compute; one that fails loses its part and starts anew. All but the time of a pass is assumed: sweep.toml.
"""

import tomllib
from collections.abc import Iterator, Mapping
from heapq import heapreplace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from mcbn.errors import MCBNError
from mcbn_benchmarks.pages import MEASURED, PRICES, Measured, read_costs
from mcbn_study.journal import Record

TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
ASSUMED: Mapping[str, float] = TOLD["assumed"]


def sweep(
    records: Measured = MEASURED,
    network: str = "resnet50",
    samples: Annotated[int, typer.Option(help="T", min=1)] = 32,
    images: Annotated[int, typer.Option(min=1)] = 1_000_000_000,
) -> Iterator[Record]:
    """SIMULATE a sweep over many GPUs with the measured time of one; no such cluster was used."""
    each = {r["case"]: r["microseconds"] for r in read_costs(records) if r["device"] == "cuda"}.get(network)
    if each is None:
        raise MCBNError(f"{records} holds no time of {network} on a GPU; measure it by `mcbn bench --device cuda`")
    seconds = each * samples / 1e6
    about = {"simulated": True, "network": network, "n_samples": samples, "seconds_per_image": seconds}
    for name, part, gpus in TOLD["jobs"]:
        assumed = ASSUMED | TOLD["changed"][name]
        yield about | {"assumptions": assumed, "changed": name, **simulate(images, part, seconds, gpus, assumed)}


def simulate(inputs: int, part_inputs: int, seconds: float, gpus: int, assumed: Mapping[str, float]) -> Record:
    """Play a job of so many inputs part by part, each input of so many seconds; work out what it comes to."""
    parts = -(-inputs // part_inputs)
    reading = part_inputs * assumed["input_bytes"] * min(gpus, parts) / (assumed["storage_gigabytes"] * 1e9)
    end, failures = play(parts, max(part_inputs * seconds, reading), gpus, assumed)
    return {
        **{"gpus": gpus, "inputs": inputs, "part_inputs": part_inputs, "hours": end / 3600},
        **{"gpu_hours": gpus * end / 3600, "dollars": gpus * end / 3600 * PRICES["cuda"]},  # of all GPUs, idle or not
        "efficiency": inputs * seconds / (gpus * end),  # computing of parts that counted, over all GPU time
        **{"failures": failures, "driver_share": (parts + failures) * assumed["driver_seconds"] / end},
    }


def play(parts: int, median: float, gpus: int, assumed: Mapping[str, float]) -> tuple[float, int]:
    """Return the seconds until the last part is done, and how many were lost on the way."""
    random = np.random.Generator(np.random.Philox(key=int(assumed["seed"])))
    start = np.log(assumed["start_seconds"]), assumed["start_spread"]
    free, driver, end, lost = sorted(random.lognormal(*start, gpus)), 0.0, 0.0, 0  # free: when each GPU is, a heap
    while parts:
        driver = max(driver, free[0]) + assumed["driver_seconds"]
        needed = random.lognormal(np.log(median), assumed["pass_spread"])
        if (fails := random.exponential(3600 / assumed["failures_per_gpu_hour"])) < needed:
            lost += 1
            heapreplace(free, driver + fails + random.lognormal(*start))
        else:
            parts -= 1
            end = max(end, driver + needed)
            heapreplace(free, driver + needed)
    return end, lost
