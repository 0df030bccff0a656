"""What predictions cost, from measured times: a million on one machine, and a SIMULATED sweep over many GPUs.

Time of a pass over N inputs with T draws is a * N * T, a from the largest N that was measured; money is time at a price
that is an assumption, stated beside it. In the sweep parts are handed out one after the other by a driver, read over
shared storage, computed, and lost when their GPU fails; all but the time of a pass is an assumption of `Assumptions`.
No such cluster was used. Deterministic.
"""

import heapq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from mcbn.errors import MCBNError
from mcbn_study.journal import Record, extend, read
from mcbn_study.tables import markdown

PRICES = {"cuda": 3.50, "cpu": 0.09}  # assumptions: US dollars an hour, of one H200, of two cores of a server
DRAWS = (32, 100, 500)
RESULTS = Path("benchmarks/results")
Measured = Annotated[Path, typer.Option(help="folder of measured times")]


def read_costs(folder: Path) -> list[Record]:
    """Read the latest record of every network at the largest N measured, with microseconds of an input and draw."""
    latest: dict[tuple[str, str], Record] = {}
    for device in PRICES:
        for record in read(folder / f"{device}.jsonl"):
            timed = record["method"] == "mcbn" and record["milliseconds"] and record["n_samples"] > 1
            place = record["case"], device
            if timed and " " not in record["case"] and record["n"] >= latest.get(place, {"n": 0})["n"]:
                each = 1000 * record["milliseconds"] / (record["n"] * record["n_samples"])
                latest[place] = record | {"device": device, "microseconds": each}
    if not latest:
        raise MCBNError(f"{folder} holds no measured times; run `mcbn bench` first")
    return list(latest.values())


def costs(records: Measured = RESULTS) -> list[str]:
    """Work out what a million predictions cost, from measured times."""
    head = ["network", "hardware", "measured", "us an input and draw", *(f"T = {T}: hours, dollars" for T in DRAWS)]
    rows = []
    for r in read_costs(records):
        hours = [1_000_000 * T * r["microseconds"] / 3.6e9 for T in DRAWS]
        spent = [f"{each:.3g} h, ${each * PRICES[r['device']]:.3g}" for each in hours]
        measured = f"N = {r['n']:,}, T = {r['n_samples']}"
        rows.append([r["case"], r["hardware"], measured, f"{r['microseconds']:.3g}", *spent])
    return [markdown(head, rows).rstrip()]


@dataclass(frozen=True)
class Assumptions:
    """What a cluster does beside computing; none of it was measured at this size."""

    start_seconds: float = 60.0  # median until a GPU has its process, network and posterior
    start_spread: float = 0.5  # standard deviation of its logarithm
    pass_spread: float = 0.05  # of the logarithm of a part's time: clocks, neighbours
    driver_seconds: float = 0.005  # of the driver alone for each part: this is the serial share
    storage_gigabytes: float = 100.0  # a second, read by all together
    input_bytes: float = 110e3  # of one image, as JPEG
    failures_per_gpu_hour: float = 1e-3  # one in a thousand hours; the part at work is lost
    seed: int = 0


CHANGED = {  # one assumption at a time
    "as assumed": Assumptions(),
    "driver 10 times slower": Assumptions(driver_seconds=10 * Assumptions.driver_seconds),
    "storage of 20 GB/s": Assumptions(storage_gigabytes=20.0),
    "10 times the failures": Assumptions(failures_per_gpu_hour=10 * Assumptions.failures_per_gpu_hour),
    "start in 5 minutes": Assumptions(start_seconds=300.0),
}
HEAD = ["GPUs", "images", "a part", "hours", "GPU hours", "dollars", "efficiency", "failures", "driver busy"]
ROW = (
    "{gpus:,}|{inputs:,}|{part_inputs:,}|{hours:.3g}|{gpu_hours:,.0f}|{dollars:,.0f}|{efficiency:.0%}|{failures}"
    "|{driver_share:.0%}"
)


def simulate(inputs: int, part_inputs: int, seconds_per_input: float, gpus: int, a: Assumptions) -> Record:
    """Play a job through part by part, and work out what it comes to; `seconds_per_input` was measured."""
    parts = -(-inputs // part_inputs)
    reading = part_inputs * a.input_bytes * min(gpus, parts) / (a.storage_gigabytes * 1e9)  # shared by all
    needed = max(part_inputs * seconds_per_input, reading)  # a GPU reads ahead while it computes
    end, failures = _play(parts, needed, gpus, a)
    hours = end / 3600
    return {
        **{"gpus": gpus, "inputs": inputs, "part_inputs": part_inputs, "hours": hours},
        "gpu_hours": gpus * hours,  # of all GPUs, idle or not
        "dollars": gpus * hours * PRICES["cuda"],
        "efficiency": inputs * seconds_per_input / (gpus * end),  # computing of parts that counted, over all GPU time
        "failures": failures,
        "driver_share": (parts + failures) * a.driver_seconds / end,  # of the time the driver is busy
    }


def _play(parts: int, median: float, gpus: int, a: Assumptions) -> tuple[float, int]:
    """Give the next part to the GPU that is free first; return the seconds to the end of the job, and failures."""
    random = np.random.Generator(np.random.Philox(key=a.seed))

    def spread(median: float, deviation: float) -> float:
        return median * float(np.exp(deviation * random.standard_normal()))

    free = [spread(a.start_seconds, a.start_spread) for _ in range(gpus)]  # when each GPU is free
    heapq.heapify(free)
    driver, end, failures, left = 0.0, 0.0, 0, parts
    while left:
        driver = max(driver, free[0]) + a.driver_seconds
        needed, fails = spread(median, a.pass_spread), random.exponential() * 3600 / a.failures_per_gpu_hour
        if fails < needed:
            failures += 1
            heapq.heapreplace(free, driver + fails + spread(a.start_seconds, a.start_spread))
        else:
            left -= 1
            end = max(end, driver + needed)
            heapq.heapreplace(free, driver + needed)
    return end, failures


def sweep(
    records: Measured = RESULTS,
    network: str = "resnet50",
    samples: Annotated[int, typer.Option(help="T", min=1)] = 32,
    images: Annotated[int, typer.Option(min=1)] = 1_000_000_000,
    out: Annotated[Path | None, typer.Option(help="file of records, written anew")] = None,
) -> None:
    """SIMULATE a sweep over many GPUs with the measured time of one; no such cluster was used."""
    measured = [r["microseconds"] for r in read_costs(records) if (r["case"], r["device"]) == (network, "cuda")]
    if not measured:
        raise MCBNError(f"{records} holds no time of {network} on a GPU")
    each = measured[0] * samples / 1e6
    sizes = [simulate(images, size, each, gpus, Assumptions()) for size in (2048, 16384) for gpus in (1, 10, 100, 1000)]
    changed = {name: simulate(images, 16384, each, 1000, assumed) for name, assumed in CHANGED.items()}
    print(f"SIMULATED: {network}, T = {samples}, {1e3 * each:.3g} ms an image as measured\n")
    print(markdown(HEAD, [ROW.format(**row).split("|") for row in sizes]))
    print(markdown(["", *HEAD], [[name, *ROW.format(**row).split("|")] for name, row in changed.items()]), end="")
    if out is not None:
        about = {"simulated": True, "network": network, "n_samples": samples, "seconds_per_image": each}
        rows = [("as assumed", row) for row in sizes] + list(changed.items())[1:]
        out.unlink(missing_ok=True)
        extend(out, [about | {"assumptions": asdict(Assumptions()), "changed": name, **row} for name, row in rows])
