"""What a million predictions cost on one machine, from measured times.

Time of a pass over N inputs with T draws is a * N * T, a from the largest N that was measured; money is time at a price
that is an assumption, stated beside it.
"""

from pathlib import Path
from typing import Annotated

import typer

from mcbn.errors import MCBNError
from mcbn_study.journal import Record, read
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
