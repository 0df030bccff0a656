"""What predictions cost, from measured times: a million on one machine, and a SIMULATED sweep over many GPUs.

Time of a pass over N inputs with T draws is a * N * T, a from the largest N that was measured; money is time at a price
that is an assumption, stated beside it. In the sweep parts are handed out one after the other by a driver, read over
shared storage, computed, and lost when their GPU fails; all but the time of a pass is an assumption of `Assumptions`.
No such cluster was used. Deterministic.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn_study.journal import Record, extend, read
from mcbn_study.tables import markdown

PRICES = {"cuda": 3.50, "cpu": 0.09}  # assumptions: US dollars an hour, of one H200, of two cores of a server
DRAWS = (32, 100, 500)
MILLION = 1_000_000


@dataclass(frozen=True)
class Cost:
    """What was measured of one network on one machine."""

    case: str
    device: str  # cpu or cuda
    hardware: str
    n: int
    n_samples: int
    microseconds: float  # an input and draw

    def hours(self, inputs: float, n_samples: int) -> float:
        """Return the hours of one such machine for so many inputs with T draws."""
        return inputs * n_samples * self.microseconds / 3.6e9


def read_costs(folder: Path) -> list[Cost]:
    """Read the latest time of every network at the largest N measured, for each device."""
    latest: dict[tuple[str, str], Record] = {}
    for device in PRICES:
        for record in read(folder / f"{device}.jsonl"):
            timed = record["method"] == "mcbn" and record["milliseconds"] and record["n_samples"] > 1
            place = record["case"], device
            if timed and " " not in record["case"] and record["n"] >= latest.get(place, {"n": 0})["n"]:
                latest[place] = record
    if not latest:
        raise MCBNError(f"{folder} holds no measured times; run `mcbn bench` first")
    sizes = {place: (r["hardware"], r["n"], r["n_samples"]) for place, r in latest.items()}
    return [Cost(*p, *sizes[p], 1000 * r["milliseconds"] / (r["n"] * r["n_samples"])) for p, r in latest.items()]


def cost_table(costs: Iterable[Cost], prices: Mapping[str, float] = PRICES, draws: Sequence[int] = DRAWS) -> str:
    """Lay out hours and dollars a million inputs, for several T."""
    head = ["network", "hardware", "measured", "us an input and draw", *(f"T = {T}: hours, dollars" for T in draws)]
    rows = []
    for cost in costs:
        hours = [cost.hours(MILLION, T) for T in draws]
        measured = f"N = {cost.n:,}, T = {cost.n_samples}", f"{cost.microseconds:.3g}"
        spent = [f"{each:.3g} h, ${each * prices[cost.device]:.3g}" for each in hours]
        rows.append([cost.case, cost.hardware, *measured, *spent])
    return markdown(head, rows)


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

    def cells(self) -> list[str]:
        """Return the row of a table."""
        sizes = [f"{count:,}" for count in (self.gpus, self.inputs, self.part_inputs)]
        spent = [f"{self.hours:.3g}", f"{self.gpu_hours:,.0f}", f"{self.dollars:,.0f}"]
        return [*sizes, *spent, f"{self.efficiency:.0%}", f"{self.failures}", f"{self.driver_share:.0%}"]


def simulate(work: Work, gpus: int, a: Assumptions) -> Projection:
    """Play the job through and work out what it comes to."""
    for name, value in (("gpus", gpus), ("inputs", work.inputs), ("part_inputs", work.part_inputs)):
        batches.require_int(name, value, 1)
    if not work.seconds_per_input > 0:
        raise MCBNError(f"seconds_per_input must be positive, got {work.seconds_per_input!r}")
    end, failures = _play(work, gpus, a)
    hours, useful = end / 3600, work.inputs * work.seconds_per_input
    spent, driver_share = gpus * hours, (work.parts + failures) * a.driver_seconds / end
    totals = hours, spent, spent * work.price, useful / (gpus * end), failures, driver_share
    return Projection(gpus, work.inputs, work.part_inputs, *totals)


def _play(work: Work, gpus: int, a: Assumptions) -> tuple[float, int]:
    """Play the job through, the next part to the GPU that is free first; return seconds to its end, and failures."""
    random = np.random.Generator(np.random.Philox(key=a.seed))

    def spread(median: float, deviation: float) -> float:
        return median * float(np.exp(deviation * random.standard_normal()))

    reading = work.part_inputs * a.input_bytes * min(gpus, work.parts) / (a.storage_gigabytes * 1e9)  # shared by all
    base = max(work.part_inputs * work.seconds_per_input, reading)  # a GPU reads ahead while it computes
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
    return end, failures


CHANGED = {  # one assumption at a time
    "as assumed": Assumptions(),
    "driver 10 times slower": Assumptions(driver_seconds=10 * Assumptions.driver_seconds),
    "storage of 20 GB/s": Assumptions(storage_gigabytes=20.0),
    "10 times the failures": Assumptions(failures_per_gpu_hour=10 * Assumptions.failures_per_gpu_hour),
    "start in 5 minutes": Assumptions(start_seconds=300.0),
}


def run_sweep(folder: Path, network: str, n_samples: int, images: int, out: Path | None) -> None:
    """Simulate with the measured time of a network; print tables, and write records anew where a file is named."""
    measured = [cost for cost in read_costs(folder) if (cost.case, cost.device) == (network, "cuda")]
    if not measured:
        raise MCBNError(f"{folder} holds no time of {network} on a GPU")
    each = measured[0].microseconds * n_samples / 1e6
    works = [Work(images, size, each) for size in (2048, 16384)]
    sizes = [simulate(work, gpus, Assumptions()) for work in works for gpus in (1, 10, 100, 1000)]
    changed = {name: simulate(works[-1], 1000, assumed) for name, assumed in CHANGED.items()}
    print(f"SIMULATED: {network}, T = {n_samples}, {1e3 * each:.3g} ms an image as measured\n")
    head = ["GPUs", "images", "a part", "hours", "GPU hours", "dollars", "efficiency", "failures", "driver busy"]
    print(markdown(head, [projection.cells() for projection in sizes]))
    print(markdown(["", *head], [[name, *projection.cells()] for name, projection in changed.items()]), end="")
    if out is not None:
        about = {"simulated": True, "network": network, "n_samples": n_samples, "seconds_per_image": each}
        rows = [("as assumed", row) for row in sizes] + list(changed.items())[1:]
        out.unlink(missing_ok=True)
        assumed = asdict(Assumptions())
        extend(out, [about | {"assumptions": assumed, "changed": name, **asdict(row)} for name, row in rows])
