"""A SIMULATED sweep over many GPUs: `python -m mcbn_benchmarks.sweep`. No such cluster was used.

Parts are handed out one after the other by a driver, read over shared storage, computed, and lost when their GPU fails;
the time of a pass is measured (`mcbn_benchmarks.costs`), all else is an assumption of `Assumptions`. Deterministic.
"""

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn_benchmarks.costs import PRICES, read_costs
from mcbn_study.journal import Record, extend
from mcbn_study.tables import markdown


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


@dataclass(frozen=True)
class Work:
    """A job: so many inputs, cut into parts."""

    inputs: int
    part_inputs: int
    seconds_per_input: float  # measured
    price: float = PRICES["cuda"]  # of a GPU and hour

    @property
    def parts(self) -> int:
        """Count the parts."""
        return -(-self.inputs // self.part_inputs)


@dataclass(frozen=True)
class Projection:
    """What a simulated job comes to."""

    gpus: int
    inputs: int
    part_inputs: int
    hours: float  # until the last part is done
    gpu_hours: float  # of all GPUs, idle or not
    dollars: float
    efficiency: float  # computing of parts that counted, over all GPU time
    failures: int
    driver_share: float  # of the time the driver is busy


def simulate(work: Work, gpus: int, a: Assumptions) -> Projection:
    """Play the job through, part by part: the next part goes to the GPU that is free first."""
    _check(work, gpus)
    random = np.random.Generator(np.random.Philox(key=a.seed))

    def spread(median: float, deviation: float) -> float:
        return median * float(np.exp(deviation * random.standard_normal()))

    base = _part_seconds(work, gpus, a)
    free = [(spread(a.start_seconds, a.start_spread), g) for g in range(gpus)]
    heapq.heapify(free)
    driver, end, failures, left = 0.0, 0.0, 0, work.parts
    while left:
        ready, g = heapq.heappop(free)
        driver = max(driver, ready) + a.driver_seconds
        needed = spread(base, a.pass_spread)
        fails = float(random.exponential()) * 3600 / a.failures_per_gpu_hour if a.failures_per_gpu_hour else np.inf
        if fails < needed:
            failures += 1
            heapq.heappush(free, (driver + fails + spread(a.start_seconds, a.start_spread), g))
            continue
        end, left = max(end, driver + needed), left - 1
        heapq.heappush(free, (driver + needed, g))
    hours, useful = end / 3600, work.inputs * work.seconds_per_input
    busy = (work.parts + failures) * a.driver_seconds / end
    spent = gpus * hours
    return Projection(
        gpus, work.inputs, work.part_inputs, hours, spent, spent * work.price, useful / (gpus * end), failures, busy
    )


def _check(work: Work, gpus: int) -> None:
    for name, value in (("gpus", gpus), ("inputs", work.inputs), ("part_inputs", work.part_inputs)):
        batches.require_int(name, value, 1)
    if not work.seconds_per_input > 0:
        raise MCBNError(f"seconds_per_input must be positive, got {work.seconds_per_input!r}")


def _part_seconds(work: Work, gpus: int, a: Assumptions) -> float:
    """Return the time of a part: computing, or reading where the storage, shared by all readers, is slower."""
    readers = min(gpus, work.parts)
    reading = work.part_inputs * a.input_bytes * readers / (a.storage_gigabytes * 1e9)
    return max(work.part_inputs * work.seconds_per_input, reading)  # a GPU reads ahead while it computes


def project(seconds_per_input: float, inputs: int) -> list[Projection]:
    """Simulate one job on several sizes of cluster and of part."""
    works = [Work(inputs, size, seconds_per_input) for size in (2048, 16384)]
    return [simulate(work, gpus, Assumptions()) for work in works for gpus in (1, 10, 100, 1000)]


def sensitivities(seconds_per_input: float, inputs: int) -> dict[str, Projection]:
    """Simulate the same job on 1,000 GPUs with one assumption changed at a time."""
    a, work = Assumptions(), Work(inputs, 16384, seconds_per_input)
    changed = {
        "as assumed": a,
        "driver 10 times slower": replace(a, driver_seconds=10 * a.driver_seconds),
        "storage of 20 GB/s": replace(a, storage_gigabytes=20.0),
        "10 times the failures": replace(a, failures_per_gpu_hour=10 * a.failures_per_gpu_hour),
        "start in 5 minutes": replace(a, start_seconds=300.0),
    }
    return {name: simulate(work, 1000, assumed) for name, assumed in changed.items()}


def table(rows: dict[str, Projection] | Sequence[Projection]) -> str:
    """Lay projections out as Markdown."""
    named = rows.items() if isinstance(rows, dict) else [("", row) for row in rows]
    head = ["GPUs", "images", "a part", "hours", "GPU hours", "dollars", "efficiency", "failures", "driver busy"]
    lines = [_line(projection) for _, projection in named]
    if isinstance(rows, dict):
        head, lines = ["", *head], [[name, *line] for name, line in zip(rows, lines, strict=True)]
    return markdown(head, lines)


def _line(r: Projection) -> list[str]:
    sizes = [f"{count:,}" for count in (r.gpus, r.inputs, r.part_inputs)]
    spent = [f"{r.hours:.3g}", f"{r.gpu_hours:,.0f}", f"{r.dollars:,.0f}"]
    return [*sizes, *spent, f"{r.efficiency:.0%}", f"{r.failures}", f"{r.driver_share:.0%}"]


def main(arguments: list[str] | None = None) -> None:
    """Simulate a sweep with the measured ResNet-50; print tables, and write records where --out names a file."""
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.sweep", description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("benchmarks/results"), help="folder of measured times")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--samples", type=int, default=32, help="T")
    parser.add_argument("--images", type=int, default=1_000_000_000)
    parser.add_argument("--out", type=Path, default=None, help="file of records, written anew")
    options = parser.parse_args(arguments)
    measured = [c for c in read_costs(options.records) if (c.case, c.device) == (options.network, "cuda")]
    if not measured:
        raise MCBNError(f"{options.records} holds no time of {options.network} on a GPU")
    each = measured[0].microseconds * options.samples / 1e6
    sizes, changed = project(each, options.images), sensitivities(each, options.images)
    print(f"SIMULATED: {options.network}, T = {options.samples}, {1e3 * each:.3g} ms an image as measured\n")
    print(f"{table(sizes)}\n{table(changed)}", end="")
    if options.out is not None:
        _write(options.out, sizes, changed, options.network, options.samples, each)


def _write(
    path: Path, sizes: Sequence[Projection], changed: dict[str, Projection], network: str, n_samples: int, each: float
) -> None:
    base: Record = {"simulated": True, "network": network, "n_samples": n_samples, "seconds_per_image": each}
    base |= {"assumptions": asdict(Assumptions())}
    rows = [("as assumed", row) for row in sizes] + list(changed.items())[1:]
    path.unlink(missing_ok=True)
    extend(path, [base | {"changed": name, **asdict(row)} for name, row in rows])


if __name__ == "__main__":
    main()
