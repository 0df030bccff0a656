"""What a million predictions cost, from measured times: `python -m mcbn_benchmarks.costs`.

Time of a pass over N inputs with T draws is a * N * T, a from the largest N that was measured; money is time at a price
that is an assumption, stated beside it.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn_study.journal import Record, read
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


def read_costs(folder: Path, *, draws_from: int = 2) -> list[Cost]:
    """Read the latest time of every network at the largest N measured, for each device."""
    latest: dict[tuple[str, str], Record] = {}
    for device in PRICES:
        for record in read(folder / f"{device}.jsonl"):
            timed = record["method"] == "mcbn" and record["milliseconds"] and record["n_samples"] >= draws_from
            place = record["case"], device
            if timed and record["n"] >= latest.get(place, {"n": 0})["n"]:
                latest[place] = record
    if not latest:
        raise MCBNError(f"{folder} holds no measured times; run `mcbn bench` first")
    return [_cost(device, record) for (_, device), record in latest.items()]


def _cost(device: str, r: Record) -> Cost:
    each = 1000 * r["milliseconds"] / (r["n"] * r["n_samples"])
    return Cost(r["case"], device, r["hardware"], r["n"], r["n_samples"], each)


def table(costs: Iterable[Cost], prices: Mapping[str, float] = PRICES, draws: Sequence[int] = DRAWS) -> str:
    """Lay out hours and dollars a million inputs, for several T."""
    head = ["network", "hardware", "measured", "us an input and draw"]
    head += [f"T = {T}: hours, dollars" for T in draws]
    rows = []
    for cost in costs:
        shown = [cost.case, cost.hardware, f"N = {cost.n:,}, T = {cost.n_samples}", f"{cost.microseconds:.3g}"]
        for T in draws:
            hours = cost.hours(MILLION, T)
            shown.append(f"{hours:.3g} h, ${hours * prices[cost.device]:.3g}")
        rows.append(shown)
    return markdown(head, rows)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.costs", description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("benchmarks/results"), help="folder of measured times")
    print(table(read_costs(parser.parse_args(arguments).records)), end="")


if __name__ == "__main__":
    main()
