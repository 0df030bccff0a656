"""What Teye et al. 2018 print in their tables, as data: `paper_numbers.csv`, one row a printed number."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

N_RUNS = 25  # 5 splits x 5 seeds, from the captions
N_SENSITIVITY = 15  # 3 splits x 5 seeds
_SIGNIFICANCE = (0.05, 0.01, 0.001, 0.0001)


@dataclass(frozen=True)
class Printed:
    """One printed number.

    Attributes:
        table: LaTeX label of its table.
        dataset: name as in `mcbn.data`.
        method: as in the records.
        metric: as in the records.
        batch_size: M, in the sensitivity tables alone.
        n_samples: T, in the sensitivity tables alone.
        mean: the number.
        standard_error: beside it, if the table has one.
        p_value: of the one-sample t-test, if the table has one.
        decimals: of the mean, as printed.
    """

    table: str
    dataset: str
    method: str
    metric: str
    batch_size: int | None
    n_samples: int | None
    mean: float
    standard_error: float | None
    p_value: float | None
    decimals: int

    @property
    def half_unit(self) -> float:
        """Half a unit of the last printed digit: the mean before rounding is that near."""
        return 0.5 * 10.0**-self.decimals


@cache
def numbers() -> tuple[Printed, ...]:
    """Return every printed number, table by table.

    >>> len(numbers())
    309
    """
    text = resources.files(__package__).joinpath("paper_numbers.csv").read_text("utf-8")
    return tuple(_printed(row) for row in csv.DictReader(text.splitlines()))


def find(dataset: str, method: str, metric: str) -> Printed | None:
    """Return what the main tables (T = 500, M by cross-validation) print, None where they print nothing.

    >>> find("boston", "mcbn", "crps_normalized").mean
    8.5
    """
    return _index().get((None, dataset, method, metric, None, None))


def find_sensitivity(table: str, dataset: str, metric: str, batch_size: int, n_samples: int) -> Printed | None:
    """Return what a sensitivity table prints for MCBN; the table counts, two of them share M = 128, T = 100."""
    return _index().get((table, dataset, "mcbn", metric, batch_size, n_samples))


def stars(p_value: float | None) -> str:
    """Significance as the paper marks it: * < .05, ** < .01, *** < .001, **** < .0001, else ns."""
    if p_value is None:
        return ""
    return "*" * sum(p_value < level for level in _SIGNIFICANCE) or "ns"


@cache
def _index() -> dict[tuple[str | int | None, ...], Printed]:
    return {
        (p.table if p.n_samples else None, p.dataset, p.method, p.metric, p.batch_size, p.n_samples): p
        for p in numbers()
    }


def _printed(row: dict[str, str]) -> Printed:
    return Printed(
        table=row["table"],
        dataset=row["dataset"],
        method=row["method"],
        metric=row["metric"],
        batch_size=int(row["batch_size"]) if row["batch_size"] else None,
        n_samples=int(row["n_samples"]) if row["n_samples"] else None,
        mean=float(row["mean"]),
        standard_error=float(row["standard_error"]) if row["standard_error"] else None,
        p_value=float(row["p_value"]) if row["p_value"] else None,
        decimals=len(row["mean"].partition(".")[2]),
    )
