"""The tables of the study of shifts, as table.md beside the records; `make pages` puts them into the documentation."""

from collections.abc import Iterator
from functools import reduce
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import betabinom, binom  # type: ignore[import-untyped]

from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Record, read
from mcbn_study.tables import read_words, render

NAMES: dict[str, str] = read_words(__package__)["methods"]
LEVEL, RATE = 0.99, 0.01
KEYS = ["kind", "network", "seed", "what", "M", "corruption", "severity", "method", "pair", "data", "centre", "drift"]
FEW = ("mcbn", "adapt 256", "adapt 32", "adapt pair")


class Selection(list[Record]):
    """Some of the records, and what tables ask of them."""

    def where(self, **wanted: Any) -> "Selection":
        """Keep the records whose fields are these, or one of several in a tuple or list."""
        choices = {name: value if isinstance(value, tuple | list) else [value] for name, value in wanted.items()}
        return Selection(r for r in self if all(r.get(name) in values for name, values in choices.items()))

    def each(self, *fields: str) -> list[Any]:
        """List the values of a field, tuples of several, in the order of their first record."""
        return list(dict.fromkeys(map(itemgetter(*fields), self)))

    def by_seed(self, field: str) -> list[float]:
        """Average a field over the records of each seed: one number a network."""
        return [fmean(float(r[field]) for r in self.where(seed=seed)) for seed in self.each("seed")]

    def cell(self, field: str, **shown: Any) -> str:
        """Show the mean over networks with its standard error."""
        return mean_cell(self.by_seed(field), **shown)

    def mean(self, field: str) -> float:
        """Average a field over networks."""
        return fmean(self.by_seed(field))

    def relative(self, fields: dict[str, str], less: float = 0.0, **home: Any) -> "Selection":
        """Divide each field by one of the record of the same network and seed at home, and take `less` from that."""
        at_home = {(r["network"], r["seed"]): r for r in self.where(**home)}
        pairs = [(r, at_home.get((r["network"], r["seed"]))) for r in self]
        whole = [(r, h) for r, h in pairs if h and fields.keys() <= r.keys()]
        return Selection({**r, **{f: r[f] / h[of] - less for f, of in fields.items()}} for r, h in whole)


def write(out: Path) -> list[Path]:
    """Write table.md."""
    if not (records := read(out / RECORDS)):
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce shift`")
    newest = {(*(str(r.get(key)) for key in KEYS), r["kind"] == "ensemble" and r["config_hash"]): r for r in records}
    kept = Selection(newest.values())
    ours = Selection(r for r in kept if not r["network"].startswith("foreign"))
    facts = {"records": kept, "ours": ours, "alarms": list(count_alarms(kept)), "names": NAMES, "few": FEW}
    return [write_text(out / "table.md", "# Shifts\n\n" + render(__package__, **facts, mean_cell=mean_cell))]


def count_alarms(records: Selection) -> Iterator[Record]:
    """Count alarms, network by network, beside the interval of such counts; streams may stay below it."""
    for network, seed, what in (kept := records.where(kind=("alarms", "streams"))).each("network", "seed", "what"):
        of = kept.where(network=network, seed=seed, what=what)
        count, n = (sum(r[name] for r in of) for name in ("alarms", "n"))
        low, high = binom.interval(LEVEL, n, RATE)
        if of[-1].get("M") and what != "streams":  # batches
            low, high = alarm_interval(n, of[-1]["config"]["references"], of[-1]["held_out"])
        inside = low <= count <= high or (what == "streams" and count <= high)
        place = {"network": f"{network}, {seed}", "what": what}
        yield place | {"count": count, "n": n, "low": int(low), "high": int(high), "inside": inside}


def alarm_interval(n: int, references: int, held_out: int) -> tuple[int, int]:
    """99 % interval of alarms among n batches: those of one reference are ranked among the same R held-out batches.

    Given these the rate is Beta(k, R + 1 - k), k = floor(alpha (R + 1)), so that its count is beta-binomial.
    """
    k, each = int(RATE * (held_out + 1)), n // references
    law = betabinom(each, k, held_out + 1 - k).pmf(np.arange(each + 1))
    low, high = np.searchsorted(reduce(np.convolve, [law] * references).cumsum(), (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
    return int(low), int(high)
