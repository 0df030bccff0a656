"""What Teye et al. 2018 print in their tables, as data: `paper_numbers.csv`, one row a printed number."""

import csv
from functools import cache
from importlib import resources
from typing import NamedTuple

from mcbn_study.estimates import Estimate

N_RUNS = 25  # 5 splits x 5 seeds, from the captions
N_SENSITIVITY = 15  # 3 splits x 5 seeds


class Place(NamedTuple):
    """Where a number is printed: data sets as in `mcbn.data`, the rest as in the records."""

    table: str  # LaTeX label
    dataset: str
    method: str
    metric: str
    batch_size: int | None = None  # M, and T: in the sensitivity tables alone
    n_samples: int | None = None


@cache
def numbers() -> dict[Place, Estimate]:
    """Return every printed number by its place, table by table.

    >>> len(numbers())
    309
    """
    text = resources.files(__package__).joinpath("paper_numbers.csv").read_text("utf-8")
    printed = {}
    for row in csv.DictReader(text.splitlines()):
        M, T = (int(row[name]) if row[name] else None for name in ("batch_size", "n_samples"))
        error, p_value = (float(row[name]) if row[name] else None for name in ("standard_error", "p_value"))
        n, decimals = N_SENSITIVITY if T else N_RUNS, len(row["mean"].partition(".")[2])
        place = Place(row["table"], row["dataset"], row["method"], row["metric"], M, T)
        printed[place] = Estimate(float(row["mean"]), error, n, p_value, decimals)
    return printed


@cache
def find(dataset: str, method: str, metric: str) -> Estimate | None:
    """Return what the main tables (T = 500, M by cross-validation) print, None where they print nothing.

    >>> find("boston", "mcbn", "crps_normalized").mean
    8.5
    """
    places = [p for p in numbers() if p[1:4] == (dataset, method, metric) and p.n_samples is None]
    return numbers()[places[-1]] if places else None


def find_sensitivity(table: str, dataset: str, metric: str, batch_size: int, n_samples: int) -> Estimate | None:
    """Return what a sensitivity table prints for MCBN; the table counts, two of them share M = 128, T = 100."""
    return numbers().get(Place(table, dataset, "mcbn", metric, batch_size, n_samples))
