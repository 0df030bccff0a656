"""Cells of the tables: a mean from runs, ours or the paper's, and the difference of the two."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from mcbn.data import describe
from mcbn_study import paper, student
from mcbn_study.regression.summary import Row
from mcbn_study.tables import MISSING

Triple: TypeAlias = tuple[str, str, str]  # ours, the paper's, the difference


class Estimate(NamedTuple):
    """A mean from n runs, ours or the paper's.

    Attributes:
        decimals: as printed; where None, two digits of the error show, in 2 to 4 decimals.
    """

    mean: float
    error: float | None
    p_value: float | None
    n: int
    decimals: int | None = None


def ours(row: Row | None) -> Estimate | None:
    """Return our estimate, None if there was no run."""
    return Estimate(row.mean, row.standard_error, row.p_value, row.n) if row else None


def theirs(found: paper.Printed | None) -> Estimate | None:
    """Return the paper's estimate, None if it prints none."""
    if found is None:
        return None
    n = paper.N_RUNS if found.n_samples is None else paper.N_SENSITIVITY
    return Estimate(found.mean, found.standard_error, found.p_value, n, found.decimals)


def triple(mine: Estimate | None, printed: Estimate | None, show: str = "error") -> Triple:
    """Show both and their difference; `show` as in `cell`."""
    return cell(mine, show), cell(printed, show), "" if show == "p" else difference(mine, printed)


def three_rows(dataset: str, triples: Sequence[Triple]) -> list[tuple[str, ...]]:
    """Lay out the triples of one data set as columns under its name."""
    mine, printed, gap = zip(*triples, strict=True)
    return [(describe(dataset).title, "ours", *mine), ("", "paper", *printed), ("", "difference", *gap)]


def cell(estimate: Estimate | None, show: str = "error") -> str:
    """Show the mean with its "error" or its "stars", or the "p" value; a dash for no estimate."""
    if estimate is None:
        return MISSING
    if show == "p":
        return MISSING if estimate.p_value is None else f"{estimate.p_value:.2E}"
    if show == "stars":
        return f"{estimate.mean:z.2f} {paper.stars(estimate.p_value)}".rstrip()
    decimals = _decimals(estimate)
    error = "" if estimate.error is None else f" ± {estimate.error:.{decimals}f}"
    return f"{estimate.mean:z.{decimals}f}{error}"


def difference(mine: Estimate | None, printed: Estimate | None) -> str:
    """Ours minus theirs, with the 95 % interval where both have a standard error; a dash where one is missing."""
    if mine is None or printed is None:
        return MISSING
    decimals = _decimals(mine)
    if mine.error is None or printed.error is None:
        return f"{mine.mean - printed.mean:+z.{decimals}f}"
    middle, low, high = student.welch(mine.mean, mine.error, mine.n, printed.mean, printed.error, printed.n)
    return f"{middle:+z.{decimals}f} ({low:z.{decimals}f} to {high:z.{decimals}f})"


def _decimals(estimate: Estimate) -> int:
    if estimate.decimals is not None:
        return estimate.decimals
    return min(4, max(2, 1 - math.floor(math.log10(estimate.error)))) if estimate.error else 2
