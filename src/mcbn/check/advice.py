"""What a diagnosis says in words: warnings, and its table."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcbn.check import drift

if TYPE_CHECKING:
    from mcbn.check.diagnosis import Diagnosis, LayerDiagnosis

FEW_DRAWS = 50  # the standard error of a variance from T draws is sqrt(2 / (T - 1)): 20 % here
LEAST_FACTOR = 0.5  # of the variance left by drawing M of N without replacement
LEAST_GAUSSIAN = 0.8  # share of units that pass; 0.95 if all are Gaussian
SPREAD_LIMIT = 1.25  # ratio of drawn to analytic std, either way


def warnings(
    rows: "Sequence[LayerDiagnosis]",
    T: int,
    M: int,
    N: int | None,
    factor: float,
    shift: drift.Shift | None,
    failure: str,
) -> tuple[str, ...]:
    """List what speaks against the draws, in plain words."""
    found = [*_numbers(T, M, N, factor), *_drifts(rows, shift), *_spread(rows[0])]
    found += _units(rows, "constant", "never vary over the draws", "they carry no uncertainty (dead units?)")
    found += _units(rows, "sparse", "are 0 for 9 of 10 inputs", "small batches may miss their few active inputs")
    for what in ("mean", "std"):
        found += _shape(rows, what, M)
    if failure:
        found.append(f"the share of each layer in the variance is not known: {failure}")
    return tuple(found)


def _numbers(T: int, M: int, N: int | None, factor: float) -> list[str]:
    found = []
    if T < FEW_DRAWS:
        error = math.sqrt(2 / (T - 1)) if T > 1 else math.inf
        found.append(
            f"few draws: with n_samples={T} a predictive variance is known to about {error:.0%}; "
            f"fit {FEW_DRAWS} or more"
        )
    if N is not None and factor < LEAST_FACTOR:
        found.append(
            f"batch_size={M} is close to the {N} training examples: draws share them, which leaves {factor:.0%} of the "
            "variance of independent batches; pass a smaller batch_size"
        )
    return found


def _drifts(rows: "Sequence[LayerDiagnosis]", shift: drift.Shift | None) -> list[str]:
    found = []
    far = [r for r in rows if r.drift and r.drift.far]
    if far:
        worst = max(far, key=lambda row: row.drift.effect if row.drift else 0.0)
        effect = worst.drift.effect if worst.drift else math.nan
        found.append(
            f"drift: drawn and running statistics disagree in {len(far)} layer(s), most in {worst.layer!r} by "
            f"{effect:.2f} channel standard deviations; draw from data made as in training, with its augmentation"
        )
    if shift and shift.far:
        found.append(f"drift of all layers together: {drift.describe(shift)}")
    other = max(rows, key=lambda row: row.offset)
    if other.offset > drift.EFFECT_LIMIT:
        found.append(
            f"other data: in layer {other.layer!r} the data given lies {other.offset:.2f} standard deviations from the "
            "draws; check with the data that fit was given"
        )
    return found


def _units(rows: "Sequence[LayerDiagnosis]", what: str, doing: str, so: str) -> list[str]:
    counts = {row.layer: getattr(row, what) for row in rows if getattr(row, what)}
    if not counts:
        return []
    layers = ", ".join(f"{layer!r} {count}" for layer, count in counts.items())
    return [f"{what} units: {sum(counts.values())} of {sum(r.units for r in rows)} {doing} ({layers}); {so}"]


def _spread(row: "LayerDiagnosis") -> list[str]:
    """Judge the first layer to run: there the analytic spread holds for random batches of any data."""
    off = [s for s in (row.mean_spread, row.std_spread) if s > SPREAD_LIMIT or s < 1 / SPREAD_LIMIT]
    if not off:
        return []
    return [
        f"spread: statistics of the first layer, {row.layer!r}, vary {row.mean_spread:.2f} (means) and "
        f"{row.std_spread:.2f} (standard deviations) times as much as those of random batches of this data; draw from "
        "shuffled data, the same as given here"
    ]


def _shape(rows: "Sequence[LayerDiagnosis]", what: str, M: int) -> list[str]:
    """Say where draws are not Gaussian, beyond what chance does with so few units."""
    name = "means" if what == "mean" else "standard deviations"
    passing = {row.layer: getattr(row, f"{what}_gaussian") for row in rows}
    chance = {row.layer: 0.95 - 3 * math.sqrt(0.95 * 0.05 / row.units) for row in rows}
    odd = [layer for layer in passing if passing[layer] < min(LEAST_GAUSSIAN, chance[layer])]
    if not odd:
        return []
    worst = min(odd, key=lambda layer: passing[layer])
    return [
        f"not Gaussian: batch {name} fail the test in {len(odd)} layer(s), most in {worst!r}, where "
        f"{passing[worst]:.0%} of units pass (95 % if Gaussian) at batch_size={M}; sampled predictions stand, "
        "Gaussian models of the statistics are approximate"
    ]


HEAD = ("layer", "units", "means Gaussian", "stds Gaussian", "mean spread", "std spread", "drift", "share", "alone")


def table(found: "Diagnosis") -> str:
    """Write a diagnosis as text."""
    N = "a stream" if found.n_examples is None else f"{found.n_examples:,} examples"
    worth = f"worth {found.n_effective:.1f} independent batches"
    lines = [f"{found.n_samples} draws of batches of {found.batch_size} from {N}, {worth}", ""]
    rows = [HEAD, *(_cells(row) for row in found.layers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    lines += ["", "Gaussian: share of units that pass at the 5 % level, 95 % if exact; spread: drawn over analytic std"]
    lines += [f"! {text}" for text in found.warnings] or ["nothing speaks against these draws"]
    return "\n".join(lines)


def _cells(row: "LayerDiagnosis") -> tuple[str, ...]:
    spreads = (f"{value:.2f}" for value in (row.mean_spread, row.std_spread))
    moved = "-" if row.drift is None else f"{row.drift.effect:.2f}"
    shares = ("-" if value is None else f"{value:.0%}" for value in (row.share, row.alone))
    gaussian = ("-" if math.isnan(v) else f"{v:.0%}" for v in (row.mean_gaussian, row.std_gaussian))
    return (row.layer or "(network)", str(row.units), *gaussian, *spreads, moved, *shares)
